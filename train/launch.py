"""Processes: is this the launch that was asked for, and who does the work that only one of them may do.

Several launchers fail silently on a CPU, with exit code 0: one process instead of two, or two that never speak to each
other. A run that is not the one asked for stops here, before anything is loaded.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..ground import BadInputError
from ..ground.files import write_atomically
from ..recipes import Recipe
from ..targets import Target
from ..targets.sharding import follow, leading

if TYPE_CHECKING:
    from transformers import TrainingArguments

_TWO_ON_CPU = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m outrider.train RECIPE"


def check_launch(args: TrainingArguments) -> None:
    """Raise BadInputError unless the processes are as many, and of the kind, as the launcher's environment says."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" not in os.environ and "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        # Exactly what `accelerate launch --cpu --num_processes 2` leaves behind: the address for several processes, but only one.
        raise BadInputError(
            f"the launcher was asked for several processes but started one (`accelerate launch --cpu` does that); use: {_TWO_ON_CPU}"
        )
    if args.world_size != asked:
        raise BadInputError(
            f"the launcher started {asked} processes, but they run as {args.world_size} (each would train its own copy); use: {_TWO_ON_CPU}"
        )
    _check_kind(args)


def _check_kind(args: TrainingArguments) -> None:
    kind = str(args.distributed_state.distributed_type.value)
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1") and kind != name:
            raise BadInputError(
                f"the launcher asked for {name}, but accelerate set up {kind!r}; {name} needs an accelerator here: leave it out."
            )
    if kind == "FSDP":
        raise BadInputError(
            "sharding a drafter with FSDP is not supported; launch with --multi_gpu (data parallel) instead."
        )


def check_sharding(recipe: Recipe) -> None:
    """Raise BadInputError if a sharded target is asked for more than passes: no process has its whole layers."""
    drafter, sharding = recipe.drafter, recipe.target.sharding
    of_layers = (
        drafter.get("type") == "self_speculative"
        or drafter.get("init") == "prune"
        or bool(drafter.get("prune"))
        or recipe.joint is not None
    )
    if sharding != "none" and of_layers:
        raise BadInputError(
            f"target.sharding is {sharding!r}, but joint training, self_speculative drafters and init prune need the target's whole layers; "
            "leave out target.sharding, or take another drafter."
        )


def main_first(args: TrainingArguments, folder: Path, work: Callable[[], Path], target: Target) -> Path:
    """`work` on the main process only; every process gets the path it returns, once it exists. Of a sharded target the others take part in its passes.

    The others watch for a file instead of waiting in a collective: those give up after half an hour, and a target may
    need longer for its responses. All processes must see `folder`.
    """
    if args.world_size == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    sign = folder / f".ready-{broadcast_object_list([uuid.uuid4().hex])[0]}"
    if args.process_index == 0:
        with leading(target) if target.sharded else nullcontext():
            result = work()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(sign, str(result))
    elif target.sharded:
        follow(target)
    while not sign.exists():
        time.sleep(0.2)
    result = Path(sign.read_text())
    args.distributed_state.wait_for_everyone()
    if args.process_index == 0:
        sign.unlink()
    return result
