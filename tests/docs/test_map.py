"""The map of files is what its script makes of their docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = runpy.run_path(str(ROOT / "docs" / "developers" / "map.py"))


def test_the_committed_map_is_what_its_script_makes() -> None:
    """If this fails: python docs/developers/map.py."""
    assert MAP["PAGE"].read_text(encoding="utf-8") == MAP["page"]()


def test_every_file_of_the_package_says_what_it_is() -> None:
    files = [file for room in MAP["ROOMS"] for file in (ROOT / room).rglob("*.py")]
    assert [file.name for file in files if not MAP["first_sentence"](file)] == []
    assert {file.parent.name for file in ROOT.glob("*/__init__.py")} <= set(MAP["ROOMS"])


def test_a_sentence_ends_at_its_full_stop(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Heads (arXiv 2410.1):\none line\nand another, e.g... two. More.\n\nMore."""\n')
    assert MAP["first_sentence"](file) == "Heads (arXiv 2410.1): one line and another, e.g... two"
