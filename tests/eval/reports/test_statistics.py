"""Bootstrap intervals: their arithmetic, their coverage, their pairing, and what they do without enough data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.eval import Interval, Ratio
from outrider.eval.reports.statistics import Bootstrap


def test_the_value_is_the_ratio_of_sums_not_the_mean_of_ratios() -> None:
    interval = Bootstrap([2]).ratio(Ratio([1, 9], [1, 3]))
    assert interval.value == 10 / 4


def test_resamples_keep_the_number_of_prompts_of_every_suite() -> None:
    weights = Bootstrap([3, 5], resamples=50).weights
    assert (weights[:, :3].sum(1) == 3).all()
    assert (weights[:, 3:].sum(1) == 5).all()


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    ratio = Ratio([1, 2, 3, 5, 8], [1, 1, 2, 2, 2])
    assert Bootstrap([5], seed=1).ratio(ratio) == Bootstrap([5], seed=1).ratio(ratio)
    assert Bootstrap([5], seed=1).ratio(ratio) != Bootstrap([5], seed=2).ratio(ratio)


def test_an_offset_shifts_value_and_bounds_alike() -> None:
    numerators, denominators = [1, 4, 2, 6], [2, 2, 2, 2]
    plain, shifted = (
        Bootstrap([4]).ratio(Ratio(numerators, denominators)),
        Bootstrap([4]).ratio(Ratio(numerators, denominators, offset=1.0)),
    )
    assert (shifted.value, shifted.low, shifted.high) == pytest.approx((plain.value + 1, plain.low + 1, plain.high + 1))


@pytest.mark.parametrize("num_prompts", [8, 30])
def test_a_95_percent_interval_holds_the_truth_in_about_95_percent_of_experiments(num_prompts: int) -> None:
    """Prompts with their own acceptance and their own number of rounds; the truth is E[accepted] / E[rounds]."""
    generator = np.random.default_rng(0)
    held, experiments = 0, 600
    for seed in range(experiments):
        rounds = generator.integers(10, 40, num_prompts)
        accepted = generator.binomial(4 * rounds, generator.beta(4, 4, num_prompts))
        held += not Bootstrap([num_prompts], resamples=500, seed=seed).ratio(Ratio(accepted, rounds)).excludes(2.0)
    # Three standard errors of 600 experiments are 2.7 points; skewed ratios of few prompts cost another point or two.
    assert 0.91 <= held / experiments <= 0.985


def test_a_comparison_is_paired_so_that_what_prompts_share_cancels() -> None:
    """Prompts differ tenfold in speed; the second is exactly 1.5 times as fast on every one of them."""
    seconds = np.array([1.0, 10.0, 3.0, 7.0, 2.0])
    slow, fast = Ratio([60] * 5, seconds), Ratio([60] * 5, seconds / 1.5)
    quotient = Bootstrap([5]).quotient(fast, slow)
    assert (quotient.value, quotient.low, quotient.high) == pytest.approx((1.5, 1.5, 1.5))
    single = Bootstrap([5]).ratio(fast)
    assert single.high / single.low > 1.5


def test_differences_between_suites_do_not_widen_the_interval() -> None:
    """Two suites with nothing random inside: their share of the whole is fixed, so there is nothing to be unsure of."""
    numerators, denominators = [1, 1, 1, 9, 9, 9], [1] * 6
    by_suite = Bootstrap([3, 3]).ratio(Ratio(numerators, denominators))
    assert (by_suite.low, by_suite.high) == (5.0, 5.0)
    pooled = Bootstrap([6]).ratio(Ratio(numerators, denominators))
    assert pooled.low < 5.0 < pooled.high


def test_one_prompt_gives_a_value_without_an_interval() -> None:
    interval = Bootstrap([1]).ratio(Ratio([3], [2]))
    assert interval.value == 1.5
    assert not interval.known
    assert interval.text() == "1.50"


def test_an_event_that_few_prompts_carry_gets_no_interval() -> None:
    interval = Bootstrap([20]).ratio(Ratio([1] + [0] * 19, [2] + [0] * 19))
    assert interval.value == 0.5
    assert not interval.known


def test_nothing_counted_gives_no_value() -> None:
    interval = Bootstrap([3]).ratio(Ratio([0, 0, 0], [0, 0, 0]))
    assert math.isnan(interval.value)
    assert interval.text() == "–"


def test_intervals_are_written_as_people_write_them() -> None:
    assert Interval(1.4249, 1.38, 1.4649).text(unit="×") == "1.42× [1.38, 1.46]"
    assert Interval(1.42, 1.38, 1.46).excludes(1.0)
    assert not Interval(1.42, 0.9, 1.46).excludes(1.0)
