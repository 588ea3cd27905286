"""Simulated drafters, whose τ and speed are known, say whether intervals and gates err as often as they say."""

from __future__ import annotations

import pytest

from benchmarks.coverage import PROMPTS, SHARES, TOLERANCE, covered, gated


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", PROMPTS)
@pytest.mark.parametrize("suites", [1, 3])
def test_95_percent_intervals_hold_the_truth_in_93_to_97_percent_of_1000_repeats(num_prompts, suites):
    shares = covered(num_prompts, suites, spread=0.5, noise=0.05, repeats=1000)
    plain = shares.pop("percentiles")["held"]
    assert {share["unknown"] for share in shares.values()} == {0}
    assert [name for name, share in shares.items() if not 0.93 <= share["held"] <= 0.97] == [], shares
    assert num_prompts > 12 or plain < 0.92, "plain percentiles are too narrow for few prompts, which the test notices"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHARES)
def test_both_gates_raise_false_alarms_in_at_most_5_percent_and_find_what_is_clear(shape):
    """Also with suites of unlike sizes, whose parts lose unlike shares in the order of their files."""
    false, clear = (gated(60, drop, 400, shape) for drop in (TOLERANCE, 0.1))
    chance = 2 * (0.05 * 0.95 / 400) ** 0.5
    assert false["sequential_failed"] <= 0.05
    assert max(false["fixed_failed"], false["sequential_passed"]) <= 0.05 + chance
    assert min(clear["fixed_failed"], clear["sequential_failed"]) >= 0.95
    assert clear["mean_prompts"] < 60
