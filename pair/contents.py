"""What the files of a pair hold: its recipe, tokenizer and prompts; and figures that are stored later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ..common import BadInputError
from ..common.locks import locked
from ..decode import Plan
from ..distill.data_set import read_digests
from ..distill.prompt_table import Prompt
from ..eval.tuning_record import Tuning
from ..recipes import Recipe, load_recipe
from ..targets import Fingerprint, load_tokenizer
from .calibration import read_calibration
from .folder import PairFiles
from .manifest import CALIBRATION, DRAFTER, LEARNT, RECIPE, SUITES, TOKENIZER, Manifest, ServedRecord, read_manifest

_PATIENCE = 600.0  # seconds that a tuning, the work of minutes, waits for another writer


@dataclass(frozen=True)
class PairContents(PairFiles):
    """A pair's folder, and what its files hold."""

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

    def learnt(self) -> set[str]:
        """Return digests of the questions that the drafter learned from (`Prompt.asked_digests`); none if unknown."""
        return read_digests(self.folder / LEARNT) if self.manifest.learnt is not None else set()

    def calibration(self) -> list[Prompt]:
        """Return the prompts that the baseline was measured on; [] if there were none."""
        return [] if self.manifest.calibration is None else read_calibration(self.folder / CALIBRATION)
