"""The figures of a report with their intervals, and the records of single prompts that they are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from ...common.values import ForeignModel

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

RESAMPLES, CONFIDENCE = 2000, 0.95  # of every interval, unless it says otherwise
ALL = "all"
PHASES = ("prefill", "draft", "verify", "host", "total")
KINDS = ("copied", "number", "word", "symbol", "blank", "other")  # of tokens; "other" where there is no tokenizer


Count = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
# JSON has no nan: a number that does not exist is written as null.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]


@dataclass(frozen=True)
class Interval:
    """A figure and its confidence interval; nan where the data do not give one."""

    value: Number
    low: Number
    high: Number

    def text(self, decimals: int = 2, unit: str = "") -> str:
        """Return `1.42× [1.38, 1.46]`; the value alone without an interval, `–` without a value."""
        return f"{self.main(decimals, unit)} {self.bounds(decimals)}".strip()

    def main(self, decimals: int = 2, unit: str = "") -> str:
        """Return the value alone, as text."""
        return "–" if math.isnan(self.value) else f"{self.value:.{decimals}f}{unit}"

    def bounds(self, decimals: int = 2) -> str:
        """Return `[1.38, 1.46]`; nothing where there is no interval, `[all alike]` where all prompts gave the same."""
        if self.has_no_width:
            return "[all alike]"
        return f"[{self.low:.{decimals}f}, {self.high:.{decimals}f}]" if self.known else ""

    @property
    def known(self) -> bool:
        """Whether there is an interval around the value."""
        return not (math.isnan(self.value) or math.isnan(self.low) or math.isnan(self.high))

    @property
    def has_no_width(self) -> bool:
        """Whether all prompts gave the same figure, so that the interval does not cover other prompts."""
        return self.known and math.isclose(self.low, self.high, rel_tol=1e-9)

    @property
    def lowest(self) -> float:
        """The lower end of the interval; the value where there is no interval."""
        return self.low if self.known else self.value

    @property
    def highest(self) -> float:
        """The upper end of the interval; the value where there is no interval."""
        return self.high if self.known else self.value

    def excludes(self, value: float) -> bool:
        """Return whether the interval is known and lies beside `value`."""
        return self.known and not self.low <= value <= self.high


@dataclass(frozen=True)
class Ratio:
    """Two lists of numbers `[N]`, one per prompt: Σ numerators / Σ denominators, plus a constant."""

    numerators: ArrayLike
    denominators: ArrayLike
    offset: float = 0.0


class ReportModel(ForeignModel):
    """A part of report.json: unknown keys are refused, and nan is written as null."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class PromptRecord(ReportModel):
    """One contestant's work on one prompt at one temperature.

    Attributes:
        prompt: its id in the suite. prompt_tokens: its length.
        tokens: new tokens; rounds emitted all but the first, which comes from reading the prompt.
        drafted, accepted: draft tokens of each round, and how many of them were kept.
        tried: the depth that the drafts of each round reached along the kept path; None for `drafted` (chains).
        seconds: wall time by phase, of the median repeat; `total` is the whole request, both prefills included.
        joules: used by the whole GPU, the mean of the repeats; None where that is not known.
        repeats: total seconds of every repeat, in the order they ran.
        identical: whether the tokens equal the plain target's; None where it draws other ones (above temperature 0).
        diverges_at: index of the first new token that differs from the plain target's; None if none does.
        answer: a digest of the new tokens, by which equal answers are known.
        asked: of a later turn a digest of the prompt's tokens, in which the target's own answers stand.
        kinds: of the places that drafts reached, how many there are of each kind of token, and how many were kept.
        text: of each new token, where the page shows them: of the best and the worst prompts.
        category: of the prompt in its suite; None for none. conversation: the id that the turns of one conversation
            share, and turn: the place of this one, from 1.
    """

    contestant: str
    temperature: float
    suite: str
    prompt: str
    prompt_tokens: Count
    tokens: Count
    drafted: list[Count]
    accepted: list[Count]
    tried: list[Count] | None = None
    seconds: dict[str, Seconds]
    repeats: list[Seconds]
    joules: Annotated[float, Field(ge=0)] | None = None
    identical: bool | None = None
    diverges_at: int | None = None
    answer: str | None = None
    asked: str | None = None
    kinds: dict[str, tuple[Count, Count]] | None = None
    text: list[str] | None = None
    category: str | None = None
    conversation: str | None = None
    turn: int = 1

    @property
    def tau(self) -> float:
        """The mean number of tokens that its rounds emitted; nan without rounds."""
        return (self.tokens - 1) / len(self.accepted) if self.accepted else math.nan

    def places(self, part_of: Callable[[int], str]) -> dict[str, tuple[int, int]]:
        """Return the places that drafts reached and those that they were kept at, by `part_of` a place.

        A place is a new token of the answer, counted from 1, whose draft had all drafts before it accepted.
        """
        counts, end = dict[str, tuple[int, int]](), 1
        for accepted, reach in zip(self.accepted, self.tried or self.drafted, strict=True):
            for depth in range(1, min(accepted + 1, reach, self.tokens - end) + 1):
                tried, kept = counts.get(part := part_of(end + depth), (0, 0))
                counts[part] = tried + 1, kept + (depth <= accepted)
            end += accepted + 1
        return counts

    def pieces(self) -> list[tuple[str, str]]:
        """Return the kept drafts of each round as text, and the target's own token; the first has no drafts."""
        text, parts = list(self.text or ()), list[tuple[str, str]]()
        for kept in (0, *self.accepted):
            parts.append(("".join(text[:kept]), "".join(text[kept : kept + 1])))
            del text[: kept + 1]
        return parts

    @property
    def drawn(self) -> tuple[str, str]:
        """The suite and the conversation that this is of, whatever the context: resamples draw these as a whole."""
        return self.suite.partition("@")[0], self.conversation or self.prompt


class DepthFigure(ReportModel):
    """Acceptance at one depth d, alpha_d.

    Of `reached` rounds whose first d − 1 drafts were accepted and that drafted a d-th, `kept` accepted it too.
    """

    depth: int
    reached: int
    kept: int
    alpha: Interval


class PlaceFigure(ReportModel):
    """Acceptance in one `part` of the answers: of the places that drafts `reached`, they were kept at `kept`."""

    part: str
    reached: int
    kept: int
    alpha: Interval


class AcceptedFigure(ReportModel):
    """The number of rounds that kept exactly `accepted` drafts, and their share of all rounds."""

    accepted: int
    rounds: int
    share: Interval


class RequestFigures(ReportModel):
    """The figures of one contestant on some requests of one suite (or of `all`) at one temperature.

    Attributes:
        num_prompts: requests, of which a conversation has several.
        tau: None where there are no rounds.
        speedup: tokens/s ÷ tokens/s of the plain target in the same engine and run.
        identical: prompts whose tokens equal the plain target's; None where they are other draws.
    """

    contestant: str
    temperature: float
    suite: str
    num_prompts: int
    num_rounds: int
    num_tokens: int
    tau: Interval | None
    tokens_per_second: Interval
    speedup: Interval
    identical: int | None


class Figures(RequestFigures):
    """The figures of all requests of a suite, or of all suites.

    Attributes:
        rule: the verification rule; "none" where nothing is drafted.
        acceptance_rate: None where there are no drafts.
        positions, kinds: acceptance by position in the answer, and by kind of token; empty where there are no drafts.
        speedup_generate: as `speedup`, over `transformers.generate`; None if it did not run.
        floor_share: of the plain target's rounds, the share of their time that reading the weights has to take.
        seconds: summed over prompts, by phase. milliseconds_per_token: the same per new token.
        joules_per_token: of the whole GPU; None where that is not known.
    """

    rule: str
    acceptance_rate: Interval | None
    alpha: list[DepthFigure]
    accepted: list[AcceptedFigure]
    positions: list[PlaceFigure] = Field(default_factory=list)
    kinds: list[PlaceFigure] = Field(default_factory=list)
    speedup_generate: Interval | None
    floor_share: Interval | None = None
    joules_per_token: Interval | None = None
    seconds: dict[str, float]
    milliseconds_per_token: dict[str, Interval]


class GroupFigures(RequestFigures):
    """The figures of a part of a suite; `by` is the kind of part: category, task (Spec-Bench's six), or turn."""

    by: str
    group: str


class BatchFigures(ReportModel):
    """The figures of one contestant at one batch size: ragged batches, whose rows are freed as they end.

    Attributes:
        groups: batches. sequences: their prompts, in all. tokens: new ones.
        speedup: tokens/s ÷ tokens/s of the plain target in the same batches; the interval is over batches.
        tau: mean tokens per round and sequence, with the target's own; None for the plain target.
        rows: mean rows that were still running, over all rounds: the batch as the device saw it.
        drafted: mean drafts of a round and sequence.
        identical: sequences whose tokens equal the plain target's (temperature 0 only).
    """

    contestant: str
    temperature: float = 0.0
    size: int
    groups: int
    sequences: int
    tokens: int
    tokens_per_second: Interval
    speedup: Interval
    tau: Interval | None
    rows: float
    drafted: float
    identical: int | None


class Baselines(ReportModel):
    """The names of the contestants that others are compared with."""

    plain: str
    generate: str | None


def tau_ratio(records: Sequence[PromptRecord]) -> Ratio:
    """Return τ over the records: Σ tokens that rounds emitted / Σ rounds."""
    return Ratio([r.tokens - 1 for r in records], [len(r.accepted) for r in records])


def speed_ratio(records: Sequence[PromptRecord]) -> Ratio:
    """Return tokens per second over the records: Σ tokens / Σ seconds of whole requests."""
    return Ratio([r.tokens for r in records], [r.seconds["total"] for r in records])
