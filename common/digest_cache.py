"""Digests of files that were read before, by what a file system says of a file that has not changed.

That is its path, device, inode, size, and the times of its last change. They are kept in this process, and those of
large files in the user's cache folder for a day: a disk that loses bits by itself is found out after a day at the
latest. A digest that is found here can only spare a reading, never refuse a file.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .atomic import machine_tag, replacing, working_name

Entries = dict[str, tuple[str, float]]  # digest and time of reading, by key

KEPT_SECONDS = 24 * 3600
_WORTH_KEEPING = 1_000_000  # bytes; a smaller file is read in a millisecond
_MOST = 10_000

# A file that was changed so recently may be changed again within one tick of the file system's clock.
_UNSETTLED = 2_000_000_000  # nanoseconds
# How often, and for how many seconds in between, that clock is looked at until it has moved on.
_LOOKS, _PAUSE = 25, 0.002

_keeping = threading.RLock()  # files are read by several threads
_known: dict[str, str] = {}
_new: dict[str, tuple[str, float]] = {}  # not in the cache folder yet
_collecting = 0
_read: tuple[tuple[int, ...], Entries] | None = None


def digest_of(file: Path, status: os.stat_result) -> str | None:
    """Return the digest of a file that was read before and has not changed since; None for others."""
    key = _key(file, status)
    if key not in _known and status.st_size >= _WORTH_KEEPING:
        kept = _kept().get(key)
        if kept is not None:
            _known[key] = kept[0]
    return _known.get(key)


def remember(
    file: Path, before: os.stat_result, after: os.stat_result, digest: str, settled: bool | None = None
) -> None:
    """Remember the digest of a file with the status that it had before and after it was read.

    Args:
        settled: whether its next change will give it another time, as far as its writer knows (`is_settled`).
    """
    key = _key(file, before)
    if settled is None:
        settled = time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _UNSETTLED
    if not settled or key != _key(file, after):
        return
    _known[key] = digest
    if before.st_size >= _WORTH_KEEPING:
        with keeping_once():
            _new[key] = digest, time.time()


def is_settled(files: Iterable[Path], folder: Path) -> bool:
    """Wait a few milliseconds, and tell whether whatever is written in `folder` from now on gets a later time.

    Then these files, which lie there, cannot change without a trace. A digest that is computed now is theirs for as
    long as their times stay.
    """
    newest = max((file.stat().st_ctime_ns for file in files), default=0)
    probe = working_name(folder / "time", "tmp")
    try:
        for _ in range(_LOOKS):
            probe.write_bytes(b"?")
            if probe.stat().st_ctime_ns > newest:
                return os.name != "nt"  # where it is the time of a file's making
            time.sleep(_PAUSE)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            probe.unlink()
    return False


@contextmanager
def keeping_once() -> Iterator[None]:
    """Write what is remembered inside into the cache folder at its end, once."""
    global _collecting
    with _keeping:
        _collecting += 1
    try:
        yield
    finally:
        with _keeping:
            _collecting -= 1
            if _new and not _collecting:
                with suppress(OSError, RuntimeError):  # it only costs time
                    _write(_kept() | _new)
                _new.clear()


def forget() -> None:
    """Forget what this process knows; what the cache folder holds stays."""
    global _read
    _known.clear()
    _read = None


def cache_file() -> Path:
    """Return where digests of large files are kept from one process to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider" / "digests.json"


def _key(file: Path, status: os.stat_result) -> str:
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return " ".join([machine_tag(), *map(str, numbers), os.path.realpath(file)])


def _kept() -> Entries:
    """Return digest and time of reading of what the cache folder knows; nothing where it is damaged or foreign."""
    global _read
    try:
        status = cache_file().stat()
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if _read is None or _read[0] != version:
            saved: dict[str, Any] = json.loads(cache_file().read_text(encoding="utf-8"))
            _read = version, {key: (str(digest), float(read)) for key, (digest, read) in saved.items()}
        now = time.time()
        return {key: entry for key, entry in _read[1].items() if 0 <= now - entry[1] < KEPT_SECONDS}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return {}


def _write(entries: Entries) -> None:
    newest = sorted(entries.items(), key=lambda entry: entry[1][1])[-_MOST:]
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    with replacing(cache_file()) as temporary:
        temporary.write_text(json.dumps(dict(newest)), encoding="utf-8")
