"""When did acceptance change? A cumulative-sum test (Page, 1954) on windows of a fixed number of rounds.

In each window the mean number of accepted drafts is compared with the baseline, in units of its own spread: z. Two sums
collect what z exceeds a slack by, one for falls and one for rises; an alarm is a sum above the threshold. The threshold
is found by simulation, baseline error included, so that quiet traffic seldom raises an alarm, and the same simulation
tells how late a change is found.

Windows are never smaller than they were asked to be, and often larger: a busy engine counts many rounds between two
looks. One of m times the size counts as m windows that all lie where their mean lies, so that baseline, threshold and
promise stay those of the size that was asked for.

Shapes: W windows, R simulated runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from ..common import BadInputError

RUNS = 4000  # simulated at least; more of them for rarer alarms
RARE = 40  # runs that must raise an alarm, for a threshold to be known
SLACK = 0.5  # best for shifts of one spread of a window, where the baseline is certain
# Errors of the baseline that the slack may hold, too: those of an uncertain one would add up to an alarm.
HELD = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0)
DEEP = 0.4  # a fall, as a share of the accepted drafts, that the slack is chosen for
LONGEST = 400  # windows after which a simulated change counts as not found

Floats = NDArray[np.float64]


class NormalDrafting(BaseModel):
    """How drafting goes when all is well.

    Attributes:
        tau: mean tokens per round, with the target's own.
        spread: standard deviation of a round's accepted drafts, as the mean of many rounds shows it: rounds of one
            prompt resemble each other, so it is more than that of single rounds. The mean of n rounds has spread / √n.
        rounds: that it was learned from. parts: independent ones (prompts, or windows), which the spread is known by.
        by_position: share of the rounds that kept the draft at each position; () if it is not known.
        source: where it comes from.
    """

    model_config = ConfigDict(extra="forbid")

    tau: float
    spread: float
    rounds: float
    parts: int = 30
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
        """Return by how many of its own spreads a window lies above the baseline."""
        return (accepted / rounds - (self.tau - 1)) * math.sqrt(rounds) / max(self.spread, 1e-9)


@dataclass(frozen=True)
class WatchLimits:
    """What a watch promises.

    Attributes:
        window: rounds of a window.
        false_alarms: the probability of any alarm in so many `quiet` windows without a change.
    """

    window: int = 200
    false_alarms: float = 0.02
    quiet: int = 200


@dataclass(frozen=True)
class Chart:
    """A test that is ready: how far the sums may grow.

    Attributes:
        threshold: above which a sum raises the alarm.
        slack: spreads of a window that never count.
        error: standard error of the baseline's mean, in spreads of a window.
        parts: that the baseline's spread is known by.
    """

    limits: WatchLimits
    threshold: float
    slack: float
    error: float
    parts: int

    @classmethod
    def calibrated(cls, baseline: NormalDrafting, limits: WatchLimits) -> Chart:
        """Return the chart that keeps what `limits` promise, for a baseline that is itself only estimated.

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


class CusumState(BaseModel):
    """Where the test stands: what falls and rises have added up to.

    Attributes:
        fallen, risen: windows since each sum was last zero: since when a change is suspected.
    """

    model_config = ConfigDict(extra="forbid")

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
        """Return what has changed: "fall", "rise", or nothing."""
        if max(self.fall, self.rise) <= threshold:
            return None
        return "fall" if self.fall >= self.rise else "rise"


# ------------------------------------------------------------ simulation


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
    found: Floats = (_noise(length, runs) + (shift - mean)) / np.maximum(spread, 0.2)
    return found


def _highest(scores: Floats, slack: float) -> Floats:
    """Return the highest that either sum has been, up to each window `[W, R]`."""
    fall = rise = highest = np.zeros(scores.shape[1])
    found = np.empty_like(scores)
    for i, score in enumerate(scores):
        fall, rise = np.maximum(0, fall - score - slack), np.maximum(0, rise + score - slack)
        highest = np.maximum(highest, np.maximum(fall, rise))
        found[i] = highest
    return found


@lru_cache(maxsize=256)
def _threshold(error: float, parts: int, slack: float, limits: WatchLimits) -> float:
    runs = max(RUNS, math.ceil(RARE / limits.false_alarms))
    highest = _highest(_scores(error, parts, limits.quiet, runs=runs), slack)[-1]
    return float(np.quantile(highest, 1 - limits.false_alarms))


@lru_cache(maxsize=256)
def _delay(error: float, parts: int, slack: float, threshold: float, shift: float) -> float:
    found = _highest(_scores(error, parts, LONGEST, shift), slack) > threshold
    first = np.where(found.any(0), found.argmax(0) + 1, math.inf)
    return float(np.median(first))
