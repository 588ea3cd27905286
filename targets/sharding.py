"""A target too large for one device: each process holds a part of every layer (FSDP2, torch's `fully_shard`).

A pass gathers one layer at a time, by all processes together, so all must make equally many passes. One process works
alone, for example answers prompts, inside `leading`, while the others `follow`: they make a pass over a single token
for each of its passes. Embeddings stay whole in every process: drafters read them outside of passes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed, nn

from .backbone import Backbone

if distributed.is_available():  # some builds of torch have none of it
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

Value = TypeVar("Value")


def processes() -> int:
    """Return how many processes work together; 1 outside of a distributed run."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


@contextmanager
def in_turn() -> Iterator[None]:
    """Let the processes run the code inside one after the other."""
    for turn in range(processes()):
        if processes() == 1 or turn == distributed.get_rank():
            yield
        if processes() > 1:
            distributed.barrier()


def all_processes(device: torch.device) -> DeviceMesh:
    """Return all processes in the one dimension along which layers are split. All of them make it together."""
    return init_device_mesh(device.type, (processes(),))


def split(model: nn.Module, layers: nn.ModuleList, device: torch.device, mesh: DeviceMesh) -> None:
    """Leave in this process its part of each layer on its device, and the rest of the model whole. Nothing is sent."""
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)


def share(value: Value) -> Value:
    """Return the first process's value in all processes."""
    box = [value]
    distributed.broadcast_object_list(box, 0)
    return box[0]


@contextmanager
def leading(target: Backbone) -> Iterator[None]:
    """Let the other processes, which `follow`, take part in every pass of a sharded target. For the first process.

    If the code inside fails, the others get no message, as they may be in the middle of a pass: the launcher ends them.
    """

    def before_a_pass(*_: object) -> None:
        _tell(target, True)

    handle = target.body.register_forward_pre_hook(before_a_pass)
    try:
        yield
    finally:
        handle.remove()
    _tell(target, False)


def follow(target: Backbone) -> None:
    """Take part in the passes of the first process until it is done `leading`. For any other process."""
    while _tell(target, False):
        settle(target)


@torch.no_grad()
def settle(target: Backbone) -> None:
    """Run a pass over one token, not in inference mode: the first one makes the tensors that layers are gathered in."""
    target.body(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=False)


def _tell(target: Backbone, another: bool) -> bool:
    """Send, from the first process, whether it makes `another` pass, and return that in the others."""
    flag = torch.tensor(float(another), device=target.device)
    distributed.broadcast(flag, 0)
    return distributed.get_rank() != 0 and bool(flag.item())


def leave_group(ended_well: bool) -> None:
    """Leave the processes of the launch, if there are any; together if all ended well.

    A process that ends while another still uses the group may be aborted at its exit, after all work is done.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if ended_well:
        distributed.barrier()
    gc.collect()  # what still holds the group would end its threads too late
    distributed.destroy_process_group()
