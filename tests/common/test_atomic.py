"""A file or folder is replaced as a whole or stays as it was; a sentence says why nothing can be written."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from outrider.common import atomic
from outrider.common.atomic import CannotWriteError, keeping, replacing, replacing_folder, require_folder
from outrider.common.locks import locked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "there"
    made.mkdir()
    (made / "old").touch()
    return made


def tree(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


def test_a_new_folder_appears_when_it_is_finished(tmp_path):
    final = tmp_path / "deep" / "new"
    with replacing_folder(final) as building:
        (building / "file").touch()
        assert not final.exists()
    assert tree(final.parent) == ["new", "new/file"]


def test_an_older_one_gives_way_as_a_whole(folder):
    with replacing_folder(folder) as building:
        (building / "new").touch()
        assert tree(folder) == ["old"]
    assert tree(folder.parent) == ["there", "there/new"]


def test_a_failure_leaves_what_was_there(folder):
    def fill() -> None:
        with replacing_folder(folder) as building:
            (building / "new").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fill()
    assert tree(folder.parent) == ["there", "there/old"]


def test_a_block_that_removes_its_folder_changes_nothing(folder):
    with replacing_folder(folder) as building:
        shutil.rmtree(building)
    assert tree(folder.parent) == ["there", "there/old"]


def killed_before(name: str, number: int, folder: Path, exchange: bool) -> bool:
    """Replace `folder` in a process that is killed before its `number`-th call of `name`; tell whether it was."""
    script = f"""
import os, shutil, signal, sys
from pathlib import Path
from unittest.mock import Mock
from outrider.common import atomic
if not {exchange}:
    atomic._exchange = lambda *_: False
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
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(folder, exchange):
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
                assert tree(folder) in (["old"], ["new"])
            with locked(folder):
                pass
            assert tree(folder.parent) in (["there", "there/old"], ["there", "there/new"]), (name, number)
            found.append(tree(folder))
    assert ["old"] in found
    assert ["new"] in found


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than the tests' own."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm")) if os.path.isdir("/dev/shm") else None
    if place is None or place.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is one file system only")
    yield place
    shutil.rmtree(place)


def test_a_link_to_another_disk_is_followed_and_stays(tmp_path, elsewhere):
    (elsewhere / "data").mkdir()
    (elsewhere / "data" / "old").touch()
    (tmp_path / "data").symlink_to(elsewhere / "data")
    with replacing_folder(tmp_path / "data") as building:
        (building / "new").touch()
        assert building.stat().st_dev == elsewhere.stat().st_dev, "it is written where it is going to be"
    assert (tmp_path / "data").is_symlink()
    assert tree(elsewhere) == ["data", "data/new"]


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
from unittest.mock import Mock
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
def test_the_root_of_a_disk_is_refused_in_a_sentence_before_any_work(folder):
    ran = run_with_mounts('mount -t tmpfs tmpfs "$1"', REPLACE, folder)
    assert ran.returncode == 0, ran.stderr
    assert "is the root of a disk (a mount point)" in ran.stdout
    assert f"such as {folder / 'out'}" in ran.stdout


@in_own_namespace
def test_a_folder_of_a_containers_image_is_replaced_and_moved_aside(folder, tmp_path):
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


def command_works(*command: object) -> bool:
    try:
        return subprocess.run(list(map(str, command)), capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A small disk of its own at `folder`; the test is skipped where nobody may mount one."""
    folder.mkdir()
    if not command_works("mount", "-t", "tmpfs", *options, "tmpfs", folder):
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("depth", ["there", "missing", "far/away/missing"])
def test_a_possible_output_leaves_no_trace(tmp_path, depth):
    (tmp_path / "there").mkdir()
    require_folder(tmp_path / depth)
    assert tree(tmp_path) == ["there"]


@pytest.mark.parametrize("output", ["file", "file/below", "file/far/below", "dangling/below"])
def test_a_file_in_the_way_is_named(tmp_path, output):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    said = rf"the report cannot be written into .*{output}: .* is (a file|no folder)"
    with pytest.raises(CannotWriteError, match=said):
        require_folder(tmp_path / output, "the report")


def test_a_read_only_disk_is_refused(tmp_path):
    with mounted(tmp_path / "disk", "-o", "ro") as disk, pytest.raises(CannotWriteError, match="Read-only file system"):
        require_folder(disk / "run")


def test_a_folder_without_permission_is_refused(tmp_path):
    """Root may write everywhere but where a file system says that nothing changes any more."""
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    if os.geteuid() == 0 and not command_works("chattr", "+i", locked):
        pytest.skip("this file system has no immutable folders")
    try:
        with pytest.raises(CannotWriteError, match=r"(Operation not permitted|Permission denied)\. Choose another"):
            require_folder(locked / "run")
    finally:
        command_works("chattr", "-i", locked)


def write_text(folder: Path) -> None:
    atomic.write_atomically(folder / "result", "x" * 300_000)


def write_tensors(folder: Path) -> None:
    with replacing(folder / "result") as temporary:
        save_file({"x": torch.zeros(100_000)}, temporary)


def write_torch(folder: Path) -> None:
    with replacing_folder(folder / "result") as building:
        torch.save(torch.zeros(100_000), building / "optimizer.pt")


WRITERS = [write_text, write_tensors, write_torch]


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_said_with_its_folder_and_what_was_kept(tmp_path, write):
    """Real: a disk of 100 kB."""
    with mounted(tmp_path / "disk", "-o", "size=100k") as disk:
        (disk / "run").mkdir()
        with pytest.raises(CannotWriteError) as raised, keeping(lambda: "All of yesterday's was kept."):
            write(disk / "run")
        assert tree(disk) == ["run"]
    said = str(raised.value)
    assert "All of yesterday's was kept." in said
    assert said.startswith(f"the disk that holds {disk / 'run'} is full: result could not be written")
    assert said.endswith("Free some space, then run the same command again.")


@pytest.mark.parametrize("write", WRITERS[:2])
def test_a_folder_that_was_deleted_meanwhile_is_named(tmp_path, write):
    with pytest.raises(CannotWriteError, match=rf"^{tmp_path / 'gone'} was deleted, or moved, while result was to be"):
        write(tmp_path / "gone" / "run")


def test_deleted_while_it_is_written(tmp_path):
    def build() -> None:
        with replacing_folder(tmp_path / "run" / "result") as building:
            shutil.rmtree(tmp_path / "run")
            (building / "file").write_text("")

    with pytest.raises(CannotWriteError, match="run was deleted"):
        build()


def test_an_error_about_something_else_stays_what_it_is(tmp_path):
    """Whatever is computed between opening and writing may fail, and read files elsewhere."""
    missing = FileNotFoundError(2, "No such file or directory", "/nowhere/target.json")
    for error in (KeyError("x"), RuntimeError("cuda"), ConnectionRefusedError(111, "refused"), missing):
        with pytest.raises(type(error)), replacing_folder(tmp_path / "result"):
            raise error


def test_a_folder_that_cannot_be_closed_hides_no_error(tmp_path, monkeypatch):
    """Python's own removal raises that, whatever it is told to ignore."""
    monkeypatch.setattr("shutil.rmtree", Mock(side_effect=OSError(errno.EBADF, "Bad file descriptor")))
    with pytest.raises(ValueError, match="the work itself"), replacing_folder(tmp_path / "out"):
        raise ValueError("the work itself")
