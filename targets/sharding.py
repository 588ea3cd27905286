"""A target too large for one device: each process holds a part of every layer, and gathers one layer at a time (FSDP2, torch's `fully_shard`).

Embeddings stay whole in every process: drafters read them outside of the target's passes. A layer is gathered by all processes together, so all
must make equally many passes. In training steps they do. What one process does alone, such as answering prompts, it does `leading`, while
the others `follow`: they make a pass of one token for each of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .target import Target


def processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


@contextmanager
def in_turn() -> Iterator[None]:
    """One process after the other."""
    rank, count = (distributed.get_rank(), processes()) if processes() > 1 else (0, 1)
    for _ in range(rank):
        distributed.barrier()
    yield
    for _ in range(rank, count if count > 1 else 0):
        distributed.barrier()


def all_processes(device: torch.device) -> DeviceMesh:
    """In the one dimension along which layers are split. Made by all together."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (processes(),))


def split(model: nn.Module, layers: nn.ModuleList, device: torch.device, mesh: DeviceMesh) -> None:
    """Leave in this process its part of each layer, on its device, and the rest of the model whole. Needs no other process to be there."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)


def share(value: Any) -> Any:
    """The first process's value, in all."""
    box = [value]
    distributed.broadcast_object_list(box, 0)
    return box[0]


@contextmanager
def leading(target: Target) -> Iterator[None]:
    """On the first process: the others, which `follow`, take part in every pass of a sharded target.

    Where it fails it says nothing more, for the others may be in the middle of a pass: the launcher ends them.
    """

    def before_a_pass(*_: object) -> None:
        _tell(target, True)

    handle = target.body.register_forward_pre_hook(before_a_pass)
    try:
        yield
    finally:
        handle.remove()
    _tell(target, False)


def follow(target: Target) -> None:
    """On any other process: takes part in the passes of the first until it is done `leading`."""
    while _tell(target, False):
        settle(target)


@torch.no_grad()
def settle(target: Target) -> None:
    """A pass of one token. The first one makes the tensors that layers are gathered in: in inference mode they would be of no use outside of it."""
    target.body(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=False)


def _tell(target: Target, another: bool) -> bool:
    """Whether the first process makes another pass: said by it, heard by the others."""
    flag = torch.tensor(float(another), device=target.device)
    distributed.broadcast(flag, 0)
    return distributed.get_rank() != 0 and bool(flag.item())
