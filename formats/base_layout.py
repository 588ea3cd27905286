"""A layout: how one kind of drafter is written for an engine, read back as that engine reads it, and read by us.

`DrafterFiles` are what is written and read: config.json, and tensors by name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..common import IncompatibleError
from ..common.atomic import replacing, write_atomically
from ..heads import Drafter, DrafterConfig
from ..heads.saved import CONFIG, read_config
from ..targets import Target
from ..targets.model_folder import refuse_pickles
from ..targets.quantised_files import dequantised
from ..targets.weights import WEIGHT_TYPES, WEIGHTS, name_and_shape_faults, stored_tensors
from .compression import Compressed, compress, require_meant
from .engine_logits import ProbeSequence

Fields = dict[str, Any]  # of a config.json
_QUANTISED, _LAYERS = "quantization_config", "transformer_layer_config"


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter in an engine's layout."""

    config: Fields  # the contents of config.json
    tensors: dict[str, Tensor]  # by their names in the layout
    folder: Path = Path()  # where it was read from, for messages

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG

    def quantised(self, made: Compressed) -> DrafterFiles:
        """Return the files of a drafter whose tensors were compressed."""
        settings, layer = {_QUANTISED: made.settings}, self.config.get(_LAYERS)
        settings = settings if layer is None else {_LAYERS: layer | settings}  # of which vLLM makes its whole config
        return replace(self, config=self.config | settings, tensors=made.tensors)

    def save(self, folder: Path, weights: str = WEIGHTS, config: str = CONFIG) -> None:
        """Write config.json and the weights into `folder`, under these names."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / config, json.dumps(self.config, indent=2) + "\n")
        held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        with replacing(folder / weights) as temporary:
            save_file(held, temporary, metadata={"format": "pt"})
        shutil.copymode(folder / config, folder / weights)  # safetensors lets only its own user read what it writes

    @classmethod
    def load(cls, folder: str | Path) -> DrafterFiles:
        """Read config.json and every safetensors file of `folder`; of quantised matrices, what they mean.

        Raises:
            BadInputError: there is no such checkpoint, or a damaged one, or one of pickles.
            IncompatibleError: it was quantised in a way that is not read.
        """
        folder, tensors = Path(folder).expanduser(), dict[str, Tensor]()
        config = read_config(folder)
        refuse_pickles(folder)
        for file in sorted(folder.glob("*.safetensors")):
            stored_tensors(file)  # refuses a damaged file
            tensors |= load_file(file)
        for part in (config, config.get(_LAYERS)):
            if isinstance(part, dict) and (settings := part.pop(_QUANTISED, None)) is not None:
                tensors = dequantised(tensors, settings, str(folder))
        return cls(config, tensors, folder)


RECORD = "written.json"  # beside an export: its config, and a digest of every tensor, so that any later change shows


def digest(tensor: Tensor) -> str:
    """Return a SHA-256 of a tensor's shape, precision and bytes."""
    head = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
    held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(head + held.numpy().tobytes()).hexdigest()


def write_record(folder: Path, written: DrafterFiles, layout: str) -> None:
    """Write the record of a checkpoint into `folder`."""
    values = {
        "schema_version": 1,
        "layout": layout,
        "config": written.config,
        "tensors": {name: digest(tensor) for name, tensor in sorted(written.tensors.items())},
    }
    write_atomically(folder / RECORD, json.dumps(values, indent=1) + "\n")


_MAPS = ("d2t", "t2d", "token_map")  # of a draft vocabulary; all other tensors of a head are weights


def other_types(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return which tensors of a head are of a type that they cannot have, and that in words, by their names."""
    plain = ", ".join(str(kind).removeprefix("torch.") for kind in WEIGHT_TYPES)
    found = {}
    for name, tensor in tensors.items():
        is_number = tensor.is_floating_point() or tensor.is_complex()
        is_map = name.rpartition(".")[2] in _MAPS
        if is_map and is_number:
            found[name] = f"{name} is {tensor.dtype}, and holds tokens: expected whole numbers."
        elif not is_map and tensor.dtype not in WEIGHT_TYPES:
            found[name] = f"{name} is {tensor.dtype}, and weights are one of {plain}."
    return found


def with_prefix(name: str, old: str, new: str) -> str:
    """Return `name` with the prefix `new` in the place of `old`; without that prefix as it is."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def fill(module: nn.Module, weights: Mapping[str, Tensor], unexpected: Iterable[str], where: str) -> None:
    """Load `weights` into `module`, strictly.

    Args:
        weights: by our names.
        unexpected: tensors of the layout that have no place in `module`.
        where: names the checkpoint.

    Raises IncompatibleError if something is missing, left over, or of another shape.
    """
    problems = name_and_shape_faults(module.state_dict(), weights) + [f"unexpected {name}" for name in unexpected]
    if problems:
        raise IncompatibleError(
            f"{where}: the tensors do not fit its config.json: {'; '.join(sorted(problems)[:4])} "
            "(names as in our head)."
        )
    module.load_state_dict(dict(weights))


@dataclass(frozen=True)
class Unsupported:
    """Something that a drafter uses and an engine cannot do."""

    setting: str  # as it is, such as `norm_before_fc: true`
    why: str  # what the engine does instead
    nearest: str  # the nearest setting that it serves

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}; nearest that can be served: {self.nearest}"


def pruned_lacking(config: Any, why: str, nearest: str = "draft_vocab_size: 0") -> list[Unsupported]:
    """Return the lack of a layout that keeps no draft vocabulary, for a drafter that has one; [] for any other."""
    size = config.draft_vocab_size
    return [] if size in (0, config.vocab_size) else [Unsupported(f"draft_vocab_size: {size}", why, nearest)]


D = TypeVar("D", bound=Drafter)
C = TypeVar("C", bound=DrafterConfig)


class ExportLayout(ABC, Generic[D, C]):
    """How one kind of drafter is written for one engine.

    Attributes:
        name: of the layout, as `outrider lint` and the documentation call it.
        drafter: the type of our drafter.
        optional: tensors that may be there or not.
        is_model: the files are a whole model, which its own library reads: `load` reads config.json alone.
        keeps_window: what reads them attends no further back than the drafter's sliding window.
        counts_outputs: its taps are outputs of layers: output i is HF `hidden_states[i + 1]`.
        first_tap: the lowest number of a tap.
        served_as: the type of drafters whose method engines name for it; "" for its own.
        launch_settings: what vLLM's configuration of drafting says of it beside its method.
        precisions: that its matrices can be written in, beside their own.
        has_output: the engine may read its output embedding quantised, too.
        other_precisions: a sentence on others that its engine reads.
    """

    name: ClassVar[str]
    drafter: str
    optional: ClassVar[tuple[str, ...]] = ()
    is_model: ClassVar[bool] = False
    keeps_window: bool = True
    counts_outputs: ClassVar[bool] = False
    first_tap: ClassVar[int] = 0
    served_as: str = ""
    launch_settings: ClassVar[Fields] = {}
    precisions: tuple[str, ...] = ()
    has_output: ClassVar[bool] = False
    other_precisions: ClassVar[str] = ""

    def lacks(self, config: C, num_layers: int) -> list[Unsupported]:
        """Return the settings of a drafter that cannot be written or served; `num_layers` are the target's."""
        return []

    def write(self, drafter: D, target: Target, depth: int) -> DrafterFiles:
        """Return the drafter in this layout; an engine drafts `depth` tokens unless it is told otherwise."""
        raise NotImplementedError(f"{self.name} is written file by file, see save.")

    @abstractmethod
    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        """Return the draft logits at each depth of the passage, `[k, V]`, as the engine computes them."""

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        """Return whether this config.json, and tensors of these `names`, are of this layout.

        A layout that other files tell of is recognised in `import_`.
        """
        return False

    @abstractmethod
    def read(self, files: DrafterFiles, target: Target) -> D:
        """Return the drafter that a checkpoint in this layout holds.

        Raises:
            BadInputError: it is damaged, or of another kind.
            IncompatibleError: it was made for another target, or uses what our drafter does not have.
        """

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that a checkpoint with this config.json must hold; {} if it tells none.

        Raises BadInputError or IncompatibleError if config.json describes no drafter of this kind.
        """
        return {}

    def listed_taps(self, config: Fields) -> tuple[str, list[int] | None]:
        """Return the field that lists the taps of a drafter's config.json, and what it holds; None for nothing."""
        return "", None

    def plain_name(self, name: str) -> str:
        """Return the layout's own name of a tensor that other programs spell in another way."""
        return name

    def rounded(self, drafter: D, target: Target, depth: int, precision: str) -> D:
        """Return the drafter that files in one of the `precisions` hold."""
        files = self.write(drafter, target, depth)
        return self.read(replace(files, tensors=self._compressed(files, precision).meant), target)

    def save_as(self, drafter: D, target: Target, folder: Path, depth: int, precision: str) -> None:
        """Write the drafter into `folder` with matrices in one of the layout's `precisions`; "" for their own."""
        if not precision:
            self.save(drafter, target, folder, depth)
            return
        files = self.write(drafter, target, depth)
        made = self._compressed(files, precision)
        files.quantised(made).save(folder)
        require_meant(self.load(folder).tensors, made.meant, self.name)

    def _compressed(self, files: DrafterFiles, precision: str) -> Compressed:
        return compress(files.tensors, precision, self.has_output)

    def save(self, drafter: D, target: Target, folder: Path, depth: int) -> None:
        """Write the drafter into `folder`."""
        self.write(drafter, target, depth).save(folder)

    def load(self, folder: Path) -> DrafterFiles:
        """Read the files that `save` wrote, or another program that writes this layout."""
        return DrafterFiles(read_config(folder), {}, folder) if self.is_model else DrafterFiles.load(folder)
