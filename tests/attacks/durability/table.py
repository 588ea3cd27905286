"""The tables of docs/security/durability.md, from the figures beside it.

python tests/attacks/durability/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security" / "durability.md"
FIGURES = PAGE.with_suffix(".json")
_FAULTS = ("EIO, ENOSPC, EDQUOT (once, and for ever), EINTR, short writes", "operations on files", "faults")
BEGIN, END = "## Tried\n\n", "The tables are of "


def tables(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the tables in Markdown."""
    kills, faults, altered, writers, costs = (
        found[name] for name in ("kills", "faults", "alterations", "writers", "costs")
    )
    lines = [
        "| killed (SIGKILL) while it ran | operations on files | kills | lost, left behind or different |",
        _rule(4),
    ]
    lines += [_row(f"{r['verb']}, seed {r['seed']}", r["operations"], r["kills"], len(r["failures"])) for r in kills]
    lines += [_row("**together**", "", sum(r["kills"] for r in kills), sum(len(r["failures"]) for r in kills)), ""]
    lines += ["| " + " | ".join([*_FAULTS, "ended well all the same", "refused", "anything else"]) + " |", _rule(6)]
    lines += [
        _row(
            f"{r['verb']}, seed {r['seed']}",
            r["operations"],
            sum(r["struck"].values()),
            r["held"],
            r["refused"],
            len(r["failures"]),
        )
        for r in faults
    ]
    counts = [sum(sum(r["struck"].values()) for r in faults), sum(r["held"] for r in faults)]
    counts += [sum(r["refused"] for r in faults), sum(len(r["failures"]) for r in faults)]
    lines += [_row("**together**", "", *counts), ""]
    lines += [
        "| altered, cut short or removed | attempts | refused | repaired | silent, traceback or crash |",
        _rule(5),
    ]
    lines += [_row(r["subject"], r["attempts"], r["refused"], r["repaired"], len(r["failures"])) for r in altered]
    sums = [sum(r[n] for r in altered) for n in ("attempts", "refused", "repaired")]
    lines += [_row("**together**", *sums, sum(len(r["failures"]) for r in altered)), ""]
    return "\n".join(lines) + "\n" + _more(writers, costs, found["rounds"])


def _more(writers: list[dict[str, Any]], costs: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> str:
    """Return the tables of writers at once and of costs, where they were run, and where the figures are."""
    lines = ["| at once | ended well | refused with exit code 2 | what was stored |", _rule(4)]
    lines += [_row(f"{r['writers']} {r['case']}", r["won"], r["refused"], _stored(r)) for r in writers]
    lines += ["", "| seconds of one core | MB read | without digests | first time | second time |", _rule(5)]
    lines += [_row(r["operation"], r["megabytes"], r["without"], r["first"], r["second"]) for r in costs]
    lines += ["", "| a round, µs of one core | without the finite check | with it | ratio |", _rule(4)]
    lines += [_row(r["case"], r["without"], r["checked"], f"{r['ratio']} ({r['low']} to {r['high']})") for r in rounds]
    return "\n".join(lines) + "\n\nThe figures are in [durability.json](durability.json).\n\n"


def _stored(row: dict[str, Any]) -> str:
    return f"{row['kept']} of {row['writers']} kept" if row["kept"] else "one training's, whole"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def page_with_tables(page: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables(found) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(), json.loads(FIGURES.read_text())))
