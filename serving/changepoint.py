"""When did acceptance change? A cumulative-sum test (Page, 1954) on windows of a fixed number of rounds.

In each window the mean number of accepted drafts is compared with the baseline, in units of its own spread: z. Two sums
collect what z exceeds a slack by, one for falls and one for rises; an alarm is a sum above the threshold. The threshold
is found by simulation, baseline error included, so that quiet traffic seldom raises an alarm, and the same simulation
tells how late a change is found.

Shapes: R simulated runs, W windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from ..ground import BadInputError

RUNS = 4000  # simulated
SLACK = 0.5  # best for shifts of one spread of a window
LONGEST = 400  # windows after which a simulated change counts as not found

Floats = NDArray[np.float64]


class Baseline(BaseModel):
    """How drafting goes when all is well.

    Attributes:
        tau: mean tokens per round, with the target's own.
        spread: standard deviation of a round's accepted drafts, as the mean of many rounds shows it: rounds of one
            prompt resemble each other, so it is more than that of single rounds. The mean of n rounds has spread / √n.
        rounds: that it was learned from.
        by_position: share of the rounds that kept the draft at each position; () if it is not known.
        source: where it comes from.
    """

    model_config = ConfigDict(extra="forbid")

    tau: float
    spread: float
    rounds: float
    by_position: tuple[float, ...] = ()
    source: str

    @classmethod
    def of(cls, rounds: Sequence[float], accepted: Sequence[float], source: str) -> Baseline:
        """Return the baseline of independent parts (prompts, or windows), by their rounds and accepted drafts.

        Raises:
            BadInputError: too few parts, or nothing was drafted in them.
        """
        sizes, kept = np.asarray(rounds, float), np.asarray(accepted, float)
        if len(sizes) < 4 or not sizes.sum():
            raise BadInputError(f"{source}: {len(sizes)} prompts or windows with drafts are too few for a baseline.")
        mean = kept.sum() / sizes.sum()
        apart = np.square(kept - mean * sizes).sum() / (len(sizes) - 1)
        return cls(tau=1 + mean, spread=math.sqrt(apart / sizes.mean()), rounds=float(sizes.sum()), source=source)

    def score(self, rounds: float, accepted: float) -> float:
        """Return by how many of its own spreads a window lies above the baseline."""
        return (accepted / rounds - (self.tau - 1)) * math.sqrt(rounds) / max(self.spread, 1e-9)


@dataclass(frozen=True)
class Limits:
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
    """A test that is ready: how far the sums may grow."""

    limits: Limits
    threshold: float
    baseline_windows: int

    @classmethod
    def calibrated(cls, baseline: Baseline, limits: Limits) -> Chart:
        """Return the chart that keeps what `limits` promise, for a baseline that is itself only estimated."""
        windows = max(1, int(baseline.rounds / limits.window))
        return cls(limits, _threshold(windows, limits.quiet, limits.false_alarms), windows)

    def delay(self, shift: float) -> float:
        """Return the median number of windows until a shift is found that moves the mean by `shift` spreads."""
        return _delay(self.baseline_windows, self.threshold, round(abs(shift), 2))

    def delay_in_rounds(self, baseline: Baseline, fall: float) -> float:
        """Return the median number of rounds until a fall of the accepted drafts is found, as a share of them."""
        shift = fall * (baseline.tau - 1) * math.sqrt(self.limits.window) / max(baseline.spread, 1e-9)
        return self.delay(shift) * self.limits.window


class Sums(BaseModel):
    """Where the test stands: what falls and rises have added up to.

    Attributes:
        fallen, risen: windows since each sum was last zero: since when a change is suspected.
    """

    model_config = ConfigDict(extra="forbid")

    fall: float = 0.0
    rise: float = 0.0
    fallen: int = 0
    risen: int = 0

    def after(self, score: float) -> Sums:
        """Return the sums after one more window."""
        fall, rise = max(0.0, self.fall - score - SLACK), max(0.0, self.rise + score - SLACK)
        return Sums(fall=fall, rise=rise, fallen=self.fallen + 1 if fall else 0, risen=self.risen + 1 if rise else 0)

    def alarm(self, threshold: float) -> str | None:
        """Return what has changed: "fall", "rise", or nothing."""
        if max(self.fall, self.rise) <= threshold:
            return None
        return "fall" if self.fall >= self.rise else "rise"


# ------------------------------------------------------------ simulation


def _scores(windows: int, length: int, shift: float = 0.0) -> Floats:
    """Return scores of simulated windows `[R, W]`, against baselines that were estimated from `windows` windows."""
    generator = np.random.default_rng(0)
    mean = generator.normal(size=(RUNS, 1)) / math.sqrt(windows)
    freedom = max(1, windows - 1)
    spread = np.sqrt(generator.chisquare(freedom, size=(RUNS, 1)) / freedom)
    return (generator.normal(size=(RUNS, length)) + shift - mean) / np.maximum(spread, 0.2)


def _highest(scores: Floats) -> Floats:
    """Return the highest that either sum has been, up to each window `[R, W]`."""
    fall = rise = highest = np.zeros(len(scores))
    found = np.empty_like(scores)
    for i, score in enumerate(scores.T):
        fall, rise = np.maximum(0, fall - score - SLACK), np.maximum(0, rise + score - SLACK)
        highest = np.maximum(highest, np.maximum(fall, rise))
        found[:, i] = highest
    return found


@lru_cache(maxsize=64)
def _threshold(windows: int, quiet: int, false_alarms: float) -> float:
    return float(np.quantile(_highest(_scores(windows, quiet))[:, -1], 1 - false_alarms))


@lru_cache(maxsize=64)
def _delay(windows: int, threshold: float, shift: float) -> float:
    found = _highest(_scores(windows, LONGEST, shift)) > threshold
    first = np.where(found.any(1), found.argmax(1) + 1, math.inf)
    return float(np.median(first))
