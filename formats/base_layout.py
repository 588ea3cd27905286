"""A layout: how one kind of drafter is written for an engine, read back as that engine reads it, and read by us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..heads import Drafter, DrafterConfig
from ..heads.saved import read_config
from ..targets import Target
from .drafter_files import DrafterFiles
from .engine_logits import ProbeSequence


@dataclass(frozen=True)
class Unsupported:
    """Something that a drafter uses and an engine cannot do.

    Attributes:
        setting: as it is, such as `norm_before_fc: true`.
        why: what the engine does instead.
        nearest: the nearest setting that it serves.
    """

    setting: str
    why: str
    nearest: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}; nearest that can be served: {self.nearest}"


class ExportLayout(ABC):
    """How one kind of drafter is written for one engine.

    Attributes:
        name: of the layout, as `outrider lint` and the documentation call it.
        drafter: the type of our drafter.
        optional: tensors that may be there or not.
        is_model: the files are a whole model, which its own library reads: `load` reads config.json alone.
    """

    name: ClassVar[str]
    drafter: str
    optional: ClassVar[tuple[str, ...]] = ()
    is_model: ClassVar[bool] = False

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        """Return the settings of a drafter that cannot be written or served; `num_layers` are the target's."""
        return []

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        """Return the drafter in this layout; an engine drafts `depth` tokens unless it is told otherwise."""
        raise NotImplementedError(f"{self.name} is written file by file, see save.")

    @abstractmethod
    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        """Return the draft logits at each depth of the passage, `[k, V]`, as the engine computes them."""

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        """Tell whether this config.json, and tensors of these `names`, are of this layout.

        A layout that other files tell of is recognised in `import_`.
        """
        return False

    @abstractmethod
    def read(self, files: DrafterFiles, target: Target) -> Drafter:
        """Return the drafter that a checkpoint in this layout holds.

        Raises:
            BadInputError: it is damaged, or of another kind.
            IncompatibleError: it was made for another target, or uses what our drafter does not have.
        """

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that a checkpoint with this config.json must hold; {} if it tells none.

        Raises:
            BadInputError, IncompatibleError: config.json describes no drafter of this kind.
        """
        return {}

    def plain_name(self, name: str) -> str:
        """Return the layout's own name of a tensor that other programs spell in another way."""
        return name

    def save(self, drafter: Drafter, target: Target, folder: Path, depth: int) -> None:
        """Write the drafter into `folder`."""
        self.write(drafter, target, depth).save(folder)

    def load(self, folder: Path) -> DrafterFiles:
        """Read the files that `save` wrote, or another program that writes this layout."""
        return DrafterFiles(read_config(folder), {}, folder) if self.is_model else DrafterFiles.load(folder)
