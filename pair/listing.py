"""A pair is a closed list of regular files: nothing links out of it, and nothing in it can be waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from ..common.safe_load import kind_of

_MAX_FILES, _MAX_DEPTH = 10_000, 20


def irregular(folder: Path) -> Iterator[str]:
    """Yield what in a pair is neither a regular file nor a folder, one line each. Nothing is opened.

    A link shows whoever opens it a file that is not in the pair, a pipe is waited for, and a device does something.
    """
    count, waiting = 0, [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                count += 1
                if count > _MAX_FILES or depth > _MAX_DEPTH:
                    yield f"more than {_MAX_FILES} files, or {_MAX_DEPTH} folders inside each other"
                    return
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:  # a temporary file of whoever writes pair.json now
                    continue
                if stat.S_ISDIR(mode):
                    waiting.append((Path(entry.path), depth + 1))
                elif not stat.S_ISREG(mode):
                    name = Path(entry.path).relative_to(folder).as_posix()
                    yield f"{name}: {kind_of(mode)}; a pair holds regular files only"


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    plain = path.as_posix() == name and not path.is_absolute() and ".." not in path.parts and path.parts
    if not plain or "\\" in name or ":" in path.parts[0] or not name.isprintable():
        raise ValueError(f"{name[:80]!r} is no plain path inside the pair")
    return name


# The path of a file inside a pair's folder: relative, without "..", as it is written on every system.
InsideName = Annotated[str, AfterValidator(_inside)]
