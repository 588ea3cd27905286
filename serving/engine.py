"""A running engine: its completions through the OpenAI-compatible interface, and its page of metrics."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from ..common import BadInputError

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


COUNTED = ("rounds", "drafted", "by_position")  # what some engines count, and others do not
SUMS = ("rounds", "drafted", "accepted", "tokens")  # what only ever grows while an engine runs


@dataclass(frozen=True)
class Counters:
    """What an engine has counted: since it started, or (see `since`) between two looks at its page.

    Attributes:
        engine: vllm, sglang, tgi or llama.cpp.
        rounds: verified proposals. drafted, accepted: draft tokens in them, and those that were kept.
        by_position: how many rounds kept the draft at each position, the first one first; () if it is not counted.
        tokens: new tokens of all requests, whether they were drafted or not.
        mean: tokens per round, where the engine shows only its own latest average; rounds are then derived from it.
        started: when the engine's process began, in seconds since 1970; None if it does not say.
        uncounted: which of `COUNTED` this engine never counts: its zeros there say nothing.
    """

    engine: str
    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: tuple[float, ...] = ()
    tokens: float = 0.0
    mean: float | None = None
    started: float | None = None
    uncounted: tuple[str, ...] = ()

    @property
    def tau(self) -> float:
        """Mean tokens per round, with the target's own token; nan without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def depth(self) -> float:
        """Mean draft tokens per round; nan where the engine does not count them."""
        return self.drafted / self.rounds if self.rounds and self.drafted else float("nan")

    def restarted(self, earlier: Counters) -> bool:
        """Tell whether the engine was started anew after `earlier`: another beginning, or a counter that fell."""
        if None not in (self.started, earlier.started) and self.started != earlier.started:
            return True
        return any(getattr(self, name) < getattr(earlier, name) for name in SUMS)

    def since(self, earlier: Counters | None) -> Counters:
        """Return what was counted after `earlier`; all of it, if the engine was started anew in between."""
        if earlier is None or self.restarted(earlier):
            return self._averaged(self.tokens)
        depths = max(len(self.by_position), len(earlier.by_position))
        positions = zip(_padded(self.by_position, depths), _padded(earlier.by_position, depths), strict=True)
        return replace(
            self,
            rounds=self.rounds - earlier.rounds,
            drafted=self.drafted - earlier.drafted,
            accepted=self.accepted - earlier.accepted,
            by_position=tuple(now - then for now, then in positions),
            tokens=self.tokens - earlier.tokens,
        )._averaged(self.tokens - earlier.tokens)

    def plus(self, other: Counters) -> Counters:
        """Return both together, as if one engine had counted them."""
        depths = max(len(self.by_position), len(other.by_position))
        positions = zip(_padded(self.by_position, depths), _padded(other.by_position, depths), strict=True)
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in ("rounds", "drafted", "accepted", "tokens")
        }
        return replace(self, **sums, by_position=tuple(map(sum, positions)))

    def _averaged(self, tokens: float) -> Counters:
        """Return these counts with the rounds that an average alone tells of: each made `mean` of the tokens."""
        if self.mean is None or not self.mean >= 1:
            return self
        rounds = tokens / self.mean
        return replace(self, rounds=rounds, accepted=tokens - rounds)


def _padded(values: tuple[float, ...], length: int) -> tuple[float, ...]:
    return values + (0.0,) * (length - len(values))


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
                    samples.setdefault(_plain(sample.name), []).append((sample.labels, sample.value))
        except ValueError as error:
            raise BadInputError(f"this is no page of Prometheus metrics ({error}); give an engine's URL.") from error
        return cls(samples)

    def has(self, *names: str) -> bool:
        """Tell whether one of the names is there."""
        return any(_plain(name) in self.samples or f"{_plain(name)}_total" in self.samples for name in names)

    def total(self, *names: str) -> float:
        """Return the first of the names that is there, summed over all labels (engines, models); 0 if none is."""
        return sum(value for _, value in self._first(names))

    def mean(self, *names: str) -> float | None:
        """Return the mean over all labels of a gauge that is above zero; None if there is none."""
        values = [value for _, value in self._first(names) if value > 0]
        return sum(values) / len(values) if values else None

    def by_position(self, name: str) -> tuple[float, ...]:
        """Return a counter by its label `position`, the first position first."""
        found: dict[int, float] = {}
        for labels, value in self._first((name,)):
            position = int(labels["position"])
            found[position] = found.get(position, 0.0) + value
        return tuple(found.get(i, 0.0) for i in range(max(found, default=-1) + 1))

    def _first(self, names: Iterable[str]) -> list[tuple[dict[str, str], float]]:
        spelled = (form for name in names for form in (f"{_plain(name)}_total", _plain(name)))
        return next((self.samples[form] for form in spelled if form in self.samples), [])


def _plain(name: str) -> str:
    return name.replace(":", "_")


# ------------------------------------------------------------ the engines


def _vllm(page: Page) -> Counters:
    """Read vLLM; before 0.9 it did not count rounds, but what they emitted: accepted tokens and one for each round."""
    positions = "vllm:spec_decode_num_accepted_tokens_per_pos"
    accepted = page.total("vllm:spec_decode_num_accepted_tokens")
    if page.has("vllm:spec_decode_num_drafts"):
        rounds = page.total("vllm:spec_decode_num_drafts")
    else:
        rounds = max(0.0, page.total("vllm:spec_decode_num_emitted_tokens") - accepted)
    return Counters(
        "vllm",
        rounds=rounds,
        drafted=page.total("vllm:spec_decode_num_draft_tokens"),
        accepted=accepted,
        by_position=page.by_position(positions),
        tokens=page.total("vllm:generation_tokens"),
        uncounted=() if page.has(positions) else ("by_position",),
    )


def _sglang(page: Page) -> Counters:
    """Read SGLang, which shows the mean of its latest rounds."""
    return Counters(
        "sglang",
        tokens=page.total("sglang:generation_tokens"),
        mean=page.mean("sglang:spec_accept_length"),
        uncounted=COUNTED,
    )


def _tgi(page: Page) -> Counters:
    """Read Text Generation Inference, whose histogram has one entry for each round: the drafts that it kept."""
    return Counters(
        "tgi",
        rounds=page.total("tgi_request_skipped_tokens_count"),
        accepted=page.total("tgi_request_skipped_tokens_sum"),
        tokens=page.total("tgi_request_generated_tokens_sum"),
        uncounted=("drafted", "by_position"),
    )


def _llama_cpp(page: Page) -> Counters:
    positions = "llamacpp:spec_decode_num_accepted_tokens_per_pos"
    return Counters(
        "llama.cpp",
        rounds=page.total("llamacpp:spec_decode_num_drafts"),
        drafted=page.total("llamacpp:spec_decode_num_draft_tokens"),
        accepted=page.total("llamacpp:spec_decode_num_accepted_tokens"),
        by_position=page.by_position(positions),
        tokens=page.total("llamacpp:tokens_predicted"),
        uncounted=() if page.has(positions) else ("by_position",),
    )


# An engine, a name that only its page has, and what reads it.
READERS: dict[str, tuple[str, Callable[[Page], Counters]]] = {
    "vllm": ("vllm:generation_tokens", _vllm),
    "sglang": ("sglang:generation_tokens", _sglang),
    "tgi": ("tgi_request_skipped_tokens_count", _tgi),
    "llama.cpp": ("llamacpp:tokens_predicted", _llama_cpp),
}


def read_counters(text: str) -> Counters:
    """Return what a page of metrics tells of drafting.

    Raises:
        BadInputError: it is no page of metrics, or that of an engine which is not known.
    """
    page = Page.parsed(text)
    for sign, read in READERS.values():
        if page.has(sign):
            return replace(read(page), started=page.mean("process_start_time_seconds"))
    raise BadInputError(
        f"no engine that is known has this page of metrics: none of {', '.join(sign for sign, _ in READERS.values())} "
        "is on it. Start the engine with its metrics on (SGLang: --enable-metrics; llama.cpp: --metrics)."
    )
