"""An engine for tests that need none of the real ones: our own decoder after a server of vLLM's interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outrider.decode import Decoder, Plan, Sampling
from outrider.heads import Drafter
from outrider.scripts.json_output import schema
from outrider.serving.reference_run import DraftCounts
from outrider.targets import Target


def answer(kind: str, text: str) -> dict[str, Any]:
    """Return the body of a verb's answer, which its schema must allow."""
    found: dict[str, Any] = json.loads(text)
    Draft202012Validator(schema(kind)).validate(found)
    return {name: value for name, value in found.items() if name not in ("schema", "exit_code")}


class Metrics:
    """The counters of a vLLM, and its page."""

    def __init__(self) -> None:
        self.counts, self.tokens, self.started = DraftCounts(), 0, 1000.0

    def count(self, counts: DraftCounts, tokens: int) -> None:
        depth = max(len(self.counts.by_position), len(counts.by_position))
        rows = [c.by_position + [0.0] * (depth - len(c.by_position)) for c in (self.counts, counts)]
        self.counts = DraftCounts(
            rounds=self.counts.rounds + counts.rounds,
            drafted=self.counts.drafted + counts.drafted,
            accepted=self.counts.accepted + counts.accepted,
            by_position=[a + b for a, b in zip(*rows, strict=True)],
        )
        self.tokens += tokens

    def restart(self) -> None:
        """Begin again, as a new process would."""
        self.counts, self.tokens, self.started = DraftCounts(), 0, self.started + 1

    def page(self) -> str:
        label, name = 'model_name="target"', "vllm:spec_decode_num"
        lines = [
            f"process_start_time_seconds {self.started}",
            f"vllm:generation_tokens_total{{{label}}} {self.tokens}",
            f"{name}_drafts_total{{{label}}} {self.counts.rounds}",
            f"{name}_draft_tokens_total{{{label}}} {self.counts.drafted}",
            f"{name}_accepted_tokens_total{{{label}}} {self.counts.accepted}",
        ]
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{{label},position="{i}"}} {kept}'
            for i, kept in enumerate(self.counts.by_position)
        ]
        return "\n".join(lines) + "\n"


class Server:
    """A server of one engine.

    Attributes:
        posted: the bodies that it was sent which are no prompts: what a webhook gets.
    """

    def __init__(self, complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None):
        self.metrics, self.posted = Metrics(), list[Any]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                models = {"object": "list", "data": [{"id": "target", "object": "model", "created": 0, "owned_by": ""}]}
                self._answer(server.metrics.page() if self.path == "/metrics" else json.dumps(models))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/completions") and complete is not None:
                    self._answer(json.dumps(complete(body)))
                else:
                    server.posted.append(body)
                    self._answer("{}")

            def _answer(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(complete=None)`: a server whose page of metrics a test writes itself, or `complete` does."""
    started: list[Server] = []

    def start(complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Server:
        started.append(Server(complete))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture
def start_engine(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """`start_engine(target, drafter, depth)`: an engine that decodes with them (None: without drafts)."""

    def start(target: Target, drafter: Drafter | None, depth: int = 3) -> Server:
        decoder, lock = Decoder(target, drafter), threading.Lock()

        def complete(body: dict[str, Any]) -> dict[str, Any]:
            sampling = Sampling(temperature=body["temperature"], seed=77)
            with lock:
                out = decoder.generate([body["prompt"]], body["max_tokens"], sampling, Plan(depth=depth))
            tokens = out.tokens[0]
            server.metrics.count(DraftCounts.of(out.rounds[0]), len(tokens))
            ended = bool(tokens) and tokens[-1] in target.eos_ids
            choice = {
                "index": 0,
                "text": target.require_tokenizer().decode(tokens, skip_special_tokens=True),
                "finish_reason": "stop" if ended else "length",
                "logprobs": None,
                "token_ids": tokens,
            }
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens), "total_tokens": 0}
            answer = {"id": "1", "object": "text_completion", "created": 0, "model": "target"}
            return answer | {"choices": [choice], "usage": usage}

        server = start_server(complete)
        return server

    return start
