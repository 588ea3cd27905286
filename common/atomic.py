"""One step in which a new file or folder takes the place of an old one, on the disk and not only in memory.

Whatever moment a process is killed in, the old or the new one stands in its place, whole. On Linux two folders are
exchanged in one call of the kernel (`renameat2`). Where that call is missing, the names are a journal: `ready` is a
finished folder on its way, and the next run under the folder's lock finishes the way.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from . import safe_load
from .errors import BadInputError

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD (fcntl.h), RENAME_EXCHANGE (linux/fs.h)
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
_NOT_EXCHANGED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}

_log = logging.getLogger(__name__)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary file that takes the place of `file` when the block ends well: all of it or nothing."""
    temporary = working_name(file, "tmp")
    try:
        with writing(file):
            yield temporary
            sync(temporary)
            temporary.replace(file)
            sync(file.parent)
    finally:
        with suppress(OSError):  # what cannot be written, cannot be tidied either
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends well: all of it or nothing.

    A block that removes it leaves `folder` as it is.
    """
    folder = folder.resolve()  # a link shows where its owner wants it to be
    building = working_name(folder, "new")
    try:
        with writing(folder):
            _require_replaceable(folder)
            building.mkdir(parents=True)
            yield building
            if building.exists():
                sync_tree(building)
                _put(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _require_replaceable(folder: Path) -> None:
    """Raise CannotWriteError for a folder that has no name that could be another's: the root of a disk."""
    if os.path.ismount(folder):
        raise CannotWriteError(
            f"{folder} is the root of a disk (a mount point), which cannot be replaced in one step.",
            advice=f"Choose a folder inside it, such as {folder / 'out'}.",
        )


def move(folder: Path, free_place: Path) -> None:
    """Give `folder` a name beside it that nothing has; a folder that cannot be renamed is copied there."""
    try:
        folder.rename(free_place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with replacing_folder(free_place) as copy:
            shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder)
    sync(free_place.parent)


def _put(building: Path, folder: Path) -> None:
    """Move a finished folder to its place; what stood there goes."""
    if not folder.exists():
        building.rename(folder)
    elif not _exchanged(building, folder):
        ready = working_name(folder, "ready")
        building.rename(ready)
        _finish(ready, folder)
    sync(folder.parent)


def _finish(ready: Path, folder: Path) -> None:
    """Give `ready` its place, without the kernel's help."""
    old = working_name(folder, "old")
    sync(folder.parent)
    if folder.exists():
        try:
            folder.rename(old)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.rmtree(folder)  # of a lower layer; from here on `ready` is the one whole folder
    ready.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step, and tell whether the system and the disk can do that."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_EXCHANGED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@cache
def _renameat2() -> ctypes._NamedFuncPointer | None:
    """Return the C library's `renameat2`; None where it has none."""
    try:
        found: ctypes._NamedFuncPointer = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, TypeError, AttributeError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return found


# ------------------------------------------------------------ what dead processes left


def recover(folder: Path) -> None:
    """Finish or remove what dead processes left beside `folder` and in it; call it with the folder's lock only."""
    _settle(folder)
    for path, place in (*((p, f) for p, f in perhaps_ours(folder.parent) if f == folder), *perhaps_ours(folder)):
        _log.warning(
            "%s is missing, and %s may be what an older Outrider moved out of its place: give it its name back if it "
            "is. It is left as it is.",
            place,
            path,
        )
    for found in leftovers_within(folder):
        if found.kind in ("ready", "old"):
            _settle(found.place)
        elif not found.in_work():
            found.remove()


def _settle(place: Path) -> None:
    """Put the newest finished folder in its place, or where there is none what stood there before; the rest goes."""
    beside = sorted((f for f in leftovers_beside(place) if not f.in_work()), key=lambda f: -f.path.lstat().st_mtime)
    finished = [found.path for found in beside if found.kind == "ready"]
    before = [found.path for found in beside if found.kind == "old"]
    if finished:
        _finish(finished[0], place)
    elif before and not place.exists():
        before[0].rename(place)
        sync(place.parent)
    for found in beside:
        found.remove()


# ------------------------------------------------------------ on the disk


def sync(path: Path) -> None:
    """Wait until the disk holds a file's content, or a folder's names."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows writes the names of a folder by itself
    descriptor = os.open(path, os.O_RDWR if not is_folder and os.access(path, os.W_OK) else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:  # a file system that cannot: nothing more can be done
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until the disk holds everything below `folder`, and its names."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            with suppress(FileNotFoundError):
                sync(Path(inner, name))
        sync(Path(inner))


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


HARMLESS = (".DS_Store", "Thumbs.db", ".nfs*", ".gitattributes")


def is_harmless(file: Path) -> bool:
    """Tell whether a file has one of these names."""
    return any(fnmatchcase(file.name, name) for name in HARMLESS)


_AGAIN = "then run the same command again."
_NEARLY_FULL = 2**20  # bytes that are left
_FULL = {errno.ENOSPC, errno.EDQUOT}
# What a place, and not a program, is the reason of.
_REFUSED = {
    getattr(errno, name)
    for name in (
        "EACCES",
        "EPERM",
        "EROFS",
        "EIO",
        "EFBIG",
        "ENAMETOOLONG",
        "ESTALE",
        "ENOTDIR",
        "EISDIR",
        "ENOENT",
        "EXDEV",
        "EBUSY",
    )
    if hasattr(errno, name)
}
_IN_WORDS = re.compile(r"\(os error (\d+)\)")  # how libraries in Rust report the system's errors


class CannotWriteError(BadInputError, OSError):
    """A result that could not be written (exit code 2).

    Attributes:
        what: could not be written where, and why.
        kept: a sentence about what is there all the same; empty where nobody has said it yet.
        advice: what to do before the next attempt.
    """

    def __init__(self, what: str, kept: str = "", advice: str = ""):
        super().__init__(" ".join(filter(None, (what, kept, advice))))
        self.what, self.kept, self.advice = what, kept, advice

    def __str__(self) -> str:
        return " ".join(filter(None, (self.what, self.kept, self.advice)))


# ------------------------------------------------------------ before the work


def require_folder(folder: Path, what: str = "the output") -> None:
    """Raise an error now, and not after hours, if nothing can be written into `folder`. It leaves no trace.

    Raises:
        CannotWriteError: a file is in the way, a parent cannot be made, the disk is read-only, …
    """
    folder = folder.expanduser().absolute()
    present = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    choose = "Choose another folder."
    if not present.is_dir():
        kind = "a file" if present.is_file() else "no folder"
        raise CannotWriteError(f"{what} cannot be written into {folder}: {present} is {kind}.", advice=choose)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
    except OSError as error:
        raise CannotWriteError(f"{what} cannot be written into {folder}: {error.strerror}.", advice=choose) from error
    finally:
        for place in made:
            if place.is_dir():
                place.rmdir()


# ------------------------------------------------------------ during the work


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn what a failed attempt to write the file or folder `place` raises inside into a CannotWriteError."""
    try:
        yield
    except CannotWriteError:
        raise
    except Exception as error:
        found = failure(error, place)
        if found is None:
            raise
        raise found from error


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Let an error that says where nothing could be written say what was `kept`, too."""
    try:
        yield
    except CannotWriteError as error:
        if error.kept:
            raise
        raise CannotWriteError(error.what, kept(), error.advice) from error


def failure(error: Exception, place: Path) -> CannotWriteError | None:
    """Return what to say of an `error` while `place` was written; None if the place is not the reason."""
    number, gone = _error_number(error, place), None
    if number in (errno.ENOENT, errno.ENOTDIR) or "does not exist" in str(error):
        gone = next((p for p in reversed(place.absolute().parents) if not p.exists()), None)
    if is_disk_full(error) or _was_filled(error, place.parent):
        what = f"the disk that holds {place.parent} is full: {place.name} could not be written ({_line(error)})."
        return CannotWriteError(what, advice=f"Free some space, {_AGAIN}")
    if gone is not None:
        return CannotWriteError(
            f"{gone} was deleted, or moved, while {place.name} was to be written into it.",
            advice="Leave the folder alone, and run the same command again.",
        )
    if number is None:
        return None
    return CannotWriteError(
        f"{place} could not be written: {os.strerror(number)}.", advice=f"Make it writable, {_AGAIN}"
    )


def is_disk_full(error: BaseException | None) -> bool:
    """Tell whether a full disk, or a full quota, lies at the root of `error`.

    Libraries in C++ and Rust (safetensors, torch) report it in words only, and often as the cause of another error.
    """
    while error is not None:
        if getattr(error, "errno", None) in _FULL or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _was_filled(error: Exception, folder: Path) -> bool:
    """Tell whether torch, which does not say why, could not write a file because `folder`'s disk is full."""
    said = str(error)
    of_torch = isinstance(error, RuntimeError) and ("inline_container" in said or "iostream error" in said)
    return of_torch and folder.exists() and shutil.disk_usage(folder).free < _NEARLY_FULL


def _error_number(error: Exception, place: Path) -> int | None:
    """Return the system's number of an error that `place` is the reason of; None for any other."""
    said = _IN_WORDS.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(said[1]) if said else None
    named = getattr(error, "filename", None)
    if isinstance(named, (str, os.PathLike)) and not Path(named).absolute().is_relative_to(place.absolute().parent):
        return None
    return number if number in _REFUSED else None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------ room


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of `folder`, which need not be there yet."""
    folder = folder.expanduser().absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def require_space(folder: Path, num_bytes: int, advice: str) -> None:
    """Raise BadInputError now if `num_bytes` do not fit on the disk that holds `folder`, rather than after hours."""
    free = free_bytes(folder)
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
