"""From prompt records to figures, with numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.eval import Figures, PromptRecord
from outrider.eval.reports.figures import Baselines
from outrider.eval.summary import summarise

BASELINES = Baselines(plain="plain", generate="generate")


def record(
    contestant: str, suite: str, prompt: str, tokens: int, seconds: float, rounds: list[tuple[int, int]], **more: Any
) -> PromptRecord:
    """`rounds`: (drafted, accepted) of each."""
    return PromptRecord(
        contestant=contestant,
        temperature=0.0,
        suite=suite,
        prompt=prompt,
        prompt_tokens=3,
        tokens=tokens,
        drafted=[d for d, _ in rounds],
        accepted=[a for _, a in rounds],
        seconds={"total": seconds},
        repeats=[seconds],
        **more,
    )


RECORDS = [
    record("fast", "code", "a", 8, 1.0, [(3, 3), (3, 0), (3, 1)], identical=True),
    record("fast", "code", "b", 8, 2.0, [(3, 2), (2, 2)], identical=False, diverges_at=5),
    record("fast", "docs", "c", 5, 1.0, [(3, 1), (0, 0)], identical=True),
    record("plain", "code", "a", 8, 2.0, [(0, 0)] * 7),
    record("plain", "code", "b", 8, 2.0, [(0, 0)] * 7),
    record("plain", "docs", "c", 5, 2.0, [(0, 0)] * 4),
    record("generate", "code", "a", 8, 3.0, []),
    record("generate", "code", "b", 8, 3.0, []),
    record("generate", "docs", "c", 5, 1.0, []),
]


def figures(contestant: str, suite: str) -> Figures:
    rules = {("fast", 0.0): "greedy", ("plain", 0.0): "none", ("generate", 0.0): "none"}
    (found,) = (f for f in summarise(RECORDS, rules, BASELINES) if (f.contestant, f.suite) == (contestant, suite))
    return found


def test_tau_is_one_plus_mean_accepted_over_all_rounds() -> None:
    tau = figures("fast", "all").tau
    assert tau is not None
    assert tau.value == pytest.approx(1 + 9 / 7)


def test_acceptance_rate_is_accepted_over_drafted() -> None:
    rate = figures("fast", "all").acceptance_rate
    assert rate is not None
    assert rate.value == pytest.approx(9 / 17)


def test_alpha_counts_only_rounds_that_reached_and_drafted_the_depth() -> None:
    """Depth 1 is drafted in 6 rounds and kept in 5, depth 2 reached in those 5 and kept in 3.

    Depth 3 is drafted in 2 of those 3 and kept in 1.
    """
    alpha = figures("fast", "all").alpha
    assert [(a.depth, a.reached, a.kept) for a in alpha] == [(1, 6, 5), (2, 5, 3), (3, 2, 1)]
    assert [a.alpha.value for a in alpha] == pytest.approx([5 / 6, 3 / 5, 1 / 2])


def test_the_histogram_counts_every_round_once() -> None:
    histogram = figures("fast", "all").accepted
    assert [(h.accepted, h.rounds) for h in histogram] == [(0, 2), (1, 2), (2, 2), (3, 1)]
    assert sum(h.share.value for h in histogram) == pytest.approx(1)


def test_speed_is_a_ratio_of_sums() -> None:
    """21 tokens in 4 s; the plain target takes 6 s for them, generate 7 s."""
    fast = figures("fast", "all")
    assert fast.tokens_per_second.value == pytest.approx(21 / 4)
    assert fast.speedup.value == pytest.approx(6 / 4)
    assert fast.speedup_generate is not None
    assert fast.speedup_generate.value == pytest.approx(7 / 4)
    assert fast.milliseconds_per_token["total"].value == pytest.approx(4000 / 21)


def test_each_suite_has_its_own_figures() -> None:
    docs = figures("fast", "docs")
    assert (docs.num_prompts, docs.num_rounds, docs.num_tokens) == (1, 2, 5)
    assert docs.tau is not None
    assert docs.tau.value == 1.5
    assert docs.speedup.value == 2.0


def test_identical_prompts_are_counted_where_they_were_compared() -> None:
    assert figures("fast", "all").identical == 2
    assert figures("plain", "all").identical is None


def test_a_baseline_has_no_acceptance() -> None:
    plain, generate = figures("plain", "all"), figures("generate", "all")
    assert plain.tau is not None
    assert plain.tau.value == 1.0
    assert (plain.acceptance_rate, plain.alpha, plain.accepted) == (None, [], [])
    assert generate.tau is None
    assert plain.speedup.value == 1.0


def test_the_order_of_records_does_not_matter_even_if_suites_alternate() -> None:
    rules = {("fast", 0.0): "greedy", ("plain", 0.0): "none", ("generate", 0.0): "none"}
    mixed = [RECORDS[i] for i in (2, 0, 1, 5, 3, 4, 8, 6, 7)]
    straight = {(f.contestant, f.suite): f for f in summarise(RECORDS, rules, BASELINES)}
    for f in summarise(mixed, rules, BASELINES):
        assert f.speedup == straight[f.contestant, f.suite].speedup
