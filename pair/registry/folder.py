"""A registry in a plain folder, on a local disk or a shared one: no server, and no lock that a crash could leave.

Writers never wait for one another. A blob is written beside its place and renamed to it, with the same bytes by any
writer. An entry is linked to its name, which the file system does for one of several writers only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ...common import BadInputError
from ...common.atomic import leftovers_within, replacing, sync, working_name, writing
from ...common.digests import problem_of
from ...common.errors import Refusal
from ...common.locks import locked
from ...common.places import REGISTRY, mark, require_place
from .layout import MAX_ENTRY, PAIRS, blob_path

_CHUNK = 1 << 20
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_WAIT = 60.0  # seconds, on a disk without links


class FolderStore:
    """A folder with a registry's files."""

    waiting: str | None = None

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()

    @property
    def where(self) -> str:
        return str(self.folder)

    def exists(self) -> bool:
        return self.folder.is_dir()

    def entries(self) -> Sequence[str]:
        files = (file for kind in ("json", "sig") for file in self.folder.glob(f"{PAIRS}/*/*.{kind}"))
        return [file.relative_to(self.folder).as_posix() for file in files]

    def read(self, path: str) -> bytes:
        with self._opened(path, MAX_ENTRY) as file:
            try:
                return file.read(MAX_ENTRY + 1) or b""  # None where a disk has nothing to say now
            except OSError as error:
                raise Refusal.of(self.folder / path, str(error.strerror), "a readable file", "Try again.") from error

    def tidy(self) -> None:
        for leftover in leftovers_within(self.folder):
            if not leftover.in_work():
                with suppress(OSError):  # a later push removes it
                    leftover.remove()

    def add(self, blobs: dict[str, Path], entry: str, content: bytes) -> bool:
        require_place(self.folder, REGISTRY, what="the registry")
        try:
            mark(self.folder, REGISTRY)
            for digest, source in blobs.items():
                self._keep(digest, source)
            return self._publish(self.folder / entry, content)
        except PermissionError as error:
            raise BadInputError(f"{self.folder}: cannot be written ({error.strerror}: {error.filename}).") from error

    def fetch(self, digest: str, to: Path, size: int) -> None:
        copy_blob(self._opened(blob_path(digest), size), to, digest, self.folder / blob_path(digest))

    def _keep(self, digest: str, source: Path) -> None:
        """Copy a file to its blob unless it is there already, whole."""
        blob = self.folder / blob_path(digest)
        if blob.is_file() and not blob.is_symlink() and problem_of(blob, digest) is None:
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        with replacing(blob) as temporary:
            with source.open("rb") as opened, temporary.open("xb") as copy:
                actual = copied(opened, copy)
            if actual != digest:
                raise BadInputError(f"{source}: altered while it was pushed; nothing was published.")
            temporary.chmod(0o444)

    def _publish(self, place: Path, content: bytes) -> bool:
        """Give the entry its name in one step; False if another has it."""
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = working_name(place, "tmp")
        try:
            with writing(place):
                temporary.write_bytes(content)
                temporary.chmod(0o444)
                sync(temporary)
                published = _linked(temporary, place)
                sync(place.parent)
        finally:
            with suppress(OSError):  # a later push removes it
                temporary.unlink(missing_ok=True)
        return published

    def _opened(self, path: str, limit: int) -> BinaryIO:
        """Open a file of the registry: a regular one, reached without any link."""
        place = self.folder / path
        if place.parent.resolve() != self.folder.resolve() / Path(path).parent:
            raise Refusal.of(place, "a link on the way to it", "folders", "Nothing was taken from it.")
        try:
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            opened = os.fdopen(os.open(place, flags), "rb")
        except FileNotFoundError as error:
            raise Refusal.of(place, "nothing", "a file of the registry", "Push the pair again.") from error
        except OSError as error:
            raise Refusal.of(
                place, error.strerror or "nothing readable", "a file that can be read", "Nothing was taken from it."
            ) from error
        status = os.fstat(opened.fileno())
        is_file = stat.S_ISREG(status.st_mode)
        if not is_file or status.st_size > limit:
            opened.close()
            wrong = f"{status.st_size} bytes" if is_file else "no regular file"
            raise Refusal.of(place, wrong, f"a regular file of at most {limit} bytes", "Nothing was taken from it.")
        return opened


def copy_blob(source: BinaryIO, to: Path, digest: str, where: str | Path) -> None:
    """Write a blob to the new file `to`; Refusal if its content has another digest."""
    with source, to.open("xb") as copy:
        actual = copied(source, copy)
    if actual != digest:
        raise Refusal.of(where, f"SHA-256 {actual[:12]}…", f"{digest[:12]}…", "Push the pair again.")


def copied(source: BinaryIO, copy: BinaryIO) -> str:
    """Copy a file's content, and return the SHA-256 of the bytes that were written."""
    digest = hashlib.sha256()
    while part := source.read(_CHUNK):
        digest.update(part)
        copy.write(part)
    return digest.hexdigest()


def _linked(temporary: Path, place: Path) -> bool:
    """Give a file its name; False if another has it. On a disk without links one writer at a time does so."""
    try:
        os.link(temporary, place)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    with locked(place.parent, wait=_WAIT):
        if place.exists():
            return False
        temporary.rename(place)
        return True
