"""The gate: fails on a proven drop only, warns when it cannot tell, and refuses to compare what differs."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.eval.reports.gate import Beside, Counted, gate
from outrider.ground import BadInputError


def rounds(num_prompts: int, alpha: float, seed: int = 0, num_rounds: int = 30) -> list[list[int]]:
    """Accepted drafts of a chain of depth 4 whose every token is accepted with probability `alpha`."""
    generator = np.random.default_rng(seed)
    return [[int(np.cumprod(generator.random(4) < alpha).sum()) for _ in range(num_rounds)] for _ in range(num_prompts)]


def test_equal_reports_pass(make_report) -> None:
    report = make_report(rounds(40, 0.6), temperatures=(0.0, 1.0))
    result = gate(report, report)
    assert result.passed
    assert [(v.finding, v.ratio.value) for v in result.verdicts] == [("passed", 1.0), ("passed", 1.0)]
    assert not any("warning" in line for line in result.lines)


def test_a_clear_drop_fails_and_says_by_how_much(make_report) -> None:
    result = gate(make_report(rounds(40, 0.4, seed=1)), make_report(rounds(40, 0.6)))
    assert not result.passed
    assert result.lines[0].startswith("gate FAILED: draft, depth 4")
    assert "paired over 40 prompts" in result.lines[1]
    assert "failed: τ fell by more than 3.0%" in result.lines[1]


def test_one_temperature_is_enough_to_fail(make_report) -> None:
    good, bad = (
        make_report(rounds(40, 0.6), temperatures=(0.0, 1.0)),
        make_report(rounds(40, 0.4, seed=1), temperatures=(0.0, 1.0)),
    )
    mixed = good.model_copy(
        update={
            "figures": [f for r, t in ((good, 0.0), (bad, 1.0)) for f in r.figures if f.temperature == t],
            "records": [f for r, t in ((good, 0.0), (bad, 1.0)) for f in r.records if f.temperature == t],
        }
    )
    result = gate(mixed, good)
    assert not result.passed
    assert [v.finding for v in result.verdicts] == ["passed", "failed"]


def test_a_gain_passes(make_report) -> None:
    assert gate(make_report(rounds(40, 0.7, seed=1)), make_report(rounds(40, 0.6))).passed


def test_a_drop_within_the_tolerance_passes(make_report) -> None:
    report, baseline = make_report(rounds(60, 0.55, seed=1)), make_report(rounds(60, 0.6))
    assert not gate(report, baseline, tolerance=0.01).passed
    assert gate(report, baseline, tolerance=0.3).verdicts[0].finding == "passed"


def test_too_few_prompts_warn_and_say_how_many_would_do(make_report) -> None:
    result = gate(make_report(rounds(4, 0.58, seed=1, num_rounds=8)), make_report(rounds(4, 0.6, num_rounds=8)))
    assert result.passed
    assert result.verdicts[0].finding == "not enough data"
    assert (
        "passed, with a warning: not enough data, 4 prompts cannot tell it from a drop to 0.970; about"
        in result.lines[1]
    )


def test_one_prompt_warns(make_report) -> None:
    result = gate(make_report([[1, 0]]), make_report([[4, 4]]))
    assert result.passed
    assert "measure at least 20" in result.lines[1]


def test_records_are_paired_by_prompt_id_whatever_their_order(make_report) -> None:
    report = make_report(rounds(20, 0.6))
    shuffled = report.model_copy(update={"records": report.records[::-1]})
    (verdict,) = gate(report, shuffled).verdicts
    assert (verdict.ratio.low, verdict.ratio.high) == (1.0, 1.0)


def test_figures_without_records_are_compared_unpaired(make_report) -> None:
    """Wider than paired, since what the prompts share no longer cancels, and still able to fail."""
    report = make_report(rounds(40, 0.6))
    bare = make_report(rounds(40, 0.6), records=False)
    (verdict,) = gate(report, bare).verdicts
    assert verdict.ratio.low < verdict.ratio.value == 1.0 < verdict.ratio.high
    assert "unpaired" in verdict.line
    assert not gate(make_report(rounds(40, 0.35, seed=1)), bare).passed


def test_false_alarms_are_as_rare_as_the_confidence_says(make_report) -> None:
    """Drafters that are equal in truth, tolerance 0: at 95% about 1 in 20 may fail."""
    failed = sum(
        not gate(
            make_report(rounds(25, 0.6, seed=2 * i)), make_report(rounds(25, 0.6, seed=2 * i + 1)), tolerance=0.0
        ).passed
        for i in range(30)
    )
    assert failed <= 5  # P(more | 5%) = 0.3%


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"depth": 3}, "depth: 4 here, 3 in the baseline"),
        ({"temperatures": (0.0, 1.0)}, "temperatures"),
        ({"max_new_tokens": 64}, "max_new_tokens: 32 here, 64 in the baseline"),
        ({"digest": "another"}, "suites: code"),
    ],
)
def test_other_conditions_are_refused_by_name(changes: dict[str, object], named: str, make_report) -> None:
    accepted = [[a % 3 for a in row] for row in rounds(5, 0.6)]
    with pytest.raises(BadInputError, match=named):
        gate(make_report(accepted), make_report(accepted, **changes))


def test_another_dtype_is_compared_with_a_warning(make_report) -> None:
    result = gate(make_report(rounds(5, 0.6)), make_report(rounds(5, 0.6), dtype="bfloat16"))
    assert result.passed
    assert result.lines[-1] == "warning: dtype is float32 here and bfloat16 in the baseline"


def test_a_contestant_that_one_report_lacks_is_refused(make_report) -> None:
    report = make_report(rounds(5, 0.6))
    with pytest.raises(BadInputError, match="no contestant 'medusa'"):
        gate(report, report, contestant="medusa")


def counted(accepted: list[list[int]], start: int = 0, suite: str = "code") -> list[Counted]:
    return [Counted(suite, f"more {start + i}", sum(row), len(row)) for i, row in enumerate(accepted)]


def test_prompts_that_were_only_counted_add_power(make_report) -> None:
    """A few timed prompts cannot tell; many counted ones beside them can, and say how many they are."""
    report = make_report(rounds(4, 0.58, seed=1, num_rounds=8))
    baseline = make_report(rounds(4, 0.6, num_rounds=8))
    more = Beside(0.0, counted(rounds(300, 0.62, seed=2)), counted(rounds(300, 0.6, seed=3)))
    few, many = gate(report, baseline), gate(report, baseline, beside=more)
    assert (few.verdicts[0].finding, many.verdicts[0].finding) == ("not enough data", "passed")
    assert "paired over 304 prompts, 300 of them calibration prompts" in many.lines[1]
    assert many.verdicts[0].smallest_drop < few.verdicts[0].smallest_drop
    worse = Beside(0.0, counted(rounds(300, 0.5, seed=2)), more.old)
    assert gate(report, baseline, beside=worse).verdicts[0].finding == "failed"


def test_a_prompt_of_both_counts_once_and_in_any_order(make_report) -> None:
    report = make_report(rounds(20, 0.6))
    known = [Counted.of(r) for r in report.records_of("draft", 0.0)]
    more = counted(rounds(5, 0.6, seed=4), suite="docs")
    result = gate(report, report, beside=Beside(0.0, [*known, *more], [*reversed(more), *known]))
    assert "paired over 25 prompts, 5 of them" in result.lines[1]
    assert (result.verdicts[0].ratio.low, result.verdicts[0].ratio.high) == (1.0, 1.0)


def test_counts_at_another_temperature_are_left_out(make_report) -> None:
    report = make_report(rounds(20, 0.6))
    more = counted(rounds(5, 0.6, seed=4))
    assert "paired over 20 prompts)" in gate(report, report, beside=Beside(1.0, more, more)).lines[1]


def test_the_smallest_drop_is_found_in_four_runs_of_five(make_report) -> None:
    """A drafter whose τ is lower by the drop that the verdict names fails in about as many runs as it says."""
    told = gate(make_report(rounds(60, 0.6)), make_report(rounds(60, 0.6, seed=1))).verdicts[0].smallest_drop
    assert 0.03 < told < 0.12

    def tau(alpha: float) -> float:
        return 1 + sum(alpha**depth for depth in range(1, 5))

    lower = min(np.linspace(0.3, 0.6, 301), key=lambda alpha: abs(tau(alpha) / tau(0.6) - (1 - told)))
    failed = sum(
        not gate(make_report(rounds(60, lower, seed=2 * i)), make_report(rounds(60, 0.6, seed=2 * i + 1))).passed
        for i in range(40)
    )
    assert 24 <= failed <= 40  # P(fewer | 80%) = 0.1%
