"""A folder is replaced as a whole, or stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.ground.files import replacing_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "there"
    made.mkdir()
    (made / "old").touch()
    return made


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_a_new_folder_appears_when_it_is_finished(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "new"
    with replacing_folder(final) as building:
        (building / "file").touch()
        assert not final.exists()
    assert names(final) == ["file"]
    assert names(final.parent) == ["new"]


def test_an_older_one_gives_way_as_a_whole(folder: Path) -> None:
    with replacing_folder(folder) as building:
        (building / "new").touch()
        assert names(folder) == ["old"]
    assert names(folder) == ["new"]
    assert names(folder.parent) == ["there"]


def test_a_failure_leaves_what_was_there(folder: Path) -> None:
    def fill() -> None:
        with replacing_folder(folder) as building:
            (building / "new").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fill()
    assert names(folder) == ["old"]
    assert names(folder.parent) == ["there"]


def test_a_block_that_removes_its_folder_changes_nothing(folder: Path) -> None:
    with replacing_folder(folder) as building:
        shutil.rmtree(building)
    assert names(folder) == ["old"]
    assert names(folder.parent) == ["there"]
