"""The table of docs/security/durability.md, from the figures beside it.

python tests/attacks/durability/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security" / "durability.md"
FIGURES = PAGE.with_suffix(".json")
BEGIN, END = "## Tried\n\n", "The table is of "


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in Markdown: a row for each kind of attack, of all its verbs or files together."""
    kills, faults, altered, writers = (found[name] for name in ("kills", "faults", "alterations", "writers"))
    killed = _total(kills, "kills")
    struck = sum(sum(row["struck"].values()) for row in faults)
    rows = [
        ("attacks", "of", "times", "ended well, or repaired", "refused", "lost, different, silent or a traceback"),
        ("---",) * 6,
        ("killed (SIGKILL)", _kinds(kills, "verb", "verbs"), killed, killed - _failures(kills), "–", _failures(kills)),
        (
            "EIO, ENOSPC, EDQUOT (once, and for ever), EINTR, short writes",
            _kinds(faults, "verb", "verbs"),
            struck,
            _total(faults, "held"),
            _total(faults, "refused"),
            _failures(faults),
        ),
        (
            "altered, cut short or removed",
            _kinds(altered, "subject", "kinds of files"),
            _total(altered, "attempts"),
            _total(altered, "repaired"),
            _total(altered, "refused"),
            _failures(altered),
        ),
        (
            "several writers at once",
            _kinds(writers, "case", "folders"),
            _total(writers, "writers"),
            _total(writers, "won"),
            _total(writers, "refused"),
            _failures(writers),
        ),
    ]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows) + "\n\n"


def _total(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _failures(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["failures"]) for row in rows)


def _kinds(rows: list[dict[str, Any]], name: str, called: str) -> str:
    return f"{len({row[name] for row in rows})} {called}"


def page_with_tables(page: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(found) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(), json.loads(FIGURES.read_text())))
