"""What was written is what is read: SHA-256 digests of a folder's files, in a list beside them.

The list (`SHA256SUMS`) has the format of `sha256sum`, so that anybody can check it (`sha256sum -c SHA256SUMS`). A
folder that grows file by file gets a line with each; a finished one ends with a line that seals the others. A list
without its seal is that of an unfinished folder.

    9f86d081…  model.safetensors
    # complete: 1 file, 3a7bd3e2…
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from . import digest_cache
from .atomic import is_harmless, replacing_folder, sync, sync_tree, write_atomically
from .errors import Refusal

LIST = "SHA256SUMS"
_SEAL_BEGIN = "# complete: "
_SEAL_FORM = _SEAL_BEGIN + "{count} file{s}, {digest}\n"

_READERS = 4  # several disks' worth: hashing takes one core each

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>[^\n]+)")
_SEAL = re.compile(_SEAL_BEGIN + r"\d+ files?, (?P<digest>[0-9a-f]{64})\n")


class Saveable(Protocol):
    """Something that writes itself into a folder."""

    def save(self, path: str | Path) -> None:
        """Write it into the folder `path`."""


def save_whole(made: Saveable, folder: Path) -> None:
    """Save `made` beside `folder` and seal it, then move it there: a reader never sees half of it."""
    with replacing_folder(folder) as building:
        made.save(building)
        seal(building)


# ------------------------------------------------------------ one file


def file_digest(file: Path, again: bool = False, settled: bool | None = None) -> str:
    """Return the SHA-256 of a file's contents; a file that was read before, and has not changed since, is not read.

    Args:
        again: read it in any case.
        settled: whether its next change will give it another time, as its writer knows (`seen.is_settled`).

    Raises:
        OSError: it cannot be read.
        Refusal: it is a pipe, a device or a folder.
    """
    with open(file, "rb", opener=_open_at_once) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Refusal.of(file, "it is no regular file", "one with contents", "Take a good copy.")
        known = None if again else digest_cache.digest_of(file, status)
        if known is not None:
            return known
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        digest_cache.remember(file, status, os.fstat(opened.fileno()), digest, settled)
    return digest


def _open_at_once(file: str, flags: int) -> int:
    """Open a file; a pipe without a writer would otherwise be waited for."""
    return os.open(file, flags | getattr(os, "O_NONBLOCK", 0))


def problem_of(file: Path, expected: str, again: bool = False) -> str | None:
    """Return what is wrong with a file whose SHA-256 should be `expected`, in words; None if nothing is.

    Args:
        again: read it in any case, as `file_digest` does.
    """
    try:
        if not again and file_digest(file) == expected:
            return None
        found = file_digest(file, again=True)  # only bytes that were read now are refused
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except Refusal:
        return "no regular file"
    return None if found == expected else f"content differs (SHA-256 {found[:12]}…, recorded {expected[:12]}…)"


# ------------------------------------------------------------ the list of a folder


def seal(folder: Path) -> None:
    """Write the list of all files in `folder`, once the disk holds them: from now on any change is found."""
    sync_tree(folder)
    found = (f for f in folder.rglob("*") if f.is_file() and f.name != LIST and not is_harmless(f))
    names = sorted(f.relative_to(folder).as_posix() for f in found)
    settled = digest_cache.is_settled((folder / name for name in names), folder)
    with digest_cache.keeping_once():
        _write_list(folder, {name: file_digest(folder / name, again=True, settled=settled) for name in names})


def add(folder: Path, name: str) -> None:
    """Add the file `name`, which was written whole, to the list of a folder that grows."""
    settled = digest_cache.is_settled([folder / name], folder)
    line = f"{file_digest(folder / name, again=True, settled=settled)}  {name}\n".encode()
    file = folder / LIST
    with file.open("ab+") as opened:
        opened.seek(max(opened.tell() - 1, 0))
        torn = opened.read() not in (b"\n", b"")  # a crash cut the last line short
        opened.write(b"\n" * torn + line)
        opened.flush()
        os.fsync(opened.fileno())
    sync(folder)


def start_list(folder: Path, names: list[str]) -> None:
    """Write the list of a folder that grows, of the files `names`, which are there already."""
    lines = [f"{file_digest(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / LIST, "".join(lines))


def seal_grown(folder: Path, names: list[str]) -> None:
    """Seal the list of a folder that has grown to the files `names`, without reading them again."""
    known = listed(folder)
    _write_list(folder, {name: known[name] for name in sorted(names)})


def listed(folder: Path) -> dict[str, str]:
    """Return the digest of each file that the list of `folder` names; {} without a list. Lines cut short count not."""
    return {found["name"]: found["digest"] for line in _lines(folder) if (found := _LINE.fullmatch(line))}


def _lines(folder: Path) -> list[str]:
    try:
        return _text(folder).splitlines()
    except FileNotFoundError:
        return []


def _text(folder: Path) -> str:
    """Return the list of `folder` as it stands there; a byte that is no text makes a line that is none of ours."""
    return (folder / LIST).read_text(encoding="utf-8", errors="replace")


def problems_so_far(folder: Path, grown: Iterable[str]) -> list[str]:
    """Return what is wrong in a folder that grows, one line each, with the file's name first.

    Args:
        grown: the names of the files there that should be in the list by now; one that is not was never finished.
    """
    known = listed(folder)
    torn = [f"{LIST}: a line is cut short or damaged"] * any(not _LINE.fullmatch(line) for line in _lines(folder))
    differing = [f"{line} (by {LIST})" for line in listed_problems(folder, known)]  # which of the two is not told
    return torn + [f"{n}: not in {LIST}" for n in grown if n not in known] + differing


def is_sealed(folder: Path) -> bool:
    """Tell whether the list of `folder` is there, and is as it was written when the folder was finished."""
    try:
        lines, begin, rest = _text(folder).rpartition(_SEAL_BEGIN)
    except OSError:
        return False
    found = _SEAL.fullmatch(begin + rest)
    return found is not None and found["digest"] == _digest_of_text(lines)


def has_seal(folder: Path) -> bool:
    """Tell whether there is a list of ours: one with a line that seals it, whether that still holds or not.

    Others make lists of this name and format by `sha256sum`.
    """
    return (folder / LIST).is_file() and _SEAL_BEGIN in _text(folder)


def problems(folder: Path) -> list[str]:
    """Return what differs from when `folder` was sealed, one line each, with the file's name first; [] if nothing."""
    if not is_sealed(folder):
        return [f"{LIST}: {'altered or unfinished' if (folder / LIST).exists() else 'missing'}"]
    return listed_problems(folder, listed(folder))


def listed_problems(folder: Path, expected: dict[str, str]) -> list[str]:
    """Return what is wrong with files in `folder` that should have these digests, one line each, the name first."""
    with digest_cache.keeping_once(), ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda name: problem_of(folder / name, expected[name]), expected)
        return [f"{name}: {problem}" for name, problem in zip(expected, found, strict=True) if problem is not None]


def require_whole(folder: Path, advice: str) -> None:
    """Refuse `folder` if anything in it differs from when it was sealed.

    Raises:
        Refusal: names each file that differs, and says `advice`.
    """
    found = problems(folder)
    if found:
        raise Refusal(f"{folder} was altered or damaged after it was written: {'; '.join(found)}. {advice}")


def _write_list(folder: Path, digests: dict[str, str]) -> None:
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    last = _SEAL_FORM.format(count=len(digests), s="" if len(digests) == 1 else "s", digest=_digest_of_text(lines))
    write_atomically(folder / LIST, lines + last)


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
