"""What was written is what is read: SHA-256 digests of files, folders, JSON and text.

The list of a folder's files (`SHA256SUMS`) has the format of `sha256sum`, so that anybody can check it
(`sha256sum -c SHA256SUMS`). A folder that grows file by file gets a line with each; a finished one ends with a line
that seals the others. A list without its seal is that of an unfinished folder.

    9f86d081…  model.safetensors
    # complete: 1 file, 3a7bd3e2…

JSON files hold a checksum of their other entries, and text files end with a comment line that has the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from . import digest_cache
from .atomic import add_line, replacing_folder, sync, sync_tree, write_atomically
from .errors import Refusal
from .untrusted_files import Unreadable, open_regular, read_bytes, read_json

LIST = "SHA256SUMS"
_SEAL_BEGIN = "# complete: "
_SEAL_FORM = _SEAL_BEGIN + "{count} file{s}, {digest}\n"

_READERS = 4  # several disks' worth: hashing takes one core each

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>[^\n]+)")
_SEAL = re.compile(_SEAL_BEGIN + r"\d+ files?, (?P<digest>[0-9a-f]{64})\n")

CHECKSUM = "checksum"
_TEXT_SEAL_BEGIN = "# sha256 of the lines above: "
_TEXT_SEAL = re.compile(_TEXT_SEAL_BEGIN + r"(?P<digest>[0-9a-f]{64})\n?")

# What file managers, network disks and git leave in any folder.
_HARMLESS = (".DS_Store", "Thumbs.db", ".nfs*", ".gitattributes")


class Saveable(Protocol):
    """Something that writes itself into a folder."""

    def save(self, path: str | Path) -> None:
        """Write it into the folder `path`."""


def save_whole(made: Saveable, folder: Path) -> None:
    """Save `made` beside `folder` and seal it, then move it there: a reader never sees half of it."""
    with replacing_folder(folder) as building:
        made.save(building)
        seal(building)


def is_harmless(file: Path) -> bool:
    """Return whether a file is no part of the folder that it lies in, by its name."""
    return any(fnmatchcase(file.name, name) for name in _HARMLESS)


def file_digest(file: Path, again: bool = False) -> str:
    """Return the SHA-256 of a file's contents; one that was read before, and has not changed, is only read `again`.

    Raises OSError if it cannot be read, and Refusal for a pipe, a device or a folder.
    """
    digest = _digest(file, again)
    digest_cache.save()
    return digest


def _digest(file: Path, again: bool, settled: bool | None = None) -> str:
    """Return the digest as `file_digest` does, for callers that save the cache and may know that it `is_settled`."""
    with open_regular(file) as opened:
        status = os.fstat(opened.fileno())
        known = None if again else digest_cache.digest_of(file, status)
        if known is not None:
            return known
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        digest_cache.remember(file, status, os.fstat(opened.fileno()), digest, settled)
    return digest


def problem_of(file: Path, expected: str, again: bool = False, size: int | None = None) -> str | None:
    """Return the problem with a file whose `file_digest` should be `expected`, in words; None if there is none.

    One that has not `size` bytes, where that is known, is not read: of a terabyte that would take an hour.
    """
    problem = _problem_of(file, expected, again, size)
    digest_cache.save()
    return problem


def _problem_of(file: Path, expected: str, again: bool = False, size: int | None = None) -> str | None:
    try:
        if size is not None and (found := file.stat().st_size) != size:
            return f"content differs ({found:,} bytes, recorded {size:,})"
        if not again and _digest(file, again=False) == expected:
            return None
        digest = _digest(file, again=True)  # only bytes that were read now are refused
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except Unreadable as error:
        return error.reason if error.reason.startswith("cannot be read") else "no regular file"
    return None if digest == expected else f"content differs (SHA-256 {digest[:12]}…, recorded {expected[:12]}…)"


def seal(folder: Path) -> None:
    """Write the list of all files in `folder`, once the disk holds them: from now on any change is found."""
    sync_tree(folder)
    files = (f for f in folder.rglob("*") if f.is_file() and f.name != LIST and not is_harmless(f))
    _write_list(folder, _digests_now(folder, sorted(f.relative_to(folder).as_posix() for f in files)))


def add(folder: Path, name: str) -> None:
    """Add the file `name`, which was written whole, to the list of a folder that grows."""
    add_line(folder / LIST, f"{_digests_now(folder, [name])[name]}  {name}", keep=True)
    sync(folder)


def _digests_now(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the digests of files that were written just now, which are remembered all the same."""
    settled = digest_cache.is_settled((folder / name for name in names), folder)
    digests = {name: _digest(folder / name, again=True, settled=settled) for name in names}
    digest_cache.save()
    return digests


def seal_grown(folder: Path, names: list[str]) -> None:
    """Seal the list of a folder that has grown to the files `names`, without reading them again."""
    known = listed(folder)
    _write_list(folder, {name: known[name] for name in sorted(names)})


def listed(folder: Path) -> dict[str, str]:
    """Return the digest of each file that the list of `folder` names; {} without a list. Torn lines do not count."""
    return {match["name"]: match["digest"] for line in _text(folder).splitlines() if (match := _LINE.fullmatch(line))}


def _text(folder: Path) -> str:
    """Return the list of `folder`, or "" without one. Lines that cannot be decoded are ignored later."""
    try:
        return read_bytes(folder / LIST).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def problems_so_far(folder: Path, grown: Iterable[str]) -> list[str]:
    """Return the problems of a folder that has `grown` by these files so far, one line each, the name first."""
    known, lines = listed(folder), _text(folder).splitlines()
    torn = [f"{LIST}: a line is cut short or damaged"] * any(not _LINE.fullmatch(line) for line in lines)
    differing = [f"{line} (by {LIST})" for line in listed_problems(folder, known)]  # either of the two may be damaged
    return torn + [f"{n}: not in {LIST}" for n in grown if n not in known] + differing


def is_sealed(folder: Path) -> bool:
    """Return whether the list of `folder` is there, and is as it was written when the folder was finished."""
    try:
        lines, begin, rest = _text(folder).rpartition(_SEAL_BEGIN)
    except OSError:
        return False
    match = _SEAL.fullmatch(begin + rest)
    return match is not None and match["digest"] == _digest_of_text(lines)


def has_seal(folder: Path) -> bool:
    """Return whether there is a list with a seal, broken or not; others make lists of this name by `sha256sum`."""
    return (folder / LIST).is_file() and _SEAL_BEGIN in _text(folder)


def problems(folder: Path) -> list[str]:
    """Return the changes since `folder` was sealed, one line each, with the file's name first; [] without any."""
    if not is_sealed(folder):
        return [f"{LIST}: {'altered or unfinished' if (folder / LIST).exists() else 'missing'}"]
    return listed_problems(folder, listed(folder))


def listed_problems(folder: Path, expected: dict[str, str], sizes: Mapping[str, int] | None = None) -> list[str]:
    """Return the problems with files in `folder` that should have these digests, one line each, the name first.

    `sizes`: those that are known, in bytes, as in `problem_of`.
    """

    def problem(name: str) -> str | None:
        return _problem_of(folder / name, expected[name], size=(sizes or {}).get(name))

    with ThreadPoolExecutor(_READERS) as readers:
        checked = list(readers.map(problem, expected))
    digest_cache.save()
    return [f"{name}: {found}" for name, found in zip(expected, checked, strict=True) if found is not None]


def require_whole(folder: Path, advice: str) -> None:
    """Raise Refusal, with each file that differs and `advice`, if `folder` is not as it was when it was sealed."""
    if lines := problems(folder):
        raise Refusal(f"{folder} was altered or damaged after it was written: {'; '.join(lines)}. {advice}")


def _write_list(folder: Path, digests: dict[str, str]) -> None:
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    last = _SEAL_FORM.format(count=len(digests), s="" if len(digests) == 1 else "s", digest=_digest_of_text(lines))
    write_atomically(folder / LIST, lines + last)


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON."""
    return _digest_of_text(canonical_json(value))


def canonical_json(value: Any) -> str:
    """Return a value as JSON whose keys are in order: equal values give equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def write_json(file: Path, values: dict[str, Any], indent: int | None = 2) -> None:
    """Write `values` with their checksum, as the last entry, into `file`, all of it or nothing."""
    plain = json.loads(json.dumps(values))  # as JSON keeps them
    write_atomically(file, json.dumps({**plain, CHECKSUM: digest_json(plain)}, indent=indent) + "\n")


def unsealed(file: Path, values: dict[str, Any], advice: str, required: bool = True) -> dict[str, Any]:
    """Return JSON `values` of `file` without their checksum; without one they are taken as they are if not `required`.

    Raises Refusal, with `advice`, if the file was altered after it was written.
    """
    if CHECKSUM not in values and not required:
        return values
    body = {key: value for key, value in values.items() if key != CHECKSUM}
    digest = digest_json(body)
    if values.get(CHECKSUM) != digest:
        kept = str(values.get(CHECKSUM, "none"))
        raise Refusal.of(
            file, f"it was altered or damaged (its checksum is {kept[:12]})", f"{digest[:12]}… for this content", advice
        )
    return body


def read_sealed(file: Path, advice: str, required: bool = True) -> dict[str, Any]:
    """Return the values that `write_json` wrote into `file`; raises BadInputError and Refusal as `unsealed` does."""
    return unsealed(file, read_json(file), advice, required)


def sealed_text(text: str) -> str:
    """Return `text`, which ends with a line break, and a comment line with its digest."""
    return f"{text}{_TEXT_SEAL_BEGIN}{_digest_of_text(text)}\n"


def is_sealed_text(file: Path) -> bool:
    """Return whether a file ends as `sealed_text` does, altered or not."""
    try:
        return _TEXT_SEAL_BEGIN in read_bytes(file).decode("utf-8", "replace")
    except (OSError, Unreadable):
        return False


def seal_problem(file: Path) -> str | None:
    """Return the problem with a file of `sealed_text`, in words; None if it is as it was written."""
    try:
        text = read_bytes(file).decode("utf-8", "replace")
    except FileNotFoundError as error:
        return f"it cannot be read ({error.strerror})"
    except Unreadable as error:
        return error.reason
    body, begin, rest = text.rpartition(_TEXT_SEAL_BEGIN)
    match = _TEXT_SEAL.fullmatch(begin + rest)
    if match is None:
        return "its last line, which would say that it is whole, is missing"
    return None if match["digest"] == _digest_of_text(body) else "it was altered after it was written"
