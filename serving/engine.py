"""A running engine: its completions through the OpenAI-compatible interface, and its page of metrics."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI

from ..common import BadInputError
from .counters import Counters, read_counters

SETTLE_SECONDS = 5.0  # how long an engine may take to count what it has already answered


@dataclass(frozen=True)
class EngineCompletion:
    """An engine's answer to one prompt.

    Attributes:
        text: the new text. tokens: the new tokens; None where the engine does not return them.
        num_tokens: how many there are. ended: whether the target ended it (not the length).
        seconds: of the whole request.
        counted: what the engine counted meanwhile; None if that was not asked for.
    """

    text: str
    tokens: tuple[int, ...] | None
    num_tokens: int
    ended: bool
    seconds: float
    counted: Counters | None = None


@dataclass(frozen=True)
class Ask:
    """How completions are asked for."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the fields of a request; those after `temperature` undo whatever the target's own defaults say."""
        plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        found: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "extra_body": plain,
        }
        return found if self.seed is None else found | {"seed": self.seed}


class Engine:
    """A client of one running engine.

    Args:
        url: of the server, with or without its `/v1`.
        model: the name that the engine serves; None takes the first one that it lists.
        key: sent as the bearer token.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None, timeout: float = 600.0):
        self.url = root_url(url)
        self.key, self.timeout = key, timeout
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", timeout=timeout, max_retries=0)
        self._model = model

    @property
    def model(self) -> str:
        """The name under which the engine serves its target."""
        if self._model is None:
            try:
                self._model = self._client.models.list().data[0].id
            except (APIConnectionError, APIStatusError) as error:
                raise self._unreachable(error) from error
        return self._model

    def counters(self) -> Counters:
        """Return what the engine has counted since it started.

        Raises:
            BadInputError: it cannot be reached, or its page of metrics cannot be read.
        """
        return read_counters(read_metrics(self.url, self.key))

    def complete(self, tokens: Sequence[int], ask: Ask) -> EngineCompletion:
        """Complete one prompt, given as token ids.

        Raises:
            BadInputError: the engine cannot be reached, or refuses the request.
        """
        began = time.perf_counter()
        try:
            answer = self._client.completions.create(model=self.model, prompt=list(tokens), **ask.body())
        except (APIConnectionError, APIStatusError) as error:
            raise self._unreachable(error) from error
        seconds = time.perf_counter() - began
        choice = answer.choices[0]
        ids = getattr(choice, "token_ids", None)
        count = answer.usage.completion_tokens if answer.usage else len(ids or ())
        ended = choice.finish_reason == "stop"
        return EngineCompletion(choice.text, None if ids is None else tuple(ids), count, ended, seconds)

    def settled(self, earlier: Counters, tokens: int) -> Counters:
        """Return the counters, as soon as the engine has counted `tokens` new tokens after `earlier`."""
        limit = time.monotonic() + SETTLE_SECONDS
        while True:
            found = self.counters()
            if found.since(earlier).tokens >= tokens or time.monotonic() > limit:
                return found
            time.sleep(0.02)

    def _unreachable(self, error: Exception) -> BadInputError:
        return BadInputError(f"the engine at {self.url} does not answer as it should ({error}). Is it running there?")


def root_url(url: str) -> str:
    """Return a server's URL without `/`, `/v1` or `/metrics` at its end."""
    root = url.rstrip("/")
    for ending in ("/metrics", "/v1"):
        root = root.removesuffix(ending)
    if not root.startswith(("http://", "https://")):
        raise BadInputError(f"{url!r} is not the URL of a server; it begins with http:// or https://.")
    return root


def read_metrics(url: str, key: str | None = None, timeout: float = 10.0) -> str:
    """Return the text of a server's page of metrics; BadInputError if it cannot be had."""
    page = f"{root_url(url)}/metrics"
    request = urllib.request.Request(page, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode("utf-8"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadInputError(f"{page} cannot be read ({error}). Is the engine running, with its metrics on?") from error
