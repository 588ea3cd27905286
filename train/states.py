"""The optimizer's state of a drafter in parts, as one: by the names of its weights, each whole.

A file of it holds what `torch.optim` would keep for each weight, and its groups without their weights; it is read with
`weights_only`. Any number of processes reads it, under FSDP2 or any stage of ZeRO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ..ground import BadInputError
from .parts import deepspeed, is_zero3, own_part

OPTIMIZER = "optimizer.pt"

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FsdpStates:
    """The state of an optimizer under FSDP2.

    Args:
        model: what `fully_shard` was called for, with the drafter's names.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def gathered(self) -> dict[str, Any]:
        """Return it, whole, in the first process. All must call this together."""
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE))

    def spread(self, saved: dict[str, Any]) -> None:
        """Give each process its parts of what `gathered` returned."""
        set_optimizer_state_dict(self.model, self.optimizer, saved, options=_WHOLE)


class ZeroStates:
    """The state of an optimizer under ZeRO, whose own is one long vector for many weights.

    Args:
        optimizer: DeepSpeed's, around that of the recipe.
        model: with the drafter's names.
    """

    def __init__(self, model: nn.Module, optimizer: Any):
        self.optimizer, self.base = optimizer, optimizer.optimizer
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def gathered(self) -> dict[str, Any]:
        """Return it, whole, in the first process. All must call this together."""
        flat = next(iter(self.base.state), None)
        if flat is None:
            return {"state": {}, "param_groups": []}
        self._link()
        own: dict[str, Any] = self.base.state[flat]
        long = [key for key, value in own.items() if isinstance(value, Tensor) and value.shape == flat.shape]
        shared = {key: value for key, value in own.items() if key not in long}
        is_first, state = torch.distributed.get_rank() == 0, {}
        for name, parameter in self.trained.items():
            found = {key: deepspeed().utils.safe_get_full_optimizer_state(parameter, key) for key in long}
            if is_first:
                whole = {key: value.detach().float().cpu().clone() for key, value in found.items()}
                state[name] = {**whole, **shared}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.base.param_groups]
        return {"state": state, "param_groups": groups}

    def spread(self, saved: dict[str, Any]) -> None:
        """Give each process its parts of what `gathered` returned, in either engine."""
        if not saved["state"]:
            return
        one = next(iter(saved["state"].values()))
        shared = {k: v for k, v in one.items() if not isinstance(v, Tensor) or v.ndim == 0}
        self._begin([key for key in one if key not in shared], shared)
        for name, parameter in self.trained.items():
            for key, value in saved["state"][name].items():
                if key not in shared:
                    self._put(parameter, key, value)

    def _begin(self, long: list[str], shared: dict[str, Any]) -> None:
        """Make what DeepSpeed makes with its first step."""
        for flat in self._vectors():
            copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in shared.items()}
            self.base.state[flat] = {**{key: torch.zeros_like(flat) for key in long}, **copies}
        self._link()

    def _link(self) -> None:
        """Let stages 1 and 2 find the part of each weight in their vectors.

        DeepSpeed does so once, when it has taken the first step of the first group, and so misses all other groups.
        """
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _vectors(self) -> list[Tensor]:
        name = "fp32_partitioned_groups_flat"  # of stage 3
        found: list[Tensor] = getattr(self.optimizer, name, None) or self.optimizer.single_partition_of_fp32_groups
        return found

    def _put(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        utils = deepspeed().utils
        if is_zero3(parameter):
            utils.safe_set_local_optimizer_state(parameter, own_part(parameter, value), key)
        else:
            utils.safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)


def write_state(states: FsdpStates | ZeroStates, folder: Path) -> None:
    """Write the optimizer's state into `folder`, by the first process. All must call this together."""
    found = states.gathered()
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / OPTIMIZER)


def read_state(states: FsdpStates | ZeroStates, folder: Path) -> None:
    """Read what `write_state` wrote. All processes must call this together.

    Raises:
        BadInputError: it is of another kind of launch, or of other weights.
    """
    saved = torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu")
    if not all(isinstance(name, str) for name in saved.get("state", {})):
        raise BadInputError(
            f"{folder} was written by a training whose drafter was whole in every process; continue it with such a "
            "launch (one process, or --multi_gpu), or start over (--fresh)."
        )
    states.spread(saved)
