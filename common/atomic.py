"""Files and folders that are written whole or not at all, on the disk and not only in memory.

A new one is written beside its place under a working name, brought to the disk, and renamed: whenever a process is
killed, the old one or the new one is there. On Linux the kernel exchanges two folders in one call. Where it cannot,
a finished folder is called `ready` on its way, and the next run under its lock (`recover`) puts it in its place.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from .errors import BadInputError, first_line

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


@contextmanager
def replacing(file: Path, beside: bool = False) -> Iterator[Path]:
    """Yield a temporary file that takes the place of `file` when the block ends well: all of it or nothing.

    `beside`: its writer makes files of its own beside it, as safetensors does: it gets a folder for them, which is
    cleared as a whole if the process dies.
    """
    working = working_name(file, "tmp")
    temporary = working / file.name if beside else working
    try:
        with writing(file):
            if beside:
                working.mkdir()
            yield temporary
            sync(temporary)
            temporary.replace(file)
            sync(file.parent)
    finally:
        with suppress(OSError):  # what cannot be written, cannot be tidied either
            shutil.rmtree(working) if beside else working.unlink(missing_ok=True)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write `file` so that a reader, or a run that continues after a crash, sees all of it or nothing."""
    with replacing(file) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def add_line(file: Path, text: str, keep: bool = False, mode: int = 0o666) -> None:
    """Add a line to a file in one call of the system: a process that is killed leaves all of it or nothing.

    Where a crash of the machine cut the last line short, this one begins anew. `keep`: wait until the disk holds it.
    `mode`: of a file that is made.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + text.encode() + b"\n")
        if keep:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends well: all of it or nothing.

    A block that removes it leaves `folder` as it is.
    """
    folder = folder.resolve()  # a link is kept, and its target replaced
    building = working_name(folder, "tmp")
    try:
        with writing(folder):
            if os.path.ismount(folder):
                raise CannotWriteError(
                    f"{folder} is the root of a disk (a mount point), which cannot be replaced in one step.",
                    advice=f"Choose a folder inside it, such as {folder / 'out'}.",
                )
            building.mkdir(parents=True)
            yield building
            if building.exists():
                sync_tree(building)
                _put(building, folder)
    finally:
        clear_away(building)


def clear_away(folder: Path) -> None:
    """Remove a folder as far as the disk lets it; a later run removes the rest."""
    with suppress(OSError):  # that a folder cannot be closed is raised all the same
        shutil.rmtree(folder, ignore_errors=True)


def _put(building: Path, folder: Path) -> None:
    """Move a finished folder to its place; the older one has the name `building` then, or is gone."""
    if not folder.exists():
        building.rename(folder)
    elif not _exchange(building, folder):
        ready = working_name(folder, "ready")
        building.rename(ready)
        _finish(ready, folder)
    sync(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system or the disk cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, TypeError, AttributeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _finish(ready: Path, folder: Path) -> None:
    """Give a finished folder its place, in steps that can be repeated from any of them."""
    old = working_name(folder, "tmp")
    sync(folder.parent)
    if folder.exists():
        try:
            folder.rename(old)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.rmtree(folder)  # of a container's lower layer; from here on `ready` is the one whole folder
    ready.rename(folder)
    sync(folder.parent)
    clear_away(old)


def move(folder: Path, free_place: Path) -> None:
    """Give `folder` a name beside it that nothing has; one of a container's lower layer is copied there."""
    try:
        folder.rename(free_place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with replacing_folder(free_place) as copy:
            shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder)
    sync(free_place.parent)


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


# How deep below a locked folder leftovers are looked for: <output>/features/<key>/<file>, and one more.
_DEPTH = 4
# After so many seconds without a change, what another machine was writing counts as abandoned.
_FOREIGN_AGE = 3600.0

_NAME = re.compile(
    r"\.(?P<name>.+)\.outrider-(?P<process>\d+)-(?P<machine>[0-9a-f]{8})-\d+\.(?P<kind>tmp|ready)", re.DOTALL
)
_number = itertools.count()
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def working_name(place: Path, kind: str) -> Path:
    """Return a new name under which this process writes `place`: of the kind `tmp`, or `ready` for a whole folder."""
    return place.with_name(f".{place.name}.outrider-{os.getpid()}-{machine_tag()}-{next(_number)}.{kind}")


@cache
def machine_tag() -> str:
    """Return eight hexadecimal digits for this machine, or container, since it was started: process ids count there."""
    boot = _BOOT.read_text() if _BOOT.is_file() else ""
    return hashlib.sha256(f"{platform.node()} {boot}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Leftover:
    """A file or folder under a working name, which says whose it is and where it was meant to be."""

    path: Path
    place: Path
    process: int
    machine: str
    kind: str

    @classmethod
    def at(cls, path: Path) -> Leftover | None:
        """Return the leftover that `path` is by its name; None for anything that is not ours."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        return cls(path, path.with_name(match["name"]), int(match["process"]), match["machine"], match["kind"])

    def changed(self) -> float:
        """Return the time of the last change; 0 if it is gone."""
        try:
            return self.path.lstat().st_mtime
        except FileNotFoundError:
            return 0.0

    def in_work(self) -> bool:
        """Return whether the process that began it may still be at work on it."""
        if self.machine != machine_tag():
            return abs(time.time() - self.changed()) < _FOREIGN_AGE  # one of the future: its clock, or ours, was wrong
        try:
            return psutil.Process(self.process).create_time() <= self.changed() + 1.0  # a later one has its number only
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True  # another user's process, which may be alive

    def remove(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            clear_away(self.path)
        else:
            self.path.unlink(missing_ok=True)


def recover(folder: Path) -> None:
    """Put what dead processes finished for `folder` or in it in its place, the newest last, and remove their other
    leftovers. Call it with the folder's lock.
    """
    beside = [leftover for leftover in _leftovers_in(folder.parent) if leftover.place == folder]
    for leftovers in (beside, list(leftovers_within(folder))):
        dead = [leftover for leftover in leftovers if not leftover.in_work()]
        for leftover in sorted(dead, key=Leftover.changed):
            if leftover.kind == "ready":
                _finish(leftover.path, leftover.place)
            else:
                leftover.remove()


def leftovers_within(folder: Path, depth: int = _DEPTH) -> Iterator[Leftover]:
    """Yield the leftovers in `folder` and in the folders below it."""
    yield from _leftovers_in(folder)
    if depth > 1:
        with suppress(OSError):
            inner = [Path(e) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
            for one in sorted(inner):
                yield from leftovers_within(one, depth - 1)


def _leftovers_in(folder: Path) -> list[Leftover]:
    paths = sorted(folder.glob(".*")) if folder.is_dir() else []
    return [leftover for path in paths if (leftover := Leftover.at(path)) is not None]


_AGAIN = "then run the same command again."
_NEARLY_FULL = 2**20  # bytes that are left
_FULL = {errno.ENOSPC, errno.EDQUOT}
_GONE = {errno.ENOENT, errno.ENOTDIR}
_NAMES = "EACCES EPERM EROFS EIO EFBIG ENAMETOOLONG ESTALE ENOTDIR EISDIR ENOENT EXDEV EBUSY"
_REFUSED = {getattr(errno, name) for name in _NAMES.split() if hasattr(errno, name)}  # for which a place is the reason
_IN_WORDS = re.compile(r"\(os error (\d+)\)")  # how libraries in Rust report the system's errors


class CannotWriteError(BadInputError, OSError):
    """A result that could not be written (exit code 2): where and why, what was `kept` all the same, and `advice`."""

    def __init__(self, what: str, kept: str = "", advice: str = ""):
        super().__init__(what)
        self.what = what
        self.kept = kept
        self.advice = advice

    def __str__(self) -> str:
        return " ".join(filter(None, (self.what, self.kept, self.advice)))


def require_folder(folder: Path, what: str = "the output") -> None:
    """Raise CannotWriteError now, and not after hours, if nothing can be written into `folder`. It leaves no trace."""
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
    except (OSError, ValueError) as error:  # ValueError: a name that no system takes, with a zero byte
        said = error.strerror if isinstance(error, OSError) else error
        raise CannotWriteError(f"{what} cannot be written into {folder}: {said}.", advice=choose) from error
    finally:
        for place in made:
            if place.is_dir():
                place.rmdir()


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn the error of a failed attempt to write the file or folder `place` into a CannotWriteError."""
    try:
        yield
    except CannotWriteError:
        raise
    except Exception as error:
        translated = failure(error, place)
        if translated is None:
            raise
        raise translated from error


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Add a sentence about what was `kept` to a CannotWriteError that has none."""
    try:
        yield
    except CannotWriteError as error:
        if error.kept:
            raise
        raise CannotWriteError(error.what, kept(), error.advice) from error


def failure(error: Exception, place: Path) -> CannotWriteError | None:
    """Return the error to raise for an `error` while `place` was written; None if the place is not the reason."""
    folder = place.absolute().parent
    number = system_number(error)
    named = getattr(error, "filename", None)
    is_elsewhere = isinstance(named, (str, os.PathLike)) and not Path(named).absolute().is_relative_to(folder)
    gone = None
    if number in _GONE or "does not exist" in str(error):
        gone = next((p for p in (*reversed(folder.parents), folder) if not p.exists()), None)
    if is_disk_full(error) or (_is_unexplained(error) and folder.exists() and free_bytes(folder) < _NEARLY_FULL):
        what = f"the disk that holds {place.parent} is full: {place.name} could not be written ({first_line(error)})."
        return CannotWriteError(what, advice=f"Free some space, {_AGAIN}")
    if gone is not None and not is_elsewhere:
        return CannotWriteError(
            f"{gone} was deleted, or moved, while {place.name} was to be written into it.",
            advice="Leave the folder alone, and run the same command again.",
        )
    if number is None or number not in _REFUSED or is_elsewhere:
        return None
    return CannotWriteError(
        f"{place} could not be written: {os.strerror(number)}.", advice=f"Make it writable, {_AGAIN}"
    )


def _is_unexplained(error: Exception) -> bool:
    """Return whether torch could not write a file, for which it gives no reason."""
    said = str(error)
    return isinstance(error, RuntimeError) and ("inline_container" in said or "iostream error" in said)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk, or a full quota, lies at the root of `error`.

    Libraries in C++ and Rust (safetensors, torch) report it in words only, and often as the cause of another error.
    """
    while error is not None:
        if system_number(error) in _FULL or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def system_number(error: BaseException) -> int | None:
    """Return the system's number of an error, which libraries in Rust say in words only."""
    said, number = _IN_WORDS.search(str(error)), error.errno if isinstance(error, OSError) else None
    return int(said[1]) if said and number is None else number


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
