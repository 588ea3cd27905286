"""Results of long work on disk: whole files or none, and a full disk said in one sentence."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import foreign
from .errors import BadInputError
from .replacing import replacing


def write_atomically(file: Path, text: str) -> None:
    """Write `file` so that a reader, or a run that continues after a crash, sees all of it or nothing."""
    with replacing(file) as temporary, temporary.open("w", encoding="utf-8") as opened:
        opened.write(text)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        BadInputError: the file cannot be read, or holds something else.
    """
    try:
        return foreign.read_json(file)
    except foreign.Unreadable as error:
        raise BadInputError(f"{file}: cannot be read ({error.reason}).") from error
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read ({error}).") from error


# ------------------------------------------------------------ room on the disk


def is_disk_full(error: BaseException | None) -> bool:
    """Tell whether a full disk, or a full quota, lies at the root of `error`.

    Libraries in C++ and Rust (safetensors, torch) report it in words only, and often as the cause of another error.
    """
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def disk_full_explained(folder: Path, kept: str) -> Iterator[None]:
    """Turn "no space left" into a BadInputError that names the folder and what was `kept`."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise BadInputError(
            f"the disk that holds {folder} is full ({error}). {kept} Free some space, then run the same command again."
        ) from error


def require_space(folder: Path, num_bytes: int, advice: str) -> None:
    """Raise BadInputError now if `num_bytes` do not fit on the disk that holds `folder`, rather than after hours."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise BadInputError(
            f"{folder} needs {readable_bytes(num_bytes)}, but its disk has {readable_bytes(free)} free. {advice}"
        )


def readable_bytes(count: int) -> str:
    """Return `count` bytes in words, such as `1.5 GB`."""
    size, units = float(count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and units[1:]:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"
