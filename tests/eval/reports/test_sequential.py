"""Bounds that hold at every look, and the prompts that a difference needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.eval import Interval, Ratio
from outrider.eval.reports.sequential import (
    Look,
    detectable,
    looking_order,
    looks,
    prompts_needed,
    prompts_to_decide,
)


def judged(factors: Sequence[float], suites: Sequence[str], seed: int = 0, spread: float = 0.02) -> list[Look]:
    """Looks at drafters of which the new one takes a prompt's rounds times its factor, and noise."""
    generator = np.random.default_rng(seed)
    old = generator.integers(20, 40, len(factors)).astype(float)
    new = old / np.asarray(factors) * np.exp(spread * generator.standard_normal(len(factors)))
    tokens, names = 2.5 * old, [f"{suite}/{i}" for i, suite in enumerate(suites)]
    return looks(Ratio(tokens, new), Ratio(tokens, old), suites, names, 0.95)


def test_bounds_hold_at_every_look_at_once():
    """The 95% bounds of a test made for one look miss the truth at some look in a fifth of such experiments."""
    generator, experiments, missed = np.random.default_rng(0), 200, 0
    names = [str(i) for i in range(60)]
    for _ in range(experiments):
        rounds = generator.integers(10, 40, 60)
        other = rounds * np.exp(0.2 * generator.standard_normal(60) - 0.02)  # as many rounds, in the mean
        seen = looks(Ratio(rounds, rounds), Ratio(rounds, other), ["code", "docs"] * 30, names, 0.95)
        missed += any(look.quotient.high < 1 for look in seen)
    assert missed / experiments <= 0.05


def test_every_look_estimates_the_ratio_of_all_prompts_whatever_the_sizes_of_suites():
    """Prompts of a suite are all alike, so that any number of each tells the whole: suites count by their shares."""
    sizes = {"a": 30, "b": 7, "c": 3}
    suites = [name for name, size in sizes.items() for _ in range(size)]
    accepted = np.array([{"a": 1.0, "b": 9.0, "c": 4.0}[name] for name in suites])
    ones = np.ones(len(suites))
    seen = looks(Ratio(accepted, ones), Ratio(2 * ones, ones), suites, [str(i) for i in range(40)], 0.95)
    assert [look.prompts for look in seen] == list(range(12, 41))
    assert [look.above for look in seen] == pytest.approx([accepted.mean()] * len(seen))
    assert [look.quotient.value for look in seen] == pytest.approx([accepted.mean() / 2] * len(seen))


def test_the_order_has_of_each_suite_its_share_and_depends_on_names_alone():
    suites, names = ["a"] * 12 + ["b"] * 108, [f"p{i}" for i in range(120)]
    order = looking_order(suites, names)
    assert sorted(order) == list(range(120))
    for seen in range(10, 121, 10):
        assert sum(i < 12 for i in order[:seen]) == seen // 10
    backwards = looking_order(suites[::-1], names[::-1])
    assert [names[::-1][i] for i in backwards] == [names[i] for i in order]


@pytest.mark.parametrize("seed", range(5))
def test_a_part_that_is_worse_fails_nothing_that_is_fine_as_a_whole(seed):
    """A drop of 15% in a tenth of the prompts, or of 10% in the first eighth of a file, is one of less than 3%."""
    small = judged([0.85] * 12 + [1.0] * 108, ["small"] * 12 + ["big"] * 108, seed)
    topic = judged([0.9] * 15 + [1.0] * 105, ["one"] * 120, seed)
    for seen in (small, topic):
        assert seen[-1].quotient.value == pytest.approx(0.986, abs=0.01)
        assert [look.prompts for look in seen if look.quotient.high < 0.97] == []


def test_prompts_that_are_equal_decide_nothing_before_a_different_one_had_its_chance():
    suites = ["a"] * 120
    equal = judged([1.0] * 120, suites, spread=0.0)
    assert equal[0].quotient.value == 1.0
    assert equal[0].quotient.low < 0.97 < equal[-1].quotient.low < 1.0
    starts = looking_order(suites, [f"a/{i}" for i in range(120)])[:12]
    seen = judged([1.0 if i in starts else 0.87 for i in range(120)], suites, spread=0.0)
    assert seen[0].quotient.value == 1.0, "the first twelve are equal"
    decided = next(x for x in seen if x.quotient.high < 0.97 or x.quotient.low >= 0.97)
    assert decided.quotient.high < 0.97


def test_bounds_of_every_look_need_more_prompts_than_the_root_says():
    assert prompts_to_decide(0.02, 100, 0.02, 0.95) == 100
    needed = prompts_to_decide(0.02, 100, 0.01, 0.95)
    assert 400 < needed < 600
    assert math.isclose(prompts_to_decide(0.02, 100, 0.005, 0.95) / needed, 4.2, abs_tol=0.4)


def test_the_prompts_that_a_difference_needs_are_those_that_find_it():
    """Of 30 prompts, an error of 5% in ln: (1.96 + 0.84)² · 0.05² / ln(1.03)² times as many."""
    look = Interval(2.0, 2.0 * np.exp(-1.96 * 0.05), 2.0 * np.exp(1.96 * 0.05))
    needed = prompts_needed(look, 30, 0.03)
    assert needed == pytest.approx(30 * (2.8016 * 0.05 / np.log(1.03)) ** 2, rel=0.01)
    assert detectable(look, 30, needed) == pytest.approx(0.03, rel=0.01)
    assert prompts_needed(look, 30, 0.9) == 12, "fewer give no interval"
    assert prompts_needed(Interval(2.0, np.nan, np.nan), 30, 0.03) is None
    assert prompts_needed(Interval(2.0, 2.0, 2.0), 30, 0.03) is None
    assert np.isnan(detectable(Interval(2.0, np.nan, np.nan), 30, 60))
