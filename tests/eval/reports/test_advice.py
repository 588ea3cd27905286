"""Figures that are easily misread have a remark beside them, in the terminal, Markdown, page and answers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.decode import Plan
from outrider.distill.prompts import Prompt
from outrider.eval import Report
from outrider.eval.measure import Contestant, measure
from outrider.eval.reports.advice import collapse, remarks
from outrider.eval.reports.render import html, markdown, print_report
from outrider.eval.suites import make_suite
from outrider.heads import DraftModel
from outrider.recipes import EvalSpec
from outrider.scripts.json_output import ReportBody
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


def test_an_interval_without_width_has_a_remark() -> None:
    (found,) = remarks(make_report([[4, 4]] * 6, depth=4))
    named = "τ, acceptance rate, alpha at depth 1, 2, 3, 4"
    assert found.startswith(f"draft at temperature 0: all 6 prompts gave the same {named}; an interval without width")


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


def test_remarks_stand_in_every_form_of_a_report(tmp_path: Path) -> None:
    report = make_report([[4, 4]] * 6, depth=4)
    (said,) = remarks(report)
    out = io.StringIO()
    print_report(report, Console(file=out, width=1000))
    assert f"note: {said}" in out.getvalue()
    assert f"> {said}" in markdown(report)
    assert said in html(report)
    assert ReportBody.of(report, tmp_path).remarks == [said]
