"""Pairs in a registry: pushed, listed, and pulled, every byte verified on each way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console

from ...common import BadInputError
from ...common.atomic import replacing_folder, require_space, write_atomically
from ...common.locks import locked, scratch_folder
from ...common.places import PAIR, require_place
from ...common.progress import progress
from ...common.untrusted_files import MEGABYTE, read_bytes
from ..folder import PairFiles, verify
from ..manifest import MANIFEST, SIGNATURE, Manifest
from .layout import Entry, PairReference, RegistryStore, Seal, check_files, check_name, check_seal, read_entry

_ATTEMPTS = 100  # at an entry's name, each lost to another writer


@dataclass(frozen=True)
class Version:
    """A version of a pair as a registry holds it: the newest revision, and its pair.json."""

    entry: Entry
    manifest: Manifest


class Registry:
    """Versions of pairs in one place."""

    def __init__(self, store: RegistryStore):
        self.store = store

    def push(self, pair: PairFiles, console: Console | None = None) -> Entry:
        """Add a pair, with its signature if it has one, and return its name, version and revision here.

        The same one a second time changes nothing.

        Raises:
            BadInputError: the pair is altered, another pair has its name and version, or the registry has measurements
                of this version that the folder lacks.
        """
        if altered := verify(pair.folder):
            raise BadInputError(
                f"{pair.folder} was altered: {'; '.join(altered[:3])}. Nothing was pushed; take a good copy."
            )
        check_name(pair.name)
        content = read_bytes(pair.folder / MANIFEST)
        check_files(pair.manifest, pair.folder / MANIFEST)
        blobs = {digest: pair.folder / name for name, digest in pair.manifest.files().items()}
        with progress(console, "pushing", 1, transient=True):
            self.store.tidy()  # also where nothing is left to push: a writer may have died after its entry appeared
            self._place(pair.manifest, content)  # a refused pair leaves no signature
            self._seal(pair, content)  # before the entry, which is never seen without it
            for _ in range(_ATTEMPTS):
                entry, known = self._place(pair.manifest, content)
                if known or self.store.add(blobs, entry.path, content):
                    return entry
        raise BadInputError(f"{self.store.where}: others publish {pair.name} all the time; try again later.")

    def pull(self, reference: PairReference, folder: Path, console: Console | None = None) -> PairFiles:
        """Write a version into `folder`, which appears whole or not at all.

        Raises:
            BadInputError: there is no such version, something else is in `folder`, another process writes there, or a
                file is missing or damaged.
        """
        require_place(folder, PAIR, what="the pair")
        version = self.version(reference)
        with locked(folder):
            return self._pulled(version, folder, console)

    def _pulled(self, version: Version, folder: Path, console: Console | None) -> PairFiles:
        content = self.store.read(version.entry.path)
        manifest = read_entry(version.entry, content, self.store.where)  # of these bytes: they may be others by now
        signature = None
        if seals := self._seals(version.entry.name, content):
            newest = seals[-1].path
            signature = check_seal(self.store.read(newest), f"{self.store.where}/{newest}")
        if (existing := _existing(folder, manifest)) is not None:
            if signature is not None:
                write_atomically(folder / SIGNATURE, signature)
            return existing
        files, sizes = manifest.files(), manifest.sizes
        require_space(folder, sum(sizes.values()), "Choose another disk.")
        with (
            replacing_folder(folder) as building,
            progress(console, f"pulling {version.entry}", len(files), transient=True) as advance,
        ):
            for name, digest in files.items():
                place = building / PurePosixPath(name)
                place.parent.mkdir(parents=True, exist_ok=True)
                self.store.fetch(digest, place, sizes[name])
                advance(1, name)
            write_atomically(building / MANIFEST, content)  # as it was signed
            if signature is not None:
                write_atomically(building / SIGNATURE, signature)
        return PairFiles.load(folder)

    def version(self, reference: PairReference) -> Version:
        """Return a version, the newest one if the reference names none.

        Raises:
            BadInputError: there is none; names those that there are.
        """
        entries = list(self._newest())
        of_name = [entry for entry in entries if entry.name == reference.name]
        wanted = [entry for entry in of_name if reference.version in (None, entry.version)]
        if wanted:
            return self._read(max(wanted))
        if of_name:
            there = ", ".join(str(entry.version) for entry in of_name)
            wrong = f"{reference.version} is none of them"
            raise BadInputError(f"{self.store.where} has {reference.name} in the versions {there}; {wrong}.")
        names = ", ".join(sorted({entry.name for entry in entries})) or "none"
        raise BadInputError(f"{self.store.where} has no pair called {reference.name!r}; there are: {names}.")

    def versions(self, name: str | None = None) -> list[Version]:
        """Return all versions of all pairs, or of one, in the order of their numbers.

        Raises:
            BadInputError: there is no registry.
        """
        return [self._read(entry) for entry in self._newest() if name in (None, entry.name)]

    def text(self, version: Version, name: str) -> str:
        """Return the text of a small file of a version, such as its recipe; "" where it has none."""
        digest = version.manifest.files().get(name)
        if digest is None:
            return ""
        with scratch_folder("registry") as scratch:
            self.store.fetch(digest, scratch / "text", version.manifest.sizes[name])
            return read_bytes(scratch / "text", 128 * MEGABYTE).decode("utf-8", "replace")

    def _seal(self, pair: PairFiles, content: bytes) -> None:
        """Add the pair's signature over `content`, its pair.json, if it has one that is not the newest here."""
        file = pair.folder / SIGNATURE
        if not file.is_file() or file.is_symlink():
            return
        signature = check_seal(read_bytes(file), str(file))
        for _ in range(_ATTEMPTS):
            seals = self._seals(pair.name, content)
            if seals and self.store.read(seals[-1].path) == signature:
                return
            number = 1 + (seals[-1].number if seals else 0)
            if self.store.add({}, Seal(pair.name, hashlib.sha256(content).hexdigest(), number).path, signature):
                return
        raise BadInputError(f"{self.store.where}: others sign {pair.name} all the time; try again later.")

    def _seals(self, name: str, content: bytes) -> list[Seal]:
        """Return the signatures over a pair.json, the newest last."""
        digest = hashlib.sha256(content).hexdigest()
        seals = map(Seal.at, self.store.entries())
        return sorted(seal for seal in seals if seal is not None and (seal.name, seal.digest) == (name, digest))

    def _place(self, manifest: Manifest, content: bytes) -> tuple[Entry, bool]:
        """Return the entry of a pair.json, and whether it is there already."""
        where = self.store.where
        name, version = manifest.name, manifest.version
        there = [e for e in self._entries() if (e.name, e.version) == (name, version)]
        held = manifest
        for entry in there:
            known = self.store.read(entry.path)
            if known == content:
                return entry, True
            held = read_entry(entry, known, where)
            if held.digest != manifest.digest:
                raise BadInputError(
                    f"{where} has another {name} version {version}: {held.digest[:12]}…, this one is "
                    f"{manifest.digest[:12]}…. Nothing was pushed; give one of them another name (`name` in the "
                    "recipe), or refresh from the newest version."
                )
        if lost := sorted(held.measured() - manifest.measured()):
            raise BadInputError(
                f"{where} has measurements of {name} version {version} that this folder lacks, and the newest push is "
                f"what others see: {', '.join(lost[:4])}. Nothing was pushed; pull that version (`outrider pair pull "
                f"{name}@{version} FOLDER`), measure or tune it there, and push that folder."
            )
        return Entry(name, version, 1 + max((e.revision for e in there), default=0)), False

    def _read(self, entry: Entry) -> Version:
        return Version(entry, read_entry(entry, self.store.read(entry.path), self.store.where))

    def _entries(self) -> list[Entry]:
        return sorted(entry for path in self.store.entries() if (entry := Entry.at(path)) is not None)

    def _newest(self) -> Iterable[Entry]:
        """Return the newest revision of each version; BadInputError where there is no registry at all."""
        newest = {(entry.name, entry.version): entry for entry in self._entries()}
        if not newest and not self.store.exists():
            raise BadInputError(
                f"there is no registry at {self.store.where}: check the place. `outrider pair push` makes a new one."
            )
        return newest.values()


def _existing(folder: Path, wanted: Manifest) -> PairFiles | None:
    """Return the pair that is in `folder` already, if any; BadInputError unless it is that version, whole."""
    if not (folder / MANIFEST).is_file():
        return None
    pair = PairFiles.load(folder)
    if pair.manifest == wanted and not verify(folder):
        return pair
    raise BadInputError(
        f"{str(folder)!r} exists and is not that version, whole; nothing was written. Choose a new folder."
    )
