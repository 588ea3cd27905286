"""A report for people: in the terminal, as Markdown, and as one self-contained page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from . import plots, tables
from .report import Report

if TYPE_CHECKING:
    from rich.console import Console

    from .tables import Table


def print_report(report: Report, console: Console) -> None:
    """Headline, and the table over all suites for each temperature."""
    from rich.text import Text

    console.print(Text(report.sentence(), style="bold"))
    for temperature in report.conditions.temperatures:
        print_table(
            fitted(tables.summary(report, temperature), console.width, _DROPPED),
            f"temperature {temperature:g}",
            console,
        )
    console.print(Text(_brief(report), style="dim"))


def print_comparison(report: Report, console: Console) -> None:
    """Every contestant at every temperature in one table (two on a narrow terminal), and the rules and conditions under it."""
    from rich.text import Text

    table = tables.comparison(report)
    for part in [table] if _width(table) <= console.width else table.split("speedup"):
        print_table(part, None, console)
    console.print(Text(f"{tables.rules_line(report)} {_brief(report)}", style="dim"))


def print_table(table: Table, title: str | None, console: Console) -> None:
    """A table for the terminal: figures right-aligned, what stands beside them dimmed."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="dim")
    for i, header in enumerate(table.headers):
        grid.add_column(header, justify="left" if i < table.labels else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text.assemble(cell.main, (f" {cell.extra}" if cell.extra else "", "dim")) for cell in row))
    console.print(grid)


def comparison_plot(report: Report) -> str:
    """comparison.svg: τ of every drafter at every temperature."""
    return plots.standalone(plots.tau_by_contestant(report))


_DROPPED = ("rule", "acceptance", "vs generate", "tokens/s")


def fitted(table: Table, width: int, dropped: Sequence[str]) -> Table:
    """The table without the columns that a narrow terminal has no room for, `dropped` from the first on; what is saved has them all."""
    for header in dropped:
        if _width(table) > width:
            table = table.without(header)
    return table


def _width(table: Table) -> int:
    """Characters of the longest line, with one space on either side of a column."""
    columns = zip(*([*table.headers], *([str(cell) for cell in row] for row in table.rows)), strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)


def _brief(report: Report) -> str:
    c = report.conditions
    prompts = sum(s.num_prompts for s in c.suites)
    return (
        f"{prompts} prompts ({', '.join(s.name for s in c.suites)}), at most {c.max_new_tokens} new tokens, {c.dtype} on {c.device}, {tables.threads(c.threads)}, "
        f"batch 1, median of {c.repeats}; {c.confidence:.0%} intervals over prompts; τ = mean tokens per round, bonus token included."
    )


def markdown(report: Report) -> str:
    """report.md."""
    parts = ["# Outrider report", f"**{report.sentence()}**"]
    if report.is_comparison:
        table = tables.comparison(report)
        parts += [f"## {table.title}", _markdown_table(table), tables.rules_line(report)]
    for temperature in report.conditions.temperatures:
        parts.append(f"## Temperature {temperature:g}")
        for make in (tables.summary, *tables.DETAILS):
            parts += _markdown_section(make(report, temperature))
    parts.append("## Same text as the plain target")
    parts.append(identity_sentence(report))
    parts += _markdown_section(tables.divergences(report))
    parts.append("## Conditions")
    parts.append(_markdown_table(tables.conditions(report)))
    parts.append("## Definitions")
    parts.append("\n".join(f"- **{word}**: {meaning}" for word, meaning in report.definitions.items()))
    return "\n\n".join(parts) + "\n"


def _markdown_section(table: Table) -> list[str]:
    return [f"### {table.title}", _markdown_table(table)] if table.rows else []


def _markdown_table(table: Table) -> str:
    rule = [":--" if i < table.labels else "--:" for i in range(len(table.headers))]
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [table.headers, rule, *rows])


def identity_sentence(report: Report) -> str:
    line = tables.identity_line(report)
    return (
        f"Prompts with exactly the plain target's tokens at temperature 0: {line}."
        if line
        else "Not checked: temperature 0 was not measured."
    )


def html(report: Report) -> str:
    """report.html: no scripts, no external files."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    template = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    ).from_string(source)
    sections = [
        {
            "temperature": f"{t:g}",
            "sentence": _unbroken(report.sentence(temperature=t)),
            "summary": tables.summary(report, t),
            "plots": [(title, Markup(plot(report, t))) for title, plot in _PLOTS] if report.primary else [],
            "details": [table for table in (make(report, t) for make in tables.DETAILS) if table.rows],
        }
        for t in report.conditions.temperatures
    ]
    comparison = tables.comparison(report) if report.is_comparison else None
    drawn = (
        (
            ("τ, tokens per round", plots.tau_by_contestant),
            ("Speedup over the plain target", plots.speedup_by_contestant),
        )
        if comparison
        else ()
    )
    return template.render(
        comparison=comparison,
        comparison_plots=[(title, Markup(plot(report))) for title, plot in drawn],
        rules=tables.rules_line(report),
        report=report,
        sections=sections,
        conditions=tables.conditions(report),
        divergences=tables.divergences(report),
        identity=identity_sentence(report),
        headline=_unbroken(report.sentence()),
        brief=_brief(report),
        legend=[(Markup(plots.swatch(colour)), label) for colour, label in plots.legend(report)],
    )


def _unbroken(sentence: str) -> str:
    """The sentence with figures that no line break can part from their intervals."""
    return re.sub(r"(\S+) \[(\S+), (\S+)\]", "\\1\u00a0[\\2,\u00a0\\3]", sentence)


_PLOTS = (
    ("Speedup over the plain target", plots.speedup),
    ("Alpha by depth", plots.alpha),
    ("Accepted drafts per round", plots.accepted),
)
