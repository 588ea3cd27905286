"""No file of a stranger runs code, and whatever is killed loses nothing; fractions of docs/security's figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def attacked(tmp_path: Path, program: str, *options: str) -> Any:
    script, out = Path(__file__).parent / program, tmp_path / "found.json"
    done = subprocess.run([sys.executable, script, *options, "--out", out], capture_output=True, text=True)
    assert out.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


def test_no_file_that_a_verb_reads_runs_code(tmp_path):
    found = attacked(tmp_path, "attack.py")
    assert found["attempts"] >= 300
    assert found["ran"] == found["odd"] == []


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs Linux and cc")
def test_whatever_is_killed_loses_nothing_and_leaves_nothing_behind(tmp_path):
    rows = attacked(tmp_path, "durability/kills.py", "--seed", "1", "--share", "0.2")
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    assert sum(row["kills"] for row in rows) >= 30
    assert {row["verb"] for row in rows} >= {"distill", "train", "pair new, in place of one", "tune", "refresh", "eval"}
    assert {row["verb"] for row in rows} >= {"pair push", "pair pull", "export", "quickstart"}
