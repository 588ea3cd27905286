"""Nothing is lost and nothing altered goes unseen: the attack programs at a fraction of their counts.

The whole of them makes the figures of docs/security/durability.md, by the command that stands there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).with_name("durability") / "run.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs Linux and cc"),
]


def attacked(name: str, out: Path, *options: str) -> list[dict[str, Any]]:
    made = subprocess.run(
        [sys.executable, RUN, name, "--seed", "1", "--out", out, *options], capture_output=True, text=True
    )
    assert out.exists(), made.stdout[-2000:] + made.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(out.read_text())[name]
    return rows


def test_whatever_is_killed_loses_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    rows = attacked("kills", tmp_path / "found.json", "--share", "0.2")
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    assert sum(row["kills"] for row in rows) >= 30
    assert {row["verb"] for row in rows} >= {"distill", "train", "pair new, in place of one", "tune", "refresh", "eval"}


def test_whatever_is_altered_is_refused_or_repaired_and_named(tmp_path: Path) -> None:
    rows = attacked("alterations", tmp_path / "found.json", "--share", "0.2")
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    assert sum(row["refused"] + row["repaired"] for row in rows) == sum(row["attempts"] for row in rows) >= 100


def test_of_many_writers_at_once_none_loses_what_it_stored(tmp_path: Path) -> None:
    stores, trainings = attacked("writers", tmp_path / "found.json")
    assert stores["failures"] == trainings["failures"] == []
    assert (stores["won"], stores["kept"]) == (16, 16)
    assert (trainings["won"], trainings["refused"]) == (1, 7)
