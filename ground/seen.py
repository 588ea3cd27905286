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
from contextlib import suppress
from pathlib import Path
from typing import Any

from .leftovers import machine_tag
from .replacing import replacing

KEPT_SECONDS = 24 * 3600
_WORTH_KEEPING = 1_000_000  # bytes; a smaller file is read in a millisecond
_MOST = 10_000

# A file that was changed so recently may be changed again within one tick of the file system's clock.
_UNSETTLED = 2_000_000_000  # nanoseconds

_keeping = threading.Lock()  # files are read by several threads
_known: dict[str, str] = {}


def digest_of(file: Path, status: os.stat_result) -> str | None:
    """Return the digest of a file that was read before and has not changed since; None for others."""
    key = _key(file, status)
    if key not in _known and status.st_size >= _WORTH_KEEPING:
        kept = _kept().get(key)
        if kept is not None:
            _known[key] = kept[0]
    return _known.get(key)


def remember(file: Path, before: os.stat_result, after: os.stat_result, digest: str) -> None:
    """Remember the digest of a file with the status that it had before and after it was read."""
    key = _key(file, before)
    settled = time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _UNSETTLED
    if not settled or key != _key(file, after):
        return
    _known[key] = digest
    if before.st_size >= _WORTH_KEEPING:
        with _keeping, suppress(OSError, RuntimeError):  # it only costs time
            _keep(key, digest)


def forget() -> None:
    """Forget what this process knows; what the cache folder holds stays."""
    _known.clear()


def cache_file() -> Path:
    """Return where digests of large files are kept from one process to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider" / "digests.json"


def _key(file: Path, status: os.stat_result) -> str:
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return " ".join([machine_tag(), *map(str, numbers), os.path.realpath(file)])


def _kept() -> dict[str, tuple[str, float]]:
    """Return digest and time of reading of what the cache folder knows; nothing where it is damaged or foreign."""
    try:
        saved: dict[str, Any] = json.loads(cache_file().read_text(encoding="utf-8"))
        now = time.time()
        return {key: (str(d), float(t)) for key, (d, t) in saved.items() if 0 <= now - float(t) < KEPT_SECONDS}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return {}


def _keep(key: str, digest: str) -> None:
    kept = _kept() | {key: (digest, time.time())}
    newest = sorted(kept.items(), key=lambda entry: entry[1][1])[-_MOST:]
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    with replacing(cache_file()) as temporary:
        temporary.write_text(json.dumps(dict(newest)), encoding="utf-8")
