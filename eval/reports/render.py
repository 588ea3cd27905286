"""A report for people: in the terminal, as Markdown, and as one self-contained page; and its files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ...common.atomic import write_atomically
from ...common.locks import locked
from . import plots, tables
from .advice import decision, remarks
from .report import REPORT_FILE, Report
from .tables import Table

_PATIENCE = 60.0  # seconds that a finished report waits for another one in the same folder

# The columns of a summary that a narrow terminal loses, in this order.
_DROPPED = (
    "rule",
    "acceptance",
    "vs generate",
    "tokens/s",
    "requests · rounds · tokens",
    "batches · prompts",
    "rows running",
)
_PLOTS = (
    ("Speedup over the plain target", plots.speedup),
    ("Alpha by depth", plots.alpha),
    ("Accepted drafts per round", plots.accepted),
)
_COMPARISON_PLOTS = (
    ("τ, tokens per round", plots.tau_by_contestant),
    ("Speedup over the plain target", plots.speedup_by_contestant),
)


def write_report(report: Report, folder: str | Path) -> Path:
    """Write report.json, report.md and report.html; each appears complete or not at all. Return the folder."""
    place = Path(folder)
    files = {"report.md": markdown(report), "report.html": html(report)}
    if report.is_comparison:
        files["comparison.svg"] = plots.standalone(plots.tau_by_contestant(report))
    # The JSON comes last: where it is, the others are.
    with locked(place, wait=_PATIENCE):
        place.mkdir(parents=True, exist_ok=True)
        for name, text in (files | {REPORT_FILE: report.to_json()}).items():
            write_atomically(place / name, text)
    return place


def print_report(report: Report, console: Console) -> None:
    """Print the headline, and the table over all suites for each temperature."""
    console.print(Text(report.sentence(), style="bold"))
    for temperature in report.conditions.temperatures:
        table = fitted(tables.summary(report, temperature), console.width, _DROPPED)
        print_table(table, f"temperature {temperature:g}", console)
        for make in (tables.by_group, tables.by_batch):
            if (found := make(report, temperature)).rows:
                print_table(fitted(found, console.width, _DROPPED), found.title, console)
    console.print(Text(_brief(report), style="dim"))
    _print_advice(report, console)


def print_comparison(report: Report, console: Console) -> None:
    """Print every contestant at every temperature in one table (two on a narrow terminal), its rules and conditions."""
    table = tables.comparison(report)
    for part in [table] if _width(table) <= console.width else table.split("τ"):
        print_table(part, None, console)
    console.print(Text(f"{tables.rules_line(report)} {_brief(report)}", style="dim"))
    _print_advice(report, console)


def _print_advice(report: Report, console: Console) -> None:
    for remark in remarks(report):
        console.print(Text(f"note: {remark}", style="yellow"))
    if todo := decision(report):
        console.print(Text(todo, style="bold"))


def print_table(table: Table, title: str | None, console: Console) -> None:
    """Print a table: figures right-aligned, intervals and counts dimmed; below them where the line is too short."""
    apart = " " if _width(table) <= console.width else "\n"
    grid = Grid(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="dim")
    for i, header in enumerate(table.headers):
        grid.add_column(header, justify="left" if i < table.labels else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text.assemble(cell.main, (f"{apart}{cell.extra}" if cell.extra else "", "dim")) for cell in row))
    console.print(grid)


def fitted(table: Table, width: int, dropped: Sequence[str]) -> Table:
    """Return the table without as many of the columns `dropped`, from the first on, as a narrow terminal needs."""
    for header in dropped:
        if _width(table) > width:
            table = table.without(header)
    return table


def _width(table: Table) -> int:
    """Return the characters of the longest line, with one space on either side of a column."""
    columns = zip(*([*table.headers], *([str(cell) for cell in row] for row in table.rows)), strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)


def _brief(report: Report) -> str:
    c = report.conditions
    prompts = sum(s.num_prompts for s in c.suites)
    return (
        f"{prompts} prompts ({', '.join(s.name for s in c.suites)}), at most {c.max_new_tokens} new tokens, "
        f"{c.dtype} on {c.device}, {tables.counted(c.threads, 'thread')}, batch 1, median of {c.repeats}; "
        f"{c.confidence:.0%} intervals over prompts; τ = mean tokens per round, bonus token included."
    )


def markdown(report: Report) -> str:
    """Return report.md."""
    parts = ["# Outrider report", f"**{tables.markdown_text(report.sentence())}**"]
    parts += [f"**{tables.markdown_text(todo)}**"] if (todo := decision(report)) else []
    parts += [f"> {tables.markdown_text(remark)}" for remark in remarks(report)]
    if report.is_comparison:
        table = tables.comparison(report)
        parts += [f"## {table.title}", markdown_table(table), tables.markdown_text(tables.rules_line(report))]
    for temperature in report.conditions.temperatures:
        parts.append(f"## Temperature {temperature:g}")
        for make in (tables.summary, *tables.DETAILS):
            parts += _markdown_section(make(report, temperature))
    parts += ["## Same text as the plain target", tables.markdown_text(identity_sentence(report))]
    parts += _markdown_section(tables.divergences(report))
    parts += ["## Conditions", markdown_table(tables.conditions(report))]
    meanings = (
        f"- **{tables.markdown_text(word)}**: {tables.markdown_text(m)}" for word, m in report.definitions.items()
    )
    parts += ["## Definitions", "\n".join(meanings)]
    return "\n\n".join(parts) + "\n"


def _markdown_section(table: Table) -> list[str]:
    return [f"### {table.title}", markdown_table(table)] if table.rows else []


def markdown_table(table: Table) -> str:
    """Return a table in Markdown."""
    rule = [":--" if i < table.labels else "--:" for i in range(len(table.headers))]
    rows = [[tables.markdown_text(str(cell)) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [table.headers, rule, *rows])


def identity_sentence(report: Report) -> str:
    """Return the number of prompts that each contestant completed exactly as the plain target did, in words."""
    lines = []
    for temperature in report.conditions.temperatures:
        drafting = [f for f in report.overall(temperature) if f.contestant != report.baselines.plain]
        judged = [f"{f.contestant} {f.identical}/{f.num_prompts}" for f in drafting if f.identical is not None]
        drawn = [f"{f.contestant} ({f.rule})" for f in drafting if f.identical is None and f.rule != "none"]
        if judged:
            said = (
                f"Prompts with exactly the plain target's tokens at temperature {temperature:g}: {', '.join(judged)}."
            )
            lines.append(said)
        if drawn:
            lines.append(
                f"At temperature {temperature:g} another draw of the same distribution, not the same text, unless the "
                f"rule is lossy: {', '.join(drawn)}."
            )
    return " ".join(lines) or "Not checked: nothing was drafted."


def html(report: Report) -> str:
    """Return report.html: no scripts, no external files."""
    drawn = _COMPARISON_PLOTS if report.is_comparison else ()
    return page(
        "report.html.jinja",
        __package__,
        comparison=tables.comparison(report) if report.is_comparison else None,
        comparison_plots=[(title, Markup(plot(report))) for title, plot in drawn],
        rules=tables.rules_line(report),
        report=report,
        sections=[_section(report, t) for t in report.conditions.temperatures],
        conditions=tables.conditions(report),
        divergences=tables.divergences(report),
        identity=identity_sentence(report),
        headline=_unbroken(report.sentence()),
        brief=_brief(report),
        decision=decision(report),
        remarks=remarks(report),
        advice=lambda text: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(_unbroken(text))))),
        legend=[(Markup(marker), label) for marker, label in plots.legend(report)],
    )


def page(template: str, package: str, **values: object) -> str:
    """Return the page of a template in `package`, or one here that it extends, with `values` in it."""
    files = ChoiceLoader([PackageLoader(package, "."), PackageLoader(__package__, ".")])
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.loader = files
    return environment.get_template(template).render(**values)


def _section(report: Report, temperature: float) -> dict[str, object]:
    """Return the page's section about one temperature."""
    details = [make(report, temperature) for make in tables.DETAILS]
    drawn = [(title, Markup(plot(report, temperature))) for title, plot in _PLOTS] if report.primary else []
    if any(f.temperature == temperature and f.tau is not None for f in report.batches):
        drawn.append(("Speedup by batch size", Markup(plots.speedup_by_batch(report.batches, temperature))))
    return {
        "temperature": f"{temperature:g}",
        "sentence": _unbroken(report.sentence(temperature=temperature)),
        "summary": tables.summary(report, temperature),
        "plots": drawn,
        "answers": sorted(
            (r for r in report.records if r.text and r.temperature == temperature), key=lambda r: r.tau, reverse=True
        ),
        "details": [table for table in details if table.rows],
    }


def _unbroken(sentence: str) -> str:
    """Return the sentence with spaces that keep figures, their names and their intervals on one line."""
    return re.sub(r"(\S+) \[(\S+), (\S+)\]", "\\1\u00a0[\\2,\u00a0\\3]", sentence.replace("τ ", "τ\u00a0"))
