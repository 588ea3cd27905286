"""Bounds that hold at every look, and the prompts that a difference needs."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.eval import Interval, Ratio
from outrider.eval.reports.sequential import detectable, looks, prompts_needed


def test_bounds_hold_at_every_look_at_once():
    """The 95% bounds of a test made for one look miss the truth at some look in a fifth of such experiments."""
    generator, experiments, missed = np.random.default_rng(0), 200, 0
    for _ in range(experiments):
        rounds = generator.integers(10, 40, 60)
        other = rounds * np.exp(0.2 * generator.standard_normal(60) - 0.02)  # as many rounds, in the mean
        seen = looks(Ratio(rounds, rounds), Ratio(rounds, other), ["code", "docs"] * 30, 0.95)
        missed += any(look.ratio.high < 1 for look in seen)
    assert missed / experiments <= 0.05


def test_suites_are_taken_in_turns_and_their_differences_are_no_noise():
    """Every prompt of a suite is like the others, so that nothing is unsure, whatever the order they came in."""
    accepted, rounds = [1.0] * 20 + [9.0] * 20, [1.0] * 40
    seen = looks(Ratio(accepted, rounds), Ratio(rounds, rounds), ["a"] * 20 + ["b"] * 20, 0.95)
    assert [look.prompts for look in seen] == list(range(12, 41))
    assert seen[0].ratio.value == pytest.approx(5.0)
    assert (seen[0].ratio.low, seen[0].ratio.high) == pytest.approx((5.0, 5.0))


def test_the_prompts_that_a_difference_needs_are_those_that_find_it():
    """Of 30 prompts, an error of 5% in ln: (1.96 + 0.84)² · 0.05² / ln(1.03)² times as many."""
    look = Interval(2.0, 2.0 * np.exp(-1.96 * 0.05), 2.0 * np.exp(1.96 * 0.05))
    needed = prompts_needed(look, 30, 0.03)
    assert needed == pytest.approx(30 * (2.8016 * 0.05 / np.log(1.03)) ** 2, rel=0.01)
    assert detectable(look, 30, needed) == pytest.approx(0.03, rel=0.01)
    assert prompts_needed(Interval(2.0, np.nan, np.nan), 30, 0.03) == 300
    assert np.isnan(detectable(Interval(2.0, np.nan, np.nan), 30, 60))
