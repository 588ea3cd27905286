"""An engine for tests that need none of the real ones: our own decoder after a server of vLLM's interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from transformers import PreTrainedTokenizerBase

from outrider.decode import Decoder, Plan, Sampling
from outrider.heads import Drafter
from outrider.scripts.json_schemas import schema
from outrider.serving.reference_run import DraftCounts
from outrider.targets import Target

from .small_engine import completion, page, serve

Complete = Callable[[dict[str, Any]], dict[str, Any]]


def answer(kind: str, text: str) -> dict[str, Any]:
    """Return the body of a verb's answer, which its schema must allow."""
    found: dict[str, Any] = json.loads(text)
    Draft202012Validator(schema(kind)).validate(found)
    return {name: value for name, value in found.items() if name not in ("schema", "exit_code")}


class Metrics:
    """The counters of a vLLM, and its page."""

    def __init__(self) -> None:
        self.counts = DraftCounts()
        self.tokens = 0
        self.started = 1000.0

    def count(self, counts: DraftCounts, tokens: int) -> None:
        self.counts, self.tokens = self.counts.plus(counts), self.tokens + tokens

    def restart(self) -> None:
        """Begin again, as a new process would."""
        self.counts = DraftCounts()
        self.tokens = 0
        self.started = self.started + 1

    def page(self) -> str:
        counts = self.counts
        sums = (counts.rounds, counts.drafted, counts.accepted)
        return page(self.started, self.tokens, sums, counts.by_position)


def tokens_of(tokenizer: PreTrainedTokenizerBase, body: dict[str, Any]) -> list[int]:
    """Return what a vLLM's `/tokenize` makes of a request."""
    text = body.get("prompt") or tokenizer.apply_chat_template(
        body["messages"],
        tokenize=False,
        add_generation_prompt=body["add_generation_prompt"],
        **body.get("chat_template_kwargs", {}),
    )
    return list(tokenizer(text, add_special_tokens=body["add_special_tokens"])["input_ids"])


class Server:
    """A server of one engine.

    Attributes:
        posted: the bodies of requests that are no prompts, such as those to a webhook.
        pages: what it answers to paths other than that of its metrics.
        tokenizer: of its `/tokenize`; without one that answers nothing.
    """

    def __init__(self, complete: Complete | None = None):
        self.metrics, self.posted = Metrics(), list[Any]()
        self.pages: dict[str, Any] = {}
        self.tokenizer: PreTrainedTokenizerBase | None = None

        def reply(path: str, body: Any) -> Any:
            if path.endswith("/completions") and complete is not None:
                return complete(body)
            self.posted.append(body)
            if path == "/tokenize" and self.tokenizer is not None:
                return {"tokens": tokens_of(self.tokenizer, body)}
            return {}

        self.http = serve(lambda: self.metrics.page(), reply, pages=self.pages)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


Serve = Callable[..., Server]


@pytest.fixture
def start_server() -> Iterator[Serve]:
    """`start_server(complete=None)`: a server whose page of metrics a test writes itself, or `complete` does."""
    started: list[Server] = []

    def start(complete: Complete | None = None) -> Server:
        started.append(Server(complete))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture
def start_engine(start_server) -> Serve:
    """`start_engine(target, drafter, depth)`: an engine that decodes with them (None: without drafts).

    Settings of sampling take the place of a request's, and then each answer is drawn by its own seed.
    """

    def start(target: Target, drafter: Drafter | None, depth: int = 3, **instead: Any) -> Server:
        decoder = Decoder(target, drafter)
        lock = threading.Lock()
        seeds = count(77)

        def complete(body: dict[str, Any]) -> dict[str, Any]:
            seed = next(seeds) if instead else 77
            sampling = Sampling(**{"temperature": body["temperature"], "seed": seed} | instead)
            with lock:
                out = decoder.generate([body["prompt"]], body["max_tokens"], sampling, Plan(depth=depth))
            tokens = out.tokens[0]
            server.metrics.count(DraftCounts.of(out.rounds[0]), len(tokens))
            text = target.require_tokenizer().decode(tokens, skip_special_tokens=True)
            return completion(tokens, text, body["prompt"], ended=bool(tokens) and tokens[-1] in target.eos_ids)

        server = start_server(complete)
        return server

    return start
