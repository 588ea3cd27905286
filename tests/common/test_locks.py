"""One writer per folder: the others are refused by name, no lock survives its process, and leftovers are cleared."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.common.atomic import Leftover, working_name
from outrider.common.locks import lock_file, locked

HOLD = """
import sys, time
from outrider.common.locks import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock of `tmp_path / "out"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def take(folder: Path, wait: float = 0.0) -> None:
    """Hold the lock of `folder` for a moment."""
    with locked(folder, wait):
        pass


def refusal(folder: Path, wait: float = 0.0) -> str:
    with pytest.raises(BadInputError) as caught:
        take(folder, wait)
    return str(caught.value)


def test_a_second_process_is_refused_with_the_name_of_the_first(holder, tmp_path):
    said = refusal(tmp_path / "out")
    assert f"is being written by process {holder.pid} (-c " in said
    assert f"on {os.uname().nodename}, since 20" in said


def test_the_name_holds_no_secret_of_the_command(tmp_path, monkeypatch):
    url = "https://user:s3cret@host.example/v1?token=s3cret"
    words = ["watch", url, "--key", "s3cret", "--key=s3cret", "--webhook", "https://hooks/s3cret", f"a.b=['{url}']"]
    monkeypatch.setattr(sys, "argv", ["/bin/outrider", *words])
    with locked(tmp_path / "out"):
        signed = lock_file(tmp_path / "out").read_text()
    assert "outrider watch https://host.example/v1 --key" in signed
    assert "s3cret" not in signed


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert names(tmp_path) == [".out.lock"]
    take(tmp_path / "out")
    assert names(tmp_path) == []


def test_a_second_thread_is_refused_and_the_same_one_may_ask_again(tmp_path):
    found: list[str] = []
    with locked(tmp_path / "out"):
        take(tmp_path / "other" / ".." / "out")
        thread = threading.Thread(target=lambda: found.append(refusal(tmp_path / "out")))
        thread.start()
        thread.join()
    assert f"process {os.getpid()}" in found[0]


def test_whoever_waits_gets_the_lock_when_the_other_is_done(tmp_path):
    order: list[str] = []
    refused = threading.Event()

    def second() -> None:
        order.append(refusal(tmp_path / "out", wait=0.1))
        refused.set()
        with locked(tmp_path / "out", wait=20.0):
            order.append("second")

    with locked(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        refused.wait(20.0)
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert "0.1 seconds were not enough" in order.pop(0)
    assert order == ["first", "second"]


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A data loader's worker may live longer than the training that started it."""
    with locked(tmp_path / "out"):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
    take(tmp_path / "out")
    child.kill()
    child.join()


def test_many_processes_take_turns(tmp_path):
    """No turn is lost, although each reads, waits, and writes what it read plus one."""
    script = """
import sys, time
from pathlib import Path
from outrider.common.locks import locked
file = Path(sys.argv[1]) / "count"
for _ in range(10):
    with locked(sys.argv[1], wait=60.0):
        number = int(file.read_text()) if file.exists() else 0
        time.sleep(0.002)
        file.write_text(str(number + 1))
"""
    folder = tmp_path / "out"
    folder.mkdir()
    started = [subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=tmp_path) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert (folder / "count").read_text() == "40"
    assert names(tmp_path) == ["out"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "Choose a folder that you may write to" in refusal(tmp_path / "file" / "out")


def test_the_lock_of_a_mount_point_lies_inside(tmp_path):
    """Two containers share what is mounted, not what stands beside it."""
    assert lock_file(Path("/proc")) == Path("/proc/.lock")
    assert lock_file(tmp_path) == tmp_path.with_name(f".{tmp_path.name}.lock")


def left(place: Path, kind: str, process: int) -> Path:
    name = working_name(place, kind).name.replace(f"-{os.getpid()}-", f"-{process}-", 1)
    return place.with_name(name)


def test_what_dead_processes_left_is_removed(tmp_path):
    """What somebody else may have made stays: a backup of one file, and others without a mark of ours."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    out, dead = tmp_path / "out", ended.pid
    (out / "features" / "key").mkdir(parents=True)
    (out / "data").mkdir()
    kept = ["kept", f".data.{dead}.old", f".features.{dead}.old", f".recipe.yaml.{dead}.tmp"]
    for name in kept:
        (out / name).touch()
    for file in (out / "recipe.yaml", out / "features" / "key" / "states", out):
        left(file, "tmp", dead).touch()
    left(out, "tmp", dead).mkdir()
    take(out)
    left_over = sorted(f.relative_to(tmp_path).as_posix() for f in tmp_path.rglob("*"))
    assert left_over == sorted(
        ["out", "out/data", "out/features", "out/features/key", *(f"out/{name}" for name in kept)]
    )


def test_what_living_processes_write_stays(tmp_path):
    (tmp_path / "out").mkdir()
    mine, parents = working_name(tmp_path / "out" / "file", "tmp"), left(tmp_path / "out" / "file", "tmp", os.getppid())
    foreign = mine.with_name(".file.outrider-1-00000000-0.tmp")
    for file in (mine, parents, foreign):
        file.touch()
    take(tmp_path / "out")
    assert all(file.exists() for file in (mine, parents, foreign))
    os.utime(foreign, (1e9, 1e9))
    os.utime(parents, (1e9, 1e9))  # older than the process that has this number now
    take(tmp_path / "out")
    assert [file.exists() for file in (mine, parents, foreign)] == [True, False, False]


def test_other_hidden_files_are_nobodys_leftovers():
    for name in (".out.lock", ".git", ".x.tmp", "x.12.tmp", ".x.12.part", ".x.123.old", ".x.123-1a2b3c4d-0.tmp"):
        assert Leftover.at(Path(name)) is None, name
