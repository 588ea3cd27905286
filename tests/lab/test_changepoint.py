"""The test for a change keeps what it promises: false alarms seldom, delays as stated."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.common import BadInputError
from outrider.lab.changepoint import LONGEST, SLACK, Chart, CusumState, NormalDrafting, WatchLimits


def prompts(generator: np.random.Generator, count: int, rate: float) -> tuple[list[float], list[float]]:
    """Return rounds and accepted drafts of prompts of which each has an acceptance of its own."""
    rounds = generator.integers(10, 40, count)
    own = generator.beta(20 * rate, 20 * (1 - rate), count)
    return list(map(float, rounds)), [float(generator.binomial(3 * n, p)) for n, p in zip(rounds, own, strict=True)]


def calibrated(generator: np.random.Generator, limits: WatchLimits) -> tuple[NormalDrafting, Chart]:
    """Return a baseline learned from 400 prompts, and its chart."""
    baseline = NormalDrafting.of(*prompts(generator, 400, 0.5), "learned")
    return baseline, Chart.calibrated(baseline, limits)


def known(rounds: float = 100_000, parts: int = 30, **limits: float) -> Chart:
    """Return the chart of a baseline from so many rounds and parts."""
    baseline = NormalDrafting(tau=2, spread=1, rounds=rounds, parts=parts, source="")
    return Chart.calibrated(baseline, WatchLimits(**limits))  # type: ignore[arg-type]


def first_alarm(
    baseline: NormalDrafting, chart: Chart, generator: np.random.Generator, rate: float, windows: int, at_once: int = 1
) -> int:
    """Return the number of windows, of `at_once` usual ones each, until an alarm on traffic of prompts; 0 for none."""
    sums = CusumState()
    rounds = 0.0
    accepted = 0.0
    number = 0
    while number < windows:
        for n, a in zip(*prompts(generator, 20, rate), strict=True):
            rounds, accepted = rounds + n, accepted + a
            if rounds >= at_once * chart.limits.window:
                number += 1
                size = rounds / chart.limits.window
                sums = sums.after(baseline.score(rounds, accepted), size, chart.slack)
                rounds = accepted = 0.0
                if sums.alarm(chart.threshold):
                    return number
    return 0


@pytest.mark.parametrize(
    ("learned_from", "quiet", "at_once"), [("prompts", 50, 1), ("windows", 200, 1), ("windows", 200, 20)]
)
def test_quiet_traffic_raises_alarms_as_seldom_as_promised(learned_from, quiet, at_once):
    """A busy engine counts many rounds between two looks, while its baseline was learned from as large windows."""
    limits, alarmed = WatchLimits(window=100, false_alarms=0.05, quiet=quiet), 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        if learned_from == "prompts":
            baseline, chart = calibrated(generator, limits)
        else:
            gathered = [prompts(generator, 5 * at_once, 0.5) for _ in range(30)]
            baseline = NormalDrafting.of([sum(r) for r, _ in gathered], [sum(a) for _, a in gathered], "learned")
            assert baseline.parts == 30
            chart = Chart.calibrated(baseline, limits)
        alarmed += first_alarm(baseline, chart, generator, 0.5, limits.quiet // at_once, at_once) > 0
    assert alarmed <= 8, "the mean is 3; more than 8 has a probability below 0.003"


def test_a_fall_is_found_after_about_as_many_rounds_as_stated():
    limits = WatchLimits(window=100)
    delays = []
    stated = 0.0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        baseline, chart = calibrated(generator, limits)
        stated = chart.delay_in_rounds(baseline, 0.3)
        found = first_alarm(baseline, chart, generator, 0.35, 100)
        assert found, "a fall by 30% is always found"
        delays.append(found * limits.window)
    assert 0.5 * stated <= np.median(delays) <= 2 * stated


def test_a_fall_is_found_in_large_windows_after_as_many_rounds():
    generator = np.random.default_rng(1)
    baseline, chart = calibrated(generator, WatchLimits(window=100))
    assert 1 <= first_alarm(baseline, chart, generator, 0.35, 100, at_once=20) <= 2


def test_a_baseline_from_few_windows_makes_the_test_more_careful():
    delays = [known(rounds).delay(1.5) for rounds in (2_000, 10_000, 100_000)]
    assert delays == sorted(delays, reverse=True)
    assert delays[0] > delays[-1]


def test_a_spread_known_from_few_prompts_makes_the_test_more_careful():
    """However many rounds each prompt has: the spread is between prompts."""
    thresholds = [known(parts=parts).threshold for parts in (5, 10, 100)]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[0] > 1.5 * thresholds[-1]


def test_an_uncertain_baseline_still_finds_a_deep_fall():
    """As of a pair that was measured on 32 prompts: fewer rounds than five windows have."""
    baseline = NormalDrafting(tau=1.99, spread=3.4, rounds=930, parts=32, source="a pair")
    chart = Chart.calibrated(baseline, WatchLimits(window=200))
    assert chart.slack > SLACK
    assert chart.delay_in_rounds(baseline, 0.4) < 10_000


def test_rare_false_alarms_are_simulated_often_enough():
    often, seldom = (known(false_alarms=p, quiet=50).threshold for p in (0.02, 0.001))
    assert seldom > often + 1


def test_a_change_too_small_to_be_found_is_said_to_be():
    chart = known()
    assert chart.delay(0.0) > LONGEST
    assert chart.delay(1.0) < chart.delay(0.7)


def test_falls_and_rises_are_told_apart_and_dated():
    sums = CusumState()
    for score in (0.1, -0.2, 3.0, 3.0, 3.0):
        sums = sums.after(score)
    assert sums.alarm(7.0) == "rise"
    assert sums.risen == 3
    assert sums.after(-30.0).alarm(7.0) == "fall"


def test_a_baseline_needs_more_than_a_few_prompts():
    with pytest.raises(BadInputError, match="too few"):
        NormalDrafting.of([10.0, 12.0], [4.0, 5.0], "a pair")
