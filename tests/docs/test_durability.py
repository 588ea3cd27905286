"""The tables of the page on durability are what the attack programs found."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_what_was_found_and_nothing_failed() -> None:
    made = runpy.run_path(str(ROOT / "tests" / "attacks" / "durability" / "table.py"))
    found, page = json.loads(made["FIGURES"].read_text()), made["PAGE"].read_text()
    assert made["page_with_tables"](page, found) == page, "run python tests/attacks/durability/table.py"
    rows = [row for attack in ("kills", "faults", "alterations", "writers") for row in found[attack]]
    assert [row["failures"] for row in rows] == [[]] * len(rows)
