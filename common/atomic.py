"""One step in which a new file or folder takes the place of an old one, on the disk and not only in memory.

Whatever moment a process is killed in, the old or the new one stands in its place, whole. On Linux two folders are
exchanged in one call of the kernel (`renameat2`). Where that call is missing, the names are a journal: `ready` is a
finished folder on its way, and the next run under the folder's lock finishes the way.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .disk import CannotWriteError, writing
from .leftovers import leftovers_beside, leftovers_within, perhaps_ours, working_name

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
