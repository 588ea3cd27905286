"""The processes of one launch hear each other, and none waits for one that is gone. All of them are real processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from outrider.common import BadInputError, file_process_group
from outrider.common.file_process_group import LaunchGroup, PeerError
from outrider.common.signals import StoppedError

Act = Callable[[LaunchGroup], None]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_process_group, "SECONDS_BETWEEN_ROLL_CALLS", 0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / f"{file_process_group.PREFIX}1"


def joined(here: LaunchGroup) -> AbstractContextManager[None]:
    return here.joined(lambda: gather(here.folder, here.rank, here.size))


def start(folder: Path, rank: int, size: int, act: Act) -> multiprocessing.Process:
    """Start the process `rank`, which does `act` and ends."""

    def run() -> None:
        with joined(LaunchGroup(folder, rank, size)):
            act(LaunchGroup(folder, rank, size))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def gather(folder: Path, rank: int, size: int) -> None:
    """Wait until every process has called it as often as this one, as a barrier does."""
    number = len(list(folder.glob(f"gathered-{rank}-*")))
    (folder / f"gathered-{rank}-{number}").touch()
    while any(not (folder / f"gathered-{other}-{number}").exists() for other in range(size)):
        time.sleep(0.01)


def wait(here: LaunchGroup) -> None:
    here.receive("never", 0)


def kill(_: LaunchGroup) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_: LaunchGroup) -> None:
    raise BadInputError("the disk is full.")


def stop(_: LaunchGroup) -> None:
    raise StoppedError(number=signal.SIGTERM)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (kill, PeerError, "process 1 of 3 died without a word"),
        (fail, PeerError, "process 1 of 3 ended: the disk is full."),
        (stop, StoppedError, "process 1 of 3 ended: stopped by SIGTERM"),
    ],
)
def test_whoever_waits_hears_at_once_of_one_that_is_gone(folder, act, error, message):
    others = [start(folder, 1, 3, act), start(folder, 2, 3, wait)]
    here, began = LaunchGroup(folder, 0, 3), time.monotonic()
    with pytest.raises(error, match=message), joined(here):
        here.receive("never", 2)
    for process in others:
        process.join(30)
        assert process.exitcode not in (0, None)
    assert time.monotonic() - began < 20
    file_process_group.clear_abandoned(folder.parent)
    assert list(folder.parent.iterdir()) == [], "the next run removes what is left"


def test_all_hear_what_the_first_found(folder):
    def listen(here: LaunchGroup) -> None:
        assert here.on_main("found", lambda: "not asked") == "42"
        here.barrier("there")

    other = start(folder, 1, 2, listen)
    here = LaunchGroup(folder, 0, 2)
    with joined(here):
        assert here.on_main("found", lambda: "42") == "42"
        here.barrier("there")
    other.join(30)
    assert other.exitcode == 0
    assert not folder.exists()


def test_one_alone_waits_for_nobody():
    alone = LaunchGroup()
    alone.barrier("there")
    alone.check_peers()
    assert alone.on_main("found", lambda: "42") == "42"


def test_a_process_in_a_collective_is_ended_with_the_message(folder, capfd):
    """It waits where no exception reaches it."""
    waits = folder.parent / "waits"

    def blocked(here: LaunchGroup) -> None:
        with here.watching_peers():
            waits.touch()
            time.sleep(60)

    other = start(folder, 1, 2, blocked)

    def fail() -> None:
        while not waits.exists():  # before, it would end by an exception
            time.sleep(0.01)
        raise BadInputError("the disk is full.")

    with pytest.raises(BadInputError), joined(LaunchGroup(folder, 0, 2)):
        fail()
    other.join(20)
    assert other.exitcode == 2
    assert "error: process 0 of 2 ended: the disk is full." in capfd.readouterr().err


def test_a_folder_that_not_all_see_is_told_as_that(folder, monkeypatch):
    monkeypatch.setattr(file_process_group, "SECONDS_UNTIL_SEEN", 0.1)
    with (
        pytest.raises(BadInputError, match=r"process 0 of 2 does not see .*alive-1.*a disk that all machines share"),
        LaunchGroup(folder, 0, 2).joined(lambda: None),
    ):
        pass


def test_a_full_disk_does_not_hide_why_a_process_ended(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder.mkdir()
    (folder / "alive-1").touch()
    monkeypatch.setattr(file_process_group, "write_atomically", full)
    with pytest.raises(BadInputError, match="the reason"), LaunchGroup(folder, 0, 2).joined(lambda: None):
        raise BadInputError("the reason")
