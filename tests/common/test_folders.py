"""A folder is replaced as a whole, or stays as it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.common.atomic import replacing_folder
from outrider.common.locks import locked


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
from outrider.common import atomic
if not {exchange}:
    atomic._renameat2 = lambda: None
calls = 0
def watch(event, arguments):
    global calls
    if event == "{name}":
        calls += 1
        if calls == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
with atomic.replacing_folder(Path(sys.argv[1])) as building:
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


def test_a_folder_of_an_older_version_that_was_killed_between_two_renames_is_named_and_stays(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name has no mark of ours: somebody else may have given it."""
    aside = folder.with_name(".there.123.old")
    folder.rename(aside)
    aside.with_name(".there.123.new").mkdir()
    with locked(folder):
        assert not folder.exists()
    assert names(folder.parent) == [".there.123.new", ".there.123.old"]
    assert f"{folder} is missing, and {aside} may be" in caplog.text


# ------------------------------------------------------------ other disks


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than the tests' own."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm")) if os.path.isdir("/dev/shm") else None
    if place is None or place.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is one file system only")
    yield place
    shutil.rmtree(place)


def test_a_link_to_another_disk_is_followed_and_stays(tmp_path: Path, elsewhere: Path) -> None:
    (elsewhere / "data").mkdir()
    (elsewhere / "data" / "old").touch()
    (tmp_path / "data").symlink_to(elsewhere / "data")
    with replacing_folder(tmp_path / "data") as building:
        (building / "new").touch()
        assert building.stat().st_dev == elsewhere.stat().st_dev, "it is written where it is going to be"
    assert (tmp_path / "data").is_symlink()
    assert names(elsewhere / "data") == ["new"]
    assert names(elsewhere) == ["data"]


in_own_namespace = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode != 0,
    reason="needs user namespaces",
)


def run_with_mounts(mounts: str, script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of Python after these mounts, which nobody else sees."""
    command = f'{mounts} && exec "{sys.executable}" -c "$SCRIPT" "$@"'
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command, "sh", *map(str, arguments)],
        env={**os.environ, "SCRIPT": script},
        capture_output=True,
        text=True,
    )


REPLACE = """
import sys
from pathlib import Path
from outrider.common import OutriderError
from outrider.common.atomic import move, replacing_folder
names = lambda folder: sorted(f.name for f in folder.iterdir())
folder = Path(sys.argv[1])
try:
    with replacing_folder(folder) as building:
        (building / "new").touch()
    print(names(folder), names(folder.parent))
    move(folder, folder.with_name("aside"))
    print(names(folder.parent), names(folder.with_name("aside")))
except OutriderError as error:
    print(error)
"""


@in_own_namespace
def test_the_root_of_a_disk_is_refused_in_a_sentence_before_any_work(folder: Path) -> None:
    ran = run_with_mounts('mount -t tmpfs tmpfs "$1"', REPLACE, folder)
    assert ran.returncode == 0, ran.stderr
    assert "is the root of a disk (a mount point)" in ran.stdout
    assert f"such as {folder / 'out'}" in ran.stdout


@in_own_namespace
def test_a_folder_of_a_containers_image_is_replaced_and_moved_aside(folder: Path, tmp_path: Path) -> None:
    """It lies in a lower layer, and cannot be renamed: the system says that it is on another disk."""
    layers = tmp_path / "layers"
    (layers / "lower" / "there").mkdir(parents=True)
    (layers / "lower" / "there" / "old").touch()
    (layers / "merged").mkdir()
    mounts = (
        'mount -t tmpfs tmpfs "$2/merged" && cd "$2" && mkdir merged/upper merged/work merged/all && '
        "mount -t overlay overlay "
        '-o lowerdir=lower,upperdir=merged/upper,workdir=merged/work,userxattr "$2/merged/all"'
    )
    there = layers / "merged" / "all" / "there"
    ran = run_with_mounts(mounts, REPLACE, there, layers)
    if "mount" in ran.stderr and ran.returncode == 32:
        pytest.skip("no overlays here")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["['new'] ['there']", "['aside'] ['new']"]
