"""The gate's verdict for other programs: JUnit XML, which CI systems show, and Markdown for a pull request."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from .gate import FAILED, PASSED, GateFinding, GateResult


def to_junit(result: GateResult) -> str:
    """Return one test case per temperature; one that failed says why, one that could not tell says so in its output."""
    failures = sum(found.conclusion == FAILED for found in result.findings)
    counts = {"name": "outrider gate", "tests": str(len(result.findings)), "failures": str(failures)}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", counts | {"errors": "0", "skipped": "0"})
    for found in result.findings:
        _case(suite, result, found)
    if result.remarks:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(result.remarks)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, result: GateResult, found: GateFinding) -> None:
    name = f"τ at temperature {found.temperature:g}"
    case = ElementTree.SubElement(suite, "testcase", {"classname": f"outrider gate: {result.label}", "name": name})
    if found.conclusion == FAILED:
        ElementTree.SubElement(case, "failure", {"message": f"τ fell beyond {result.tolerance:.1%}"}).text = found.line
    else:
        ElementTree.SubElement(case, "system-out").text = found.line


def to_markdown(result: GateResult) -> str:
    """Return a heading with the verdict, a table with a row for each temperature, and the warnings and notes."""
    rows = [_row(found) for found in result.findings]
    return "\n".join(
        [
            f"### {'✅ gate passed' if result.passed else '❌ gate failed'}: {result.label}",
            "",
            f"τ is the mean number of tokens per round, the target's own included. It may fall by "
            f"{result.tolerance:.1%}; a fall beyond that fails with {result.confidence:.0%} one-sided confidence.",
            "",
            "| temperature | τ before | τ now | ratio | conclusion | smallest drop found in 4 runs of 5 |",
            "|---|---|---|---|---|---|",
            *rows,
            *(["", *(f"- {line}" for line in result.remarks)] if result.remarks else []),
            "",
        ]
    )


def _row(found: GateFinding) -> str:
    mark = {PASSED: "✅", FAILED: "❌"}.get(found.conclusion, "⚠️")
    drop = "–" if math.isnan(found.smallest_drop) else f"{found.smallest_drop:.1%}"
    taus = " | ".join("–" if math.isnan(tau) else f"{tau:.2f}" for tau in (found.before, found.after))
    return f"| {found.temperature:g} | {taus} | {found.ratio.text(3)} | {mark} {found.conclusion} | {drop} |"
