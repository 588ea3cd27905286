"""Versions over time: τ and speedup of each with intervals, and what changed from one to the next."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from ..common import BadInputError
from ..eval.reports import plots
from ..eval.reports.figures import Interval
from ..eval.reports.gate import Counted, aligned, paired_ratio, unpaired_ratio
from ..eval.reports.render import markdown_table, page
from ..eval.reports.report import Report
from ..eval.reports.tables import Cell, Table, counted, markdown_text

_ONE_SIDED = 0.975  # of each end of a 95% interval


@dataclass(frozen=True)
class VersionFigures:
    """The figures of one version at one temperature, and its conditions by subject (target, data, machine, …)."""

    label: str
    created: str
    tau: Interval | None
    speedup: Interval
    conditions: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    counted: Sequence[Counted] = ()  # the rounds on each prompt, by which versions on the same prompts are compared

    @classmethod
    def of(cls, report: Report, label: str, temperature: float | None = None) -> VersionFigures:
        """Return the figures of a report's first drafter at its first temperature, or at one that is named."""
        figures, c = report.headline(temperature=temperature), report.conditions
        conditions = {
            "target": str(c.target.get("fingerprint"))[:12],
            "drafter": str(report.contestant(figures.contestant).digest)[:12],
            "plan": report.contestant(figures.contestant).label,
            "data": ", ".join(f"{s.name} ({s.num_prompts}, {s.digest[:12]})" for s in c.suites),
            "machine": f"{c.dtype} on {c.device_name}, {counted(c.threads, 'thread')}",
            "settings": (
                f"{figures.rule} at {figures.temperature:g}, {c.max_new_tokens} tokens, {counted(c.repeats, 'repeat')}"
            ),
            "software": ", ".join(f"{name} {version}" for name, version in sorted(c.versions.items())),
        }
        rounds = Counted.conversations(report.records_of(figures.contestant, figures.temperature))
        return cls(label, report.created, figures.tau, figures.speedup, conditions, counted=rounds)


def differences(before: VersionFigures, after: VersionFigures) -> list[str]:
    """Return what changed between neighbours, a line for each subject."""
    names = [name for name in after.conditions if name in before.conditions]
    changed = [name for name in names if before.conditions[name] != after.conditions[name]]
    return [*after.changes, *(f"{name}: {before.conditions[name]} → {after.conditions[name]}" for name in changed)]


def moves(versions: Sequence[VersionFigures]) -> list[str]:
    """Return for each version its τ over that of the one before, with a 95% interval; "" for the first."""
    return ["", *(_move(before, after) for before, after in pairwise(versions))]


def _move(before: VersionFigures, after: VersionFigures) -> str:
    if before.conditions.get("data") != after.conditions.get("data"):
        return "other prompts"
    asked = [{(one.suite, one.prompt) for one in version.counted} for version in (before, after)]
    if asked[0] and asked[0] == asked[1]:
        ratio = paired_ratio(after.counted, aligned(before.counted, after.counted), _ONE_SIDED, 0)
    else:
        ratio = unpaired_ratio(after.tau, before.tau, _ONE_SIDED)
    return ratio.text(unit="×") if ratio.known else "no interval"


def table_of(versions: Sequence[VersionFigures]) -> Table:
    """Return one row per version, in the order given."""
    rows = [
        [Cell(v.label), Cell.of(v.tau), Cell.of(v.speedup, unit="×"), Cell(move), Cell(v.created[:10])]
        for v, move in zip(versions, moves(versions), strict=True)
    ]
    return Table("Versions", ["version", "τ", "speedup", "τ over before", "measured"], rows)


def trend_markdown(versions: Sequence[VersionFigures]) -> str:
    """Return the table and the changes as Markdown."""
    parts = ["# Versions over time", markdown_table(table_of(versions)), "## What changed"]
    for before, after in pairwise(versions):
        lines = differences(before, after) or ["nothing that is known"]
        parts.append(f"**{markdown_text(after.label)}**\n\n" + "\n".join(f"- {markdown_text(x)}" for x in lines))
    return "\n\n".join(parts) + "\n"


def by_version(title: str, names: Sequence[str], values: Sequence[Interval | None], least: float, unit: str) -> str:
    """Return the plot of one figure over versions, in their order."""
    alike = os.path.commonprefix(names)  # noqa: RUF071 (letters of labels, which are no paths)
    shared = max(alike.rfind(separator) for separator in "@-_/ ") + 1
    shown = {
        name[shared:]: value
        for name, value in zip(names, values, strict=True)
        if value is not None and math.isfinite(value.value)
    }
    most = max(least + 0.5, plots.nice_limit(max([1.0, *map(plots.top_of, shown.values())])))
    return plots.curves(title, "version", {"τ": shown}, (least, most), unit, colours=["c0"])


def trend_html(versions: Sequence[VersionFigures]) -> str:
    """Return the page: no scripts, no external files.

    Raises:
        BadInputError: fewer than two versions.
    """
    if len(versions) < 2:
        raise BadInputError(f"a page over time needs at least two versions, got {len(versions)}.")
    labels = [v.label for v in versions]
    parts = [label.rpartition("@") for label in labels]
    names = [part[-1] for part in parts] if len({part[0] for part in parts}) == 1 else labels
    drawn = [
        ("τ, tokens per round", by_version("τ by version", names, [v.tau for v in versions], 1, "")),
        (
            "Speedup over the plain target",
            by_version("Speedup by version", names, [v.speedup for v in versions], 0, "×"),
        ),
    ]
    return page(
        "trend.html.jinja",
        __package__,
        title=f"{len(versions)} versions, {labels[0]} to {labels[-1]}",
        table=table_of(versions),
        plots=[(title, Markup(svg)) for title, svg in drawn],
        changes=[
            (after.label, differences(before, after) or ["nothing that is known"])
            for before, after in pairwise(versions)
        ],
    )
