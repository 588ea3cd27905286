"""The optimizer's state of a drafter in parts, as one: by the names of its weights, each whole.

The file is what `torch.optim` saves, with names in place of numbers; it is read with `weights_only`. Every launch reads
every such file, also that of a drafter which was whole in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

from .sharded_drafter import deepspeed, is_zero3, own_part

OPTIMIZER, SCHEDULE = "optimizer.pt", "scheduler.pt"  # as transformers calls them
INSIDE = "loss.drafter."  # where `ShardedDrafter` has the drafter's weights

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class WholeStates:
    """The state of an optimizer whose weights each process has whole."""

    inside = ""  # before the names of the drafter's weights in `model`

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    @property
    def groups(self) -> list[list[str]]:
        """The names of the weights in each group."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def spread(self, saved: dict[str, Any]) -> None:
        """Take over a state by names; the settings of a group are those that its weights had."""
        settings = {name: group for group in saved["param_groups"] for name in group["params"]}
        numbers = {name: number for number, name in enumerate(name for group in self.groups for name in group)}
        groups = [{**settings[names[0]], "params": [numbers[name] for name in names]} for names in self.groups]
        state = {numbers[name]: values for name, values in saved["state"].items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


class FsdpStates(WholeStates):
    """The state of an optimizer under FSDP2; `model` is what `fully_shard` was called for."""

    inside = INSIDE

    def gathered(self) -> dict[str, Any]:
        """Return the whole state in the first process. All processes must call this together."""
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE))

    def spread(self, saved: dict[str, Any]) -> None:
        """Give each process its parts of what `gathered` returned."""
        set_optimizer_state_dict(self.model, self.optimizer, saved, options=_WHOLE)


class ZeroStates:
    """The state of an optimizer under ZeRO, whose own is one long vector for many weights.

    Args:
        optimizer: DeepSpeed's, around that of the recipe.
        model: with the drafter's names.
        groups: the names of the weights in each group, as the optimizer was made with them.
    """

    inside = INSIDE

    def __init__(self, model: nn.Module, optimizer: Any, groups: list[list[str]]):
        self.optimizer = optimizer
        self.base = optimizer.optimizer
        self.groups = groups
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.is_stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")

    def gathered(self) -> dict[str, Any]:
        """Return the whole state in the first process. All processes must call this together."""
        flat = next(iter(self.base.state), None)
        if flat is None:
            return {"state": {}, "param_groups": []}
        self._link()
        own: dict[str, Any] = self.base.state[flat]
        long = [key for key, value in own.items() if isinstance(value, Tensor) and value.shape == flat.shape]
        shared = {key: value for key, value in own.items() if key not in long}
        is_first, state = torch.distributed.get_rank() == 0, {}
        for name, parameter in self.trained.items():
            values = {key: deepspeed().utils.safe_get_full_optimizer_state(parameter, key) for key in long}
            if is_first:
                whole = {key: value.detach().float().cpu().clone() for key, value in values.items()}
                state[name] = {**whole, **shared}
        groups = [{**group, "params": names} for group, names in zip(self.base.param_groups, self.groups, strict=True)]
        return {"state": state, "param_groups": groups}

    def spread(self, saved: dict[str, Any]) -> None:
        """Give each process its parts of what `gathered` returned, in either engine."""
        if not saved["state"]:
            return
        one, utils = next(iter(saved["state"].values())), deepspeed().utils
        shared = {k: v for k, v in one.items() if not isinstance(v, Tensor) or v.ndim == 0}
        for flat in self._vectors:  # the state that DeepSpeed makes at its first step
            copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in shared.items()}
            self.base.state[flat] = {**{key: torch.zeros_like(flat) for key in one if key not in shared}, **copies}
        self._link()
        for name, parameter in self.trained.items():
            for key, value in saved["state"].get(name, {}).items():
                if key in shared:
                    continue
                if is_zero3(parameter):
                    utils.safe_set_local_optimizer_state(parameter, own_part(parameter, value), key)
                else:
                    utils.safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)

    def _link(self) -> None:
        """Link all groups' weights with their parts of the vectors of stages 1 and 2; DeepSpeed links one group."""
        if not self.is_stage3:
            for weights, flat in zip(self.optimizer.bit16_groups, self._vectors, strict=True):
                deepspeed().utils.lazy_init_hp_params_optimizer_state(weights, flat, self.base.state)

    @property
    def _vectors(self) -> list[Tensor]:
        name = "fp32_partitioned_groups_flat" if self.is_stage3 else "single_partition_of_fp32_groups"
        return list(getattr(self.optimizer, name))


States = ZeroStates | WholeStates


def remove_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Remove the groups without weights from an optimizer that has not taken a step.

    Medusa has nothing but matrices, and so none without weight decay. DeepSpeed would drop such a group by itself,
    after the schedule was made with a rate for it; every launch drops it, so that each continues the others' states.
    """
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def write_states(states: FsdpStates | ZeroStates, schedule: LRScheduler | None, folder: Path) -> None:
    """Write the states of optimizer and schedule, by the first process. All processes must call this together."""
    whole = states.gathered()
    if torch.distributed.get_rank() != 0:  # which may have nothing of it
        return
    torch.save(_renamed(whole, lambda name: name.removeprefix(INSIDE)), folder / OPTIMIZER)
    if schedule is not None:
        torch.save(schedule.state_dict(), folder / SCHEDULE)


def read_schedule(schedule: LRScheduler, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the state of a schedule, and set the rates of that step."""
    schedule.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def is_named(folder: Path) -> bool:
    """Return whether the optimizer's state in a checkpoint is by names: from a sharded drafter."""
    file = folder / OPTIMIZER
    return file.is_file() and _has_names(torch.load(file, weights_only=True, mmap=True, map_location="cpu"))


def read_state(states: States, folder: Path) -> None:
    """Read what `write_states`, or the launch of a whole drafter, wrote. All processes must call this together."""
    saved = torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu")
    if _has_names(saved):
        saved = _renamed(saved, lambda name: states.inside + name)
    else:
        names = dict(enumerate(name for group in states.groups for name in group))
        saved = _renamed(saved, lambda number: names[number])
    states.spread(saved)


def _has_names(saved: dict[str, Any]) -> bool:
    return any(isinstance(name, str) for name in saved["state"])


def _renamed(saved: dict[str, Any], name: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a state with the name (or number) of every weight replaced."""
    groups = [{**group, "params": [name(p) for p in group["params"]]} for group in saved["param_groups"]]
    return {"state": {name(key): values for key, values in saved["state"].items()}, "param_groups": groups}
