"""Training a head in several processes: tokens/s with the target whole in each, or split over them (FSDP2).

    for n in 1 2 4 8; do
        torchrun --nproc-per-node $n -m benchmarks.scaling --target embedded@8b --out scaling-$n.json
    done
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m benchmarks.scaling --target embedded \\
        --lengths 32 --rows 2 --repeats 2

A step reads a batch with the target, since a split one cannot be left out, and takes a whole step of an EAGLE-3 head on
what it gave, data parallel (DDP). Each process has rows of its own; tokens are counted over all of them. A quotient of
tokens/s at n processes and at one, over n, is the efficiency.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from outrider.costs.timing import timed
from outrider.heads import Eagle3, TargetBatch
from outrider.targets import Target
from outrider.targets.layers import decoder_layers
from outrider.targets.sharding import all_processes, split

from .grown import Grown
from .report import command, conditions, options, write
from .training import Training, optimizer_of

WARM_UP = 2


def join() -> torch.device:
    """Join the group of processes that the launcher started; return this one's device."""
    on_gpu = torch.cuda.is_available() and not os.environ.get("ACCELERATE_USE_CPU")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def read(target: Target, head: Eagle3, tokens: torch.Tensor) -> TargetBatch:
    """Return a batch with what the target makes of `tokens` `[B, T]`."""
    with torch.no_grad():
        out = target.forward(tokens, taps=head.taps, logits=False)
    return TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), out.hidden, out.last)


def measure(grown: Grown, rows: int, length: int, repeats: int) -> dict[str, Any]:
    """Return time, speed and memory of a step of all processes; each waits for all."""
    target = grown.target
    device = torch.device("cuda", torch.cuda.current_device()) if target.device.type == "cuda" else target.device
    head = grown.untrained(steps=3).train()
    wrapped = DistributedDataParallel(head, device_ids=[device] if device.type == "cuda" else None)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    tokens = torch.randint(target.vocab_size, (rows, length), generator=generator).to(device)
    training = Training(wrapped, optimizer_of(head, device), read(target, head, tokens))

    def step() -> None:
        training.batch = read(target, head, tokens)
        training.step()

    for _ in range(WARM_UP):
        step()
    distributed.barrier()
    seconds = torch.tensor(statistics.median(timed(step, device) for _ in range(repeats)), device=device)
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
    everyone = distributed.get_world_size() * training.tokens
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"seconds": seconds.item(), "tokens_per_second": everyone / seconds.item(), "peak_bytes": peak}


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "shape", target="embedded@8b", repeats=5)
    parser.add_argument("--rows", type=int, default=4, help="of each process")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--sharding", nargs="+", choices=["none", "fsdp2"], default=["none", "fsdp2"])
    arguments = parser.parse_args(given)
    device = join()
    grown = Grown.load(arguments, torch.bfloat16, device)
    target = grown.target
    first = distributed.get_rank() == 0
    result: dict[str, Any] = {
        "conditions": conditions(target, target=grown.words, rows=arguments.rows),
        "processes": distributed.get_world_size(),
        "steps": [],
    }
    for sharding in arguments.sharding:
        if sharding == "fsdp2":
            split(target.model, decoder_layers(target.body, target.num_layers), device, all_processes(device))
            target.sharded = True
        for length in arguments.lengths:
            row = measure(grown, arguments.rows, length, arguments.repeats)
            result["steps"].append({"sharding": sharding, "length": length} | row)
            if first:
                print(f"{sharding:6} length {length:6} {row['tokens_per_second']:10.0f} tokens/s", flush=True)
                write(result, arguments.out)
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
