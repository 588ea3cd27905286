"""A pair: what its files hold, figures that are stored later, and its opening for decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common import BadInputError, OutriderError
from ..common.locks import locked
from ..common.machine import device_name
from ..decode import Plan
from ..distill.data_set import read_digests
from ..distill.prompt_table import Prompt
from ..eval.tuning_record import BatchTuning, Tuning, nearest
from ..heads import Drafter, fuse, load_drafter
from ..recipes import Recipe, load_recipe
from ..recipes.schema import gone_and_off
from ..targets import Fingerprint, Target, load_tokenizer, require_same_vocabulary
from ..targets.config_only import target_without_layers
from .calibration import read_calibration
from .folder import PairFiles
from .manifest import (
    ADAPTER,
    CALIBRATION,
    DRAFTER,
    LEARNT,
    RECIPE,
    SUITES,
    TOKENIZER,
    Manifest,
    ServedRecord,
    read_manifest,
)

_PATIENCE = 600.0  # seconds that a tuning, the work of minutes, waits for another writer


class StaleError(OutriderError):
    """The target is not the one the pair was made for, though the drafter still fits it: a finding (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Pair(PairFiles):
    """A drafter, the target it was made for, and their measurements, as one folder."""

    @property
    def plan(self) -> Plan:
        return self.manifest.plan.restored()

    def store_tuning(self, tuning: Tuning) -> Pair:
        """Return this pair with `tuning` stored, in place of one of the same machine, temperature and batch sizes.

        Raises:
            BadInputError: the folder holds another pair by now, or another process keeps writing it.
        """
        return self._store(lambda now: now.tuned(tuning))

    def store_served(self, record: ServedRecord) -> Pair:
        """Return this pair with an engine's figures stored, in place of earlier ones of the same engine and depth.

        Raises:
            BadInputError: the folder holds another pair by now, or another process keeps writing it.
        """
        return self._store(lambda now: now.with_served(record))

    def _store(self, change: Callable[[Manifest], Manifest]) -> Pair:
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

    def recipe(self, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Recipe:
        """Return the recipe with changes as `load_recipe` takes them; suites that the pair keeps are named by file.

        Keys of trainings that went since are left out: the drafter is there.

        Raises:
            BadInputError: the recipe is damaged, or an override cannot be used.
        """
        recipe = load_recipe(self.recipe_file, overrides, gone_and_off() | dict(changes or {}))
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

    def tuned(self, target: Target, batch_size: int = 1, temperature: float = 0.0) -> BatchTuning | None:
        """Return the result of `outrider tune` for `target` on this machine; None if it never ran here.

        It is that of the largest batch size not above `batch_size`, at the nearest temperature.
        """
        machine = (device_name(target.device), str(target.dtype).removeprefix("torch."))
        return nearest(self.manifest.tuning, machine, batch_size, temperature)

    @property
    def adapter(self) -> str | None:
        """The place of the target's adapter: the pair's own copy, else where it came from; None without one."""
        kept = bool(self.manifest.target.adapter_files)
        return str(self.folder / ADAPTER) if kept else self.manifest.target.source.adapter

    def load_target(self, path: str | None = None, layers: bool = True, **options: Any) -> Target:
        """Return a target in the pair's dtype and quantisation: at `path`, loaded with `options`, or the recorded one.

        Args:
            layers: False opens a recorded one that lives in an engine without them.

        Raises:
            BadInputError: it cannot be loaded, or no source is recorded.
        """
        source = self.manifest.target.source
        recorded = {"dtype": self.dtype} | ({} if source.quantize is None else {"quantize": source.quantize})
        if path is not None:
            return Target.load(path, **recorded | options)
        if source.path is None:
            raise BadInputError(
                f"{self.folder}: this pair's target was given in memory, so it cannot be loaded again; name the target."
            )
        try:
            if not layers and self.recipe().target.engine is not None:
                return target_without_layers(source.path, source.revision, self.dtype)
            return Target.load(source.path, source.revision, self.adapter, **recorded | options)
        except BadInputError as error:
            raise BadInputError(
                f"the target recorded in {self.folder} cannot be loaded; name one that can. {error}"
            ) from error

    def open(self, target: Target | None = None, check: bool = True) -> tuple[Target, Drafter, Plan]:
        """Return target, drafter and plan for a decoder: `Decoder(target, drafter).generate(…, plan=plan)`.

        Args:
            target: the target; None loads the recorded one.
            check: False accepts a target whose content changed, as long as the drafter fits it.

        Raises:
            IncompatibleError: the drafter cannot draft for this target (tokenizer, vocabulary, taps).
            StaleError: the target's content differs from that of the pair's target.
        """
        target = target or self.load_target()
        drafter = self.drafter_for(target)
        differences = self.fingerprint().differences(target.fingerprint()) if check else []
        if differences:
            raise StaleError(
                f"this target is not the one {self.name} version {self.version} was made for: {', '.join(differences)} "
                "differ. The output would still be exact, but how fast is unknown: run "
                f"`outrider probe {self.folder} --target …`, or refresh the pair."
            )
        return target, drafter, self.plan

    def open_tuned(
        self, target: Target | None = None, batch_size: int = 1, temperature: float = 0.0, check: bool = True
    ) -> tuple[Target, Drafter, Plan]:
        """Return target, drafter and plan as `open` does, with the plan that was tuned on this machine.

        The drafter is the pair's own, or its fusion with a drafter without weights if that was fastest. A pair that
        was not tuned on this machine is opened with its own plan.

        Args:
            batch_size, temperature: of the requests to come, see `tuned`.

        Raises:
            IncompatibleError, StaleError: as `open` does.
        """
        target, drafter, plan = self.open(target, check)
        tuning = self.tuned(target, batch_size, temperature)
        return (target, drafter, plan) if tuning is None else (target, tuned_drafter(tuning, drafter), tuning.plan)

    def drafter_for(self, target: Target) -> Drafter:
        """Return the drafter, on the target's device.

        Raises:
            IncompatibleError: it cannot draft for `target`; names the first token, size or tap that differs.
        """
        self.require_whole()
        own = self.tokenizer()
        if own is not None and target.tokenizer is not None:
            require_same_vocabulary(own, target.tokenizer, f"the pair {self.name!r}")
        return load_drafter(self.drafter_folder, target)


def tuned_drafter(tuning: BatchTuning, drafter: Drafter) -> Drafter:
    """Return the drafter of the tuned plan: `drafter` by itself, or its fusion with a drafter without weights."""
    return drafter if tuning.statistical is None else fuse(tuning.statistical, drafter)
