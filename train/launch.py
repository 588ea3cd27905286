"""Many processes: who does the work that only one of them may do, and what all of them know together.

Whether the processes are the ones that were asked for, `train.check` tells.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainingArguments

from ..common import OutriderError
from ..common.locks import locked


class PeerLostError(OutriderError):
    """Another process of the launch ended while this one waited for it."""

    exit_code = 1


def is_lost_peer(error: Exception) -> bool:
    """Tell whether an error is what is left of another process that ended."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
    )


# What torch says, in a RuntimeError of no kind of its own, when gloo or NCCL finds nobody on the other side.
_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")


def kind_of_processes(args: TrainingArguments) -> str:
    """Return accelerate's word for how the processes work together: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, …

    accelerate itself says FSDP and DEEPSPEED only once the training has an engine.
    """
    if getattr(args, "deepspeed_plugin", None) is not None:
        return "DEEPSPEED"
    kind = "NO" if args.distributed_state is None else str(args.distributed_state.distributed_type.value)
    return "FSDP" if is_asked_for("FSDP") and kind not in ("NO", "MULTI_CPU") else kind


def is_asked_for(engine: str) -> bool:
    """Tell whether the launcher was asked for `FSDP` or `DEEPSPEED`."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() in ("true", "1")


def is_spread(args: TrainingArguments) -> bool:
    """Tell whether an engine spreads the drafter, or what its optimizer keeps, over the processes: FSDP2, or ZeRO."""
    return kind_of_processes(args) in ("FSDP", "DEEPSPEED")


class Together:
    """What all processes of a training know together."""

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, of each entry."""
        added: Tensor = self.accelerator.reduce(values, "sum")
        return added

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        if self.args.world_size == 1:
            return value
        return float(self.sum(torch.tensor(value, device=self.args.device)).item()) / self.args.world_size

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set in any process."""
        if self.args.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.args.device)).item())

    def each(self, value: float) -> list[int]:
        """Return the (whole) number of every process, in their order."""
        own = torch.zeros(self.args.world_size, dtype=torch.double, device=self.args.device)
        own[self.args.process_index] = value
        return [int(found) for found in self.sum(own).tolist()]


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process held: on a GPU that of tensors, else all that Linux gave it; else 0."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) * 1024 if found else 0


@contextmanager
def alone_in(folder: Path, args: TrainingArguments) -> Iterator[None]:
    """Hold the lock of `folder` inside, by the main process for all of them."""
    if args.process_index != 0:
        yield
        return
    with locked(folder):
        yield
