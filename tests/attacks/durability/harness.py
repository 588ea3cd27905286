"""Attempts in processes of their own: forked from one that has everything loaded, and killed at a chosen moment."""

from __future__ import annotations

import ctypes
import hashlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.scripts import failures

HERE = Path(__file__).resolve().parent
PATIENCE = 300.0  # seconds, after which an attempt counts as hanging
CHANGES, KILL = 0, 0  # of interpose.c: the operations that change files, and SIGKILL before one of them


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: its exit code (negative for a signal), what it said, and its changes of files."""

    code: int
    said: str
    operations: int = 0


def under_interposition(folder: Path) -> None:
    """Start this program again with the operations on files counted; return in the process that counts."""
    if "OUTRIDER_ATTACK" in os.environ:
        return
    library = folder / "interpose.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "interpose.c", "-ldl"], check=True)
    os.environ |= {"OUTRIDER_ATTACK": str(folder), "LD_PRELOAD": str(library)}
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def attempt(action: Callable[[], object], kill_before: int | None = None, kill_after: float | None = None) -> Outcome:
    """Run `action` in a forked process.

    Args:
        kill_before: SIGKILL before the change of a file with this number; 0 only counts them, None does not.
        kill_after: SIGKILL after so many seconds.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _act(action, writing, kill_before)
    os.close(writing)
    timer = threading.Timer(PATIENCE if kill_after is None else kill_after, os.kill, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    timer.join()
    text, _, count = said.partition("\n# operations ")
    return Outcome(os.waitstatus_to_exitcode(status), text, int(count or 0))


def _act(action: Callable[[], object], writing: int, kill_before: int | None) -> None:
    """Run the action as the command line would, tell what it says, and leave without any cleaning up."""
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    code, shim = 0, ctypes.CDLL(None)
    if kill_before is not None:
        shim.attack_arm(CHANGES, ctypes.c_long(kill_before), KILL, 0)
    try:
        action()
    except BaseException as error:
        code = (failures.exit_code(error) if isinstance(error, Exception) else None) or failures.FAULT
        traceback.print_exc() if code == failures.FAULT else print(f"error: {failures.sentence(error)}")
    if kill_before is not None:
        print("\n# operations", shim.attack_count(CHANGES), end="")
    os._exit(code)


def names(folder: Path) -> set[str]:
    """Return the paths of all files and empty folders in `folder`."""
    found = (p for p in folder.rglob("*") if not p.is_dir() or not any(p.iterdir()))
    return {p.relative_to(folder).as_posix() for p in found}


def contents(folder: Path, skipped: Callable[[str], bool] = lambda name: False) -> dict[str, str]:
    """Return the digest of each file in `folder` whose path is not skipped."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in sorted(names(folder))
        if not skipped(name) and (folder / name).is_file()
    }
