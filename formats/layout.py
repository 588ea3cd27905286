"""A layout: how one kind of drafter is written for an engine, read back as that engine reads it, and read by us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..common import IncompatibleError
from ..heads import Drafter, DrafterConfig
from ..targets import Target
from .drafter_files import DrafterFiles
from .reading import ProbeSequence


@dataclass(frozen=True)
class Unsupported:
    """Something that a drafter uses and an engine cannot do.

    Attributes:
        found: the setting as it is, such as `norm_before_fc: true`.
        why: what the engine does instead.
        nearest: the nearest setting that it serves.
    """

    found: str
    why: str
    nearest: str

    def __str__(self) -> str:
        return f"{self.found}: {self.why}; nearest that can be served: {self.nearest}"


class ExportLayout(ABC):
    """How one kind of drafter is written for one engine.

    Attributes:
        name: of the layout, as `outrider lint` and the documentation call it.
        drafter: the type of our drafter.
        optional: tensors that may be there or not.
    """

    name: ClassVar[str]
    drafter: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        """Return what of a drafter's settings cannot be said or served.

        Args:
            num_layers: of the target.
        """

    @abstractmethod
    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        """Return the drafter in this layout; `depth` is how many tokens the engine drafts if nobody says otherwise."""

    @abstractmethod
    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        """Return the draft logits at each depth of the passage, `[k, V]`, as the engine makes them of the files."""

    @abstractmethod
    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        """Return whether this config.json, and tensors of these `names`, are of this layout."""

    @abstractmethod
    def read(self, found: DrafterFiles, target: Target) -> Drafter:
        """Return the drafter that a checkpoint in this layout holds.

        Raises:
            BadInputError: it is damaged, or of another kind.
            IncompatibleError: it was made for another target, or uses what our drafter does not have.
        """

    @abstractmethod
    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the tensors that a checkpoint with this config.json must hold, with their shapes.

        Raises:
            BadInputError, IncompatibleError: config.json describes no drafter of this kind.
        """

    def plain_name(self, name: str) -> str:
        """Return the layout's own name of a tensor that other programs spell in another way."""
        return name

    def save(self, drafter: Drafter, target: Target, folder: Path, depth: int) -> None:
        """Write the drafter into `folder`."""
        self.write(drafter, target, depth).save(folder)

    def load(self, folder: Path) -> DrafterFiles:
        """Read what `save` wrote, or another program that writes this layout."""
        return DrafterFiles.load(folder)


def refuse_lacks(lacks: list[Unsupported], where: str) -> None:
    """Raise IncompatibleError if there is anything that `where` cannot serve, with the nearest setting for each."""
    if lacks:
        raise IncompatibleError(f"{where} cannot serve this drafter. " + ". ".join(map(str, lacks)) + ".")
