"""The regression gate: tells whether τ fell beyond a tolerance, with confidence.

It fails only on evidence. Too few prompts to tell is a pass with a warning that says how many would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.special import ndtri

from ...ground import BadInputError
from .figures import Record, tau_ratio
from .intervals import Interval
from .report import Report
from .statistics import Bootstrap, strata_of

PASSED, FAILED, UNDECIDED = "passed", "failed", "not enough data"


@dataclass(frozen=True)
class Finding:
    """What was found of one contestant at one temperature.

    Attributes:
        conclusion: `PASSED`, `FAILED` or `UNDECIDED`.
        ratio: τ_new / τ_old; the interval's ends are one-sided bounds.
        line: the finding in words.
    """

    temperature: float
    conclusion: str
    ratio: Interval
    line: str


@dataclass(frozen=True)
class GateResult:
    """What the gate says: `passed` is False only for a proven drop; `lines` are for people, warnings included."""

    passed: bool
    lines: list[str]
    findings: list[Finding] = field(default_factory=list)


def gate(
    report: Report, baseline: Report, tolerance: float = 0.03, confidence: float = 0.95, contestant: str | None = None
) -> GateResult:
    """Compare τ on all suites together, at every temperature.

    Fails if the upper one-sided bound of τ_new / τ_old lies below 1 − tolerance. Where both reports hold prompt
    records the ratio is bootstrapped paired by prompt, else the two figures' own intervals are combined.

    Args:
        tolerance: the relative drop that is allowed.
        contestant: which one; the report's first drafter if not given.

    Raises:
        BadInputError: the reports were made under different conditions, or one lacks the contestant.
    """
    if not 0 <= tolerance < 1 or not 0.5 < confidence < 1:
        raise BadInputError(
            f"gate: need 0 <= tolerance < 1 and 0.5 < confidence < 1, got {tolerance} and {confidence}."
        )
    name = contestant or report.primary
    if name is None:
        raise BadInputError("the report holds no drafter; there is nothing to gate.")
    _same_conditions(report, baseline, name)
    findings = [_judge(report, baseline, name, t, tolerance, confidence) for t in report.conditions.temperatures]
    passed = all(f.conclusion != FAILED for f in findings)
    summary = (
        f"gate {'passed' if passed else 'FAILED'}: {report.contestant(name).label}, τ may fall by {tolerance:.1%}, "
        f"{confidence:.0%} one-sided confidence"
    )
    return GateResult(passed, [summary, *(f.line for f in findings), *_remarks(report, baseline)], findings)


def _same_conditions(report: Report, baseline: Report, name: str) -> None:
    """Raise BadInputError naming every condition that τ depends on and that differs."""
    new, old = _conditions(report, name), _conditions(baseline, name)
    differing = [f"{key}: {new[key]} here, {old[key]} in the baseline" for key in new if new[key] != old[key]]
    if differing:
        raise BadInputError(
            f"the two reports cannot be compared, their conditions differ. {'; '.join(differing)}. "
            "Measure again under the baseline's conditions."
        )


def _conditions(report: Report, name: str) -> dict[str, object]:
    info, c = report.contestant(name), report.conditions
    rules = {f"{t:g}": report.headline(name, t).rule for t in c.temperatures}
    return {
        "depth": info.depth,
        "temperatures": sorted(c.temperatures),
        "verification rules": ", ".join(f"{rule} at {t}" for t, rule in sorted(rules.items())),
        "max_new_tokens": c.max_new_tokens,
        "suites": ", ".join(f"{s.name} ({s.num_prompts} prompts, sha256 {s.digest[:12]})" for s in c.suites),
    }


def _judge(
    report: Report, baseline: Report, name: str, temperature: float, tolerance: float, confidence: float
) -> Finding:
    ratio, how = _tau_ratio(report, baseline, name, temperature, confidence)
    floor = 1 - tolerance
    if ratio.known and ratio.high < floor:
        conclusion, why = FAILED, f"τ fell by more than {tolerance:.1%}"
    elif ratio.known and ratio.low >= floor:
        conclusion, why = PASSED, "no drop beyond the tolerance"
    else:
        conclusion, why = UNDECIDED, _needed(ratio, floor, report.headline(name, temperature).num_prompts)
    old, new = (r.headline(name, temperature).tau for r in (baseline, report))
    before, after = (t.main() if t else "–" for t in (old, new))
    word = "passed, with a warning" if conclusion == UNDECIDED else conclusion
    line = f"temperature {temperature:g}: τ {before} → {after}, ratio {ratio.text(3)} ({how}): {word}: {why}"
    return Finding(temperature, conclusion, ratio, line)


def _tau_ratio(
    report: Report, baseline: Report, name: str, temperature: float, confidence: float
) -> tuple[Interval, str]:
    """Return τ_new / τ_old with one-sided bounds, and how it was made."""
    new, old = report.records_of(name, temperature), baseline.records_of(name, temperature)
    if new and old:
        return _paired(new, _aligned(old, new), confidence, report.conditions.seed), f"paired over {len(new)} prompts"
    figures = [r.headline(name, temperature).tau for r in (report, baseline)]
    return _unpaired(figures[0], figures[1], confidence), "unpaired: a report without prompt records"


def _aligned(records: Sequence[Record], like: Sequence[Record]) -> list[Record]:
    """Return `records` in the order of `like`'s prompts."""
    by_prompt = {(r.suite, r.prompt): r for r in records}
    missing = [r.prompt for r in like if (r.suite, r.prompt) not in by_prompt]
    if missing or len(by_prompt) != len(like):
        first = missing[0] if missing else "none, it has more"
        raise BadInputError(
            f"the baseline's records do not cover the same prompts; the first that is missing: {first}."
        )
    return [by_prompt[r.suite, r.prompt] for r in like]


def _paired(new: Sequence[Record], old: Sequence[Record], confidence: float, seed: int) -> Interval:
    # Two-sided at 2c − 1 is one-sided at c on either end.
    bootstrap = Bootstrap(strata_of([r.suite for r in new]), confidence=2 * confidence - 1, seed=seed)
    return bootstrap.quotient(tau_ratio(new), tau_ratio(old))


def _unpaired(new: Interval | None, old: Interval | None, confidence: float) -> Interval:
    """Return the ratio of two independent figures: log-normal, with each one's spread read from its 95% interval."""
    if new is None or old is None:
        return Interval(math.nan, math.nan, math.nan)
    value = new.value / old.value
    if not (new.known and old.known):
        return Interval(value, math.nan, math.nan)
    spread = math.hypot(*(math.log(i.high / i.low) / (2 * ndtri(0.975)) for i in (new, old))) * ndtri(confidence)
    return Interval(value, value * math.exp(-spread), value * math.exp(spread))


def _needed(ratio: Interval, floor: float, num_prompts: int) -> str:
    """Say how many prompts would decide it, if the ratio stays: an interval shrinks with their square root."""
    if not ratio.known:
        return f"{num_prompts} prompts give no interval; measure at least 20"
    half = (ratio.high - ratio.low) / 2
    distance = max(abs(ratio.value - floor), (1 - floor) / 10, 1e-3)
    needed = math.ceil(num_prompts * (half / distance) ** 2)
    return (
        f"not enough data, {num_prompts} prompts cannot tell it from a drop to {floor:.3f}; "
        f"about {max(needed, num_prompts + 1)} would"
    )


def _remarks(report: Report, baseline: Report) -> list[str]:
    """Name the conditions that may move τ a little, and differ."""
    new, old = report.conditions, baseline.conditions
    pairs = [("dtype", new.dtype, old.dtype), ("device", new.device, old.device), ("seed", new.seed, old.seed)]
    return [f"warning: {what} is {now} here and {then} in the baseline" for what, now, then in pairs if now != then]
