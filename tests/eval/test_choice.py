"""Which measured plan is chosen, and why."""

from __future__ import annotations

import pytest

from outrider.costs.rounds import RoundTimes
from outrider.decode import Control, Costs, Plan, Round, Tree
from outrider.eval import Ratio, choice
from outrider.eval.batches import BatchAnswer
from outrider.eval.choice import MeasuredOption
from outrider.eval.prediction import Option
from outrider.eval.reports.statistics import Bootstrap

BOOTSTRAP = Bootstrap([6])


def raced(plan: Plan, seconds: float, noise: float = 0.0) -> MeasuredOption:
    """Six batches of 100 tokens in about `seconds` each."""
    times = [seconds * (1 + noise * (-1) ** i) for i in range(6)]
    plain = Ratio([100] * 6, [1.0] * 6)
    return MeasuredOption(
        Option(plan, 2.0, RoundTimes(0, 0.01), 100 / seconds), 2.0, Ratio([100] * 6, times), plain, BOOTSTRAP
    )


PLAIN, CHAIN, SHALLOW = raced(Plan(0), 1.0), raced(Plan(4), 0.6), raced(Plan(1), 0.8)
TREE = Plan(tree=Tree((-1, -1, 0)))
CONTROLLED = Plan(6, control=Control(Costs(((0, 0.01),)), (0.5,)))


@pytest.mark.parametrize(
    ("fixed", "controlled", "expected", "words"),
    [
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.5), CONTROLLED, "falls back"),
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.61, noise=0.3), CONTROLLED, "within the noise"),
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.7), Plan(4), "0.86× [0.86, 0.86] the speed of depth 4"),
        ([CHAIN, raced(TREE, 0.5)], raced(CONTROLLED, 0.55), TREE, "The fastest"),
        ([CHAIN, raced(TREE, 0.5)], raced(CONTROLLED, 0.45), CONTROLLED, "The fastest"),
        ([raced(Plan(1), 1.5)], raced(CONTROLLED, 1.02), Plan(0), "Nothing is faster than the plain target"),
        ([raced(Plan(1), 1.5)], raced(CONTROLLED, 0.98), CONTROLLED, "falls back"),
        (
            [raced(Plan(1), 0.97)],
            raced(CONTROLLED, 1.02, noise=0.3),
            Plan(1),
            "is slower than the plain target, this one is not",
        ),
    ],
)
def test_the_best_measured_plan_is_chosen(
    fixed: list[MeasuredOption], controlled: MeasuredOption, expected: Plan, words: str
) -> None:
    chosen, reason = choice.choose([PLAIN, *fixed, controlled])
    assert chosen.option.plan == expected
    assert words in reason


def test_speed_and_speedup_are_those_of_the_median_repeat() -> None:
    options = [Option(Plan(d), 2.0, RoundTimes(0, 0.01), 1.0) for d in (0, 2)]
    rounds = [[Round(2, 1, 2), Round(2, 2, 3)]]
    runs = {
        "plain": [[BatchAnswer([[1] * 6], [[Round(0, 0, 1)] * 5], 0.0, t) for t in (2.0, 2.5, 9.0)]] * 4,
        "depth 2": [[BatchAnswer([[1] * 6], rounds, 0.0, t) for t in (1.0, 0.5, 7.0)]] * 4,
    }
    plain, drafted = choice.measured_options(options, runs, Bootstrap([4]))
    assert plain.figures()["speedup"] == 1.0
    assert drafted.figures() == {"tau": 2.5, "tokens_per_second": 6.0, "speedup": 2.5, "low": 2.5, "high": 2.5}
