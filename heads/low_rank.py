"""A drafter that is learnt as a small change of another one: W' = W + (α / r) B A (LoRA, arXiv 2106.09685).

A is [r, in], B [out, r], and begins at zero. What is saved is the base as it was, and the change in peft's own format,
so that many drafters over one base share its file wherever files are stored by content:

    config.json                 drafter_type: low_rank, and the base's type
    base/                       the base drafter, as it was saved
    adapter_config.json, adapter_model.safetensors      as `peft` writes them

Loaded to draft, it is a plain drafter of the base's type with the changed matrices (`plain`).
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from ..common.atomic import clear_away, replacing, write_atomically
from ..common.digests import LIST
from ..targets import Target
from ..targets.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..targets.weights import WEIGHT_TYPES
from .base import Drafter, DrafterLoss, TargetBatch
from .registry import restore_drafter
from .saved import CONFIG, DrafterConfig, read_config

BASE = "base"
_PREFIX = "base_model.model."  # of every name in peft's files


@dataclass
class LowRankConfig(DrafterConfig):
    """Settings of the change.

    Attributes:
        rank: r, of every product. alpha: α; 0 for twice the rank.
        base_type: the base's type.
    """

    least: ClassVar = {"rank": 1}

    rank: int = 8
    alpha: float = 0.0
    base_type: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = self.alpha or 2.0 * self.rank


class LowRank(Drafter[LowRankConfig]):
    """A change of another drafter that is being trained.

    Args:
        base: is frozen.
        base_folder: where it was saved; its files are what `save` copies.
    """

    name = "low_rank"
    config_class = LowRankConfig
    writes_text: ClassVar[bool] = False

    def __init__(self, config: LowRankConfig, base: Drafter, base_folder: Path):
        if not base.trainable:
            raise BadInputError(f"a {base.name} drafter has no weights: there is nothing that a low rank could change.")
        config.base_type = base.name
        super().__init__(config)
        self.base, self.base_folder = base, base_folder
        matrices = dict(_matrices(base, config.rank))
        if not matrices:
            raise BadInputError(f"no matrix of this {base.name} drafter is larger than rank {config.rank}; lower it.")
        self._learning = [parameter for parameter in base.parameters() if parameter.requires_grad]
        base.requires_grad_(False)
        self.names = list(matrices)
        self.down = nn.ParameterList(torch.empty(config.rank, m.shape[1]) for m in matrices.values())  # [r, in]
        generator = torch.Generator().manual_seed(0)  # so that a training which is begun again is the same one
        for down in self.down:
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)  # as peft does
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(m.shape[0], config.rank)) for m in matrices.values()])

    @classmethod
    def over(cls, folder: Path, target: Target, rank: int) -> Self:
        """Return a change of the drafter in `folder` to be trained for `target`, in fp32.

        A change of the same rank goes on from there; one of another rank begins anew over the same base.
        """
        values = read_config(folder)
        is_changed = values.pop("drafter_type", None) == cls.name
        if is_changed and values.get("rank") == rank:
            drafter = cls.from_folder(folder, values, target)
        else:
            base_folder = folder / BASE if is_changed else folder
            drafter = cls(LowRankConfig(rank), restore_drafter(base_folder, target), base_folder)
        drafter.to(target.device).check(target)
        return drafter.float()

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Self:
        config = cls.configured(values, f"{folder / CONFIG}: drafter")
        drafter = cls(config, restore_drafter(folder / BASE, target), folder / BASE)
        drafter._load(folder / ADAPTER_WEIGHTS)
        return drafter

    def save(self, path: str | Path) -> None:
        """Write the base as it was, and the change in peft's format."""
        folder = Path(path)
        if self.base_folder.resolve() != (folder / BASE).resolve():  # else it is there already
            clear_away(folder / BASE)
            # A seal of this folder lists the base's files, too.
            shutil.copytree(self.base_folder, folder / BASE, ignore=shutil.ignore_patterns(LIST))
        with replacing(folder / ADAPTER_WEIGHTS) as temporary:
            weights = {name: weight.cpu().contiguous() for name, weight in self._in_peft().items()}
            save_file(weights, temporary, metadata={"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "target_modules": [name.removesuffix(".weight") for name in self.names],
            "base_model_name_or_path": None,
            "inference_mode": True,
        }
        write_atomically(folder / ADAPTER_CONFIG, json.dumps(settings, indent=2) + "\n")
        self.save_config(folder)

    def check(self, target: Target) -> None:
        self.base.check(target)

    @property
    def learns_as(self) -> type[Drafter]:
        return self.base.learns_as

    @property
    def taps(self) -> tuple[int, ...]:
        return self.base.taps

    def plain(self) -> Drafter:
        """Return the base itself, with the change added to its weights, in fp64 and rounded once; to be called once."""
        weights = self.base.state_dict()
        for name, down, up in zip(self.names, self.down, self.up, strict=True):
            changed = weights[name].double() + self.scale * (up.double() @ down.double())
            weights[name].copy_(changed.to(weights[name].dtype))
        for parameter in self._learning:
            parameter.requires_grad_(True)
        return self.base

    @property
    def scale(self) -> float:
        """α / r, by which the products are multiplied."""
        return self.config.alpha / self.config.rank

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the loss of the base, run with the LoRA-updated matrices."""
        own = dict(self.base.named_parameters())
        changed = {
            name: own[name] + self.scale * (up @ down)
            for name, down, up in zip(self.names, self.down, self.up, strict=True)
        }
        return torch.func.functional_call(self.base, changed, (batch,))

    def _in_peft(self) -> dict[str, Tensor]:
        """Return A and B under peft's names, without gradients."""
        modules = [_PREFIX + name.removesuffix(".weight") for name in self.names]
        weights = dict(zip((f"{module}.lora_A.weight" for module in modules), self.down, strict=True))
        weights |= zip((f"{module}.lora_B.weight" for module in modules), self.up, strict=True)
        return {name: weight.detach() for name, weight in weights.items()}

    def _load(self, file: Path) -> None:
        try:
            stored = load_file(file)
        except Exception as error:  # the library raises what it likes at a damaged file
            raise BadInputError(f"{file}: damaged or not a safetensors file ({error}). Copy it again.") from error
        own = self._in_peft()
        wrong = sorted(own.keys() ^ stored.keys()) or sorted(n for n in own if own[n].shape != stored[n].shape)
        wrong += sorted(name for name, tensor in stored.items() if tensor.dtype not in WEIGHT_TYPES)
        if wrong:
            what = f"{wrong[0]} is missing, or of another shape or type"
            raise IncompatibleError(f"{file} does not fit its base drafter: {what}.")
        for name, weight in own.items():
            weight.copy_(stored[name])


def _matrices(base: Drafter, rank: int) -> list[tuple[str, Tensor]]:
    """Return the weights of the base's linear layers that learn and are larger than the rank, by their names."""
    linears = {f"{name}.weight" for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    learning = [(name, p) for name, p in base.named_parameters() if name in linears and p.requires_grad]
    return [(name, p) for name, p in learning if min(p.shape) > rank]
