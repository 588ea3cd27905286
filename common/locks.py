"""One writer per folder: an exclusive lock that the kernel takes back from a process that dies.

The lock file stands beside the folder (`.<name>.lock`), so that a pair stays a closed list of files, and says who
holds it. It is gone when no process writes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from .atomic import recover
from .errors import BadInputError
from .values import printable_command

_COMMAND_LENGTH = 200
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}

_log = logging.getLogger(__name__)
_held: set[tuple[str, int]] = set()  # folders, each with the thread that holds its lock


@contextmanager
def locked(folder: str | Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the one lock of `folder` inside: no other writes there, and leftovers of dead processes are cleared first.

    A thread that holds it may ask again. No lock survives the process that held it. A folder inside has its own.

    `wait`: seconds to wait for another writer. Work of minutes or hours does not wait.

    Raises BadInputError if another process or thread holds it (names process, command, machine, since when), or the
    place cannot be written.
    """
    resolved = Path(folder).expanduser().resolve()
    key = (str(resolved), threading.get_ident())
    lock = None if key in _held else _acquired(resolved, wait)
    if lock is None:
        yield
        return
    _held.add(key)
    try:
        recover(resolved)
        yield
    finally:
        _held.remove(key)
        _release(lock)


@contextmanager
def claiming(file: Path, wait: float = 0.0) -> Iterator[bool | None]:
    """Try for the lock file `file`, and yield whether this process holds it inside; None on a disk without locks.

    Unlike `locked`, it belongs to no folder, nothing is cleared, and another holder is no error: after `wait` seconds
    (-1 for as long as it takes), this process does not hold it. The kernel takes it back from a process that dies.
    """
    lock = FileLock(file, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield None
        return
    try:
        yield True
    finally:
        _release(lock)


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Yield an empty folder in the system's place for temporary files, which goes afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"outrider-{purpose}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def lock_file(folder: Path) -> Path:
    """Return the lock file of a resolved folder: beside it, or inside where only the inside is shared."""
    shared_inside = os.path.ismount(folder) or (folder.is_dir() and not os.access(folder.parent, os.W_OK))
    return folder / ".lock" if shared_inside else folder.with_name(f".{folder.name}.lock")


def _acquired(folder: Path, wait: float) -> BaseFileLock | None:
    """Return the held lock; None, with a warning, on a disk without locks."""
    file = lock_file(folder)
    lock = FileLock(file, thread_local=False, on_acquired=_sign)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait)
    except Timeout as error:
        waited = f"{wait:g} seconds were not enough for it. " if wait else ""
        raise BadInputError(
            f"{folder} is being written by {_holder(file)}. {waited}Wait until it ends, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno in _NO_LOCKS:
            _log.warning("%s is on a disk without locks: take care that nothing else writes there.", folder)
            return None
        raise BadInputError(
            f"{folder} cannot be written: {error.strerror} ({file}). Choose a folder that you may write to."
        ) from error
    return lock


def _release(lock: BaseFileLock) -> None:
    """Remove the lock file while it is held, so that a process waiting for it asks for a new one; then let go."""
    with suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def _sign(descriptor: int) -> None:
    """Write into the lock file who holds it."""
    owner = {
        "process": os.getpid(),
        "command": printable_command([Path(sys.argv[0]).name, *sys.argv[1:]])[:_COMMAND_LENGTH],
        "machine": platform.node(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(owner).encode())


def _holder(file: Path) -> str:
    """Return the lock's holder, if the file names it: another program's does not, nor one that is being written."""
    try:
        said = "process {process} ({command}) on {machine}, since {since}".format(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, LookupError):
        return "another process"
    return "".join(letter if letter.isprintable() else "?" for letter in said)
