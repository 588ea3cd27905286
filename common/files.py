"""Results of long work on disk: whole files or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import safe_load
from .atomic import replacing
from .errors import BadInputError


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write `file` so that a reader, or a run that continues after a crash, sees all of it or nothing."""
    with replacing(file) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        BadInputError: the file cannot be read, or holds something else.
    """
    try:
        return safe_load.read_json(file)
    except safe_load.Unreadable as error:
        raise BadInputError(f"{file}: cannot be read ({error.reason}).") from error
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read ({error}).") from error
