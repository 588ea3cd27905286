"""The gate: fails on a proven drop only, warns when it cannot tell, and refuses to compare what differs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from outrider.common import BadInputError
from outrider.eval import Interval, Ratio, Report
from outrider.eval.reports.gate import Counted, GateComparison, gate, to_junit, to_markdown
from outrider.eval.reports.render import markdown
from outrider.eval.reports.report import SuiteInfo
from outrider.eval.reports.statistics import Bootstrap

from ..conftest import make_report, refusal


def rounds(num_prompts: int, alpha: float, seed: int = 0, num_rounds: int = 30) -> list[list[int]]:
    """Accepted drafts of a chain of depth 4 whose every token is accepted with probability `alpha`."""
    generator = np.random.default_rng(seed)
    return [[int(np.cumprod(generator.random(4) < alpha).sum()) for _ in range(num_rounds)] for _ in range(num_prompts)]


def drawn(num_prompts: int, alpha: float, seed: int = 0, num_rounds: int = 30, **more: Any) -> Report:
    return make_report(rounds(num_prompts, alpha, seed, num_rounds), **more)


def test_equal_reports_pass():
    report = drawn(40, 0.6, temperatures=(0.0, 1.0))
    result = gate(report, report)
    assert result.passed
    assert [(f.conclusion, f.ratio.value) for f in result.findings] == [("passed", 1.0), ("passed", 1.0)]
    assert not any("warning" in line for line in result.lines)
    assert [f.conclusion for f in gate(report, report, tolerance=0.0).findings] == ["passed"] * 2


def test_a_clear_drop_fails_and_says_by_how_much():
    result = gate(drawn(40, 0.4, seed=1), drawn(40, 0.6))
    assert not result.passed
    assert result.lines[0].startswith("gate FAILED: draft, depth 4")
    assert "paired over 40 prompts" in result.lines[1]
    assert "failed: τ fell by more than 3.0%" in result.lines[1]


def test_one_temperature_is_enough_to_fail():
    good, bad = (drawn(40, alpha, seed, temperatures=(0.0, 1.0)) for alpha, seed in ((0.6, 0), (0.4, 1)))
    parts = {
        name: [f for r, t in ((good, 0.0), (bad, 1.0)) for f in getattr(r, name) if f.temperature == t]
        for name in ("figures", "records")
    }
    result = gate(good.model_copy(update=parts), good)
    assert not result.passed
    assert [f.conclusion for f in result.findings] == ["passed", "failed"]


def test_a_drop_within_the_tolerance_passes_and_a_gain_does():
    report, baseline = drawn(60, 0.55, seed=1), drawn(60, 0.6)
    assert not gate(report, baseline, tolerance=0.01).passed
    assert gate(report, baseline, tolerance=0.3).findings[0].conclusion == "passed"
    assert gate(drawn(40, 0.7, seed=1), drawn(40, 0.6)).passed, "a gain"


def test_too_few_prompts_warn_and_say_how_many_would_do():
    result = gate(drawn(4, 0.58, seed=1, num_rounds=8), drawn(4, 0.6, num_rounds=8))
    assert result.passed
    assert result.findings[0].conclusion == "not enough data"
    said = "passed, with a warning: not enough data, 4 prompts cannot tell it from a drop to 0.970; about"
    assert said in result.lines[1]
    result = gate(make_report([[1, 0]]), make_report([[4, 4]]))
    assert result.passed
    assert "measure at least 20" in result.lines[1], "one prompt"


def test_records_are_paired_by_prompt_id_whatever_their_order():
    report = drawn(20, 0.6)
    shuffled = report.model_copy(update={"records": report.records[::-1]})
    (finding,) = gate(report, shuffled).findings
    assert (finding.ratio.low, finding.ratio.high) == (1.0, 1.0)


def test_figures_without_records_are_compared_unpaired():
    """Wider than paired, since what the prompts share no longer cancels, and still able to fail."""
    report = drawn(40, 0.6)
    bare = drawn(40, 0.6, records=False)
    (finding,) = gate(report, bare).findings
    assert finding.ratio.low < finding.ratio.value == 1.0 < finding.ratio.high
    assert "unpaired" in finding.line
    assert not gate(drawn(40, 0.35, seed=1), bare).passed


def test_false_alarms_are_as_rare_as_the_confidence_says():
    """Drafters that are equal in truth, tolerance 0: at 95% about 1 in 20 may fail."""
    failed = sum(
        not gate(drawn(25, 0.6, seed=2 * i), drawn(25, 0.6, seed=2 * i + 1), tolerance=0.0).passed for i in range(30)
    )
    assert failed <= 5  # P(more | 5%) = 0.3%


def told(taus: dict[tuple[str, float], tuple[Interval | None, int]], **conditions: object) -> Report:
    """A report without records: of each drafter at each temperature τ and the number of prompts."""
    names, heats = (tuple(dict.fromkeys(part)) for part in zip(*taus, strict=True))
    report = make_report(rounds(3, 0.6), temperatures=heats, records=False, **conditions)
    figures = [
        report.headline("draft", t).model_copy(update={"contestant": n, "tau": tau, "num_prompts": count})
        for (n, t), (tau, count) in taus.items()
    ]
    contestants = [report.contestant("draft").model_copy(update={"name": name}) for name in names]
    return report.model_copy(update={"figures": figures, "contestants": contestants})


def one(tau: Interval | None, num_prompts: int = 40) -> Report:
    return told({("draft", 0.0): (tau, num_prompts)})


EXACTLY_2 = Interval(2.0, 2.0, 2.0)


def against_2(ratio: float, spread: float, confidence: float = 0.95) -> Interval:
    """A τ whose ratio to exactly 2 has the one-sided bounds ratio · exp(∓spread)."""
    half = spread * stats.norm.ppf(0.975) / stats.norm.ppf(confidence)
    return Interval(2 * ratio, 2 * ratio * math.exp(-half), 2 * ratio * math.exp(half))


def test_records_give_the_paired_bootstrap_of_their_sums():
    """At 95% one-sided that is a two-sided interval of 90%, with the report's own seed."""
    new, old = rounds(20, 0.58, seed=1), rounds(20, 0.6)
    taus = [Ratio([sum(row) + len(row) for row in rows], [len(row) for row in rows]) for rows in (new, old)]
    for seed, confidence in ((0, 0.95), (3, 0.95), (0, 0.8)):
        (finding,) = gate(make_report(new, seed=seed), make_report(old), confidence=confidence).findings
        assert finding.ratio == Bootstrap([20], confidence=2 * confidence - 1, seed=seed).quotient(*taus)
        assert finding.temperature == 0.0


def test_suites_are_drawn_again_each_by_itself():
    new, old = rounds(20, 0.58, seed=1), rounds(20, 0.6)

    def in_two_suites(report: Report) -> Report:
        records = [r.model_copy(update={"suite": "docs"}) if i % 2 else r for i, r in enumerate(report.records)]
        return report.model_copy(update={"records": records})

    def by_suite(rows: list[list[int]]) -> Ratio:
        rows = rows[::2] + rows[1::2]
        return Ratio([sum(row) + len(row) for row in rows], [len(row) for row in rows])

    (finding,) = gate(in_two_suites(make_report(new)), in_two_suites(make_report(old))).findings
    apart = Bootstrap([10, 10], confidence=0.9).quotient(by_suite(new), by_suite(old))
    assert finding.ratio.value == pytest.approx(apart.value)
    assert finding.ratio.high - finding.ratio.low == pytest.approx(apart.high - apart.low, rel=0.2)
    assert "paired over 20 prompts" in finding.line


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_without_records_are_combined_as_independent_log_normals(confidence):
    new, old = Interval(2.2, 2.0, 2.5), Interval(2.0, 1.9, 2.1)
    (finding,) = gate(one(new), one(old), confidence=confidence).findings
    deviation = math.hypot(math.log(2.5 / 2.0), math.log(2.1 / 1.9)) / (2 * 1.959964)
    spread = deviation * stats.norm.ppf(confidence)
    assert finding.ratio.value == pytest.approx(1.1)
    assert finding.ratio.low == pytest.approx(1.1 * math.exp(-spread), rel=1e-6)
    assert finding.ratio.high == pytest.approx(1.1 * math.exp(spread), rel=1e-6)


def test_the_lines_say_what_was_compared_and_what_came_out():
    result = gate(one(against_2(1.05, 0.01)), one(EXACTLY_2), tolerance=0.015, confidence=0.9)
    assert result.lines[0] == "gate passed: draft, depth 4, τ may fall by 1.5%, 90% one-sided confidence"
    assert result.lines[1].startswith("temperature 0: τ 2.00 → 2.10, ratio 1.050 [1.0")
    assert result.lines[1].endswith(
        "] (unpaired: a report without prompt records): passed: no drop beyond the tolerance; "
        "a drop of 2.8% would have failed in 4 runs of 5"
    )
    assert len(result.lines) == 2


def test_each_temperature_of_the_contestant_that_is_asked_for_is_judged_by_its_own_figures():
    names, heats = ("draft", "second"), (0.0, 1.0)
    new = {key: (against_2(0.97 + 0.01 * i, 0.1), 10 + i) for i, key in enumerate(product(names, heats))}
    old = dict.fromkeys(new, (EXACTLY_2, 10))
    result = gate(told(new), told(old), contestant="second")
    assert [f.temperature for f in result.findings] == [0.0, 1.0]
    assert [f.ratio.value for f in result.findings] == pytest.approx([0.99, 1.0])
    assert "gate passed: second, depth 4" in result.lines[0]
    for line, tau, heat, count in zip(result.lines[1:], ("1.98", "2.00"), ("0", "1"), (12, 13), strict=True):
        assert line.startswith(f"temperature {heat}: τ 2.00 → {tau}, ")
        assert f"{count} prompts cannot tell" in line
    assert gate(told(new), told(old)).findings[0].ratio.value == pytest.approx(0.97), "the first one if none is named"


@pytest.mark.parametrize(
    ("ratio", "spread", "tolerance", "half", "distance"),
    [
        (1.0, 0.05, 0.03, math.sinh(0.05), 0.03),
        (0.9, 0.1, 0.03, 0.9 * math.sinh(0.1), 0.07),
        (0.97, 0.05, 0.03, 0.97 * math.sinh(0.05), 0.003),
        (1.0, 0.05, 0.0, math.sinh(0.05), 0.001),
    ],
    ids=["from above", "from below", "at the tolerance itself, a tenth of it", "without a tolerance, a thousandth"],
)
def test_the_prompts_that_would_do_shrink_the_interval_to_the_distance(ratio, spread, tolerance, half, distance):
    """An interval shrinks with the square root of the prompts; the distance is from the ratio to the tolerance."""
    (finding,) = gate(one(against_2(ratio, spread)), one(EXACTLY_2), tolerance=tolerance).findings
    assert finding.conclusion == "not enough data"
    assert f"a drop to {1 - tolerance:.3f}; about {math.ceil(40 * (half / distance) ** 2)} would" in finding.line


def test_more_prompts_than_there_were_are_asked_for_in_any_case():
    (finding,) = gate(one(against_2(0.9, 0.0755)), one(EXACTLY_2)).findings
    assert finding.ratio.high > 0.97
    assert "about 41 would" in finding.line


@pytest.mark.parametrize("without", ["new", "old"])
def test_a_report_without_rounds_cannot_be_judged(without):
    new, old = (one(None if without == which else EXACTLY_2) for which in ("new", "old"))
    (finding,) = gate(new, old).findings
    assert finding.conclusion == "not enough data"
    assert all(math.isnan(number) for number in (finding.ratio.value, finding.ratio.low, finding.ratio.high))
    before, after = ("2.00", "–") if without == "new" else ("–", "2.00")
    assert f": τ {before} → {after}, ratio – (" in finding.line
    assert finding.line.endswith("40 prompts give no interval; measure at least 20")


def test_a_figure_without_an_interval_gives_a_ratio_without_one():
    (finding,) = gate(one(Interval(2.2, math.nan, math.nan)), one(EXACTLY_2)).findings
    assert finding.ratio.value == pytest.approx(1.1)
    assert math.isnan(finding.ratio.low)
    assert math.isnan(finding.ratio.high)
    assert finding.conclusion == "not enough data"


def test_records_of_other_prompts_are_refused():
    report = drawn(5, 0.6)
    drafted = [r for r in report.records if r.contestant == "draft"]
    fewer = report.model_copy(update={"records": drafted[:3]})
    said = "do not cover the same prompts; the first that is missing:"
    assert f"{said} <p & 3>." in refusal(gate, report, fewer)
    assert f"{said} none, it has more." in refusal(gate, fewer, report)


@pytest.mark.parametrize(("tolerance", "confidence"), [(-0.01, 0.95), (1.0, 0.95), (0.03, 0.5), (0.03, 1.0)])
def test_impossible_settings_are_refused_with_their_values(tolerance, confidence):
    report = drawn(5, 0.6)
    said = f"0 <= tolerance < 1 and 0.5 < confidence < 1, got {tolerance} and {confidence}."
    assert said in refusal(gate, report, report, tolerance, confidence)


def test_a_report_without_the_contestant_or_any_drafter_is_refused():
    report = drawn(5, 0.6)
    with pytest.raises(BadInputError, match="no contestant 'medusa'"):
        gate(report, report, contestant="medusa")
    bare = report.model_copy(update={"contestants": [c for c in report.contestants if c.kind != "drafter"]})
    with pytest.raises(BadInputError, match="holds no drafter; there is nothing to gate"):
        gate(bare, report)


def test_every_condition_that_differs_is_named():
    shallow = [[min(a, 2) for a in row] for row in rounds(6, 0.6)]
    changes = {"digest": "0123456789abcdef", "max_new_tokens": 64, "sampling": {"top_p": 0.9}}
    other = make_report(shallow, depth=2, temperatures=(0.7,), **changes)
    assert refusal(gate, drawn(5, 0.6, temperatures=(1.0, 0.0)), other) == (
        "the two reports cannot be compared, their conditions differ. depth: 4 here, 2 in the baseline; "
        "temperatures: [0.0, 1.0] here, [0.7] in the baseline; "
        "verification rules: greedy at 0, rejection at 1 here, rejection at 0.7 in the baseline; "
        "sampling: temperature alone here, {'top_p': 0.9} in the baseline; "
        "max_new_tokens: 32 here, 64 in the baseline; "
        "suites: code (5 prompts, sha256 d) here, code (6 prompts, sha256 0123456789ab) in the baseline. "
        "Measure again under the baseline's conditions."
    )


def test_the_rule_that_counts_is_that_of_the_contestant():
    report = told({("draft", 0.0): (EXACTLY_2, 40), ("second", 0.0): (EXACTLY_2, 40)})
    first, second = report.figures
    other = report.model_copy(update={"figures": [first, second.model_copy(update={"rule": "typical"})]})
    assert gate(report, other, contestant="draft").passed
    said = "differ. verification rules: greedy at 0 here, typical at 0 in the baseline. Measure"
    assert said in refusal(gate, report, other, contestant="second")


def test_all_suites_are_named_where_one_differs():
    def on(digest: str) -> Report:
        suites = [SuiteInfo(name=n, digest=d, num_prompts=5) for n, d in (("code", "a"), ("docs", digest))]
        return make_report(rounds(5, 0.6), suites=suites)

    said = "suites: code (5 prompts, sha256 a), docs (5 prompts, sha256 b) here, code"
    assert said in refusal(gate, on("b"), on("c"))


def test_remarks_name_what_may_move_tau_a_little():
    accepted = rounds(5, 0.6)
    result = gate(make_report(accepted), make_report(accepted, dtype="bfloat16", device="cuda", seed=1))
    assert result.passed
    assert result.lines[-3:] == [
        "warning: dtype is float32 here and bfloat16 in the baseline",
        "warning: device is cpu here and cuda in the baseline",
        "warning: seed is 0 here and 1 in the baseline",
    ]


def counted(accepted: list[list[int]], start: int = 0, suite: str = "code") -> list[Counted]:
    return [Counted(suite, f"more {start + i}", sum(row) + len(row), len(row)) for i, row in enumerate(accepted)]


def test_prompts_that_were_only_counted_add_power():
    """A few timed prompts cannot tell; many counted ones beside them can, and say how many they are."""
    report = drawn(4, 0.58, seed=1, num_rounds=8)
    baseline = drawn(4, 0.6, num_rounds=8)
    more = GateComparison(0.0, counted(rounds(300, 0.62, seed=2)), counted(rounds(300, 0.6, seed=3)))
    few, many = gate(report, baseline), gate(report, baseline, beside=more)
    assert (few.findings[0].conclusion, many.findings[0].conclusion) == ("not enough data", "passed")
    assert "paired over 304 prompts, 300 of them calibration prompts" in many.lines[1]
    assert many.findings[0].smallest_drop < few.findings[0].smallest_drop
    worse = GateComparison(0.0, counted(rounds(300, 0.5, seed=2)), more.old)
    assert gate(report, baseline, beside=worse).findings[0].conclusion == "failed"


def test_a_prompt_of_both_counts_once_in_any_order_and_none_at_another_temperature():
    report = drawn(20, 0.6)
    known = [Counted.of(r) for r in report.records_of("draft", 0.0)]
    more = counted(rounds(5, 0.6, seed=4), suite="docs")
    result = gate(report, report, beside=GateComparison(0.0, [*known, *more], [*reversed(more), *known]))
    assert "paired over 25 prompts, 5 of them" in result.lines[1]
    assert (result.findings[0].ratio.low, result.findings[0].ratio.high) == (1.0, 1.0)
    assert "paired over 20 prompts)" in gate(report, report, beside=GateComparison(1.0, more, more)).lines[1]


def test_later_turns_after_other_answers_are_no_pairs_and_contexts_no_prompts_of_their_own():
    def asked(answers: str, alpha: float) -> Report:
        report = drawn(40, 0.6)
        later = [
            r.model_copy(update={"turn": 2, "prompt": f"{r.prompt}, turn 2", "conversation": r.prompt, "asked": a})
            for r, a in zip(
                drawn(40, alpha, seed=1).records_of("draft", 0.0), [answers] * 30 + ["same"] * 10, strict=True
            )
        ]
        return report.model_copy(update={"records": [*report.records, *later]})

    [line] = [f.line for f in gate(asked("new", 0.3), asked("old", 0.6)).findings]
    assert "paired over 40 prompts, without 30 later turns, asked after other answers" in line
    assert not gate(asked("one", 0.3), asked("one", 0.6)).passed
    with_contexts = [
        r.model_copy(update={"suite": f"code@{n}"}) for n in (60, 90) for r in drawn(5, 0.6).records_of("draft", 0.0)
    ]
    assert len(Counted.conversations(with_contexts)) == 5


def test_both_sides_are_said_as_they_are():
    """τ = emitted / rounds, of all prompts together."""
    finding = gate(make_report([[2, 4], [3, 3]]), make_report([[1, 1], [2, 0]])).findings[0]
    assert (finding.tau_before, finding.tau_after) == (2.0, 4.0)


def test_the_smallest_drop_is_found_in_four_runs_of_five():
    """A drafter whose τ is lower by the drop that the verdict names fails in about as many runs as it says."""
    told = gate(drawn(60, 0.6), drawn(60, 0.6, seed=1)).findings[0].smallest_drop
    assert 0.03 < told < 0.12

    def tau(alpha: float) -> float:
        return 1 + sum(alpha**depth for depth in range(1, 5))

    lower = min(np.linspace(0.3, 0.6, 301), key=lambda alpha: abs(tau(alpha) / tau(0.6) - (1 - told)))
    failed = sum(not gate(drawn(60, lower, seed=2 * i), drawn(60, 0.6, seed=2 * i + 1)).passed for i in range(40))
    assert 24 <= failed <= 40  # P(fewer | 80%) = 0.1%


def test_two_targets_are_named():
    """A refresh is gated against its parent on another target: that is said, and does not decide anything."""
    report, baseline = drawn(20, 0.6), drawn(20, 0.6)
    assert gate(report, baseline).remarks == []
    report.conditions.target["fingerprint"] = "fedcba9876543210"
    baseline.conditions.target["fingerprint"] = "0123456789abcdef"
    result = gate(report, baseline)
    assert result.passed
    assert (result.target, result.baseline_target) == ("fedcba9876543210", "0123456789abcdef")
    assert result.remarks == [
        "note: the two reports are about different targets (fedcba987654… here, 0123456789ab… in the "
        "baseline): what their difference made easier or harder to predict is in the ratio, too"
    ]


def test_names_from_outside_make_no_xml_and_no_markdown() -> None:
    label = "x\x1b]0;\x07</testsuite> <img src=//h>](http://h) | ``` \ud800\n# heading"
    result = replace(gate(*[drawn(5, 0.6)] * 2), label=label, remarks=[f"note: {label}"])
    assert ElementTree.fromstring(to_junit(result))[0].tag == "testsuite"  # a control character is no XML
    page = to_markdown(result)
    assert not any(forbidden in page for forbidden in ("\x1b", "<img", "](http", "```", "\ud800", "\n# heading"))
    assert "&lt;img src=//h>]\\(http://h) &#124;" in page


def test_reports_of_strangers_make_no_markdown() -> None:
    hostile = "<script>](http://h)\n\n# a\\|heading"
    report = drawn(5, 0.6)
    suites = [suite.model_copy(update={"name": hostile}) for suite in report.conditions.suites]
    meant = {hostile: hostile}
    strange = report.model_copy(
        update={"conditions": report.conditions.model_copy(update={"suites": suites}), "definitions": meant}
    )
    page = markdown(strange)
    assert not any(forbidden in page for forbidden in ("<script", "](http", "\n# a", "\\|"))
