"""A pair, opened for decoding: its target, its drafter, and the plan that is fastest here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..common import BadInputError, IncompatibleError, OutriderError
from ..common.machine import device_name
from ..decode import Plan
from ..eval.tuning_record import BatchTuning, nearest
from ..heads import Drafter, fuse, load_drafter
from ..targets import Target, require_same_vocabulary
from ..targets.config_only import target_without_layers
from .contents import PairContents
from .manifest import ADAPTER


class StaleError(OutriderError):
    """The target is not the one the pair was made for, though the drafter still fits it: a finding (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Compatibility:
    """The relation of a target to the one a pair was made for.

    Attributes:
        status: "same" content; "changed" (the drafter fits, a probe tells how well); "incompatible" (it cannot draft).
        lines: the differences, for people; the first is the reason of an incompatibility.
    """

    status: Literal["same", "changed", "incompatible"]
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pair(PairContents):
    """A drafter, the target it was made for, and their measurements, as one folder."""

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


def compatibility(pair: Pair, target: Target) -> Compatibility:
    """Compare `target` with the one `pair` was made for; raises only if the pair itself is damaged."""
    try:
        pair.drafter_for(target)
    except IncompatibleError as error:
        return Compatibility("incompatible", [str(error)])
    differences = pair.fingerprint().differences(target.fingerprint())
    return Compatibility("changed" if differences else "same", differences)
