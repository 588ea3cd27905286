"""What is predicted of a plan: by hand, and from costs and acceptance as they are measured."""

from __future__ import annotations

import pytest

from outrider.decode import Control, Costs, Plan, Round
from outrider.eval import prediction
from outrider.eval.acceptance import Acceptance
from outrider.eval.batches import BatchAnswer
from outrider.eval.prediction import Loop, Option

CURVE = {0: 0.010, 1: 0.011, 4: 0.014, 8: 0.018, 64: 0.074}


def test_predicted_tokens_per_second_by_hand() -> None:
    """Two rows of 11 tokens, 10 of them in 4 rounds each; rows run in 80% of the rounds, so there are 5.

    That is 0.5 s + 5 · 0.1 s for 22 tokens.
    """
    assert prediction.tokens_per_second(
        2.5, Loop(prefill=0.5, seconds=0.1, running=0.8), tokens=11, batch=2
    ) == pytest.approx(22.0)


def test_what_rounds_take_is_read_off_whole_batches() -> None:
    """3 rounds for the first row and 1 for the second are 3 passes, 4 of 6 row-rounds; the median of batches."""
    rounds = [[Round(1, 0, 1)] * 3, [Round(1, 0, 1)]]
    done = [BatchAnswer([[1] * 4, [1] * 2], rounds, 1.0, seconds) for seconds in (1.3, 1.6, 9.0)]
    assert prediction.loop_of(done) == Loop(1.0, pytest.approx(0.2), pytest.approx(4 / 6))


def test_costs_add_up_to_the_rounds_that_were_timed() -> None:
    loops = {0: Loop(0, 0.012), 1: Loop(0, 0.016), 4: Loop(0, 0.028)}
    costs = prediction.costs_in_loop(CURVE, loops)
    assert costs.host == pytest.approx(0.002)
    assert [costs.round_time(d) for d in (0, 1, 4)] == pytest.approx([0.012, 0.016, 0.028])
    assert costs.round_time(2) == pytest.approx(0.020)
    assert costs.verify_time(64) == pytest.approx(0.074)


def test_rounds_that_are_faster_than_a_pass_by_itself_keep_its_growth() -> None:
    """As with captured graphs, where a pass by itself waits for the host."""
    costs = prediction.costs_in_loop(CURVE, {0: Loop(0, 0.004), 1: Loop(0, 0.006)})
    assert costs.host == 0
    assert [costs.round_time(0), costs.round_time(1)] == pytest.approx([0.004, 0.006])
    assert costs.verify_time(64) == pytest.approx(0.004 + 0.064)


def test_noise_does_not_make_more_work_cheaper() -> None:
    costs = prediction.costs_in_loop(
        {0: 0.010, 1: 0.014, 2: 0.012, 8: 0.020}, {0: Loop(0, 0.010), 1: Loop(0, 0.020), 2: Loop(0, 0.018)}
    )
    assert costs.verify_time(1) == costs.verify_time(2) == pytest.approx(0.013)
    assert costs.round_time(1) == pytest.approx(costs.round_time(2)) == pytest.approx(0.019)


def predicted(draft: float, alpha: float, wide: float, ranks: tuple[tuple[float, ...], ...] = ()) -> list[Option]:
    """Options, best first, where plain rounds take 10 ms, a level `draft` more, and a pass `wide` more per draft."""
    curve = {n: 0.010 + wide * n for n in (0, 1, 8, 64)}
    loops = {d: Loop(0, 0.010 + (draft + wide) * d) for d in (0, 1, 2, 4, 8)}
    seen = Acceptance((alpha,) * 8, tuple(alpha**d for d in range(1, 9)), ranks, 100)
    costs = prediction.costs_in_loop(curve, loops)
    chains = prediction.chain_options(costs, loops, seen, 1)
    trees = [
        prediction._cheap_option(costs, chains, tree, seen, 1)
        for tree in prediction.hopeful_trees(costs, chains, seen, 1)
    ]
    return prediction.best([*chains, *trees], 99)


RANKS = ((0.5, 0.2, 0.1, 0.05),) * 4


@pytest.mark.parametrize(
    ("draft", "alpha", "wide", "expected"),
    [(0.012, 0.6, 0.0005, 0), (0.0001, 0.95, 0.0001, 8), (0.001, 0.5, 0.0001, 2)],
)
def test_expensive_drafts_are_left_out_and_cheap_good_ones_go_deep(
    draft: float, alpha: float, wide: float, expected: int
) -> None:
    assert predicted(draft, alpha, wide)[0].plan == Plan(expected)


def test_where_width_is_free_a_tree_wins_and_where_it_is_not_no_tree_is_even_timed() -> None:
    first = predicted(0.001, 0.5, 1e-6, RANKS)[0]
    assert first.plan.tree is not None
    assert first.tau == pytest.approx(first.plan.tree.value(RANKS))
    assert not any(o.plan.is_tree for o in predicted(0.001, 0.5, 0.005, RANKS))


def test_the_controlled_chain_may_go_a_little_deeper_than_the_best() -> None:
    seen, costs = Acceptance((0.5,) * 8, (), (), 100), Costs(((0, 0.01),))
    options = [Option(Plan(d), 1.5, Loop(0, 0.01), speed) for d, speed in ((1, 50.0), (3, 80.0), (7, 60.0))]
    found = prediction.control_option(options, costs, seen, 8)
    assert (found.plan.depth, found.predicted) == (5, 80.0)
    assert found.plan.control == Control(costs, seen.rates, 16.0)
    assert prediction.control_option(options[2:], costs, seen, 8).plan.depth == 8
    assert prediction.control_option(options[:2], costs, seen, 4).plan.depth == 4


def test_drafting_in_one_pass_costs_the_same_at_any_depth() -> None:
    """What it took at the depths that were timed is one price, their median, and no deeper chain pays more."""
    loops = {0: Loop(0, 0.012), 1: Loop(0, 0.0163), 4: Loop(0, 0.0191), 8: Loop(0, 0.0232)}
    costs = prediction.costs_in_loop(CURVE, loops, one_pass=True)
    assert costs.draft == pytest.approx([0.0] + [0.0032] * 8)
    assert costs.draft_time(30) == costs.draft_time(1)
    assert costs.round_time(8) - costs.round_time(1) == pytest.approx(CURVE[8] - CURVE[1])
