"""Figures that are easily misread have a remark beside them, and a report ends with what to do, in every form."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from rich.console import Console

from outrider.decode import Plan
from outrider.distill.prompt_table import Prompt
from outrider.eval import Interval, Report
from outrider.eval.measure import Contestant, measure
from outrider.eval.reports.advice import collapse, decision, remarks
from outrider.eval.reports.figures import DepthFigure
from outrider.eval.reports.gate import gate
from outrider.eval.reports.render import html, markdown, print_report
from outrider.eval.suites import make_suite
from outrider.heads import DraftModel
from outrider.recipes import EvalSpec
from outrider.scripts.json_schemas import report_fields
from outrider.targets import Target

from ..conftest import make_report

USUAL = [[4, 1, 0, 2], [2, 2, 0], [0, 3, 1, 4], [1, 1, 0, 0]]


def trained(report: Report, depth: int) -> Report:
    drafter, *others = report.contestants
    return report.model_copy(update={"contestants": [drafter.model_copy(update={"trained_depth": depth}), *others]})


def answered(report: Report, answers: str) -> Report:
    """The report with these answers to the prompts, a letter each, by every contestant."""
    count = len(answers)
    records = [r.model_copy(update={"answer": answers[i % count]}) for i, r in enumerate(report.records)]
    return report.model_copy(update={"records": records})


def test_a_usual_report_needs_no_remark() -> None:
    assert remarks(trained(answered(make_report(USUAL), "abcd"), 4)) == []


@pytest.mark.parametrize(("answers", "said"), [("aaaa", "4 of 4"), ("abaa", "3 of 4"), ("abab", ""), ("abcd", "")])
def test_answers_that_are_alike_are_counted(answers: str, said: str) -> None:
    found = remarks(answered(make_report(USUAL), answers))
    assert [line.partition(" answers alike at temperature 0: ")[0] for line in found] == ([said] if said else [])


def test_the_gate_says_so_too() -> None:
    report = answered(make_report(USUAL), "aaaa")
    assert gate(report, report).remarks[-1].startswith("warning: 4 of 4 answers alike at temperature 0: ")
    usual = answered(report, "abcd")
    assert gate(usual, usual).remarks == []


def test_an_interval_without_width_has_a_remark() -> None:
    (found,) = remarks(make_report([[4, 4]] * 6, depth=4))
    named = "τ, acceptance rate, alpha at depth 1, 2, 3, 4"
    assert found.startswith(f"draft at temperature 0: all 6 prompts gave the same {named}; an interval without width")
    assert Interval(5.0, 5.0, 5.0).text() == "5.00 [all alike]"


def test_acceptance_that_collapses_after_the_trained_depth_is_named() -> None:
    report = make_report([[2, 1, 2, 0, 2], [2, 2, 0, 1], [1, 2, 2, 2], [2, 0, 2, 1]], depth=4)
    assert not any("alpha falls" in line for line in remarks(report)), "nobody knows how deep it was trained"
    assert not any("alpha falls" in line for line in remarks(trained(report, 4)))
    (found,) = (line for line in remarks(trained(report, 2)) if "alpha falls" in line)
    assert "alpha falls from 0.71 at depth 2, the last it was trained at, to 0.00 at depth 3; draft no deeper" in found


def test_collapse_is_a_loss_of_more_than_half() -> None:
    assert collapse([0.7, 0.6, 0.2], 2)
    assert [collapse(*case) for case in (([0.7, 0.6, 0.3], 2), ([0.7, 0.6], 2), ([0.7, 0.6, 0.2], None))] == [""] * 3


def test_a_plan_that_was_cut_is_named() -> None:
    (found,) = remarks(make_report(USUAL, depth=4, max_new_tokens=5))
    assert found == "draft, depth 4: of 5 new tokens a round can emit 4; a deeper plan is cut to that."


def test_equal_prompts_are_found_in_a_measurement(tiny_llama: Any) -> None:
    """Six times the same prompt, and a drafter that is the target: figures without spread, and a plan that is cut."""
    prompts = [Prompt(str(i), "same", (5, 1, 9)) for i in range(6)]
    settings = EvalSpec(max_new_tokens=8, repeats=1, temperatures=[0.0], depth=3)
    target = Target(tiny_llama(layers=2))
    contestant = Contestant("self", DraftModel(target.model), Plan(depth=100))
    report = measure(target, [contestant], [make_suite("same", prompts)], settings, generate_baseline=False)
    assert report.contestant("self").depth == 7
    said = remarks(report)
    assert [line.split(":")[0] for line in said] == [
        "self, depth 7",
        "6 of 6 answers alike at temperature 0",
        "self at temperature 0",
    ]


def test_what_was_found_in_the_run_is_a_remark() -> None:
    report = trained(answered(make_report(USUAL), "abcd"), 4)
    assert remarks(report.model_copy(update={"findings": ["draft at temperature 1: no."]})) == [
        "draft at temperature 1: no."
    ]


def test_remarks_stand_in_every_form_of_a_report(tmp_path: Path) -> None:
    report = make_report([[4, 4]] * 6, depth=4)
    (said,) = remarks(report)
    out = io.StringIO()
    print_report(report, Console(file=out, width=1000))
    assert f"note: {said}" in out.getvalue()
    assert f"> {said}" in markdown(report)
    assert said in html(report)
    assert report_fields(report, tmp_path)["remarks"] == [said]


def told(
    *speedups: Interval, rates: tuple[float, ...] = (0.7, 0.6, 0.5), tuned: bool = False, depth: int | None = None
) -> str:
    """The decision on contestants of these speedups: the head `draft` first, whose alphas are `rates`."""
    report = make_report(USUAL)
    head = report.headline()
    plain = report.headline("plain")
    (drafter, alone) = report.contestants
    alpha = [DepthFigure(depth=d, reached=20, kept=10, alpha=Interval(a, 0, 1)) for d, a in enumerate(rates, 1)]
    names = ["draft", *(f"other {i}" for i in range(1, len(speedups)))]
    figures = [
        head.model_copy(update={"contestant": name, "speedup": speedup, "alpha": alpha})
        for name, speedup in zip(names, speedups, strict=True)
    ]
    infos = [drafter.model_copy(update={"name": n, "tuned": tuned and n != "draft"}) for n in names]
    made = report.model_copy(update={"figures": [*figures, plain], "contestants": [*infos, alone]})
    return decision(made if depth is None else trained(made, depth))


GAIN, MORE, SAME, LESS = (Interval(*of) for of in ((1.3, 1.2, 1.4), (2.3, 1.7, 3), (1.1, 0.8, 1.3), (0.8, 0.7, 0.9)))
UNSURE = Interval(5.0, 0.9, 9.0)


def test_what_to_serve_is_what_gains_by_its_interval() -> None:
    assert told(GAIN, UNSURE).startswith("Serve with: draft, depth 4, 1.30× [1.20, 1.40]. Next:")
    found = told(GAIN, MORE, tuned=True)
    assert found == "Serve with: other 1, depth 4, 2.30× [1.70, 3.00]. draft, depth 4: 1.30× [1.20, 1.40]."
    assert told(SAME, MORE, tuned=True).startswith(
        "Serve with: other 1, depth 4, 2.30× [1.70, 3.00]. draft, depth 4: no gain shown, 1.10× [0.80, 1.30]."
    )
    assert told(LESS, SAME).startswith("Serve the plain target. draft, depth 4: 0.80× [0.70, 0.90]. ")
    said = "Serve the plain target. draft, depth 4: 1.50× without an interval, too few prompts. Next: measure more"
    assert told(Interval(1.5, math.nan, math.nan)) == f"{said} prompts."


def test_a_temperature_at_which_something_else_is_fastest_is_named() -> None:
    """N-grams gained at temperature 0, and slowed down at 1, which the decision did not say."""
    report = make_report(USUAL)
    head, plain = report.headline().model_copy(update={"speedup": GAIN}), report.headline("plain")

    def both(warm: Interval) -> str:
        there = [f.model_copy(update={"temperature": 1.0}) for f in (head.model_copy(update={"speedup": warm}), plain)]
        conditions = report.conditions.model_copy(update={"temperatures": [0.0, 1.0]})
        return decision(report.model_copy(update={"figures": [head, plain, *there], "conditions": conditions}))

    assert "1.30× [1.20, 1.40]. At temperature 1: the plain target. Next:" in both(SAME)
    assert "At temperature" not in both(MORE)


@pytest.mark.parametrize(
    ("speedup", "more", "said"),
    [
        (GAIN, {}, "Next: `outrider tune` finds the fastest plan."),
        (LESS, {}, "Next: `outrider tune` finds the fastest plan."),
        (SAME, {}, "Next: more prompts, since the interval holds 1."),
        (LESS, {"rates": (0.31, 0.3)}, "Next: more data or training, since 31% of its first drafts are accepted."),
        (LESS, {"rates": (0.7, 0.63, 0.0), "depth": 2}, "Next: depth 2, or more steps in training."),
    ],
)
def test_the_next_step_is_what_would_help(speedup: Interval, more: dict[str, Any], said: str) -> None:
    assert told(speedup, **more).endswith(said)


def test_no_plan_makes_up_for_a_head_that_was_tuned_in_vain() -> None:
    assert told(LESS, LESS, tuned=True).endswith("Next: more data or training, since no plan makes up for it.")


def test_the_decision_stands_in_every_form_of_a_report(tmp_path: Path) -> None:
    report = make_report(USUAL)
    said, out = decision(report), io.StringIO()
    print_report(report, Console(file=out, width=1000))
    assert said.startswith("Serve with: draft, depth 4, 2.00×")
    assert out.getvalue().endswith(f"{said}\n")
    assert f"**{said}**" in markdown(report)
    assert f"<title>{escape(said)}</title>" in html(report)
    assert report_fields(report, tmp_path)["decision"] == said
    assert decision(report.model_copy(update={"contestants": report.contestants[1:]})) == ""
