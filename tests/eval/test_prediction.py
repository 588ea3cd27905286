"""What is predicted of a plan: by hand, and from costs and acceptance as they are measured."""

from __future__ import annotations

import pytest

from outrider.costs.rounds import RoundTimes, costs_in_loop
from outrider.decode import Control, Costs, Plan, Round
from outrider.eval import prediction
from outrider.eval.acceptance import Acceptance
from outrider.eval.batches import BatchAnswer
from outrider.eval.prediction import Option


def test_what_rounds_take_is_read_off_whole_batches() -> None:
    """3 rounds for the first row and 1 for the second are 3 passes, 4 of 6 row-rounds; the median of batches."""
    rounds = [[Round(1, 0, 1)] * 3, [Round(1, 0, 1)]]
    done = [BatchAnswer([[1] * 4, [1] * 2], rounds, 1.0, seconds) for seconds in (1.3, 1.6, 9.0)]
    assert prediction.round_times(done) == RoundTimes(1.0, pytest.approx(0.2), pytest.approx(4 / 6))


def predicted(draft: float, alpha: float, wide: float, ranks: tuple[tuple[float, ...], ...] = ()) -> list[Option]:
    """Options, best first, where plain rounds take 10 ms, a level `draft` more, and a pass `wide` more per draft."""
    curve = {n: 0.010 + wide * n for n in (0, 1, 8, 64)}
    loops = {d: RoundTimes(0, 0.010 + (draft + wide) * d) for d in (0, 1, 2, 4, 8)}
    seen = Acceptance((alpha,) * 8, tuple(alpha**d for d in range(1, 9)), ranks, 100)
    costs = costs_in_loop(curve, loops)
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
    options = [Option(Plan(d), 1.5, RoundTimes(0, 0.01), speed) for d, speed in ((1, 50.0), (3, 80.0), (7, 60.0))]
    found = prediction.control_option(options, costs, seen, 8)
    assert (found.plan.depth, found.predicted) == (5, 80.0)
    assert found.plan.control == Control(costs, seen.rates, 16.0)
    assert prediction.control_option(options[2:], costs, seen, 8).plan.depth == 8
    assert prediction.control_option(options[:2], costs, seen, 4).plan.depth == 4
