"""Many processes: sums over all of them, and refusing launches that would not work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainingArguments

from ..common import BadInputError, OutriderError
from . import muon

_TWO_ON_CPU = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m outrider.train RECIPE"


class PeerLostError(OutriderError):
    """Another process of the launch ended while this one waited for it."""

    exit_code = 1


# Parts of the messages of torch's RuntimeErrors when gloo or NCCL loses the other side.
_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error comes from the loss of another process."""
    says_so = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
    return says_so or isinstance(error, torch.distributed.DistError)


def kind_of_processes(args: TrainingArguments) -> str:
    """Return accelerate's word for the kind of parallelism (NO, MULTI_GPU, FSDP, …), before it has an engine."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        return "DEEPSPEED"
    kind = "NO" if args.distributed_state is None else str(args.distributed_state.distributed_type.value)
    return "FSDP" if is_asked_for("FSDP") and kind not in ("NO", "MULTI_CPU") else kind


def is_asked_for(engine: str) -> bool:
    """Return whether the launcher was asked for `FSDP` or `DEEPSPEED`."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() in ("true", "1")


def is_sharded(args: TrainingArguments) -> bool:
    """Return whether FSDP2 or ZeRO spreads the drafter, or the states of its optimizer, over the processes."""
    return kind_of_processes(args) in ("FSDP", "DEEPSPEED")


class Processes:
    """Sums over all processes of a training, which all of them must call together."""

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, of each entry."""
        return self.accelerator.reduce(values, "sum")

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        if self.args.world_size == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, device=self.args.device), "mean"))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return self.mean(float(flag)) > 0

    def gather(self, value: float) -> list[int]:
        """Return the (whole) number of every process, in their order."""
        own = torch.tensor([value], dtype=torch.double, device=self.args.device)
        return [int(number) for number in self.accelerator.gather(own).tolist()]


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on a GPU that of tensors, on Linux its resident set; elsewhere 0."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(match[1]) * 1024 if match else 0


def check_number_of_processes(args: TrainingArguments) -> None:
    """Refuse fewer processes than the launcher was asked for: on a CPU several launchers fail silently."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" not in os.environ and "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        # Exactly what `accelerate launch --cpu --num_processes 2` leaves: the address for several processes, and one.
        raise BadInputError(
            "the launcher was asked for several processes but started one (`accelerate launch --cpu` does that); "
            f"use: {_TWO_ON_CPU}"
        )
    if args.world_size != asked:
        raise BadInputError(
            f"the launcher started {asked} processes, but they run as {args.world_size} (each would train its own "
            f"copy); use: {_TWO_ON_CPU}"
        )


def check_kind_of_processes(args: TrainingArguments) -> None:
    """Refuse a kind of parallelism that was asked for and is not there."""
    kind = kind_of_processes(args)
    if kind == "DEEPSPEED" and os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1"):
        raise BadInputError(
            "the launcher asked for DEEPSPEED, and ACCELERATE_USE_CPU makes accelerate leave it out without a word; "
            "unset ACCELERATE_USE_CPU and add training.use_cpu=true (CPU processes run ZeRO, too)."
        )
    for name in ("FSDP", "DEEPSPEED"):
        if is_asked_for(name) and kind != name:
            raise BadInputError(
                f"the launcher asked for {name}, but accelerate set up {kind!r}; {name} needs an accelerator here: "
                "leave it out."
            )


def check_engine(args: TrainingArguments, actual: str) -> None:
    """Refuse to train with another engine (accelerate's word `actual`) than the launcher was asked for."""
    asked = kind_of_processes(args)
    if actual != asked:
        raise BadInputError(
            f"the launch is {asked}, but accelerate would train as {actual}; look at the launcher's options and at the "
            "ACCELERATE_* variables of the environment."
        )


def check_sharding(args: TrainingArguments) -> None:
    """Refuse what a sharded drafter (FSDP2, ZeRO) cannot be trained with."""
    if not is_sharded(args):
        return
    kind, stage = kind_of_processes(args), getattr(args.deepspeed_plugin, "zero_stage", None)
    if stage == 0:
        raise BadInputError("DeepSpeed ZeRO stage 0 splits nothing; take --zero_stage 1, 2 or 3, or --multi_gpu.")
    if kind == "FSDP" and os.environ.get("FSDP_VERSION", "1") != "2":
        raise BadInputError("FSDP: only version 2 is supported; add --fsdp_version 2 (fsdp_version: 2 in a config).")
    if args.optim == muon.NAME:
        raise BadInputError(
            f"training.optim: muon moves whole matrices, and under {kind} each process has only parts of them; take "
            "adamw_torch, or launch with --multi_gpu (data parallel)."
        )
    if args.fp16:
        raise BadInputError(f"training.fp16: under {kind} take training.bf16, which needs no scaled gradients.")
