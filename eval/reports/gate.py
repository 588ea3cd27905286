"""The regression gate: whether τ fell beyond a tolerance, with confidence.

It fails only on evidence. With too few prompts it passes, with a warning that says how many would do; every verdict
says how large a drop it would have detected. τ needs no clock, so a pair's calibration prompts, which were only
counted, are evidence beside those that were timed. Verdicts are written as JUnit XML for CI systems, too, and as
Markdown for a pull request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from scipy.special import ndtri

from ...common import BadInputError
from ...common.terminal import visible
from .advice import alike
from .figures import Interval, Number, PromptRecord, Ratio
from .report import Report
from .statistics import POWER, Bootstrap
from .tables import markdown_text

PASSED = "passed"
FAILED = "failed"
UNDECIDED = "not enough data"
_MOVING = ("dtype", "device", "seed")  # conditions that may move τ a little


@dataclass(frozen=True)
class GateFinding:
    """The verdict on one contestant at one temperature.

    Attributes:
        conclusion: `PASSED`, `FAILED` or `UNDECIDED`.
        ratio: τ_new / τ_old; the interval's ends are one-sided bounds.
        line: the finding in words.
        tau_before, tau_after: τ of the baseline, and now; nan where a report has none.
        smallest_drop: relative, the smallest that four of five such comparisons detect; nan without an interval.
    """

    temperature: float
    conclusion: str
    ratio: Interval
    line: str
    smallest_drop: Number
    tau_before: Number
    tau_after: Number


@dataclass(frozen=True)
class Counted:
    """The rounds on one prompt and the tokens they emitted, without the time they took: τ = emitted / rounds."""

    suite: str
    prompt: str
    emitted: int
    rounds: int

    @classmethod
    def of(cls, record: PromptRecord) -> Counted:
        """Return the counts of a report's record."""
        return cls(*record.drawn, record.tokens - 1, len(record.accepted))

    @classmethod
    def conversations(cls, records: Sequence[PromptRecord]) -> list[Counted]:
        """Return the sums over the turns of each conversation: these are drawn again together."""
        sums: dict[tuple[str, str], Counted] = {}
        for one in map(cls.of, records):
            known = sums.get((one.suite, one.prompt), replace(one, emitted=0, rounds=0))
            sums[one.suite, one.prompt] = replace(
                one, emitted=known.emitted + one.emitted, rounds=known.rounds + one.rounds
            )
        return list(sums.values())


@dataclass(frozen=True)
class GateComparison:
    """More prompts than those of the reports, counted for both sides at one temperature."""

    temperature: float
    new: Sequence[Counted]
    old: Sequence[Counted]


@dataclass(frozen=True)
class GateResult:
    """The gate's verdict.

    Attributes:
        passed: False only for a proven drop.
        label: the contestant, in words.
        target, baseline_target: the digests of both reports' targets.
        remarks: warnings and notes.
    """

    passed: bool
    label: str
    tolerance: float
    confidence: float
    target: str
    baseline_target: str
    same_target: bool
    findings: list[GateFinding]
    remarks: list[str]

    @property
    def lines(self) -> list[str]:
        """All of it for people: a summary, the findings, and the remarks."""
        summary = (
            f"gate {'passed' if self.passed else 'FAILED'}: {self.label}, τ may fall by {self.tolerance:.1%}, "
            f"{self.confidence:.0%} one-sided confidence"
        )
        return [summary, *(finding.line for finding in self.findings), *self.remarks]


def gate(
    report: Report,
    baseline: Report,
    tolerance: float = 0.03,
    confidence: float = 0.95,
    contestant: str | None = None,
    beside: GateComparison | None = None,
    judge: Judge | None = None,
) -> GateResult:
    """Compare τ on all suites together, at every temperature.

    Fails if the upper one-sided bound of τ_new / τ_old lies below 1 − tolerance. Where both reports hold prompt
    records the ratio is bootstrapped paired by prompt, else the two figures' own intervals are combined.

    Args:
        tolerance: the relative drop that is allowed.
        contestant: which one; the report's first drafter if not given.
        beside: more prompts; those that the reports hold, too, count once.
        judge: what finds the verdict on the comparison at one temperature; `judged` if not given.

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
    findings = []
    for temperature in report.conditions.temperatures:
        more = beside if beside is not None and beside.temperature == temperature else None
        compared = _compared(report, baseline, name, temperature, confidence, more)
        findings.append((judge or judged)(compared, temperature, tolerance, confidence))
    target, baseline_target = (str(r.conditions.target.get("fingerprint")) for r in (report, baseline))
    return GateResult(
        passed=all(f.conclusion != FAILED for f in findings),
        label=report.contestant(name).label,
        tolerance=tolerance,
        confidence=confidence,
        target=target,
        baseline_target=baseline_target,
        same_target=target == baseline_target,
        findings=findings,
        remarks=_remarks(report, baseline, target, baseline_target),
    )


def _same_conditions(report: Report, baseline: Report, name: str) -> None:
    """Raise BadInputError for the conditions that τ depends on, and that differ."""
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
        "sampling": c.sampling or "temperature alone",
        "max_new_tokens": c.max_new_tokens,
        "suites": ", ".join(f"{s.name} ({s.num_prompts} prompts, sha256 {s.digest[:12]})" for s in c.suites),
    }


def judged(compared: Compared, temperature: float, tolerance: float, confidence: float) -> GateFinding:
    """Return the finding that one look at all prompts of a comparison amounts to; an interval shrinks with their root.

    The smallest drop takes ln of the ratio to be normal.
    """
    ratio, floor = compared.ratio, 1 - tolerance

    def needed(half: float, distance: float) -> int:
        return math.ceil(compared.num_prompts * (half / distance) ** 2)

    if not ratio.known:
        return finding_of(compared, temperature, tolerance, needed)
    error = math.log(ratio.high / ratio.low) / (2 * float(ndtri(confidence)))
    drop = 1 - floor * math.exp(-error * float(ndtri(confidence) + ndtri(POWER)))
    return finding_of(compared, temperature, tolerance, needed, drop)


def finding_of(
    compared: Compared,
    temperature: float,
    tolerance: float,
    needed: Callable[[float, float], int],
    smallest_drop: float = math.nan,
) -> GateFinding:
    """Return the finding on a ratio whose ends are one-sided bounds.

    Args:
        needed: the number of prompts that brings half the width of the bounds down to a distance, from both.
        smallest_drop: that four of five such comparisons detect; nan where none can be told.
    """
    ratio, floor = compared.ratio, 1 - tolerance
    if ratio.known and ratio.high < floor:
        conclusion, why = FAILED, f"τ fell by more than {tolerance:.1%}"
    elif ratio.known and ratio.low >= floor:
        conclusion, why = PASSED, "no drop beyond the tolerance"
    else:
        conclusion, why = UNDECIDED, _needed(ratio, floor, compared.num_prompts, needed)
    word = "passed, with a warning" if conclusion == UNDECIDED else conclusion
    known = not math.isnan(smallest_drop)
    power = f"; a drop of {smallest_drop:.1%} would have failed in 4 runs of 5" if known else ""
    line = (
        f"temperature {temperature:g}: τ {_shown(compared.before)} → {_shown(compared.after)}, "
        f"ratio {ratio.text(3)} ({compared.how}): {word}: {why}{power}"
    )
    return GateFinding(temperature, conclusion, ratio, line, smallest_drop, compared.before, compared.after)


def _shown(tau: float) -> str:
    return "–" if math.isnan(tau) else f"{tau:.2f}"


@dataclass(frozen=True)
class Compared:
    """The ratio τ_new / τ_old with one-sided bounds, how it was made, the number of prompts, and both τ."""

    ratio: Interval
    how: str
    num_prompts: int
    before: float
    after: float
    new: Sequence[Counted] = ()
    old: Sequence[Counted] = ()


Judge = Callable[[Compared, float, float, float], GateFinding]  # of temperature, tolerance and confidence


def _compared(
    report: Report, baseline: Report, name: str, temperature: float, confidence: float, beside: GateComparison | None
) -> Compared:
    sides = [which.records_of(name, temperature) for which in (report, baseline)]
    moved = _asked_otherwise(*sides)
    new, old = (Counted.conversations([r for r in side if (r.suite, r.prompt) not in moved]) for side in sides)
    if not (new and old):
        now, then = (r.headline(name, temperature) for r in (report, baseline))
        before, after = (figures.tau.value if figures.tau else math.nan for figures in (then, now))
        ratio = unpaired_ratio(now.tau, then.tau, confidence)
        return Compared(ratio, "unpaired: a report without prompt records", now.num_prompts, before, after)
    old, how = aligned(old, new), f"paired over {len(new)} prompts"
    if beside is not None:
        known = {(c.suite, c.prompt) for c in new}
        more = [c for c in beside.new if (c.suite, c.prompt) not in known]
        new, old = [*new, *more], [*old, *aligned(beside.old, beside.new, {(c.suite, c.prompt) for c in more})]
        how = f"paired over {len(new)} prompts, {len(more)} of them calibration prompts"
    how += f", without {len(moved)} later turns, asked after other answers" if moved else ""
    before, after = (sum(c.emitted for c in s) / max(1, sum(c.rounds for c in s)) for s in (old, new))
    ratio = paired_ratio(new, old, confidence, report.conditions.seed)
    return Compared(ratio, how, len(new), before, after, new, old)


def _asked_otherwise(new: Sequence[PromptRecord], old: Sequence[PromptRecord]) -> set[tuple[str, str]]:
    """Return the later turns that one side was not asked, or after other answers of its target: no pairs of prompts."""
    now, then = ({(r.suite, r.prompt): r.asked for r in side if r.turn > 1} for side in (new, old))
    return {turn for turn in now.keys() | then.keys() if now.get(turn, "") != then.get(turn, "")}


def aligned(
    records: Sequence[Counted], like: Sequence[Counted], wanted: set[tuple[str, str]] | None = None
) -> list[Counted]:
    """Return `records` in the order of `like`'s prompts, those that are `wanted` (None: all)."""
    by_prompt = {(r.suite, r.prompt): r for r in records}
    missing = [r.prompt for r in like if (r.suite, r.prompt) not in by_prompt]
    if missing or len(by_prompt) != len(like):
        first = missing[0] if missing else "none, it has more"
        raise BadInputError(
            f"the baseline's records do not cover the same prompts; the first that is missing: {first}."
        )
    return [by_prompt[r.suite, r.prompt] for r in like if wanted is None or (r.suite, r.prompt) in wanted]


def paired_ratio(new: Sequence[Counted], old: Sequence[Counted], confidence: float, seed: int) -> Interval:
    """Return τ_new / τ_old on the same prompts, in one order; each end holds with this confidence by itself."""
    suites = list(dict.fromkeys(c.suite for c in new))
    order = sorted(range(len(new)), key=lambda i: suites.index(new[i].suite))  # suite by suite, as the strata are
    # Two-sided at 2c − 1 is one-sided at c on either end.
    bootstrap = Bootstrap([sum(c.suite == s for c in new) for s in suites], confidence=2 * confidence - 1, seed=seed)
    return bootstrap.quotient(tau_of([new[i] for i in order]), tau_of([old[i] for i in order]))


def tau_of(counted: Sequence[Counted]) -> Ratio:
    return Ratio([c.emitted for c in counted], [c.rounds for c in counted])


def unpaired_ratio(new: Interval | None, old: Interval | None, confidence: float) -> Interval:
    """Return the ratio of two independent figures: log-normal, with each one's spread read from its 95% interval."""
    if new is None or old is None:
        return Interval(math.nan, math.nan, math.nan)
    value = new.value / old.value
    if not (new.known and old.known):
        return Interval(value, math.nan, math.nan)
    spread = math.hypot(*(math.log(i.high / i.low) / (2 * ndtri(0.975)) for i in (new, old))) * ndtri(confidence)
    return Interval(value, value * math.exp(-spread), value * math.exp(spread))


def _needed(ratio: Interval, floor: float, num_prompts: int, needed: Callable[[float, float], int]) -> str:
    """Return why there is no verdict, and how many prompts would give one."""
    if not ratio.known:
        return f"{num_prompts} prompts give no interval; measure at least 20"
    distance = max(abs(ratio.value - floor), (1 - floor) / 10, 1e-3)
    would = max(needed((ratio.high - ratio.low) / 2, distance), num_prompts + 1)
    return f"not enough data, {num_prompts} prompts cannot tell it from a drop to {floor:.3f}; about {would} would"


def _remarks(report: Report, baseline: Report, new: str, old: str) -> list[str]:
    """Return what the verdict's figures do not say: differing conditions that may move τ, and answers that are alike.

    `new` and `old` are the targets.
    """
    note = (
        f"note: the two reports are about different targets ({new[:12]}… here, {old[:12]}… in the baseline): what "
        "their difference made easier or harder to predict is in the ratio, too"
    )
    both = [(name, getattr(report.conditions, name), getattr(baseline.conditions, name)) for name in _MOVING]
    warnings = [f"warning: {name} is {now} here and {then} in the baseline" for name, now, then in both if now != then]
    repeated = [words for t in report.conditions.temperatures if (words := alike(report, t))]
    return [note] * (new != old) + warnings + [f"warning: {words}" for words in repeated]


def to_junit(result: GateResult) -> str:
    """Return JUnit's XML with one test case per temperature, whose output is the finding."""
    failures = sum(finding.conclusion == FAILED for finding in result.findings)
    counts = {"name": "outrider gate", "tests": str(len(result.findings)), "failures": str(failures)}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", counts | {"errors": "0", "skipped": "0"})
    for finding in result.findings:
        labels = {"classname": f"outrider gate: {result.label}", "name": f"τ at temperature {finding.temperature:g}"}
        case = ElementTree.SubElement(suite, "testcase", labels)
        if finding.conclusion == FAILED:
            failure = ElementTree.SubElement(case, "failure", {"message": f"τ fell beyond {result.tolerance:.1%}"})
            failure.text = finding.line
        else:
            ElementTree.SubElement(case, "system-out").text = finding.line
    if result.remarks:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(result.remarks)
    ElementTree.indent(suites)
    return visible(ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)) + "\n"


def to_markdown(result: GateResult) -> str:
    """Return a heading with the verdict, a table with a row for each temperature, and the warnings and notes."""
    rows = []
    for finding in result.findings:
        mark = {PASSED: "✅", FAILED: "❌"}.get(finding.conclusion, "⚠️")
        drop = "–" if math.isnan(finding.smallest_drop) else f"{finding.smallest_drop:.1%}"
        figures = f"{_shown(finding.tau_before)} | {_shown(finding.tau_after)} | {finding.ratio.text(3)}"
        rows.append(f"| {finding.temperature:g} | {figures} | {mark} {finding.conclusion} | {drop} |")
    return "\n".join(
        [
            f"### {'✅ gate passed' if result.passed else '❌ gate failed'}: {markdown_text(result.label)}",
            "",
            f"τ is the mean number of tokens per round, the target's own included. It may fall by "
            f"{result.tolerance:.1%}; a fall beyond that fails with {result.confidence:.0%} one-sided confidence.",
            "",
            "| temperature | τ before | τ now | ratio | conclusion | smallest drop found in 4 runs of 5 |",
            "|---|---|---|---|---|---|",
            *rows,
            *(["", *(f"- {markdown_text(line)}" for line in result.remarks)] if result.remarks else []),
            "",
        ]
    )
