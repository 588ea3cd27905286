"""Names of what is being written, by which the next run knows what a dead process left.

`.<name>.outrider-<process>-<machine>-<number>.<kind>` stands beside the file or folder `<name>` that it is going to be:

    tmp    a file that is being written
    new    a folder that is being filled
    ready  a folder that is finished, and takes its place now
    old    what stood in that place before
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

# How deep below a locked folder leftovers are looked for: <output>/features/<key>/<file>, and one more.
_DEPTH = 4
# After so many seconds without a change, what another machine was writing counts as left behind.
_FOREIGN_AGE = 3600.0

_NAME = re.compile(
    r"\.(?P<name>.+)\.outrider-(?P<process>\d+)-(?P<machine>[0-9a-f]{8})-\d+\.(?P<kind>tmp|new|ready|old)", re.DOTALL
)
# Names that older versions gave to what they had moved out of its place, and others may give, too.
_PERHAPS = re.compile(r"\.(?P<name>.+)\.\d+(?:-[0-9a-f]{8}-\d+)?\.(?:ready|old)", re.DOTALL)
_number = itertools.count()
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Leftover:
    """Something unfinished on the disk, and what its name says of it."""

    path: Path
    name: str
    process: int
    machine: str
    kind: str

    @classmethod
    def at(cls, path: Path) -> Leftover | None:
        """Return what `path` is by its name; None for anything that is not ours."""
        found = _NAME.fullmatch(path.name)
        if found is None:
            return None
        return cls(path, found["name"], int(found["process"]), found["machine"], found["kind"])

    @property
    def place(self) -> Path:
        """Where it was meant to be."""
        return self.path.with_name(self.name)

    def in_work(self) -> bool:
        """Tell whether the process that began it may still be at work on it."""
        try:
            changed = self.path.lstat().st_mtime
        except FileNotFoundError:
            return False
        if self.machine != machine_tag():
            return time.time() - changed < _FOREIGN_AGE
        try:
            return psutil.Process(self.process).create_time() <= changed + 1.0  # a later one only has its number
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True  # somebody else's, of whom the system tells nothing

    def remove(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


def working_name(place: Path, kind: str) -> Path:
    """Return a new name under which this process writes what is going to be `place`."""
    return place.with_name(f".{place.name}.outrider-{os.getpid()}-{machine_tag()}-{next(_number)}.{kind}")


@cache
def machine_tag() -> str:
    """Return eight hexadecimal digits for this machine, or container, since it was started: process ids count there."""
    boot = _BOOT.read_text() if _BOOT.is_file() else ""
    return hashlib.sha256(f"{platform.node()} {boot}".encode()).hexdigest()[:8]


def leftovers_beside(place: Path) -> list[Leftover]:
    """Return what was going to be `place`."""
    return [found for found in _in(place.parent) if found.name == place.name]


def leftovers_within(folder: Path, depth: int = _DEPTH) -> Iterator[Leftover]:
    """Yield what is unfinished in `folder` and in the folders below it."""
    yield from _in(folder)
    for inner in _folders(folder) if depth > 1 else ():
        yield from leftovers_within(inner, depth - 1)


def perhaps_ours(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield what nobody can tell to be ours by its name, and the place that it left, where nothing stands now."""
    for path in sorted(folder.glob(".*")):
        found = _PERHAPS.fullmatch(path.name)
        if found is not None and not (place := path.with_name(found["name"])).exists():
            yield path, place


def _in(folder: Path) -> list[Leftover]:
    paths = sorted(folder.glob(".*")) if folder.is_dir() else []
    return [found for path in paths if (found := Leftover.at(path)) is not None]


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(
            Path(e) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
        )
    except OSError:
        return []
