"""Where nothing can be written, a sentence says so: before the work, or, during it, with what was kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.common.atomic import (
    CannotWriteError,
    keeping,
    replacing,
    replacing_folder,
    require_folder,
    write_atomically,
)


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


def tree(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


# ------------------------------------------------------------ before


@pytest.mark.parametrize("depth", ["there", "missing", "far/away/missing"])
def test_a_possible_output_leaves_no_trace(tmp_path: Path, depth: str) -> None:
    (tmp_path / "there").mkdir()
    require_folder(tmp_path / depth)
    assert tree(tmp_path) == ["there"]


@pytest.mark.parametrize("output", ["file", "file/below", "file/far/below", "dangling/below"])
def test_a_file_in_the_way_is_named(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(
        CannotWriteError, match=rf"the report cannot be written into .*{output}: .* is (a file|no folder)"
    ):
        require_folder(tmp_path / output, "the report")


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "ro") as disk, pytest.raises(CannotWriteError, match="Read-only file system"):
        require_folder(disk / "run")


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
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


# ------------------------------------------------------------ during


def write_text(folder: Path) -> None:
    write_atomically(folder / "result", "x" * 300_000)


def write_tensors(folder: Path) -> None:
    with replacing(folder / "result") as temporary:
        save_file({"x": torch.zeros(100_000)}, temporary)


def write_torch(folder: Path) -> None:
    with replacing_folder(folder / "result") as building:
        torch.save(torch.zeros(100_000), building / "optimizer.pt")


WRITERS = [write_text, write_tensors, write_torch]


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_said_with_its_folder_and_what_was_kept(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Real: a disk of 100 kB."""
    with mounted(tmp_path / "disk", "-o", "size=100k") as disk:
        (disk / "run").mkdir()
        with pytest.raises(CannotWriteError) as raised, keeping(lambda: "All of yesterday's was kept."):
            write(disk / "run")
        assert tree(disk) == ["run"]
    said = str(raised.value)
    assert f"{disk / 'run'}" in said
    assert "All of yesterday's was kept." in said
    assert said.startswith(f"the disk that holds {disk / 'run'} is full: result could not be written")
    assert said.endswith("Free some space, then run the same command again.")


@pytest.mark.parametrize("write", WRITERS[:2])
def test_a_folder_that_was_deleted_meanwhile_is_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(CannotWriteError, match=rf"^{tmp_path / 'gone'} was deleted, or moved, while result was to be"):
        write(tmp_path / "gone" / "run")


def test_deleted_while_it_is_written(tmp_path: Path) -> None:
    def build() -> None:
        with replacing_folder(tmp_path / "run" / "result") as building:
            shutil.rmtree(tmp_path / "run")
            (building / "file").write_text("")

    with pytest.raises(CannotWriteError, match="run was deleted"):
        build()


def test_an_error_about_something_else_stays_what_it_is(tmp_path: Path) -> None:
    """Whatever is computed between opening and writing may fail, and read files elsewhere."""

    def fail(error: Exception) -> None:
        with replacing_folder(tmp_path / "result"):
            raise error

    for error in (KeyError("x"), RuntimeError("cuda"), ConnectionRefusedError(111, "refused")):
        with pytest.raises(type(error)):
            fail(error)
    with pytest.raises(FileNotFoundError):
        fail(FileNotFoundError(2, "No such file or directory", "/nowhere/target.json"))
