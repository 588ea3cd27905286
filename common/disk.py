"""Where results go: whether they can be written there, tried before the work, and a sentence where they could not be.

The sentence names the folder that was written, says what was kept, and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BadInputError

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
    number, gone = _number(error, place), None
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


def _number(error: Exception, place: Path) -> int | None:
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
