"""Confidence intervals by the bootstrap over prompts.

Rounds of one prompt resemble each other, so the prompt is the unit that is drawn again. Every figure here is a ratio of
sums over prompts (τ, acceptance, tokens/s), and every comparison is a ratio of two of them on the same draws: paired.

Shapes: N prompts, R resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

from .figures import CONFIDENCE, RESAMPLES, Interval, Ratio

Floats = NDArray[np.float64]
FEWEST = 12  # prompts, before which variances are not to be trusted
POWER = 0.8  # share of comparisons that detect the difference that they were planned for


class Bootstrap:
    """One set of resamples, shared by every figure made from it, so that comparisons are paired.

    Args:
        strata: how many prompts each suite has, in the order of the values that will be given. Each suite is drawn
            again by itself: its share of the whole is a choice, not chance.
        confidence: of the two-sided intervals.
        clusters: the conversation of each value, counted from 0 over all suites, where turns of one are several values;
            `strata` then counts conversations, which are drawn again as a whole. None: each value stands for itself.

    The intervals are expanded percentile intervals (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015):
    percentiles of the resamples, taken further out by what Student's t makes of so few prompts, and by the variance
    that a bootstrap of them lacks: one degree of freedom for the mean of each suite, and one for the ratio. Plain
    percentiles are too narrow below some 40 prompts (`benchmarks.coverage` tries both on figures that are known).
    """

    def __init__(
        self,
        strata: Sequence[int],
        resamples: int = RESAMPLES,
        confidence: float = CONFIDENCE,
        seed: int = 0,
        clusters: Sequence[int] | None = None,
    ):
        generator = np.random.default_rng(seed)
        drawn = [generator.multinomial(n, np.full(n, 1 / n), size=resamples) for n in strata if n]
        self.weights: Floats = np.concatenate(drawn, axis=1).astype(np.float64)  # [R, N]
        self.weights = self.weights if clusters is None else self.weights[:, list(clusters)]
        self.freedom = sum(strata) - len(drawn)
        self.tail = self._tail(sum(strata), (1 - confidence) / 2)

    def _tail(self, num_prompts: int, tail: float) -> float:
        """Return the share of resamples outside the interval at each end; nan where there is nothing to draw from."""
        if self.freedom < 1:
            return math.nan
        lacking = num_prompts / max(1, self.freedom - 1)
        return float(ndtr(stdtrit(self.freedom, tail) * math.sqrt(lacking)))

    def ratio(self, ratio: Ratio) -> Interval:
        """Return the ratio over all prompts, with its interval."""
        return self._interval(_value(ratio), self._draws(ratio))

    def quotient(self, above: Ratio, below: Ratio) -> Interval:
        """Return `above / below`, both on the same resampled prompts."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(np.divide(_value(above), _value(below)))
            return self._interval(value, self._draws(above) / self._draws(below))

    def difference(self, one: Ratio, other: Ratio) -> Interval:
        """Return `one − other`, both on the same resampled prompts."""
        return self._interval(_value(one) - _value(other), self._draws(one) - self._draws(other))

    def _draws(self, ratio: Ratio) -> Floats:
        """Return the ratio in each resample, `[R]`; nan where a resample has no denominator."""
        above = self.weights @ np.asarray(ratio.numerators, float)
        below = self.weights @ np.asarray(ratio.denominators, float)
        return np.divide(above, below, out=np.full_like(above, np.nan), where=below != 0) + ratio.offset

    def _interval(self, value: float, draws: Floats) -> Interval:
        usable = draws[np.isfinite(draws)]
        # Where many resamples lack the event altogether, too few prompts carry it for an interval.
        if math.isnan(self.tail) or math.isnan(value) or len(usable) < 0.95 * len(draws):
            return Interval(value, math.nan, math.nan)
        low, high = np.quantile(usable, [self.tail, 1 - self.tail])
        return Interval(value, float(low), float(high))


def strata_of(suites: Sequence[str]) -> list[int]:
    """Return how many prompts each suite has, from the suite of each prompt."""
    return list(Counter(suites).values())


def _value(ratio: Ratio) -> float:
    below = float(np.sum(ratio.denominators))
    return float(np.sum(ratio.numerators)) / below + ratio.offset if below else math.nan


def prompts_needed(interval: Interval, num_prompts: int, difference: float) -> int | None:
    """Return the prompts with which four of five runs tell a ratio from a fixed number, so far away; None: unknown.

    The noise is that of the interval of `num_prompts`; where it has no width, nothing is known of it.
    """
    found = detectable(interval, num_prompts, num_prompts)
    if math.isnan(found) or found == 0:
        return None
    return max(FEWEST, math.ceil(num_prompts * (math.log1p(found) / math.log1p(difference)) ** 2))


def detectable(interval: Interval, num_prompts: int, prompts: int) -> float:
    """Return the relative difference that four of five runs with `prompts` find, by the interval of `num_prompts`."""
    if not interval.known or interval.low <= 0:
        return math.nan
    quantile = float(ndtri(0.5 + CONFIDENCE / 2))
    error = math.log(interval.high / interval.low) / (2 * quantile) * math.sqrt(num_prompts / prompts)
    return math.expm1(error * (quantile + float(ndtri(POWER))))
