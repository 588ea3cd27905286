"""The gate at the first prompt that decides it: bounds that hold at every look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.eval import Ratio
from outrider.eval.reports.gate import gate
from outrider.eval.reports.render import write_report
from outrider.lab.sequential import Look, judged_in_turn, looking_order, looks, prompts_to_decide

from ..eval.conftest import refusal
from ..eval.reports.test_gate import drawn
from ..scripts.conftest import Command, answer


def judged(factors: Sequence[float], suites: Sequence[str], seed: int = 0, spread: float = 0.02) -> list[Look]:
    """Looks at drafters of which the new one takes a prompt's rounds times its factor, and noise."""
    generator = np.random.default_rng(seed)
    old = generator.integers(20, 40, len(factors)).astype(float)
    new = old / np.asarray(factors) * np.exp(spread * generator.standard_normal(len(factors)))
    tokens, names = 2.5 * old, [f"{suite}/{i}" for i, suite in enumerate(suites)]
    return looks(Ratio(tokens, new), Ratio(tokens, old), suites, names, 0.95)


def test_bounds_hold_at_every_look_at_once():
    """The 95% bounds of a test made for one look miss the truth at some look in a fifth of such experiments."""
    generator = np.random.default_rng(0)
    experiments = 200
    missed = 0
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


def test_a_sequential_gate_says_how_many_prompts_decide_it_and_needs_few_for_a_clear_drop():
    """Its bounds hold at every look, so that they are wider than those of one look at all prompts."""
    clear, close = (gate(drawn(120, alpha, seed=1), drawn(120, 0.6), 0.0, judge=judged_in_turn) for alpha in (0.4, 0.6))
    (failed,), (open_still,) = clear.findings, close.findings
    assert (failed.conclusion, open_still.conclusion) == ("failed", "not enough data")
    assert "12 of 120 prompts decide it, bounds for every look; all of them: " in failed.line
    assert failed.tau_after / failed.tau_before == pytest.approx(failed.ratio.value), "τ of the prompts that decided"
    assert math.isnan(failed.smallest_drop), "which is told of fixed numbers of prompts"
    fixed = gate(drawn(120, 0.6, seed=1), drawn(120, 0.6), 0.0).findings[0].ratio
    wider = open_still.ratio
    assert wider.low < fixed.low < fixed.high < wider.high
    assert wider.value == pytest.approx(fixed.value)
    said = "needs prompt records of both sides, and at least 12 prompts; there are 5."
    assert said in refusal(gate, drawn(5, 0.6), drawn(5, 0.6), judge=judged_in_turn)


def test_the_verb_answers_as_the_gate_does(outrider: Command, tmp_path: Path) -> None:
    now, worse, then = (
        write_report(drawn(120, alpha, seed), tmp_path / str(seed)) for seed, alpha in ((1, 0.6), (2, 0.4), (3, 0.6))
    )
    passed = answer("gate", outrider("lab", "gate", now, "--against", then, "--json"))
    assert "bounds for every look" in passed["findings"][0]["line"]
    failed = outrider("lab", "gate", worse, "--against", then)
    assert failed.exit_code == 1
    assert "12 of 120 prompts decide it" in failed.stdout
