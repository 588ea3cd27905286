"""Comparisons that may be looked at after every prompt, and how many prompts a comparison needs.

A confidence sequence holds at all numbers of prompts at once, so that a gate may be asked again whenever more prompts
were measured, and a decision may be taken at the first look that allows one. Its bounds are those of the normal mixture
for the mean of the prompts' influences on the ratio (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform
central limit theory and asymptotic confidence sequences", arXiv 2103.06476, its one-sided form).

Shapes: N prompts, t of which were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

from .figures import CONFIDENCE, Interval, Ratio
from .statistics import Floats

FIRST_LOOK = 12  # prompts, before which variances are not to be trusted
_TIGHTEST = 60  # prompts at which the bounds are the closest to those of a fixed test
POWER = 0.8  # share of comparisons that detect the difference that they were planned for


@dataclass(frozen=True)
class Look:
    """The ratio after `prompts` of them, with one-sided bounds that hold at every look."""

    prompts: int
    ratio: Interval


def looks(above: Ratio, below: Ratio, suites: Sequence[str], confidence: float) -> list[Look]:
    """Return `above / below` after every number of prompts from the first look on, the suites taken in turns.

    Args:
        suites: of each prompt; differences between suites are no noise, since every look has its share of each.
        confidence: of each one-sided bound, at all looks together.
    """
    order = _in_turns(suites)
    columns = [np.asarray(part, float)[order] for r in (above, below) for part in (r.numerators, r.denominators)]
    names = np.asarray(suites)[order]
    found = []
    for t in range(FIRST_LOOK, len(order) + 1):
        seen, labels = [column[:t] for column in columns], names[:t]
        value, influences = _log_ratio(*seen)
        freedom = t - len(set(labels))
        if not math.isfinite(value) or freedom < 1:
            continue
        spread = math.sqrt(_within(influences, labels) / freedom)
        width = spread * _boundary(t, 1 - confidence, freedom)
        found.append(Look(t, Interval(math.exp(value), math.exp(value - width), math.exp(value + width))))
    return found


def _in_turns(suites: Sequence[str]) -> list[int]:
    """Return the places of the prompts in turns: the first of each suite, the second of each, …."""
    turns: dict[str, int] = {}
    places = []
    for i, suite in enumerate(suites):
        turns[suite] = turns.get(suite, -1) + 1
        places.append((turns[suite], i))
    return [i for _, i in sorted(places)]


def _log_ratio(above: Floats, above_of: Floats, below: Floats, below_of: Floats) -> tuple[float, Floats]:
    """Return ln of the ratio of ratios of sums, and each prompt's influence on it, `[t]`."""
    if not (above.sum() and below.sum() and above_of.sum() and below_of.sum()):
        return math.nan, np.zeros_like(above)
    parts = [len(column) * column / column.sum() for column in (above, above_of, below, below_of)]
    value = math.log(above.sum() / above_of.sum()) - math.log(below.sum() / below_of.sum())
    return value, parts[0] - parts[1] - parts[2] + parts[3]


def _within(values: Floats, labels: NDArray[np.str_]) -> float:
    """Return the sum of squares around the mean of each suite."""
    return float(sum(((own := values[labels == name]) - own.mean()) @ (own - own.mean()) for name in set(labels)))


def _boundary(t: int, error: float, freedom: int) -> float:
    """Return the width of a one-sided bound after t prompts, in standard deviations of one.

    The bound is taken further out by what Student's t makes of its quantile, for the deviation is estimated, too.
    """
    rho = (-2 * math.log(error) + math.log(-2 * math.log(error)) + 1) / _TIGHTEST
    inner = t * rho + 1
    quantile = math.sqrt(2 * inner / (t * rho) * math.log(1 + math.sqrt(inner) / (2 * error)))
    return -float(stdtrit(freedom, ndtr(-quantile))) / math.sqrt(t)


def prompts_needed(interval: Interval, num_prompts: int, difference: float) -> int:
    """Return the prompts with which four of five runs find a relative difference, by the interval of `num_prompts`."""
    if math.isnan(found := detectable(interval, num_prompts, num_prompts)):
        return 10 * num_prompts  # nothing is known of the noise yet
    return max(2, math.ceil(num_prompts * (math.log1p(found) / math.log1p(difference)) ** 2))


def detectable(interval: Interval, num_prompts: int, prompts: int) -> float:
    """Return the relative difference that four of five runs with `prompts` find, by the interval of `num_prompts`."""
    if not interval.known or interval.low <= 0:
        return math.nan
    quantile = float(ndtri(0.5 + CONFIDENCE / 2))
    error = math.log(interval.high / interval.low) / (2 * quantile) * math.sqrt(num_prompts / prompts)
    return math.expm1(error * (quantile + float(ndtri(POWER))))
