"""The gate between two versions of a pair: their newest reports, and the calibration prompts both were counted on."""

from __future__ import annotations

from ..common import BadInputError
from ..eval.reports.gate import Counted, GateComparison, GateResult, gate
from ..eval.reports.report import Report
from .manifest import REPORTS, ProbeBaseline
from .pair import Pair


def gate_pairs(new: Pair, old: Pair, tolerance: float = 0.03, confidence: float = 0.95) -> GateResult:
    """Tell whether τ of `new` fell beyond the tolerance below that of `old`, with confidence; see `eval.reports.gate`.

    A refresh hands its parent's calibration prompts on, so both versions hold what their drafter did on the same ones.
    They count beside the prompts of the reports wherever both ran them under the same plan and settings.

    Raises:
        BadInputError: a pair without a report, or reports that were made under different conditions.
    """
    report, kind = newest_report(new), new.manifest.drafter.type
    name = kind if any(c.name == kind for c in report.contestants) else None
    return gate(report, newest_report(old), tolerance, confidence, name, _calibration(new, old))


def newest_report(pair: Pair) -> Report:
    """Return the report that came with the pair last; BadInputError if none did."""
    dated = sorted(p for p in (pair.folder / REPORTS).glob("*") if p.is_dir())
    if not dated:
        raise BadInputError(
            f"{pair.folder}: this pair holds no report; measure it (`outrider eval`), and bind it again with one."
        )
    return Report.load(dated[-1])


def _calibration(new: Pair, old: Pair) -> GateComparison | None:
    """Return what both drafters did on the calibration prompts; None if these, plan or settings differ."""
    baselines = [pair.manifest.measurements.baseline for pair in (new, old)]
    same = (new.manifest.calibration, new.plan) == (old.manifest.calibration, old.plan)
    after, before = baselines
    if after is None or before is None or not same or _settings(after) != _settings(before):
        return None
    return GateComparison(after.temperature, _counted(after), _counted(before))


def _settings(baseline: ProbeBaseline) -> tuple[int, float, int]:
    return baseline.max_new_tokens, baseline.temperature, baseline.seed


def _counted(baseline: ProbeBaseline) -> list[Counted]:
    return [Counted(m.suite, m.id, m.accepted, m.rounds) for m in baseline.prompts]
