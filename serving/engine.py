"""A running engine: its completions through the OpenAI-compatible interface, and its page of metrics."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

from openai import APIConnectionError, APIStatusError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from ..common import BadInputError
from .reference_run import DraftCounts

SETTLE_SECONDS = 5.0  # how long an engine may take to count what it has already answered


@dataclass(frozen=True)
class EngineCompletion:
    """An engine's answer to one prompt.

    Attributes:
        text: the new text. tokens: the new tokens; None where the engine does not return them.
        num_tokens: their number. seconds: of the whole request.
    """

    text: str
    tokens: tuple[int, ...] | None
    num_tokens: int
    seconds: float


class Engine:
    """A client of one running engine.

    Args:
        url: of the server, with or without its `/v1`.
        key: sent as the bearer token.
    """

    def __init__(self, url: str, key: str | None = None):
        self.url, self.key = root_url(url), key
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", timeout=600.0, max_retries=0)

    @cached_property
    def model(self) -> str:
        """The name under which the engine serves its target: the first one that it lists."""
        try:
            return self._client.models.list().data[0].id
        except (APIConnectionError, APIStatusError) as error:
            raise self._unreachable(error) from error

    def counters(self) -> Counters:
        """Return the engine's counters since it started.

        Raises:
            BadInputError: it cannot be reached, or its page of metrics cannot be read.
        """
        return read_counters(read_metrics(self.url, self.key))

    def complete(self, tokens: Sequence[int], max_new_tokens: int = 64, temperature: float = 0.0) -> EngineCompletion:
        """Complete one prompt, given as token ids.

        Raises:
            BadInputError: the engine cannot be reached, or refuses the request.
        """
        began = time.perf_counter()
        try:
            answer = self._client.completions.create(
                model=self.model,
                prompt=list(tokens),
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=1.0,  # this and the others undo the target's own defaults
                extra_body={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True},
            )
        except (APIConnectionError, APIStatusError) as error:
            raise self._unreachable(error) from error
        seconds = time.perf_counter() - began
        choice = answer.choices[0]
        ids = getattr(choice, "token_ids", None)
        count = answer.usage.completion_tokens if answer.usage else len(ids or ())
        return EngineCompletion(choice.text, None if ids is None else tuple(ids), count, seconds)

    def settled(self, earlier: Counters, tokens: int) -> Counters:
        """Return the counters, as soon as the engine has counted `tokens` new tokens after `earlier`."""
        limit = time.monotonic() + SETTLE_SECONDS
        while True:
            now = self.counters()
            if now.since(earlier).tokens >= tokens or time.monotonic() > limit:
                return now
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
    """Return the text of a server's page of metrics; BadInputError if it cannot be read."""
    page = f"{root_url(url)}/metrics"
    request = urllib.request.Request(page, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode("utf-8"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadInputError(f"{page} cannot be read ({error}). Is the engine running, with its metrics on?") from error


COUNTED = ("rounds", "drafted", "by_position")  # counted by some engines, and not by others


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Counters(DraftCounts):
    """The counters of an engine: since it started, or (see `since`) between two looks at its page.

    Attributes:
        engine: vllm, sglang, tgi or llama.cpp.
        tokens: new tokens of all requests, whether they were drafted or not.
        mean: tokens per round, where the engine shows only its own latest average; rounds are then derived from it.
        started: when the engine's process began, in seconds since 1970; None if it does not tell.
        uncounted: those of `COUNTED` that this engine never counts: its zeros there mean nothing.
    """

    sums: ClassVar[tuple[str, ...]] = ("rounds", "drafted", "accepted", "tokens")
    engine: str = ""
    tokens: float = 0.0
    mean: float | None = None
    started: float | None = None
    uncounted: tuple[str, ...] = ()

    def restarted(self, earlier: Counters) -> bool:
        """Tell whether the engine was started anew after `earlier`: another beginning, or a counter that fell."""
        if None not in (self.started, earlier.started) and self.started != earlier.started:
            return True
        return any(getattr(self, name) < getattr(earlier, name) for name in self.sums)

    def since(self, earlier: Counters | None) -> Counters:
        """Return the counts after `earlier`; all of them, if the engine was started anew in between."""
        new = self if earlier is None or self.restarted(earlier) else self.plus(earlier, -1)
        if new.mean is None or not new.mean >= 1:
            return new
        rounds = new.tokens / new.mean  # an average alone tells of rounds: each made `mean` of the tokens
        return replace(new, rounds=rounds, accepted=new.tokens - rounds)


# ------------------------------------------------------------ one page


@dataclass(frozen=True)
class Page:
    """The samples of one page of metrics, by name; `:` and `_` are the same letter, as exporters exchange them."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def parsed(cls, text: str) -> Page:
        """Read the text of a page; BadInputError if it is no page of metrics."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name.replace(":", "_"), []).append((sample.labels, sample.value))
        except ValueError as error:
            raise BadInputError(f"this is no page of Prometheus metrics ({error}); give an engine's URL.") from error
        return cls(samples)

    def values(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values of a metric, whose name may end with `_total`; [] if it is not there."""
        plain = name.replace(":", "_")
        return self.samples.get(f"{plain}_total") or self.samples.get(plain, [])

    def total(self, name: str) -> float:
        """Return a metric summed over all labels (engines, models); 0 if it is not there."""
        return sum(value for _, value in self.values(name))

    def mean(self, name: str) -> float | None:
        """Return the mean over all labels of a gauge that is above zero; None if there is none."""
        values = [value for _, value in self.values(name) if value > 0]
        return sum(values) / len(values) if values else None

    def by_position(self, name: str) -> tuple[float, ...]:
        """Return a counter by its label `position`, the first position first."""
        sums: dict[int, float] = {}
        for labels, value in self.values(name):
            position = int(labels["position"])
            sums[position] = sums.get(position, 0.0) + value
        return tuple(sums.get(i, 0.0) for i in range(max(sums, default=-1) + 1))


# ------------------------------------------------------------ the engines


def _spec_decode(page: Page, engine: str, prefix: str, tokens: str) -> Counters:
    """Read vLLM's names, which llama.cpp has, too.

    Before 0.9 vLLM did not count rounds, but the tokens that they emitted: accepted ones and one for each round.
    """
    counts = f"{prefix}:spec_decode_num"
    accepted, positions = page.total(f"{counts}_accepted_tokens"), f"{counts}_accepted_tokens_per_pos"
    emitted = page.total(f"{counts}_emitted_tokens")
    return Counters(
        engine=engine,
        rounds=page.total(f"{counts}_drafts") if page.values(f"{counts}_drafts") else max(0.0, emitted - accepted),
        drafted=page.total(f"{counts}_draft_tokens"),
        accepted=accepted,
        by_position=page.by_position(positions),
        tokens=page.total(tokens),
        uncounted=() if page.values(positions) else ("by_position",),
    )


def _sglang(page: Page) -> Counters:
    """Read SGLang, which shows the mean of its latest rounds."""
    tokens, mean = page.total("sglang:generation_tokens"), page.mean("sglang:spec_accept_length")
    return Counters(engine="sglang", tokens=tokens, mean=mean, uncounted=COUNTED)


def _tgi(page: Page) -> Counters:
    """Read Text Generation Inference, whose histogram has one entry for each round: the drafts that it kept."""
    return Counters(
        engine="tgi",
        rounds=page.total("tgi_request_skipped_tokens_count"),
        accepted=page.total("tgi_request_skipped_tokens_sum"),
        tokens=page.total("tgi_request_generated_tokens_sum"),
        uncounted=("drafted", "by_position"),
    )


_VLLM, _LLAMA_CPP = "vllm:generation_tokens", "llamacpp:tokens_predicted"
# By a name that only the page of one engine has: its reader.
READERS: dict[str, Callable[[Page], Counters]] = {
    _VLLM: partial(_spec_decode, engine="vllm", prefix="vllm", tokens=_VLLM),
    "sglang:generation_tokens": _sglang,
    "tgi_request_skipped_tokens_count": _tgi,
    _LLAMA_CPP: partial(_spec_decode, engine="llama.cpp", prefix="llamacpp", tokens=_LLAMA_CPP),
}


def read_counters(text: str) -> Counters:
    """Return the counters of drafting on a page of metrics.

    Raises:
        BadInputError: it is no page of metrics, or that of an engine which is not known.
    """
    page = Page.parsed(text)
    for name, read in READERS.items():
        if page.values(name):
            return replace(read(page), started=page.mean("process_start_time_seconds"))
    raise BadInputError(
        f"no engine that is known has this page of metrics: none of {', '.join(READERS)} is on it. Start the engine "
        "with its metrics on (SGLang: --enable-metrics; llama.cpp: --metrics)."
    )
