"""The content of a pair's folder, and its verification, which needs no torch.

    pair.json            identity, lineage, measurements (manifest.py)
    drafter/             config.json, model.safetensors
    recipe.yaml          the recipe of its training, resolved
    calibration.jsonl    the prompts that a probe repeats
    tokenizer/           the target's tokenizer, to name the first token that differs in another one
    adapter/             the target's PEFT adapter, where it has a local one
    reports/<date>/      measurements
    suites/              the prompt files of the measurements, where no package ships them
    pair.json.sig        its signature, if it has one (signature.py)

The target's own weights are not here: the pair names them by content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..common import BadInputError, Refusal
from ..common.atomic import Leftover
from ..common.digests import is_harmless, problem_of
from ..common.locks import lock_file
from ..common.untrusted_files import kind_of
from .manifest import MANIFEST, SIGNATURE, Manifest, inspect_manifest, read_manifest

if TYPE_CHECKING:
    from ..targets import Target

_MAX_FILES, _MAX_DEPTH = 10_000, 20  # of a pair, folders inside each other


@dataclass(frozen=True)
class PairFiles:
    """A pair's folder: its manifest and its files."""

    folder: Path
    manifest: Manifest

    @classmethod
    def load(cls, folder: str | Path, check: bool = True) -> Self:
        """Read a pair, and refuse it if its files were altered (`check`; False reads pair.json alone).

        Raises:
            BadInputError: there is no pair, or its pair.json is damaged.
            Refusal: names each file that was altered.
        """
        path = Path(folder).expanduser()
        pair = cls(path, read_manifest(path))
        if check:
            pair.require_whole()
        return pair

    def require_whole(self) -> None:
        """Refuse this pair if its files were altered; files that did not change since they were read are not read."""
        altered = list(_altered_files(self.folder, self.manifest, problem_of))
        if altered:
            raise Refusal(
                f"{self.folder} was altered after the pair was made: {'; '.join(altered)}. Take a good copy of the "
                "pair (`outrider pair verify` compares all of it)."
            )

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def digest(self) -> str:
        """The identity by content, a SHA-256."""
        return self.manifest.digest


def verify(folder: str | Path, target: Target | None = None) -> list[str]:
    """Recompute every digest of a pair, compare `target` with its own, and return the differences, one line each.

    Raises:
        BadInputError: there is no pair.json.
    """
    path = Path(folder).expanduser()
    if not (path / MANIFEST).is_file():
        raise BadInputError(f"no pair at {str(path)!r}: {MANIFEST} is missing there.")
    try:
        manifest, alterations = inspect_manifest(path)
    except BadInputError as error:
        return [str(error)]
    lines = [f"{MANIFEST}: {line}" for line in alterations]
    lines += _altered_files(path, manifest, partial(problem_of, again=True))
    if target is not None:
        differences = manifest.target.fingerprint.restored().differences(target.fingerprint())
        lines += [f"target: differs in {line}" for line in differences]
    return lines


def _altered_files(folder: Path, manifest: Manifest, problem_with: Callable[..., str | None]) -> Iterator[str]:
    odd = list(_irregular(folder))
    yield from odd
    if odd:  # links and devices are not followed
        return
    folder, expected = folder.resolve(), manifest.files()
    files = (p for p in folder.rglob("*") if (p.is_file() or p.is_symlink()) and not _is_unfinished(folder, p))
    present = {p.relative_to(folder).as_posix() for p in files} - {MANIFEST, SIGNATURE}
    present -= {name for name in present - expected.keys() if is_harmless(Path(name))}
    for name in sorted(expected.keys() | present):
        if name not in present:
            yield f"{name}: missing"
        elif name not in expected:
            yield f"{name}: not listed in {MANIFEST}"
        elif (problem := problem_with(folder / name, expected[name], size=manifest.sizes.get(name))) is not None:
            yield f"{name}: {problem}"


def _is_unfinished(folder: Path, path: Path) -> bool:
    """Return whether a file belongs to a writer of pair.json, running or killed."""
    leftover = Leftover.at(path)
    places = (folder / MANIFEST, folder / SIGNATURE)
    return path == lock_file(folder) or (leftover is not None and leftover.place in places)


def _irregular(folder: Path) -> Iterator[str]:
    """Yield a line for each link, pipe or device, without opening it."""
    count, waiting = 0, [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                count += 1
                if count > _MAX_FILES or depth > _MAX_DEPTH:
                    yield f"more than {_MAX_FILES} files, or {_MAX_DEPTH} folders inside each other"
                    return
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:  # a temporary file of a writer of pair.json
                    continue
                if stat.S_ISDIR(mode):
                    waiting.append((Path(entry.path), depth + 1))
                elif not stat.S_ISREG(mode):
                    name = Path(entry.path).relative_to(folder).as_posix()
                    yield f"{name}: {kind_of(mode)}; a pair holds regular files only"
