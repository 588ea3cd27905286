"""Bootstrap intervals: their arithmetic, their coverage, their pairing, and what they do without enough data."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from pydantic import TypeAdapter
from scipy import stats

from outrider.eval import Interval, Ratio
from outrider.eval.reports.statistics import Bootstrap, detectable, prompts_needed, strata_of


def test_the_value_is_the_ratio_of_sums_not_the_mean_of_ratios():
    assert Bootstrap([2]).ratio(Ratio([1, 9], [1, 3])).value == 10 / 4
    assert Bootstrap([4]).ratio(Ratio([0.1, 0.2, 0.3, 0.4], [0.25] * 4)).known, "a sum of one is like any other"


def test_two_thousand_resamples_give_a_95_percent_interval_if_nothing_else_is_asked_for():
    assert Bootstrap([3, 5]).weights.shape == (2000, 8)
    assert Bootstrap([3, 5]).tail == Bootstrap([3, 5], resamples=2000, confidence=0.95).tail


def test_resamples_keep_the_number_of_prompts_of_every_suite():
    weights = Bootstrap([3, 5], resamples=50).weights
    assert (weights[:, :3].sum(1) == 3).all()
    assert (weights[:, 3:].sum(1) == 5).all()


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    ratio = Ratio([1, 2, 3, 5, 8], [1, 1, 2, 2, 2])
    assert Bootstrap([5], seed=1).ratio(ratio) == Bootstrap([5], seed=1).ratio(ratio)
    assert Bootstrap([5], seed=1).ratio(ratio) != Bootstrap([5], seed=2).ratio(ratio)
    assert Bootstrap([5]).ratio(ratio) == Bootstrap([5], seed=0).ratio(ratio)


def test_an_offset_shifts_value_and_bounds_alike():
    numerators, denominators = [1, 4, 2, 6], [2, 2, 2, 2]
    plain, shifted = (Bootstrap([4]).ratio(Ratio(numerators, denominators, offset)) for offset in (0.0, 1.0))
    assert (shifted.value, shifted.low, shifted.high) == pytest.approx((plain.value + 1, plain.low + 1, plain.high + 1))


@pytest.mark.parametrize("strata", [[2], [8], [3, 5], [40]], ids=str)
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_intervals_are_percentiles_taken_further_out_for_few_prompts(strata, confidence):
    """By Student's t instead of the normal quantile, and in the variance by one degree for each suite and the ratio."""
    num_prompts, freedom = sum(strata), sum(strata) - len(strata)
    numerators = np.arange(num_prompts) ** 2.0
    bootstrap = Bootstrap(strata, confidence=confidence)
    interval = bootstrap.ratio(Ratio(numerators, np.ones(num_prompts)))
    lacking = {1: 2.0, 7: 8 / 6, 6: 8 / 5, 39: 40 / 38}[freedom]
    tail = stats.norm.cdf(stats.t.ppf((1 - confidence) / 2, freedom) * math.sqrt(lacking))
    assert tail < (1 - confidence) / 2, "further out"
    expected = np.quantile(bootstrap.weights @ numerators / num_prompts, [tail, 1 - tail])
    assert (interval.low, interval.high) == pytest.approx(tuple(expected))


@pytest.mark.parametrize("num_prompts", [8, 30])
def test_a_95_percent_interval_holds_the_truth_in_about_95_percent_of_experiments(num_prompts):
    """Prompts with their own acceptance and their own number of rounds; the truth is E[accepted] / E[rounds]."""
    generator = np.random.default_rng(0)
    held, experiments = 0, 600
    for seed in range(experiments):
        rounds = generator.integers(10, 40, num_prompts)
        accepted = generator.binomial(4 * rounds, generator.beta(4, 4, num_prompts))
        held += not Bootstrap([num_prompts], resamples=500, seed=seed).ratio(Ratio(accepted, rounds)).excludes(2.0)
    # Three standard errors of 600 experiments are 2.7 points; skewed ratios of few prompts cost another point or two.
    assert 0.91 <= held / experiments <= 0.985


def test_a_comparison_is_paired_so_that_what_prompts_share_cancels():
    """Prompts differ tenfold in speed; the second is exactly 1.5 times as fast on every one of them."""
    seconds = np.array([1.0, 10.0, 3.0, 7.0, 2.0])
    slow, fast = Ratio([60] * 5, seconds), Ratio([60] * 5, seconds / 1.5)
    quotient = Bootstrap([5]).quotient(fast, slow)
    assert (quotient.value, quotient.low, quotient.high) == pytest.approx((1.5, 1.5, 1.5))
    single = Bootstrap([5]).ratio(fast)
    assert single.high / single.low > 1.5


def test_a_difference_is_paired_too():
    accepted = np.array([1.0, 10.0, 3.0, 7.0, 2.0])
    one, other = Ratio(accepted + 0.5, [1] * 5), Ratio(accepted, [1] * 5)
    difference = Bootstrap([5]).difference(one, other)
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.5, 0.5, 0.5))
    apart = Bootstrap([5]).difference(Ratio(accepted, [1] * 5), Ratio([3] * 5, [1] * 5))
    assert apart.value == pytest.approx(accepted.mean() - 3)
    assert apart.low < apart.value < apart.high


def test_differences_between_suites_do_not_widen_the_interval():
    """Two suites with nothing random inside: their share of the whole is fixed, so there is nothing to be unsure of."""
    numerators, denominators = [1, 1, 1, 9, 9, 9], [1] * 6
    by_suite = Bootstrap([3, 3]).ratio(Ratio(numerators, denominators))
    assert (by_suite.low, by_suite.high) == (5.0, 5.0)
    pooled = Bootstrap([6]).ratio(Ratio(numerators, denominators))
    assert pooled.low < 5.0 < pooled.high


def test_one_prompt_or_an_event_that_few_prompts_carry_gives_a_value_without_an_interval():
    interval = Bootstrap([1]).ratio(Ratio([3], [2]))
    assert (interval.value, interval.known, interval.text()) == (1.5, False, "1.50")
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    interval = Bootstrap([20]).ratio(Ratio([1] + [0] * 19, [2] + [0] * 19))
    assert (interval.value, interval.known) == (0.5, False)


def test_an_interval_needs_95_percent_of_the_resamples():
    """Of 20 resamples, those that draw neither of the first two prompts have nothing to divide by."""
    bootstraps = [Bootstrap([4], resamples=20, seed=seed) for seed in range(100)]
    empty = [int((b.weights[:, :2].sum(1) == 0).sum()) for b in bootstraps]
    known = {n: b.ratio(Ratio([1, 2, 0, 0], [1, 1, 0, 0])).known for n, b in zip(empty, bootstraps, strict=True)}
    assert [known[n] for n in (0, 1, 2)] == [True, True, False]


def test_resamples_without_the_event_raise_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rare, never = Ratio([1, 0, 0], [1, 0, 0]), Ratio([0, 0, 0], [1, 1, 1])
        assert Bootstrap([3]).ratio(rare).value == 1
        assert Bootstrap([3]).quotient(rare, never).value == math.inf
        assert math.isnan(Bootstrap([3]).quotient(never, never).value)


def test_nothing_counted_gives_no_value():
    interval = Bootstrap([3]).ratio(Ratio([0, 0, 0], [0, 0, 0]))
    assert math.isnan(interval.value)
    assert interval.text() == "–"


def test_intervals_are_written_as_people_write_them():
    found = Interval(1.4249, 1.38, 1.4649)
    said = (found.text(unit="×"), found.text(), found.main(), found.bounds())
    assert said == ("1.42× [1.38, 1.46]", "1.42 [1.38, 1.46]", "1.42", "[1.38, 1.46]")


def test_an_interval_holds_its_ends_and_needs_them_and_its_value():
    assert Interval(1.42, 1.38, 1.46).excludes(1.0)
    assert not Interval(1.42, 1.38, 1.46).excludes(1.38)
    assert not Interval(1.42, 1.38, 1.46).excludes(1.46)
    assert not Interval(1.42, 0.9, 1.46).excludes(1.0)
    for numbers in ((math.nan, 1.0, 2.0), (1.5, math.nan, 2.0), (1.5, 1.0, math.nan)):
        assert not Interval(*numbers).known
        assert not Interval(*numbers).excludes(3.0)
    read = TypeAdapter(Interval).validate_python({"value": 1.5, "low": None, "high": 2.0})
    assert math.isnan(read.low), "what JSON writes as null is not a number again"


def test_strata_are_the_suites_sizes_in_the_order_of_their_first_prompts():
    assert strata_of(["docs", "docs", "code", "docs"]) == [3, 1]
    assert strata_of([]) == []


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
