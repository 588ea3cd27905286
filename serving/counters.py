"""What a serving engine counts of its own drafting, read from its page of Prometheus metrics.

Every engine has names of its own, and changed them between versions. They all stand in `READERS`, one function for each
engine; what they return is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from ..common import BadInputError

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
