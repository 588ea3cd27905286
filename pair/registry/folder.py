"""A registry in a plain folder, on a local disk or a shared one: no server, and no lock that a crash could leave.

Writers never wait for one another. A blob is written beside its place and renamed to it, with the same bytes by any
writer. An entry is linked to its name, which the file system does for one of several writers only.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ...common import BadInputError
from ...common.atomic import leftovers_within, replacing, sync, working_name, writing
from ...common.digests import problem_of
from ...common.errors import Refusal
from ...common.locks import locked
from ...common.places import REGISTRY, mark, require_place
from ...common.untrusted_files import open_regular, read_bytes
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
        with self._found(path) as place:
            return read_bytes(place, MAX_ENTRY)

    def fetch(self, digest: str, to: Path, size: int) -> None:
        with self._found(blob_path(digest)) as place, open_regular(place) as opened:
            there = os.fstat(opened.fileno()).st_size
            if there > size:
                wrong = f"{there} bytes"
                raise Refusal.of(place, wrong, f"a regular file of at most {size} bytes", "Nothing was taken from it.")
            copy_blob(opened, to, digest, place)

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
            return _publish(self.folder / entry, content)
        except PermissionError as error:
            raise BadInputError(f"{self.folder}: cannot be written ({error.strerror}: {error.filename}).") from error

    @contextmanager
    def _found(self, path: str) -> Iterator[Path]:
        """Yield the place of a file; Refusal if it is not there."""
        try:
            yield self.folder / path
        except FileNotFoundError as error:
            wanted = "a file of the registry"
            raise Refusal.of(self.folder / path, "nothing", wanted, "Push the pair again.") from error

    def _keep(self, digest: str, source: Path) -> None:
        """Copy a file to its blob unless it is there already, whole."""
        blob = self.folder / blob_path(digest)
        if blob.is_file() and problem_of(blob, digest) is None:
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        with replacing(blob) as temporary:
            with source.open("rb") as opened, temporary.open("xb") as copy:
                actual = _copied(opened, copy)
            if actual != digest:
                raise BadInputError(f"{source}: altered while it was pushed; nothing was published.")
            temporary.chmod(0o444)


def _publish(place: Path, content: bytes) -> bool:
    """Return whether an entry got its name, in one step: not if another has it."""
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


def copy_blob(source: BinaryIO, to: Path, digest: str, where: str | Path) -> None:
    """Write a blob to the new file `to`; Refusal if its content has another digest."""
    with source, to.open("xb") as copy:
        actual = _copied(source, copy)
    if actual != digest:
        raise Refusal.of(where, f"SHA-256 {actual[:12]}…", f"{digest[:12]}…", "Push the pair again.")


def _copied(source: BinaryIO, copy: BinaryIO) -> str:
    """Return the SHA-256 of a file's bytes, which are copied."""
    digest = hashlib.sha256()
    while part := source.read(_CHUNK):
        digest.update(part)
        copy.write(part)
    return digest.hexdigest()
