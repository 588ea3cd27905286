"""What an engine did, beside what our decoder does with the same prompts.

The prompts are compared one by one: the interval of a difference is that of paired prompts, which is far narrower than
the intervals of the two figures.

Shapes: N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict

from ..eval.reports.figures import Interval, Ratio
from ..eval.reports.statistics import Bootstrap, strata_of
from .fault_models import is_same
from .reference_run import DraftCounts, Expectation

# Several positions, and τ and the texts' length at several temperatures, each decide whether an engine differs: each
# must be surer than one figure alone, or one right engine in ten would be accused.
CONFIDENCE_OF_DIFFERENCES = 0.99
AVERAGED = 0.1  # of τ: what an engine's own average of its latest rounds may be off by, for it lags
FEW = 8  # rounds that reach a position, below which nothing is said about it

Write = Callable[[list[int]], str]  # from token ids to text


class ResultModel(BaseModel):
    """A part of the result; unknown keys are refused, and nan is written as null."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Reply(ResultModel):
    """What the engine did with one prompt: once at temperature 0, above it as often as our decoder did.

    Attributes:
        text: of the first answer. tokens: its new token ids; None where the engine returns text alone.
        lengths: new tokens of every answer. seconds, counts: of all of them.
        uncounted: what the engine never counts, see `counters.COUNTED`.
    """

    text: str
    tokens: list[int] | None
    lengths: list[int]
    seconds: float
    counts: DraftCounts
    uncounted: list[str] = []


class Position(ResultModel):
    """Acceptance at one position of the drafts, given that all drafts before it were accepted.

    Attributes:
        own, served: the share that was accepted here and there. difference: served − own, with its interval.
    """

    position: int
    own: float
    served: float
    difference: Interval

    @property
    def parted(self) -> bool:
        """Whether the two certainly differ."""
        return self.difference.excludes(0.0)


class Divergence(ResultModel):
    """A text that is not ours: the index of the first new token that differs, of `length` of ours.

    (Where an engine returns text alone, both count characters.)
    """

    suite: str
    prompt: str
    index: int
    length: int


class ServedComparison(ResultModel):
    """Our decoder and the engine at one temperature.

    Attributes:
        own, served: τ with its interval. difference: served − own, of paired prompts; like all differences here it has
            a 99% interval, since several of them decide.
        drafted_own, drafted_served: draft tokens per round; None there if the engine does not count them.
        uncounted: what the engine does not count, so that nothing is said about it. Without "rounds" its τ is its own
            average of its latest rounds.
        rounds: of the engine. by_position: rounds of the engine that kept the draft at each position.
        identical: prompts whose text is ours (at temperature 0; None above it). divergences: the others.
        same_drafts: prompts in whose rounds the engine accepted exactly what our decoder did (at temperature 0): with
            float32 on both sides that is nearly all of them. None where an engine does not count by position.
        length: new tokens per prompt, served − own: texts of the same distribution are equally long.
        one_hot: τ of our decoder when it proposes the most probable drafts; None at temperature 0.
        tokens_per_second: of whole requests, one after the other. plain: of the engine without drafts.
        speedup: their ratio; None where the plain engine was not asked.
    """

    temperature: float
    num_prompts: int
    own: Interval
    served: Interval
    difference: Interval
    drafted_own: float
    drafted_served: float | None
    uncounted: list[str] = []
    rounds: int
    by_position: list[int]
    positions: list[Position]
    identical: int | None = None
    divergences: list[Divergence] = []
    same_drafts: int | None = None
    length: Interval
    one_hot: Interval | None = None
    one_hot_difference: Interval | None = None
    tokens_per_second: Interval
    plain: Interval | None = None
    speedup: Interval | None = None

    def agrees(self, tolerance: float) -> bool:
        """Whether τ is ours: no certain difference, or one of at most `tolerance` times our τ.

        Where there is no difference to be sure of, as without any round, the values themselves are compared.
        """
        if "rounds" in self.uncounted:
            tolerance = max(tolerance, AVERAGED)
        if not self.difference.known:
            return abs(self.served.value - self.own.value) <= tolerance * self.own.value  # False of no number
        return not self.difference.excludes(0.0) or abs(self.difference.value) <= tolerance * self.own.value

    @property
    def parts_at(self) -> int | None:
        """The first position at which acceptance certainly differs; None if it does nowhere."""
        return next((p.position for p in self.positions if p.parted), None)


class Replies(ResultModel):
    """What the engine answered at one temperature, in the order of the expectation's prompts.

    Attributes:
        plain: the same engine's replies without drafts; None if they were not asked for.
    """

    temperature: float
    drafting: list[Reply]
    plain: list[Reply] | None = None


def compare(expected: Expectation, replies: Replies, write: Write = str) -> ServedComparison:
    """Compare what the engine did with what our decoder did, prompt by prompt.

    Args:
        write: turns token ids into text.
    """
    sides = _PairedCounts(expected, replies)
    temperature = replies.temperature
    differing = None if temperature else list(divergences(expected, replies, write))
    figures: dict[str, Any] = {**sides.taus(), **sides.texts(), **sides.speeds()}
    return ServedComparison(
        temperature=temperature,
        num_prompts=len(expected.prompts),
        **figures,
        drafted_own=_share(sides.own, "drafted"),
        drafted_served=None if "drafted" in sides.uncounted else _share(sides.served, "drafted"),
        uncounted=sorted(sides.uncounted),
        rounds=round(sum(c.rounds for c in sides.served)),
        by_position=[round(sum(_at(c, i) for c in sides.served)) for i in range(sides.depth)],
        positions=list(sides.positions()),
        identical=None if differing is None else len(expected.prompts) - len(differing),
        divergences=differing or [],
        same_drafts=None if differing is None or "by_position" in sides.uncounted else sides.same(),
    )


class _PairedCounts:
    """Both sides of a comparison, as sums by prompt `[N]`; our side is the mean over its seeds."""

    def __init__(self, expected: Expectation, replies: Replies):
        self.replies, self.answers = replies, expected.at(replies.temperature)
        self.own = [_mean(a.counts) for a in self.answers]
        self.one_hot = [_mean(a.counts) for a in expected.one_hot.get(f"{replies.temperature:g}", [])]
        self.served = [r.counts for r in replies.drafting]
        self.uncounted = {name for r in replies.drafting for name in r.uncounted}
        strata = strata_of([p.suite for p in expected.prompts])
        self.resampled = Bootstrap(strata)
        self.surer = Bootstrap(strata, confidence=CONFIDENCE_OF_DIFFERENCES)

    @property
    def depth(self) -> int:
        return max((len(c.by_position) for c in [*self.own, *self.served]), default=0)

    def taus(self) -> dict[str, Interval | None]:
        served, own = _tau(self.served), _tau(self.own)
        found: dict[str, Interval | None] = {
            "own": self.resampled.ratio(own),
            "served": self.resampled.ratio(served),
            "difference": self.surer.difference(served, own),
        }
        if self.one_hot:
            found["one_hot"] = self.resampled.ratio(_tau(self.one_hot))
            found["one_hot_difference"] = self.surer.difference(served, _tau(self.one_hot))
        return found

    def texts(self) -> dict[str, Interval]:
        """Return how much longer the engine's texts are than ours, and how many more of them the target ended."""
        count = [1] * len(self.answers)
        lengths = Ratio([sum(r.lengths) / len(r.lengths) for r in self.replies.drafting], count)
        own = Ratio([sum(a.lengths) / len(a.lengths) for a in self.answers], count)
        return {"length": self.surer.difference(lengths, own)}

    def same(self) -> int:
        """Return in how many prompts both sides accepted the same, position by position."""
        return sum(is_same(s, o) for s, o in zip(self.served, self.own, strict=True))

    def speeds(self) -> dict[str, Interval | None]:
        speed = _speed(self.replies.drafting)
        if self.replies.plain is None:
            return {"tokens_per_second": self.resampled.ratio(speed)}
        plain = _speed(self.replies.plain)
        return {
            "tokens_per_second": self.resampled.ratio(speed),
            "plain": self.resampled.ratio(plain),
            "speedup": self.resampled.quotient(speed, plain),
        }

    def positions(self) -> Iterator[Position]:
        """Yield the conditional acceptance at each position that enough rounds reached on both sides."""
        if "by_position" in self.uncounted:
            return
        for i in range(self.depth):
            own, served = _alpha(self.own, i), _alpha(self.served, i)
            if min(_sum(own.denominators), _sum(served.denominators)) < FEW:
                return
            yield Position(
                position=i + 1,
                own=self.surer.ratio(own).value,
                served=self.surer.ratio(served).value,
                difference=self.surer.difference(served, own),
            )


# ------------------------------------------------------------ sums


def _mean(seeds: Sequence[DraftCounts]) -> DraftCounts:
    """Return the mean of the counts of several seeds."""
    depth = max((len(c.by_position) for c in seeds), default=0)
    return DraftCounts(
        rounds=sum(c.rounds for c in seeds) / len(seeds),
        drafted=sum(c.drafted for c in seeds) / len(seeds),
        accepted=sum(c.accepted for c in seeds) / len(seeds),
        by_position=[sum(_at(c, i) for c in seeds) / len(seeds) for i in range(depth)],
    )


def _at(counts: DraftCounts, index: int) -> float:
    return counts.by_position[index] if index < len(counts.by_position) else 0.0


def _tau(counts: Sequence[DraftCounts]) -> Ratio:
    return Ratio([c.accepted for c in counts], [c.rounds for c in counts], offset=1.0)


def _alpha(counts: Sequence[DraftCounts], index: int) -> Ratio:
    """Return the acceptance at a position of the rounds that kept all drafts before it."""
    reached = [_at(c, index - 1) if index else c.rounds for c in counts]
    return Ratio([_at(c, index) for c in counts], reached)


def _speed(replies: Sequence[Reply]) -> Ratio:
    return Ratio([sum(r.lengths) for r in replies], [r.seconds for r in replies])


def _sum(values: ArrayLike) -> float:
    return float(np.sum(values))


def _share(counts: Sequence[DraftCounts], name: str) -> float:
    rounds = sum(c.rounds for c in counts)
    return sum(getattr(c, name) for c in counts) / rounds if rounds else math.nan


# ------------------------------------------------------------ texts


def divergences(expected: Expectation, replies: Replies, write: Write) -> Iterator[Divergence]:
    """Yield where each text that is not ours parts from ours."""
    for asked, own, reply in zip(expected.prompts, expected.at(replies.temperature), replies.drafting, strict=True):
        mine: Sequence[int] | str = own.tokens
        theirs: Sequence[int] | str = own.tokens[:0] if reply.tokens is None else reply.tokens
        if reply.tokens is None:
            mine, theirs = write(own.tokens), reply.text
        if list(mine) != list(theirs):
            index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            place = min(len(mine), len(theirs)) if index is None else index
            yield Divergence(suite=asked.suite, prompt=asked.id, index=place, length=len(mine))
