"""The content of a pair's folder, and its verification.

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
_PATIENCE = 600.0  # seconds that a tuning, the work of minutes, waits for another writer


@dataclass(frozen=True)
class PairContents:
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

    @property
    def plan(self) -> Plan:
        return self.manifest.plan.restored()

    def store_tuning(self, tuning: Tuning) -> Self:
        """Store `tuning` in pair.json, in place of an earlier one of the same machine, temperature and batch sizes.

        Raises:
            BadInputError: the folder holds another pair by now, or another process keeps writing it.
        """
        return self._store(lambda now: now.tuned(tuning))

    def store_served(self, record: ServedRecord) -> Self:
        """Store an engine's figures in pair.json, in place of earlier ones of the same engine and depth.

        Raises:
            BadInputError: the folder holds another pair by now, or another process keeps writing it.
        """
        return self._store(lambda now: now.with_served(record))

    def _store(self, change: Callable[[Manifest], Manifest]) -> Self:
        with locked(self.folder, wait=_PATIENCE):
            now = read_manifest(self.folder)  # measuring takes minutes: other records written meanwhile stay
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
        """Return the fingerprint of the pair's target."""
        return self.manifest.target.fingerprint.restored()

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """Return the recipe with `overrides` (`key.path=value`); suites that the pair keeps are named by their files.

        Raises:
            BadInputError: the recipe is damaged, or an override cannot be used.
        """
        recipe = load_recipe(self.recipe_file, overrides)
        kept = {f"{SUITES}/{name}" for name in self.manifest.suites}
        suites = [str(self.folder.resolve() / name) if name in kept else name for name in recipe.eval.suites]
        return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"suites": suites})})

    def tokenizer(self) -> Any | None:
        """Return the tokenizer of the pair's target; None if that had none."""
        return load_tokenizer(self.folder / TOKENIZER)

    def calibration(self) -> list[Prompt]:
        """Return the prompts that the baseline was measured on; [] if there were none."""
        return [] if self.manifest.calibration is None else read_calibration(self.folder / CALIBRATION)


# ------------------------------------------------------------ verification


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


def _altered_files(folder: Path, manifest: Manifest, problem_with: Callable[[Path, str], str | None]) -> Iterator[str]:
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
        elif (problem := problem_with(folder / name, expected[name])) is not None:
            yield f"{name}: {problem}"


def _is_unfinished(folder: Path, path: Path) -> bool:
    """Tell whether a file belongs to a writer of pair.json, running or killed."""
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
