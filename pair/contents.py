"""What a pair's folder holds, and whether it is what it was when the pair was made.

    pair.json            identity, lineage, measurements (manifest.py)
    drafter/             config.json, model.safetensors
    recipe.yaml          what trained it, resolved
    calibration.jsonl    the prompts that a probe repeats
    tokenizer/           the target's tokenizer, to name the first token that differs in another one
    adapter/             the target's PEFT adapter, where it has a local one
    reports/<date>/      what was measured
    suites/              the prompt files that it was measured on, where no package ships them
    pair.json.sig        who signed it, where somebody did (signature.py)

The target's own weights are not here: the pair names them by content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..common import BadInputError, Refusal
from ..common.atomic import Leftover
from ..common.digests import is_harmless, problem_of
from ..common.locks import lock_file, locked
from ..common.safe_load import kind_of
from ..decode import Plan
from ..distill.prompts import Prompt
from ..eval.tuning import Tuning
from ..recipes import Recipe, load_recipe
from ..targets import Fingerprint, Target, load_tokenizer
from .calibration import read_calibration
from .manifest import (
    CALIBRATION,
    DRAFTER,
    MANIFEST,
    RECIPE,
    SIGNATURE,
    SUITES,
    TOKENIZER,
    Manifest,
    ServedRecord,
    inspect_manifest,
    read_manifest,
)

_MAX_FILES, _MAX_DEPTH = 10_000, 20  # of a pair, folders inside each other
_PATIENCE = 600.0  # seconds that a stored tuning waits for another writer: it took minutes to find


@dataclass(frozen=True)
class PairContents:
    """A pair's folder: what it says, and the files that it keeps."""

    folder: Path
    manifest: Manifest

    @classmethod
    def load(cls, folder: str | Path, check: bool = True) -> Self:
        """Read a pair, whose files must be what they were when it was made.

        Args:
            check: False reads pair.json alone.

        Raises:
            BadInputError: there is no pair, or its pair.json is damaged.
            Refusal: its files were altered, and which.
        """
        path = Path(folder).expanduser()
        pair = cls(path, read_manifest(path))
        if check:
            pair.require_whole()
        return pair

    def require_whole(self) -> None:
        """Refuse this pair if its files were altered; files that did not change since they were read are not read.

        Raises:
            Refusal: names each file that differs.
        """
        found = list(_altered_files(self.folder, self.manifest, problem_of))
        if found:
            raise Refusal(
                f"{self.folder} was altered after the pair was made: {'; '.join(found)}. Take a good copy of the pair "
                "(`outrider pair verify` compares all of it)."
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

    @property
    def plan(self) -> Plan:
        return self.manifest.plan.restored()

    def store_tuning(self, tuning: Tuning) -> Self:
        """Store `tuning` in pair.json, in place of what was known of the same machine, temperature and batch sizes.

        Raises:
            BadInputError: the folder holds another pair by now, or somebody else keeps writing it.
        """
        return self._store(lambda now: now.tuned(tuning))

    def store_served(self, found: ServedRecord) -> Self:
        """Store what an engine made of the pair, in place of what was known of the same engine and depth.

        Raises:
            BadInputError: the folder holds another pair by now, or somebody else keeps writing it.
        """
        return self._store(lambda now: now.with_served(found))

    def _store(self, change: Callable[[Manifest], Manifest]) -> Self:
        with locked(self.folder, wait=_PATIENCE):
            now = read_manifest(self.folder)  # measuring takes minutes: what else was written since stays
            if now.digest != self.digest:
                raise BadInputError(
                    f"{self.folder} holds another pair by now ({now.name} version {now.version}); nothing was stored. "
                    "Measure that one."
                )
            manifest = change(now)
            manifest.write(self.folder, instead_of=now)
        return replace(self, manifest=manifest)

    @property
    def dtype(self) -> str:
        """The dtype of the target's weights; another dtype is another target."""
        return self.manifest.target.fingerprint.dtype

    @property
    def drafter_folder(self) -> Path:
        return self.folder / DRAFTER

    @property
    def recipe_file(self) -> Path:
        return self.folder / RECIPE

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the target the pair was made for."""
        return self.manifest.target.fingerprint.restored()

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """Return the recipe with `overrides` (`key.path=value`); suites that the pair keeps are named by their files.

        Raises:
            BadInputError: the recipe is damaged, or an override cannot be used.
        """
        recipe = load_recipe(self.recipe_file, overrides)
        suites = [self._kept_suite(name) for name in recipe.eval.suites]
        return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"suites": suites})})

    def _kept_suite(self, name: str) -> str:
        kept = name.removeprefix(f"{SUITES}/") in self.manifest.suites and name.startswith(f"{SUITES}/")
        return str(self.folder.resolve() / name) if kept else name

    def tokenizer(self) -> Any | None:
        """Return the tokenizer of the target the pair was made for; None if that had none."""
        return load_tokenizer(self.folder / TOKENIZER)

    def calibration(self) -> list[Prompt]:
        """Return the prompts that the baseline was measured on; [] if there were none."""
        return [] if self.manifest.calibration is None else read_calibration(self.folder / CALIBRATION)


# ------------------------------------------------------------ verification


def verify(folder: str | Path, target: Target | None = None) -> list[str]:
    """Recompute every digest of a pair; with `target`, compare its content too.

    Returns:
        What differs, one line each; [] if the pair is intact.

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
    read_again = partial(problem_of, again=True)
    found = [f"{MANIFEST}: {line}" for line in alterations] + list(_altered_files(path, manifest, read_again))
    if target is not None:
        found += [
            f"target: differs in {line}"
            for line in manifest.target.fingerprint.restored().differences(target.fingerprint())
        ]
    return found


def _altered_files(folder: Path, manifest: Manifest, problem_with: Callable[[Path, str], str | None]) -> Iterator[str]:
    odd = list(irregular(folder))
    yield from odd
    if odd:  # what a link or a device shows is not looked at
        return
    folder, expected = folder.resolve(), manifest.files()
    found = (p for p in folder.rglob("*") if (p.is_file() or p.is_symlink()) and not _is_in_the_way(folder, p))
    present = {p.relative_to(folder).as_posix() for p in found} - {MANIFEST, SIGNATURE}
    present -= {name for name in present - expected.keys() if is_harmless(Path(name))}
    for name in sorted(expected.keys() | present):
        if name not in present:
            yield f"{name}: missing"
        elif name not in expected:
            yield f"{name}: not listed in {MANIFEST}"
        elif (problem := problem_with(folder / name, expected[name])) is not None:
            yield f"{name}: {problem}"


def _is_in_the_way(folder: Path, path: Path) -> bool:
    """Tell whether a writer of pair.json has this file there for a moment, or left it when it was killed."""
    unfinished = Leftover.at(path)
    places = (folder / MANIFEST, folder / SIGNATURE)
    return path == lock_file(folder) or (unfinished is not None and unfinished.place in places)


def irregular(folder: Path) -> Iterator[str]:
    """Yield what in a pair is neither a regular file nor a folder, one line each. Nothing is opened.

    A link shows whoever opens it a file that is not in the pair, a pipe is waited for, and a device does something.
    """
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
                except FileNotFoundError:  # a temporary file of whoever writes pair.json now
                    continue
                if stat.S_ISDIR(mode):
                    waiting.append((Path(entry.path), depth + 1))
                elif not stat.S_ISREG(mode):
                    name = Path(entry.path).relative_to(folder).as_posix()
                    yield f"{name}: {kind_of(mode)}; a pair holds regular files only"
