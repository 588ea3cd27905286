"""A folder is replaced as a whole, or stays as it was."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.ground.locks import locked
from outrider.ground.replacing import replacing_folder


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


# ------------------------------------------------------------ killed in between


def killed_before(name: str, number: int, folder: Path, exchange: bool) -> bool:
    """Replace `folder` in a process that is killed before its `number`-th call of `name`; tell whether it was."""
    script = f"""
import os, shutil, signal, sys
from pathlib import Path
from outrider.ground import replacing
if not {exchange}:
    replacing._renameat2 = lambda: None
calls = 0
def watch(event, arguments):
    global calls
    if event == "{name}":
        calls += 1
        if calls == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
with replacing.replacing_folder(Path(sys.argv[1])) as building:
    (building / "new").touch()
    sys.addaudithook(watch)
"""
    return subprocess.run([sys.executable, "-c", script, str(folder)]).returncode == -signal.SIGKILL


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(folder: Path, exchange: bool) -> None:
    """Whether the kernel exchanges the folders or the names are a journal."""
    found = []
    for name in ("os.rename", "open", "shutil.rmtree", "os.rmdir", "os.remove"):
        for number in range(1, 20):
            shutil.rmtree(folder)
            folder.mkdir()
            (folder / "old").touch()
            if not killed_before(name, number, folder, exchange):
                break
            if exchange:
                assert names(folder) in (["old"], ["new"])
            with locked(folder):
                pass
            assert names(folder) in (["old"], ["new"]), (name, number)
            assert names(folder.parent) == ["there"], (name, number)
            found.append(names(folder))
    assert ["old"] in found
    assert ["new"] in found


def test_a_folder_of_an_older_version_that_was_killed_between_two_renames_comes_back(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder.rename(folder.with_name(f".there.{dead.pid}.old"))
    folder.with_name(f".there.{dead.pid}.new").mkdir()
    with locked(folder):
        assert names(folder) == ["old"]
    assert names(folder.parent) == ["there"]
