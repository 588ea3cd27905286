"""Writing results of long work: whole files or none, and a full disk said in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..target import BadInputError


def write_atomically(file: Path, text: str) -> None:
    """Write `file` so that a reader, or a run that continues after a crash, sees all of it or nothing."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{file}: cannot be read ({error}).") from error


@contextmanager
def disk_full_explained(folder: Path, kept: str) -> Iterator[None]:
    """Turn "no space left" into a BadInputError that names the folder and what was `kept`."""
    try:
        yield
    except Exception as error:
        if not _is_disk_full(error):
            raise
        raise BadInputError(f"the disk that holds {folder} is full ({error}). {kept} Free some space, then run the same command again.") from error


def require_space(folder: Path, num_bytes: int, advice: str) -> None:
    """Raise BadInputError now if `num_bytes` do not fit on the disk that holds `folder`, rather than after hours."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise BadInputError(f"{folder} needs {readable_bytes(num_bytes)}, but its disk has {readable_bytes(free)} free. {advice}")


def readable_bytes(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and units[1:]:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def _is_disk_full(error: BaseException) -> bool:
    """Libraries in C++ and Rust report it without an errno of their own."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
