"""A running engine: its completions through the OpenAI-compatible interface, and what it counted meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from ..common import BadInputError, http_client
from ..common.http_client import METRICS_TYPES, AnswerLimits, BadAnswerError, ModelList, TokenId, ask, read_answer
from ..common.untrusted_files import MEGABYTE
from ..common.values import ForeignModel, is_server_address, printable_urls
from .engine_metrics import PageCounters, read_counters

LOOK_SECONDS, COMPLETION_SECONDS = 10.0, 600.0  # that an engine may take to answer
BYTES_OF_A_TOKEN = 1024  # as text, as an id, and in fields beside them
SETTLE_SECONDS = 5.0  # how long an engine may take to count what it has already answered


class SentText(ForeignModel, extra="forbid"):
    """A suite's text or chat, as `/tokenize` of vLLM and SGLang is asked, and the tokens that we make of it."""

    name: str
    request: dict[str, Any]
    tokens: list[int]


@dataclass(frozen=True)
class EngineCompletion:
    """An engine's answer to one prompt.

    Attributes:
        text: the new text. tokens: the new tokens; None where the engine does not return them.
        log_probs: of the tokens, by the target before temperature; () where they were not asked for, or not told.
        num_tokens: their number. seconds: of the whole request.
    """

    text: str
    tokens: tuple[int, ...] | None
    num_tokens: int
    seconds: float
    log_probs: tuple[float, ...] = ()


class Engine:
    """A client of one running engine.

    Args:
        url: of the server, with or without its `/v1`.
        key: sent as the bearer token.
        name: of the model that is asked; needed where the server has several.
    """

    def __init__(self, url: str, key: str | None = None, name: str | None = None):
        self.url = root_url(url)
        self.key = key
        self.name = name

    @cached_property
    def model(self) -> str:
        """The name under which the engine serves its target; BadInputError if it has another one, or several."""
        place = f"{self.url}/v1/models"
        models = read_answer(ModelList, self._look(place), place, self.key).data
        different = {m.root or m.id for m in models}  # one may have several names
        if self.name not in [m.id for m in models] if self.name else len(different) > 1:
            listed = ", ".join(map(str, models[:8]))
            which = f"no model {self.name!r}" if self.name else "several models"
            raise BadInputError(f"{self.url} serves {which}; it has {listed}. Name the pair's target with --model.")
        return self.name or models[0].id

    def tokenize(self, sent: SentText) -> list[int]:
        """Return a text's or a chat's tokens by the server's own tokenizer; BadInputError if it tells none."""
        place, num_bytes = f"{self.url}/tokenize", MEGABYTE + BYTES_OF_A_TOKEN * len(sent.tokens)
        body = json.dumps({"model": self.model} | sent.request).encode()
        content = ask(place, body, self.key, AnswerLimits(LOOK_SECONDS, num_bytes))
        return read_answer(_Tokens, content, place, self.key).tokens

    def about(self, engine: str) -> ServerFacts:
        """Return what the server says of itself; nothing known where it says nothing. `engine`: as counters name it."""
        for page in ABOUT.get(engine, ()):
            with suppress(BadAnswerError):
                return read_answer(ServerFacts, self._look(f"{self.url}{page}"), f"{self.url}{page}")
        return ServerFacts()

    def _look(self, place: str) -> bytes:
        return ask(place, key=self.key, limits=AnswerLimits(LOOK_SECONDS))

    def counters(self) -> PageCounters:
        """Return the counters on the engine's page of metrics; those of its model alone, where they name it.

        Raises:
            BadInputError: it cannot be reached, or its page of metrics cannot be read.
        """
        found = read_counters(read_metrics(self.url, self.key))
        return found.of_model(self.name) if self.name in found.models else found

    def complete(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int | None = None,
        log_probs: bool = False,
    ) -> EngineCompletion:
        """Complete one prompt, given as token ids; `seed` is of its draws. With `log_probs` of its tokens, if known.

        Raises:
            BadInputError: the engine cannot be reached, refuses the request, or gives an answer that cannot be used.
        """
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": max_new_tokens, "temperature": temperature}
        body |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # not the target's own defaults
        body |= {"return_token_ids": True} | ({} if seed is None else {"seed": seed})
        body |= {"logprobs": 1} if log_probs else {}
        place, num_bytes = f"{self.url}/v1/completions", MEGABYTE + BYTES_OF_A_TOKEN * (max_new_tokens + len(tokens))
        began = time.perf_counter()
        content = ask(place, json.dumps(body).encode(), self.key, AnswerLimits(COMPLETION_SECONDS, num_bytes))
        seconds = time.perf_counter() - began
        answer = read_answer(_CompletionBody, content, place, self.key)
        ids, choice = answer.choices[0].token_ids, answer.choices[0]
        count = answer.usage.completion_tokens if answer.usage else len(ids or ())
        if max(count, len(ids or ())) > max_new_tokens:
            raise BadInputError(f"{place} answers with {count} tokens to a request for {max_new_tokens} at most.")
        told = tuple(choice.logprobs.token_logprobs) if choice.logprobs else ()
        return EngineCompletion(choice.text, None if ids is None else tuple(ids), count, seconds, told)

    def settled(self, earlier: PageCounters, tokens: int) -> PageCounters:
        """Return the counters, as soon as the engine has counted `tokens` new tokens after `earlier`.

        Raises:
            BadInputError: it was started anew after `earlier`: what it counted before that is lost.
        """
        limit = time.monotonic() + SETTLE_SECONDS
        while True:
            now = self.counters()
            if now.restarted(earlier):
                raise BadInputError(f"{self.url} was started anew in the middle of the measurement; measure again.")
            if now.since(earlier).tokens >= tokens or time.monotonic() > limit:
                return now
            time.sleep(0.02)


# Pages on which a server describes itself, newer ones first.
ABOUT = {"vllm": ("/version",), "sglang": ("/server_info", "/get_server_info")}


class ServerFacts(ForeignModel):
    """A server's description of itself; `drafted`: the tokens that SGLang verifies a round, with the root."""

    version: str | None = Field(default=None, max_length=100)
    drafted: int | None = Field(default=None, alias="speculative_num_draft_tokens")


class _Tokens(ForeignModel):
    """The answer of `/tokenize`."""

    tokens: list[TokenId]


class _LogProbs(ForeignModel):
    # llama.cpp has a list `content` in its place, in which every verified draft has a probability of 1: none is told.
    token_logprobs: list[Annotated[float, Field(le=0.01, ge=-1e4)]] = Field(default=[])


class _Choice(ForeignModel):
    text: str
    token_ids: list[TokenId] | None = None
    logprobs: _LogProbs | None = None


class _Usage(ForeignModel):
    completion_tokens: int = Field(ge=0)


class _CompletionBody(ForeignModel):
    """The answer of `/v1/completions`."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def root_url(url: str) -> str:
    """Return a server's URL without `/`, `/v1` or `/metrics` at its end."""
    root = url.rstrip("/")
    for ending in ("/metrics", "/v1"):
        root = root.removesuffix(ending)
    if not is_server_address(root):
        raise BadInputError(
            f"{printable_urls(url)!a} is not the URL of a server: it begins with http:// or https://, and holds no "
            "user, no password, no `?` and no `#`; a key has an option of its own."
        )
    return root


def read_metrics(url: str, key: str | None = None) -> str:
    """Return the text of a server's page of metrics; BadInputError if it cannot be read."""
    limits = AnswerLimits(LOOK_SECONDS, kinds=METRICS_TYPES)
    try:
        return ask(f"{root_url(url)}/metrics", key=key, limits=limits).decode("utf-8", "replace")
    except http_client.BadAnswerError as error:
        raise BadInputError(f"{error} Is the engine running, with its metrics on?") from error
