"""Forecasts of a training's τ at its end, from its first tenth on.

Where the learning rate falls to zero, the odds of acceptance, α / (1 − α), grow as a power of the share of the training
that is over, at every depth: from the share f to the end by f^-EXPONENT. At the end of the same training in twice the
time they are larger by 2^LONGER. Both exponents, and how far trainings stray from them, were measured over drafters of
ten kinds (`benchmarks/results/forecasts-cpu.json`): drafters that begin with the target's weights have smaller ones
than new heads. τ is the analytic one of the training's log, at temperature 1 over the depths that are trained:
1 + Σ_d Π_{i ≤ d} α_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, count, takewhile
from operator import mul
from statistics import mean
from typing import Any, Self

EXPONENT, STRAY = 0.5, 0.2  # of the odds over the share that is left, and its standard deviation over kinds
LONGER = (0.2, 0.7)  # of the odds at the end over the length of a training, from long trainings to short ones
FIRST_SHARE, LEAST_STEPS = 0.1, 100  # a shorter training logs too little
WINDOW = 0.6  # what τ is now: the mean from this share of the steps so far on
QUANTILE = 1.96
PREFIX = "forecast_"  # of its names in a log
SCHEDULES = ("cosine", "linear", "polynomial")  # that fall to zero


@dataclass(frozen=True)
class Forecast:
    """τ of a training over the last logged steps (`now`), at its end with a 95% interval, and from `twice_low` to
    `twice_high` what more it would be in twice the time.
    """

    now: float
    end: float
    low: float
    high: float
    twice_low: float
    twice_high: float

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self | None:
        """Return the forecast in an entry of a training's log; None where there is none."""
        values = [value for each in fields(cls) if isinstance(value := entry.get(PREFIX + each.name), float)]
        return cls(*values) if len(values) == len(fields(cls)) else None

    def logged(self) -> dict[str, float]:
        """Return the entries of a training's log."""
        return {PREFIX + name: value for name, value in asdict(self).items()}

    def text(self) -> str:
        """Return words for people."""
        twice = f"{self.twice_low:+.2f} to {self.twice_high:+.2f} in twice the time"
        return f"{self.end:.2f} [{self.low:.2f}, {self.high:.2f}] at the end, {twice}"


def forecast(history: Sequence[Mapping[str, Any]], share: float) -> Forecast | None:
    """Return the forecast of a training of which `share` is over, from its log's entries.

    None before a tenth, and for trainings of few steps.
    """
    entries = [entry for entry in history if "loss" in entry and "alpha_d1" in entry]
    last = entries[-1]["step"] if entries else 0
    if share < FIRST_SHARE or last < LEAST_STEPS * share:
        return None
    recent = [entry for entry in entries if entry["step"] > WINDOW * last]
    keys = takewhile(entries[-1].__contains__, (f"alpha_d{depth}" for depth in count(1)))
    alphas = [mean(entry[key] for entry in recent if key in entry) for key in keys]
    left = -math.log(min(1.0, share * (1 + WINDOW) / 2))  # from the middle of what was averaged
    stray = QUANTILE * STRAY
    end, low, high = (_tau(alphas, left * power) for power in (EXPONENT, EXPONENT - stray, EXPONENT + stray))
    twice = (_tau(alphas, left * EXPONENT + power * math.log(2)) - end for power in LONGER)
    return Forecast(_tau(alphas, 0.0), end, low, high, *twice)


def _tau(alphas: Sequence[float], log_factor: float) -> float:
    """Return τ of acceptances whose odds grow by a factor, given by its logarithm."""
    grown = (alpha / (alpha + (1 - alpha) * math.exp(-log_factor)) for alpha in alphas)
    return 1 + sum(accumulate(grown, mul))
