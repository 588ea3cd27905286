"""A drafter in an engine's layout: config.json, and tensors by name; read, written, and loaded into a head of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..common import IncompatibleError
from ..common.atomic import replacing, write_atomically
from ..heads.saved import CONFIG, read_config
from ..targets.model_folder import refuse_pickles
from ..targets.weights import WEIGHTS, stored_tensors


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter in an engine's layout.

    Attributes:
        config: the contents of config.json.
        tensors: by their names in the layout.
        folder: where it was read from, for messages.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path = Path()

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG

    def save(self, folder: Path, weights: str = WEIGHTS) -> None:
        """Write config.json and the weights into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG, json.dumps(self.config, indent=2) + "\n")
        held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        with replacing(folder / weights) as temporary:
            save_file(held, temporary, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / weights)  # safetensors lets only its own user read what it writes

    @classmethod
    def load(cls, folder: str | Path) -> DrafterFiles:
        """Read config.json and every safetensors file of `folder`.

        Raises:
            BadInputError: there is no such checkpoint, or a damaged one, or one of pickles.
        """
        folder, tensors = Path(folder).expanduser(), dict[str, Tensor]()
        config = read_config(folder)
        refuse_pickles(folder)
        for file in sorted(folder.glob("*.safetensors")):
            stored_tensors(file)  # refuses a damaged file
            tensors |= load_file(file)
        return cls(config, tensors, folder)


def header_names(folder: Path) -> set[str]:
    """Return the names of all tensors in `folder`, without reading them."""
    return {name for file in sorted(folder.glob("*.safetensors")) for name in stored_tensors(file)}


def with_prefix(name: str, old: str, new: str) -> str:
    """Return `name` with the prefix `new` in the place of `old`; without that prefix as it is."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def fill(module: nn.Module, weights: Mapping[str, Tensor], unexpected: Iterable[str], where: str) -> None:
    """Load `weights` into `module`, strictly.

    Args:
        weights: by our names.
        unexpected: tensors of the layout that have no place in `module`.
        where: names the checkpoint.

    Raises:
        IncompatibleError: something is missing, left over, or of another shape.
    """
    own = module.state_dict()
    problems = [f"missing {name}" for name in own.keys() - weights.keys()]
    problems += [f"unexpected {name}" for name in [*unexpected, *(weights.keys() - own.keys())]]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if problems:
        raise IncompatibleError(
            f"{where}: the tensors do not fit its config.json: {'; '.join(sorted(problems)[:4])} "
            "(names as in our head)."
        )
    module.load_state_dict(dict(weights))
