"""The answers of an engine beside those of our decoder to the same prompts.

The prompts are compared one by one: the interval of a difference is that of paired prompts, which is far narrower than
the intervals of the two figures.

Shapes: N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any

import numpy as np
from pydantic import BaseModel

from ..common.plugins import plugin
from ..eval.reports.figures import Interval, Ratio
from ..eval.reports.statistics import Bootstrap, strata_of
from ..targets import Target
from .reference_run import DraftCounts, Expectation, ServedAnswer, margin_at, surprise

# Several positions, and τ and the texts' length at several temperatures, each decide whether an engine differs: each
# must be surer than one figure alone, or one correct engine in ten would be suspected.
CONFIDENCE_OF_DIFFERENCES = 0.99
SURELY = 3.3  # standard deviations of a surprise: its variance is known, and faults of sampling go far beyond
AVERAGED = 0.1  # of τ: the error allowed to an engine's own average of its latest rounds, which lags
FEW = 8  # rounds that reach a position, below which it is not compared
# By how much a target may prefer its own token, in logits, where another order of sums decides otherwise; and the mean
# difference of log-probabilities, in nats a token, that another order explains: in float32 1e-6 was measured between
# vLLM and our decoder, in bfloat16 0.007 to 0.014.
TIES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
OFF = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}

Write = Callable[[list[int]], str]  # from token ids to text


class ResultModel(BaseModel, extra="forbid", ser_json_inf_nan="null"):
    """A part of the result; unknown keys are refused, and nan is written as null."""


class Reply(ResultModel):
    """An engine's answers to one prompt: one at temperature 0, above it as many as our decoder gave.

    Attributes:
        text: of the first answer. tokens: its new token ids; None where the engine returns text alone.
        drawn: the new token ids of every answer, above temperature 0; [] where the engine returns text alone.
        lengths: new tokens of every answer. seconds, counts: of all of them.
        uncounted: see `engine.COUNTED`.
        unsteady: the prompt was asked twice at temperature 0, and got two texts.
        log_probs: of its tokens, where they were asked for, at temperature 0.
    """

    text: str
    tokens: Sequence[int] | None
    drawn: Sequence[Sequence[int]] = ()
    lengths: list[int]
    seconds: float
    counts: DraftCounts
    uncounted: Sequence[str] = ()
    unsteady: bool = False
    log_probs: Sequence[float] = ()


class Position(ResultModel):
    """Acceptance at one position of the drafts, given that all drafts before it were accepted.

    Attributes:
        own, served: the accepted share here and there. difference: served − own, with its interval.
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

    Attributes:
        ending: one text is the beginning of the other.
        margin: by how much more the target's logits prefer our token there than any other; None where that is unknown.
    """

    suite: str
    prompt: str
    index: int
    length: int
    ending: bool
    margin: float | None = None

    def is_tie(self, dtype: str) -> bool:
        """Return whether another order of sums in this dtype explains it."""
        return self.margin is not None and self.margin <= TIES.get(dtype, TIES["bfloat16"])


class FaultCandidate(BaseModel, extra="forbid"):
    """A possible explanation of an engine's acceptance.

    Attributes:
        says: the mistake; or that there is none, or another that was not tried.
        kind: of the suspicion; "" for those two.
        odds: how probable the engine's counts are with it, as a share of the best candidate's probability.
        same: prompts in which our decoder, with the mistake, accepts exactly as many drafts as the engine; None for
            mistakes that were not tried.
    """

    says: str
    kind: str
    odds: float
    same: int | None


class ServedComparison(ResultModel):
    """Our decoder and the engine at one temperature.

    Attributes:
        own, served: τ with its interval. difference: served − own, of paired prompts; like all differences here it has
            a 99% interval, since several of them decide.
        drafted_own, drafted_served: draft tokens per round; None there if the engine does not count them.
        uncounted: figures that the engine does not count, so that they are not compared. Without "rounds" its τ is its
            own average of its latest rounds.
        rounds: of the engine. by_position: rounds of the engine that kept the draft at each position.
        identical: prompts whose text is ours (at temperature 0; None above it). divergences: the others.
        unsteady: the engine gave two texts to one prompt at temperature 0.
        same_drafts: those of them in whose rounds the engine accepted exactly as many drafts as our decoder: with
            float32 on both sides nearly all. None where an engine does not count by position.
        off: the mean difference of the first text's log-probabilities from ours, in nats a token, as far as the texts
            are equal; None where an engine tells none. rounding: the same of our own target in bfloat16.
        candidates: the mistakes that were tried, the most probable ones first.
        length: new tokens per prompt, served − own: texts of the same distribution are equally long.
        surprise: by how much less probable the engine's texts are than draws from our target, in nats per token: 0 on
            average if the engine samples rightly. None where that is unknown.
        one_hot: τ of our decoder proposing the most probable drafts; None at temperature 0.
        tokens_per_second: of whole requests, one after the other. plain: of the engine without drafts.
        speedup: their ratio; None without the plain engine.
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
    unsteady: bool = False
    same_drafts: int | None = None
    off: float | None = None
    rounding: float | None = None
    candidates: list[FaultCandidate] = []
    length: Interval
    surprise: Interval | None = None
    one_hot: Interval | None = None
    one_hot_difference: Interval | None = None
    tokens_per_second: Interval
    plain: Interval | None = None
    speedup: Interval | None = None

    def agrees(self, tolerance: float) -> bool:
        """Return whether τ is ours: no certain difference, or one of at most `tolerance` times our τ.

        Where the difference has no interval, as without any round, the values themselves are compared.
        """
        if "rounds" in self.uncounted:
            tolerance = max(tolerance, AVERAGED)
        if not self.difference.known:
            return abs(self.served.value - self.own.value) <= tolerance * self.own.value  # False of no number
        return not self.difference.excludes(0.0) or abs(self.difference.value) <= tolerance * self.own.value

    def parted(self, dtype: str) -> list[Divergence]:
        """Return the texts that are not ours, without near-ties."""
        return [divergence for divergence in self.divergences if not divergence.is_tie(dtype)]

    def same_target(self, dtype: str) -> bool:
        """Return whether the target is ours, as far as texts and log-probabilities tell; only ends may differ."""
        is_off = self.off is not None and self.off > OFF.get(dtype, OFF["bfloat16"])
        return all(d.ending for d in self.parted(dtype)) and not is_off

    @property
    def parts_at(self) -> int | None:
        """The first position at which acceptance certainly differs; None if it does nowhere."""
        return next((p.position for p in self.positions if p.parted), None)


class Replies(ResultModel):
    """An engine's replies at one temperature, in the order of the expectation's prompts.

    Attributes:
        plain: the same engine's replies without drafts; None without such an engine.
    """

    temperature: float
    drafting: list[Reply]
    plain: list[Reply] | None = None


def compare(
    expected: Expectation, replies: Replies, write: Write = str, target: Target | None = None
) -> ServedComparison:
    """Compare the engine's replies with our decoder's answers, prompt by prompt.

    Args:
        write: turns token ids into text.
        target: asked how probable the engine's texts are; None leaves that open.
    """
    temperature, answers = replies.temperature, expected.at(replies.temperature)
    own, served = [_mean(a.counts) for a in answers], [r.counts for r in replies.drafting]
    one_hot = [_mean(a.counts) for a in expected.one_hot.get(f"{temperature:g}", [])]
    uncounted = {name for r in replies.drafting for name in r.uncounted}
    depth = max((len(c.by_position) for c in [*own, *served]), default=0)
    strata = strata_of([p.suite for p in expected.prompts])
    resampled, surer = Bootstrap(strata), Bootstrap(strata, confidence=CONFIDENCE_OF_DIFFERENCES)
    parted = [] if temperature else list(divergences(expected, replies, write, target))
    differing = [divergence for divergence in parted if divergence is not None]
    ours = [i for i, divergence in enumerate(parted) if divergence is None]  # prompts whose text is ours
    known = {} if "by_position" in uncounted else expected.mistakes
    mistakes = {name: [tried[i] for i in ours] for name, tried in known.items()}
    same = sum(is_same(served[i], answers[i]) for i in ours)
    speed, plain = _speed(replies.drafting), None if replies.plain is None else _speed(replies.plain)
    off, rounding = (None, None) if temperature else _off(expected, replies.drafting[0])
    compared = ServedComparison(
        temperature=temperature,
        off=off,
        rounding=rounding,
        num_prompts=len(expected.prompts),
        own=resampled.ratio(_tau(own)),
        served=resampled.ratio(_tau(served)),
        difference=surer.difference(_tau(served), _tau(own)),
        drafted_own=_drafted(own),
        drafted_served=None if "drafted" in uncounted else _drafted(served),
        uncounted=sorted(uncounted),
        rounds=round(sum(c.rounds for c in served)),
        by_position=[round(sum(c.at(i) for c in served)) for i in range(depth)],
        positions=[] if "by_position" in uncounted else list(_positions(own, served, depth, surer)),
        identical=None if temperature else len(expected.prompts) - len(differing),
        divergences=differing,
        unsteady=any(r.unsteady for r in replies.drafting),
        same_drafts=None if temperature or "by_position" in uncounted else same,
        length=surer.difference(_length(replies.drafting), _length(answers)),
        surprise=None if target is None or not temperature else _surprise(expected, replies, target),
        one_hot=resampled.ratio(_tau(one_hot)) if one_hot else None,
        one_hot_difference=surer.difference(_tau(served), _tau(one_hot)) if one_hot else None,
        tokens_per_second=resampled.ratio(speed),
        plain=None if plain is None else resampled.ratio(plain),
        speedup=None if plain is None else resampled.quotient(speed, plain),
    )
    exact = expected.dtype == "float32" and compared.same_target(expected.dtype)
    if (explainer := fault_explainer()) is not None:
        compared.candidates = explainer.explain([served[i] for i in ours], [answers[i] for i in ours], mistakes, exact)
    return compared


def fault_explainer() -> Any | None:
    """Return the module that tries mistakes on our own drafter (`lab.fault_explanation`); None where it is missing."""
    return plugin("diagnosis", "mistakes")


def is_same(served: DraftCounts, answer: ServedAnswer) -> bool:
    """Return whether both have as many rounds, and accepted as much in them at every position.

    The round that an end-of-text token cuts short counts in full in an engine, and in our decoder up to that token.
    """
    own, spare = answer.counts[0], int(answer.ended)
    depth = max(len(served.by_position), len(own.by_position))
    more = [served.rounds - own.rounds, *(served.at(i) - own.at(i) for i in range(depth))]
    return all(0 <= m <= spare for m in more)


def _off(expected: Expectation, first: Reply) -> tuple[float | None, float | None]:
    """Return the mean differences of the engine's log-probabilities, and of rounded ones, from ours."""
    pairs = zip(expected.at(0.0)[0].tokens, first.tokens or (), strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    own, count = expected.log_probs, min(equal, len(first.log_probs), len(expected.log_probs))
    if not count:
        return None, None
    there, rounded = (sum(abs(own[i] - of[i]) for i in range(count)) for of in (first.log_probs, expected.rounded))
    return there / count, rounded / count


def _positions(
    own: Sequence[DraftCounts], served: Sequence[DraftCounts], depth: int, surer: Bootstrap
) -> Iterator[Position]:
    """Yield the conditional acceptance at each position that enough rounds reached on both sides."""
    for i in range(depth):
        here, there = (Ratio([c.at(i) for c in side], [c.reached(i) for c in side]) for side in (own, served))
        if min(np.sum(here.denominators), np.sum(there.denominators)) < FEW:
            return
        difference = surer.difference(there, here)
        one, other = surer.ratio(here).value, surer.ratio(there).value
        yield Position(position=i + 1, own=one, served=other, difference=difference)


def _mean(seeds: Sequence[DraftCounts]) -> DraftCounts:
    """Return the mean of the counts of several seeds."""
    total, count = reduce(DraftCounts.plus, seeds), len(seeds)
    return DraftCounts(
        rounds=total.rounds / count,
        drafted=total.drafted / count,
        accepted=total.accepted / count,
        by_position=tuple(kept / count for kept in total.by_position),
    )


def _tau(counts: Sequence[DraftCounts]) -> Ratio:
    return Ratio([c.accepted for c in counts], [c.rounds for c in counts], offset=1.0)


def _length(answers: Sequence[Reply] | Sequence[ServedAnswer]) -> Ratio:
    return Ratio([sum(a.lengths) / len(a.lengths) for a in answers], [1] * len(answers))


def _speed(replies: Sequence[Reply]) -> Ratio:
    return Ratio([sum(r.lengths) for r in replies], [r.seconds for r in replies])


def _drafted(counts: Sequence[DraftCounts]) -> float:
    """Return the draft tokens per round."""
    rounds = sum(c.rounds for c in counts)
    return sum(c.drafted for c in counts) / rounds if rounds else math.nan


def divergences(
    expected: Expectation, replies: Replies, write: Write, target: Target | None = None
) -> Iterator[Divergence | None]:
    """Yield the place where each text differs from ours first; None for one that is ours."""
    for asked, own, reply in zip(expected.prompts, expected.at(replies.temperature), replies.drafting, strict=True):
        mine: Sequence[int] | str = own.tokens if reply.tokens is not None else write(own.tokens)
        theirs: Sequence[int] | str = reply.tokens if reply.tokens is not None else reply.text
        shorter = min(len(mine), len(theirs))
        pairs = enumerate(zip(mine, theirs, strict=False))
        index = next((i for i, (a, b) in pairs if a != b), shorter)
        if index == len(mine) == len(theirs):
            yield None
            continue
        ending = index == shorter
        if reply.tokens is None:  # from characters to tokens
            index = next(
                (i for i in range(len(own.tokens)) if len(write(own.tokens[: i + 1])) > index), len(own.tokens)
            )
        margin = None if target is None or ending else margin_at(target, asked.tokens, own.tokens, index)
        yield Divergence(
            suite=asked.suite, prompt=asked.id, index=index, length=len(own.tokens), ending=ending, margin=margin
        )


def _surprise(expected: Expectation, replies: Replies, target: Target) -> Interval | None:
    """Return the surprise of all drawn texts over their tokens; None where an engine returns text alone.

    None, too, where a text is empty or has tokens that our target does not know: then there is nothing to weigh.
    """
    drawn = [text for reply in replies.drafting for text in reply.drawn]
    if not all(reply.drawn for reply in replies.drafting) or not all(text for text in drawn):
        return None
    if max(map(max, drawn)) >= target.vocab_size:
        return None
    both = zip(expected.prompts, replies.drafting, strict=True)
    asked = [(prompt.tokens, text) for prompt, reply in both for text in reply.drawn]
    excess, variance = np.sum([surprise(target, *texts, replies.temperature) for texts in asked], axis=0)
    count = sum(len(text) for text in drawn)
    value, wide = excess / count, SURELY * math.sqrt(variance) / count
    return Interval(value, value - wide, value + wide)
