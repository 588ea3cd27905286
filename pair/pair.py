"""A pair on disk: loaded, opened for decoding, and checked against what it was when it was made.

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..decode import Plan
from ..distill.prompts import Prompt
from ..eval.tuning import BatchTuning, Tuning, nearest
from ..ground import BadInputError, IncompatibleError, OutriderError, Refusal
from ..ground.digests import problem_of
from ..ground.harmless import is_harmless
from ..ground.leftovers import Leftover
from ..ground.locks import lock_file, locked
from ..ground.machine import device_name
from ..heads import Drafter, fuse, load_drafter
from ..recipes import Recipe, load_recipe
from ..targets import Fingerprint, Target, load_tokenizer, require_same_vocabulary
from .calibration import read_calibration
from .listing import irregular
from .manifest import (
    ADAPTER,
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

_PATIENCE = 600.0  # seconds that a stored tuning waits for another writer: it took minutes to find


class StaleError(OutriderError):
    """The target is not the one the pair was made for, though the drafter still fits it: a finding (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Compatibility:
    """How a target relates to the one a pair was made for.

    Attributes:
        status: "same" content; "changed" (the drafter fits, how well a probe tells); "incompatible" (it cannot draft).
        lines: what differs, for people; the first is the reason of an incompatibility.
    """

    status: Literal["same", "changed", "incompatible"]
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """A drafter, the target it was made for, and what was measured, as one folder."""

    folder: Path
    manifest: Manifest

    @classmethod
    def load(cls, folder: str | Path, check: bool = True) -> Pair:
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

    def tuned(self, target: Target, batch_size: int = 1, temperature: float = 0.0) -> BatchTuning | None:
        """Return what `outrider tune` found for `target` on this machine; None if it never ran here.

        It is that of the largest batch size not above `batch_size`, at the nearest temperature.
        """
        machine = (device_name(target.device), str(target.dtype).removeprefix("torch."))
        return nearest(self.manifest.tuning, machine, batch_size, temperature)

    def tuned_plan(self, target: Target, batch_size: int = 1, temperature: float = 0.0) -> Plan | None:
        """The plan that `tuned` found; None for none. It is meant for the drafter that `open_tuned` gives."""
        found = self.tuned(target, batch_size, temperature)
        return None if found is None else found.plan

    def store_tuning(self, tuning: Tuning) -> Pair:
        """Store `tuning` in pair.json, in place of what was known of the same machine, temperature and batch sizes.

        Raises:
            BadInputError: the folder holds another pair by now, or somebody else keeps writing it.
        """
        return self._store(lambda now: now.tuned(tuning))

    def store_served(self, found: ServedRecord) -> Pair:
        """Store what an engine made of the pair, in place of what was known of the same engine and depth.

        Raises:
            BadInputError: the folder holds another pair by now, or somebody else keeps writing it.
        """
        return self._store(lambda now: now.with_served(found))

    def _store(self, change: Callable[[Manifest], Manifest]) -> Pair:
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

    def load_target(self, path: str | None = None, **options: Any) -> Target:
        """Return a target in the pair's dtype: the one at `path` (`options` as for `Target.load`), or the recorded one.

        Raises:
            BadInputError: it cannot be loaded, or no source is recorded.
        """
        if path is not None:
            return Target.load(path, **{"dtype": self.dtype} | options)
        source = self.manifest.target.source
        if source.path is None:
            raise BadInputError(
                f"{self.folder}: this pair's target was given in memory, so it cannot be loaded again; name the target."
            )
        try:
            recorded = {"dtype": self.dtype} | ({} if source.quantize is None else {"quantize": source.quantize})
            return Target.load(source.path, source.revision, self._adapter(), **recorded | options)
        except BadInputError as error:
            raise BadInputError(
                f"the target recorded in {self.folder} cannot be loaded; name one that can. {error}"
            ) from error

    def _adapter(self) -> str | None:
        """Return the recorded target's adapter: the one that the pair keeps, else where it was found."""
        return str(self.folder / ADAPTER) if self.manifest.target.adapter_files else self.manifest.target.source.adapter

    def open(self, target: Target | None = None, check: bool = True) -> tuple[Target, Drafter, Plan]:
        """Return what a decoder needs: `Decoder(target, drafter).generate(…, plan=plan)`.

        Args:
            target: the target; None loads the recorded one.
            check: False accepts a target whose content changed, as long as the drafter fits it.

        Raises:
            IncompatibleError: the drafter cannot draft for this target (tokenizer, vocabulary, taps).
            StaleError: the target's content differs from what the pair was made for.
        """
        target = target or self.load_target()
        drafter = self.drafter_for(target)
        differences = self.fingerprint().differences(target.fingerprint()) if check else []
        if differences:
            raise StaleError(
                f"this target is not the one {self.name} version {self.version} was made for: {', '.join(differences)} "
                "differ. The output would still be "
                f"exact, but how fast is unknown: run `outrider probe {self.folder} --target …`, or refresh the pair."
            )
        return target, drafter, self.plan

    def open_tuned(
        self, target: Target | None = None, batch_size: int = 1, temperature: float = 0.0, check: bool = True
    ) -> tuple[Target, Drafter, Plan]:
        """What a decoder needs to run as fast as this machine was found to: `open` with the tuned plan.

        The drafter is the pair's own, or its fusion with the drafter without weights that the tuning found best
        together with it. A pair that was not tuned on this machine is opened with its own plan.

        Args:
            batch_size, temperature: what it will be used for, see `tuned`.

        Raises:
            IncompatibleError, StaleError: as `open` does.
        """
        target, drafter, plan = self.open(target, check)
        found = self.tuned(target, batch_size, temperature)
        return (target, drafter, plan) if found is None else (target, tuned_drafter(found, drafter), found.plan)

    def drafter_for(self, target: Target) -> Drafter:
        """Return the drafter, on the target's device.

        Raises:
            IncompatibleError: it cannot draft for `target`; names the first token, size or tap that differs.
        """
        self.require_whole()
        _check_vocabulary(self, target)
        return load_drafter(self.drafter_folder, target)


def _check_vocabulary(pair: Pair, target: Target) -> None:
    own = pair.tokenizer()
    if own is not None and target.tokenizer is not None:
        require_same_vocabulary(own, target.tokenizer, f"the pair {pair.name!r}")


def tuned_drafter(found: BatchTuning, drafter: Drafter) -> Drafter:
    """Return what the tuned plan is for: `drafter` by itself, or its fusion with a drafter without weights."""
    return drafter if found.statistical is None else fuse(found.statistical, drafter)


def compatibility(pair: Pair, target: Target) -> Compatibility:
    """Compare `target` with the one `pair` was made for; raises only if the pair itself is damaged."""
    try:
        pair.drafter_for(target)
    except IncompatibleError as error:
        return Compatibility("incompatible", [str(error)])
    differences = pair.fingerprint().differences(target.fingerprint())
    return Compatibility("changed" if differences else "same", differences)


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
