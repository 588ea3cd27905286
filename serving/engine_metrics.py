"""An engine's page of metrics: what it counts of drafting, by label set, in the names of each engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import ConfigDict, FailFast, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ..common import BadInputError

if TYPE_CHECKING:
    from ..decode import Round

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError:  # it comes with the extra `serving`
    text_string_to_metric_families = None  # type: ignore[assignment]

# A page of metrics has some thousand samples of some ten labels; a round has some ten drafts at most.
MOST_SAMPLES = 50_000
LONGEST_LINE = 4096
MOST_POSITIONS = 1024
LARGEST_COUNT = 2**53
MOST_ENGINES = 256  # label sets on one page
WITHIN = ("position", "le")  # labels of one engine's metric; all others tell whose it is


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DraftCounts:
    """The drafting of one prompt, as an engine counts it: rounds in which nothing was drafted do not count.

    Attributes:
        rounds: verified proposals. drafted, accepted: draft tokens in them, and those that were kept.
        by_position: rounds that kept the draft at each position, the first one first; () if it is not counted.
    """

    sums: ClassVar[tuple[str, ...]] = ("rounds", "drafted", "accepted")
    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: Annotated[tuple[float, ...], FailFast()] = ()

    @classmethod
    def of(cls, rounds: Sequence[Round], room: int | None = None) -> DraftCounts:
        """Return the counts of one prompt's rounds in our decoder.

        Args:
            room: how many tokens these rounds may emit, for an engine that drafts no more than that: each round must
                leave room for the target's own token.
        """
        kept: list[tuple[int, int]] = []
        for one in rounds:
            drafted = one.drafted if room is None else min(one.drafted, room - 1)
            room = None if room is None else room - one.emitted
            kept += [(drafted, min(one.accepted, drafted))] if drafted else []
        deepest = max((drafted for drafted, _ in kept), default=0)
        return cls(
            rounds=len(kept),
            drafted=sum(drafted for drafted, _ in kept),
            accepted=sum(accepted for _, accepted in kept),
            by_position=tuple(sum(accepted > i for _, accepted in kept) for i in range(deepest)),
        )

    def at(self, index: int) -> float:
        """Return the rounds that kept the draft at `index`, from 0 on."""
        return self.by_position[index] if index < len(self.by_position) else 0.0

    def reached(self, index: int) -> float:
        """Return the rounds that kept all drafts before `index`."""
        return self.at(index - 1) if index else self.rounds

    def plus(self, other: DraftCounts, sign: int = 1) -> Self:
        """Return the sum of both, as if one engine had counted them; their difference for `sign` −1."""
        depth = max(len(self.by_position), len(other.by_position))
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in self.sums}
        return replace(self, **sums, by_position=tuple(self.at(i) + sign * other.at(i) for i in range(depth)))

    @property
    def tau(self) -> float:
        """Mean tokens per round, with the target's own token; nan without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")


COUNTED = ("rounds", "drafted", "by_position")  # counted by some engines, and not by others


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Counters(DraftCounts):
    """The counters of one label set: since it began, or (see `since`) between two looks at its page.

    Attributes:
        engine: vllm, sglang, tgi or llama.cpp. model: by the label `model_name`; "" without that label.
        tokens: new tokens of all requests, whether they were drafted or not.
        mean: tokens per round, where the engine shows only its own latest average; rounds are then derived from it.
        started: when the engine's process began, in seconds since 1970; None if it does not tell.
        uncounted: those of `COUNTED` that this engine never counts: its zeros there mean nothing.
    """

    sums: ClassVar[tuple[str, ...]] = ("rounds", "drafted", "accepted", "tokens")
    engine: str = ""
    tokens: float = 0.0
    model: str = ""
    mean: float | None = None
    started: float | None = None
    uncounted: tuple[str, ...] = ()

    def restarted(self, earlier: Counters) -> bool:
        """Return whether counting began anew after `earlier`: with another process, or a counter that fell.

        A counter that has passed its earlier value again by the next look cannot be noticed, but another process can.
        """
        if None not in (self.started, earlier.started) and self.started != earlier.started:
            return True
        new = self.plus(earlier, -1)
        return min(*(getattr(new, name) for name in self.sums), *new.by_position, 0.0) < 0

    def since(self, earlier: Counters | None) -> Counters:
        """Return the counts after `earlier`; all of them, if counting began anew in between."""
        new = self if earlier is None or self.restarted(earlier) else self.plus(earlier, -1)
        if new.mean is None or not new.mean >= 1:
            return new
        rounds = new.tokens / new.mean  # an average alone tells of rounds: each made `mean` of the tokens
        return replace(new, rounds=rounds, accepted=new.tokens - rounds)


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PageCounters:
    """The counters on a page of metrics, by label set: one for each engine, model and rank that counts for itself.

    Attributes:
        engine: its kind, see `Counters`.
        parts: by the labels, as the page writes them; "" for an engine that writes none.
        absent: those of `parts` that earlier looks saw, and the latest one did not.
    """

    engine: str = ""
    parts: dict[str, Counters] = Field(default={})
    absent: tuple[str, ...] = ()

    @property
    def models(self) -> list[str]:
        """The models that these counters name."""
        return sorted({counts.model for counts in self.parts.values()} - {""})

    def of_model(self, name: str) -> PageCounters:
        """Return the counters of one model alone."""
        return replace(self, parts={labels: counts for labels, counts in self.parts.items() if counts.model == name})

    def present(self) -> list[str]:
        """Return the label sets of the latest look."""
        return [labels for labels in self.parts if labels not in self.absent]

    def restarted(self, earlier: PageCounters) -> list[str]:
        """Return the label sets that began to count anew after `earlier`."""
        known = ((labels, earlier.parts.get(labels)) for labels in self.present())
        return [labels for labels, before in known if before and self.parts[labels].restarted(before)]

    def since(self, earlier: PageCounters | None) -> Counters:
        """Return the sum of what each label set counted after `earlier`: all its counts, if they began after that."""
        before = {} if earlier is None else earlier.parts
        new = [self.parts[labels].since(before.get(labels)) for labels in self.present()]
        return reduce(Counters.plus, new) if new else Counters(engine=self.engine)

    def after(self, earlier: PageCounters) -> PageCounters:
        """Return these counters beside those of `earlier` that are no longer there, and may come back."""
        gone = [labels for labels in earlier.parts if labels not in self.parts][-MOST_ENGINES:]
        return replace(self, parts=self.parts | {g: earlier.parts[g] for g in gone}, absent=tuple(gone))


Sample = tuple[dict[str, str], float]  # labels and value


def _agree(labels: dict[str, str], others: dict[str, str]) -> bool:
    return all(labels.get(name, text) == text for name, text in others.items())


@dataclass(frozen=True)
class Page:
    """The samples of one page of metrics, by name; `:` and `_` are the same letter, as exporters exchange them."""

    samples: dict[str, list[Sample]]

    @classmethod
    def parsed(cls, text: str) -> Page:
        """Read the text of a page; BadInputError if it is no page of metrics, or too large a one."""
        lines = text.split("\n")
        if len(lines) > MOST_SAMPLES or max(map(len, lines)) > LONGEST_LINE:
            raise BadInputError(
                f"this page of metrics has {len(lines)} lines, the longest of {max(map(len, lines))} letters; expected "
                f"at most {MOST_SAMPLES} lines of {LONGEST_LINE} letters. Give an engine's URL."
            )
        samples: dict[str, list[Sample]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name.replace(":", "_"), []).append((sample.labels, sample.value))
        except Exception as error:  # the parser checks little: on odd text it fails in any way
            raise BadInputError(
                f"this is no page of Prometheus metrics ({type(error).__name__}); it begins with {text[:80]!a}. Give "
                "an engine's URL."
            ) from error
        return cls(samples)

    def values(self, name: str) -> list[Sample]:
        """Return the labels and values of a metric, whose name may end with `_total`; [] if it is not there.

        Raises:
            BadInputError: no engine counts to such a value.
        """
        plain = name.replace(":", "_")
        found = self.samples.get(f"{plain}_total") or self.samples.get(plain, [])
        for _, value in found:
            if not 0 <= value <= LARGEST_COUNT:  # NaN is neither
                shown = str(value)[:40]  # the parser returns integers of any length
                raise BadInputError(f"the metric {name} is {shown}; expected a number from 0 to {LARGEST_COUNT:g}.")
        return found

    def by_labels(self, counted: Sequence[str]) -> dict[str, Page]:
        """Return the page of each label set of the metrics whose names begin with `counted`, by its labels as written.

        Other metrics (a mean, the beginning of a process) may have labels of their own, and more or fewer of them: they
        belong to each label set that they do not contradict.

        Raises:
            BadInputError: there are too many.
        """
        beginnings = tuple(name.replace(":", "_") for name in counted)
        found: dict[str, tuple[dict[str, str], dict[str, list[Sample]]]] = {}
        for name in (name for name in self.samples if name.startswith(beginnings)):
            for labels, value in self.samples[name]:
                whose = {label: labels[label] for label in sorted(labels) if label not in WITHIN}
                written = ",".join(f"{label}={json.dumps(text)}" for label, text in whose.items())
                found.setdefault(written, (whose, {}))[1].setdefault(name, []).append((labels, value))
        if len(found) > MOST_ENGINES:
            raise BadInputError(
                f"this page of metrics is of {len(found)} engines, expected at most {MOST_ENGINES}. Give one's URL."
            )
        beside = {name: self.samples.get(name, []) for name in (_MEAN, _STARTED)}
        return {
            written: Page(own | {name: [s for s in samples if _agree(whose, s[0])] for name, samples in beside.items()})
            for written, (whose, own) in found.items()
        }

    def total(self, name: str) -> float:
        """Return the sum of a metric; 0 if it is not there."""
        return sum(value for _, value in self.values(name))

    def mean(self, name: str) -> float | None:
        """Return the mean of a gauge over the ranks where it is above zero; None without one."""
        values = [value for _, value in self.values(name) if value > 0]
        return sum(values) / len(values) if values else None

    @property
    def model(self) -> str:
        """The model of the page of one label set; "" if it names none."""
        return next((labels.get("model_name", "") for samples in self.samples.values() for labels, _ in samples), "")

    def only(self, name: str) -> float | None:
        """Return the value of a metric; None if it is not there, or has several."""
        values = self.values(name)
        return values[0][1] if len(values) == 1 else None

    def by_position(self, name: str) -> tuple[float, ...]:
        """Return a counter by its label `position`, the first position first."""
        sums: dict[int, float] = {}
        for labels, value in self.values(name):
            text = labels.get("position", "")
            position = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else MOST_POSITIONS
            if position >= MOST_POSITIONS:
                raise BadInputError(f"{name} has the position {text[:40]!a}; expected one below {MOST_POSITIONS}.")
            sums[position] = sums.get(position, 0.0) + value
        return tuple(sums.get(i, 0.0) for i in range(max(sums, default=-1) + 1))


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
    return Counters(engine="sglang", tokens=page.total(_SGLANG), mean=page.mean(_MEAN), uncounted=COUNTED)


def _tgi(page: Page) -> Counters:
    """Read Text Generation Inference, whose histogram has one entry for each round: the drafts that it kept."""
    return Counters(
        engine="tgi",
        rounds=page.total("tgi_request_skipped_tokens_count"),
        accepted=page.total("tgi_request_skipped_tokens_sum"),
        tokens=page.total("tgi_request_generated_tokens_sum"),
        uncounted=("drafted", "by_position"),
    )


_VLLM = "vllm:generation_tokens"
_SGLANG = "sglang:generation_tokens"
_LLAMA_CPP = "llamacpp:tokens_predicted"
_MEAN = "sglang_spec_accept_length"
_STARTED = "process_start_time_seconds"
# By a name that only the page of one engine has: its reader, and how the names of its counters begin.
READERS: dict[str, tuple[Callable[[Page], Counters], tuple[str, ...]]] = {
    _VLLM: (partial(_spec_decode, engine="vllm", prefix="vllm", tokens=_VLLM), (_VLLM, "vllm:spec_decode_num")),
    _SGLANG: (_sglang, (_SGLANG,)),
    "tgi_request_skipped_tokens_count": (_tgi, ("tgi_request_skipped_tokens", "tgi_request_generated_tokens")),
    _LLAMA_CPP: (
        partial(_spec_decode, engine="llama.cpp", prefix="llamacpp", tokens=_LLAMA_CPP),
        (_LLAMA_CPP, "llamacpp:spec_decode_num"),
    ),
}


def read_counters(text: str) -> PageCounters:
    """Return the counters of drafting on a page of metrics.

    Raises:
        BadInputError: it is no page of metrics, or that of an engine which is not known.
    """
    page = Page.parsed(text)
    known = [name for name in READERS if page.values(name)]
    if len(known) != 1:
        raise BadInputError(
            f"this page of metrics is of several kinds of engines: it has {', '.join(known)}. Give the URL of one."
            if known
            else f"no engine that is known has this page of metrics: none of {', '.join(READERS)} is on it. Start the "
            "engine with its metrics on (SGLang: --enable-metrics; llama.cpp: --metrics)."
        )
    read, counted = READERS[known[0]]
    whole, parts = read(page), {}
    for labels, own in page.by_labels(counted).items():
        started = own.only(f"{known[0]}_created") or own.only(_STARTED)
        parts[labels] = replace(read(own), model=own.model, started=started, uncounted=whole.uncounted)
    return PageCounters(whole.engine, parts)
