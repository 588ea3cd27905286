"""The moment when acceptance changed: a cumulative-sum test (Page, 1954) on windows of a fixed number of rounds.

In each window the mean number of accepted drafts is compared with the baseline, in units of its own spread: z. Two sums
collect the excess of z over a slack, one for falls and one for rises; an alarm is a sum above the threshold. The
threshold comes from a simulation, baseline error included, so that quiet traffic seldom raises an alarm, and the same
simulation tells how late a change is found.

Windows are often larger than asked for: a busy engine counts many rounds between two looks. One of m times the size
counts as m windows with the same mean, so that baseline, threshold and promise stay those of the chosen size.

Shapes: W windows, R simulated runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..common import BadInputError
from ..common.values import ForeignModel

RUNS = 4000  # simulated at least; more of them for rarer alarms
RARE = 40  # runs that must raise an alarm, for a threshold to be known
SLACK = 0.5  # best for shifts of one spread of a window, where the baseline is certain
# Errors of the baseline that the slack may hold, too: those of an uncertain one would add up to an alarm.
HELD = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0)
DEEP = 0.4  # a fall, as a share of the accepted drafts, that the slack is chosen for
LONGEST = 400  # windows after which a simulated change counts as not found

Floats = NDArray[np.float64]


class NormalDrafting(ForeignModel, extra="forbid", allow_inf_nan=False):
    """The baseline of a watch: usual drafting.

    Attributes:
        tau: mean tokens per round, with the target's own.
        spread: standard deviation of a round's accepted drafts, as the mean of many rounds shows it: rounds of one
            prompt resemble each other, so it is more than that of single rounds. The mean of n rounds has spread / √n.
        rounds: the number that it was learned from. parts: that of independent parts (prompts, or windows).
        by_position: share of the rounds that kept the draft at each position; () if it is not known.
        source: its origin, for messages.
    """

    tau: float = Field(ge=1)
    spread: float = Field(ge=0)
    rounds: float = Field(gt=0)
    parts: int = Field(30, ge=2)
    by_position: tuple[float, ...] = ()
    source: str

    @classmethod
    def of(cls, rounds: Sequence[float], accepted: Sequence[float], source: str) -> NormalDrafting:
        """Return the baseline of independent parts (prompts, or windows), by their rounds and accepted drafts.

        Raises:
            BadInputError: too few parts, or nothing was drafted in them.
        """
        sizes, kept = np.asarray(rounds, float), np.asarray(accepted, float)
        if len(sizes) < 4 or not sizes.sum():
            raise BadInputError(f"{source}: {len(sizes)} prompts or windows with drafts are too few for a baseline.")
        mean = kept.sum() / sizes.sum()
        apart = np.square(kept - mean * sizes).sum() / (len(sizes) - 1)
        return cls(
            tau=1 + mean,
            spread=math.sqrt(apart / sizes.mean()),
            rounds=float(sizes.sum()),
            parts=len(sizes),
            source=source,
        )

    def score(self, rounds: float, accepted: float) -> float:
        """Return the distance of a window above the baseline, in its own spreads."""
        return (accepted / rounds - (self.tau - 1)) * math.sqrt(rounds) / max(self.spread, 1e-9)


@dataclass(frozen=True)
class WatchLimits:
    """The promise of a watch.

    Attributes:
        window: rounds of a window.
        false_alarms: the probability of any alarm in so many `quiet` windows without a change.
    """

    window: int = 200
    false_alarms: float = 0.02
    quiet: int = 200


@dataclass(frozen=True)
class Chart:
    """A calibrated test.

    Attributes:
        threshold: a sum above it raises the alarm.
        slack: spreads of a window that never count.
        error: standard error of the baseline's mean, in spreads of a window.
        parts: of the baseline.
    """

    limits: WatchLimits
    threshold: float
    slack: float
    error: float
    parts: int

    @classmethod
    def calibrated(cls, baseline: NormalDrafting, limits: WatchLimits) -> Chart:
        """Return the chart that keeps the promise of `limits`, for a baseline that is itself only estimated.

        Of several slacks it has the one that finds a deep fall first.
        """
        # Rounded up, so that the simulations of baselines that are nearly equal are the same.
        error, parts = math.ceil(50 * math.sqrt(limits.window / baseline.rounds)) / 50, baseline.parts
        slacks = sorted({max(SLACK, round(held * error, 3)) for held in HELD})
        charts = [cls(limits, _threshold(error, parts, slack, limits), slack, error, parts) for slack in slacks]
        return min(charts, key=lambda chart: chart.delay_in_rounds(baseline, DEEP))

    def delay(self, shift: float) -> float:
        """Return the median number of windows until a shift is found that moves the mean by `shift` spreads."""
        return _delay(self.error, self.parts, self.slack, self.threshold, round(abs(shift), 2))

    def delay_in_rounds(self, baseline: NormalDrafting, fall: float) -> float:
        """Return the median number of rounds until a fall of the accepted drafts is found, as a share of them."""
        shift = fall * (baseline.tau - 1) * math.sqrt(self.limits.window) / max(baseline.spread, 1e-9)
        return self.delay(shift) * self.limits.window


class CusumState(ForeignModel, extra="forbid", allow_inf_nan=False):
    """The sums of a test, of falls and of rises.

    Attributes:
        fallen, risen: windows since each sum was last zero: since when a change is suspected.
    """

    fall: float = 0.0
    rise: float = 0.0
    fallen: int = 0
    risen: int = 0

    def after(self, score: float, size: float = 1.0, slack: float = SLACK) -> CusumState:
        """Return the sums after one more window, of `size` times the rounds that the test was made for.

        As many windows of the usual size, with the same mean, lie `score / √size` spreads from the baseline each.
        """
        moved, kept = score * math.sqrt(size), slack * size
        fall, rise = max(0.0, self.fall - moved - kept), max(0.0, self.rise + moved - kept)
        return CusumState(
            fall=fall, rise=rise, fallen=self.fallen + 1 if fall else 0, risen=self.risen + 1 if rise else 0
        )

    def alarm(self, threshold: float) -> str | None:
        """Return the change: "fall", "rise", or None."""
        if max(self.fall, self.rise) <= threshold:
            return None
        return "fall" if self.fall >= self.rise else "rise"


@lru_cache(maxsize=8)
def _noise(length: int, runs: int) -> Floats:
    """Return standard normal numbers `[W, R]`."""
    return np.random.default_rng(1).normal(size=(length, runs))


def _scores(error: float, parts: int, length: int, shift: float = 0.0, runs: int = RUNS) -> Floats:
    """Return scores of simulated windows `[W, R]`, against baselines whose mean and spread are themselves estimates."""
    generator = np.random.default_rng(0)
    mean = generator.normal(size=runs) * error
    freedom = max(1, parts - 1)
    spread = np.sqrt(generator.chisquare(freedom, size=runs) / freedom)
    scores: Floats = (_noise(length, runs) + (shift - mean)) / np.maximum(spread, 0.2)
    return scores


def _highest(scores: Floats, slack: float) -> Floats:
    """Return the maximum of either sum up to each window `[W, R]`."""
    fall = rise = highest = np.zeros(scores.shape[1])
    maxima = np.empty_like(scores)
    for i, score in enumerate(scores):
        fall, rise = np.maximum(0, fall - score - slack), np.maximum(0, rise + score - slack)
        highest = np.maximum(highest, np.maximum(fall, rise))
        maxima[i] = highest
    return maxima


@lru_cache(maxsize=256)
def _threshold(error: float, parts: int, slack: float, limits: WatchLimits) -> float:
    runs = max(RUNS, math.ceil(RARE / limits.false_alarms))
    highest = _highest(_scores(error, parts, limits.quiet, runs=runs), slack)[-1]
    return float(np.quantile(highest, 1 - limits.false_alarms))


@lru_cache(maxsize=256)
def _delay(error: float, parts: int, slack: float, threshold: float, shift: float) -> float:
    alarmed = _highest(_scores(error, parts, LONGEST, shift), slack) > threshold
    first = np.where(alarmed.any(0), alarmed.argmax(0) + 1, math.inf)
    return float(np.median(first))
