"""Digests of files that were read before, by path, device, inode, size, and the times of the last change.

They are kept in this process, and those of large files in the user's cache folder for a day: a disk that loses bits
without changing a time is found out then. A digest from here can only spare a reading, never refuse a file.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from .atomic import machine_tag, replacing, working_name
from .untrusted_files import read_json

Entries = dict[str, tuple[str, float]]  # digest and time of reading, by key

KEPT_SECONDS = 24 * 3600
_WORTH_KEEPING = 1_000_000  # bytes; a smaller file is read in a millisecond
_MOST = 10_000

# A file that was changed so recently may be changed again within one tick of the file system's clock.
_UNSETTLED = 2_000_000_000  # nanoseconds
# How often, and for how many seconds in between, that clock is looked at until it has moved on.
_LOOKS, _PAUSE = 25, 0.002

_known: dict[str, str] = {}
_unsaved: Entries = {}
_one_at_a_time = threading.Lock()  # files are read by several threads


def digest_of(file: Path, status: os.stat_result) -> str | None:
    """Return the digest of a file that was read before and has not changed since; None for others."""
    key = _key(file, status)
    if key not in _known and status.st_size >= _WORTH_KEEPING:
        with _one_at_a_time:  # so that the cache folder is read once
            saved = _saved().get(key)
        if saved:
            _known[key] = saved[0]
    return _known.get(key)


def remember(file: Path, before: os.stat_result, after: os.stat_result, digest: str, settled: bool | None) -> None:
    """Remember the digest of a file with the status that it had before and after it was read.

    `settled`: whether its next change will give it another time (`is_settled`); None where that is unknown.
    """
    key = _key(file, before)
    if settled is None:
        settled = time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _UNSETTLED
    if settled and key == _key(file, after):
        _known[key] = digest
        if before.st_size >= _WORTH_KEEPING:
            _unsaved[key] = digest, time.time()


def is_settled(files: Iterable[Path], folder: Path) -> bool:
    """Wait a few milliseconds, and tell whether all that is written in `folder` from now on gets a later time.

    Then a digest of `files`, which lie there, is theirs for as long as their times stay.
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


def state_of(folder: Path) -> str | None:
    """Return a text that is another one once a file in `folder` changes; None while a last change is too recent."""
    files = {file: file.stat() for file in sorted(folder.iterdir()) if file.is_file()}
    newest = max((max(status.st_mtime_ns, status.st_ctime_ns) for status in files.values()), default=0)
    return None if time.time_ns() - newest <= _UNSETTLED else "\n".join(_key(*item) for item in files.items())


def save() -> None:
    """Write the digests that were remembered since the last time into the cache folder, if any."""
    with _one_at_a_time, suppress(OSError, RuntimeError):  # it only costs time
        entries = dict(_unsaved)
        _unsaved.clear()
        if entries:
            _write(_saved() | entries)


def forget() -> None:
    """Forget the digests of this process; those in the cache folder stay."""
    _known.clear()
    _parsed.cache_clear()


def cache_file() -> Path:
    """Return the file in which digests of large files are kept from one process to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider" / "digests.json"


def _key(file: Path, status: os.stat_result) -> str:
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return " ".join([machine_tag(), *map(str, numbers), os.path.realpath(file)])


def _saved() -> Entries:
    """Return the last day's digests in the cache folder; none where it is damaged or foreign."""
    try:
        status, now = cache_file().stat(), time.time()
        saved = _parsed(cache_file(), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return {key: entry for key, entry in saved.items() if 0 <= now - entry[1] < KEPT_SECONDS}
    except (OSError, ValueError, TypeError, RuntimeError):
        return {}


@lru_cache(maxsize=1)
def _parsed(file: Path, version: tuple[int, ...]) -> Entries:  # noqa: ARG001 (a part of the key)
    """Return the contents of the cache file, which is read again only when another version of it is there."""
    saved = read_json(file)
    return {key: (str(digest), float(read)) for key, (digest, read) in saved.items()}


def _write(entries: Entries) -> None:
    newest = sorted(entries.items(), key=lambda entry: entry[1][1])[-_MOST:]
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    with replacing(cache_file()) as temporary:
        temporary.write_text(json.dumps(dict(newest)), encoding="utf-8")
