"""No file of a stranger runs code, and none ends a command as no command may; counted, and from a seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("attack.py")


def attacked(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments, "--out", str(file)], capture_output=True, text=True
    )
    assert file.is_file(), done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_no_file_that_a_verb_reads_runs_code(tmp_path: Path) -> None:
    found = attacked(tmp_path, "execution")
    assert found["attempts"] >= 300
    assert found["ran"] == []
    assert found["odd"] == []


@pytest.mark.slow
def test_damaged_files_end_with_an_exit_code_in_time_and_memory(tmp_path: Path) -> None:
    found = attacked(tmp_path, "fuzz", "--count", "1000", "--seed", "0")
    assert found["cases"] == 1000
    assert found["odd"] == []
