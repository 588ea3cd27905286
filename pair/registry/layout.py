"""The layout of a registry, in a folder, on the Hub and in a wandb artifact alike.

    blobs/ab/abcd…                  a file of a pair, by the SHA-256 of its content: each content is stored once
    pairs/NAME/VERSION.REVISION.json    a pair.json as it is; it names the blobs of all other files
    pairs/NAME/DIGEST.NUMBER.sig    a pair.json.sig, of the pair.json with this SHA-256; the highest number counts

An entry under `pairs` appears after all its blobs, in one step, and never changes. The same version with another tuning
or measurement is the next revision. Another pair under the same name and version is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...common import BadInputError
from ...common.errors import Refusal
from ...common.untrusted_files import decoded
from ..manifest import Manifest, inspect_text

BLOBS, PAIRS = "blobs", "pairs"
MAX_ENTRY = 64_000_000  # bytes of a pair.json; those of the largest models have about one
_MAX_SEAL = 64_000  # bytes of a signature, which has 300
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBER = r"([1-9][0-9]{0,8})"
_ENTRY = re.compile(rf"{PAIRS}/({_NAME})/{_NUMBER}\.{_NUMBER}\.json")
_SEAL = re.compile(rf"{PAIRS}/({_NAME})/({_DIGEST.pattern})\.{_NUMBER}\.sig")
_NOTHING = "Nothing was taken from it."


class RegistryStore(Protocol):
    """A place with files in it: a folder, or a service.

    `waiting`: the command that sends what was added to it; None where all of it is there.
    """

    waiting: str | None

    @property
    def where(self) -> str:
        """The place in words, as a user gives it."""

    def exists(self) -> bool:
        """Return whether there is such a place already; the first `add` makes it."""

    def entries(self) -> Sequence[str]:
        """Return the paths of all files under `pairs`, in any order; [] where there is no registry yet."""

    def read(self, path: str) -> bytes:
        """Return the content of the entry at `path`."""

    def tidy(self) -> None:
        """Remove the leftovers of writers that died, where they can leave any."""

    def add(self, blobs: dict[str, Path], entry: str, content: bytes) -> bool:
        """Publish an entry (or a seal) with its blobs (files by digest), all or nothing; False if its path is taken."""

    def fetch(self, digest: str, to: Path, size: int) -> None:
        """Write the blob with this digest to the new file `to`.

        Raises Refusal if it is missing, irregular, larger than `size` bytes (before anything is copied), or damaged.
        """


@dataclass(frozen=True, order=True)
class Entry:
    """An entry's name, version and revision, as in its path."""

    name: str
    version: int
    revision: int

    @classmethod
    def at(cls, path: str) -> Entry | None:
        """Return the entry at `path`; None if it is not an entry."""
        match = _ENTRY.fullmatch(path)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))

    @property
    def path(self) -> str:
        return f"{PAIRS}/{self.name}/{self.version}.{self.revision}.json"

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, order=True)
class Seal:
    """A signature of a pair of this name, over the pair.json with this SHA-256; the highest number counts."""

    name: str
    digest: str
    number: int

    @classmethod
    def at(cls, path: str) -> Seal | None:
        """Return the seal at `path`; None if it is not a seal."""
        match = _SEAL.fullmatch(path)
        return None if match is None else cls(match[1], match[2], int(match[3]))

    @property
    def path(self) -> str:
        return f"{PAIRS}/{self.name}/{self.digest}.{self.number}.sig"


@dataclass(frozen=True)
class PairReference:
    """A pair in a registry: its name and, unless the newest is meant, its version."""

    name: str
    version: int | None

    @classmethod
    def parse(cls, text: str) -> PairReference:
        """Return the reference `NAME` or `NAME@VERSION`; BadInputError for any other text."""
        match = re.fullmatch(rf"({_NAME})(?:@v?([0-9]{{1,9}}))?", text)
        if match is None:
            raise BadInputError(f"{text!r} names no pair of a registry: expected NAME or NAME@VERSION, such as mine@2.")
        return cls(match[1], None if match[2] is None else int(match[2]))


def blob_path(digest: str) -> str:
    """Return the path of the blob with this digest."""
    return f"{BLOBS}/{digest[:2]}/{digest}"


def read_entry(entry: Entry, content: bytes, where: str) -> Manifest:
    """Return the manifest of an entry.

    Raises:
        BadInputError: it is damaged, altered, or of another pair.
    """
    place = Path(where) / entry.path
    manifest, alterations = inspect_text(place, decoded(content, str(place)))
    if alterations:
        said = "; ".join(alterations)
        raise Refusal.of(place, said, "a pair.json as it was written", "Push a good copy of the pair.")
    if (manifest.name, manifest.version) != (entry.name, entry.version):
        other = f"{manifest.name} version {manifest.version}"
        raise Refusal.of(place, other, f"{entry.name} version {entry.version}", _NOTHING)
    check_files(manifest, place)
    return manifest


def check_seal(content: bytes, where: str) -> bytes:
    """Return the content of a seal; Refusal unless it looks like a signature (`pair verify` checks it)."""
    if len(content) > _MAX_SEAL or not content.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        wrong = f"{len(content)} bytes that are no signature"
        raise Refusal.of(where, wrong, "what `outrider pair sign` writes", "Sign the pair, and push it again.")
    return content


def check_name(name: str) -> None:
    """Refuse a pair's name that could not be part of a path."""
    if not re.fullmatch(_NAME, name):
        raise Refusal(f"the pair's name is {name!r}; expected up to 128 letters, digits, '.', '_' and '-'.")


def check_files(manifest: Manifest, place: Path) -> None:
    """Refuse digests that are none, and missing sizes; the names are those of a pair, by the manifest's schema."""
    files = manifest.files()
    if without := files.keys() - manifest.sizes.keys():
        raise Refusal.of(place, f"no size of {min(without)!r}", "one of each file", "Make the pair again (`pair new`).")
    for name, digest in files.items():
        if not _DIGEST.fullmatch(digest):
            raise Refusal.of(place, f"{digest!r} for {name!r}", "a SHA-256", _NOTHING)
