"""No file of a stranger runs code or ends a command as none may; nothing is lost, and nothing altered goes unseen.

The programs at the counts, or a fraction of them, that made the figures of docs/security.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
needs_cc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs Linux and cc"
)


def attacked(tmp_path: Path, program: str, name: str, *options: str) -> Any:
    script, out = Path(__file__).parent / program, tmp_path / "found.json"
    done = subprocess.run([sys.executable, script, name, *options, "--out", out], capture_output=True, text=True)
    assert out.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


def attacked_durability(tmp_path: Path, name: str, *options: str) -> list[dict[str, Any]]:
    return attacked(tmp_path, "durability/run.py", name, "--seed", "1", *options)[name]


def test_no_file_that_a_verb_reads_runs_code(tmp_path):
    found = attacked(tmp_path, "attack.py", "execution")
    assert found["attempts"] >= 300
    assert found["ran"] == found["odd"] == []


def test_damaged_files_end_with_an_exit_code_in_time_and_memory(tmp_path):
    found = attacked(tmp_path, "attack.py", "fuzz", "--count", "1000", "--seed", "0")
    assert found["attempts"] == 1000
    assert found["ran"] == found["odd"] == []


def test_no_text_from_outside_is_obeyed_by_a_terminal_or_a_page(tmp_path):
    found = attacked(tmp_path, "attack.py", "escapes", "--seed", "0")
    assert found["attempts"] >= 100
    assert found["odd"] == []


@needs_cc
def test_a_disk_that_fails_loses_nothing_and_leaves_nothing_behind(tmp_path):
    rows = attacked_durability(tmp_path, "faults", "--share", "0.2")
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    assert {row["verb"] for row in rows} == {"pair push", "pair pull", "export", "refresh", "quickstart"}
    assert sum(sum(row["struck"].values()) for row in rows) >= 40


@needs_cc
def test_whatever_is_killed_loses_nothing_and_leaves_nothing_behind(tmp_path):
    rows = attacked_durability(tmp_path, "kills", "--share", "0.2")
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    assert sum(row["kills"] for row in rows) >= 30
    assert {row["verb"] for row in rows} >= {"distill", "train", "pair new, in place of one", "tune", "refresh", "eval"}
    assert {row["verb"] for row in rows} >= {"pair push", "pair pull", "export", "quickstart"}


@needs_cc
def test_whatever_is_altered_is_refused_or_repaired_and_named(tmp_path):
    rows = attacked_durability(tmp_path, "alterations", "--share", "0.2")
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    assert sum(row["refused"] + row["repaired"] for row in rows) == sum(row["attempts"] for row in rows) >= 100


@needs_cc
def test_of_many_writers_at_once_none_loses_what_it_stored(tmp_path):
    stores, trainings = attacked_durability(tmp_path, "writers")
    assert stores["failures"] == trainings["failures"] == []
    assert (stores["won"], stores["kept"]) == (16, 16)
    assert (trainings["won"], trainings["refused"]) == (1, 7)
