"""A head's training step: tokens/s, MFU and peak memory, by length and by how many positions have logits at a time.

    python -m benchmarks.training --target embedded@8b --lengths 1024 2048 4096 --out training.json
    python -m benchmarks.training --target embedded --lengths 64 --rows 2 --repeats 2

An EAGLE-3 head with random weights on random hidden states of a target of that shape (`grown.py`), whose layers take no
part and are as few as it can have: mixed precision in bfloat16, AdamW, whole steps with their optimizer. MFU is the
operations of matrix products and attention, counted in a step, over the time of a step and the rate of large products
that is measured here; --peak-tflops gives another rate, such as a data sheet's.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.common.machine import best_device
from outrider.costs.counting import Flops
from outrider.costs.timing import timed
from outrider.heads import Eagle3, TargetBatch, losses
from outrider.targets import Target

from .ceilings import product_rate, product_size
from .grown import Grown
from .report import NOTHING, command, conditions, options, table, write

LAYERS = 12  # of a grown target: the small one has as many, and a step runs none of them
WARM_UP = 3


@dataclass
class Training:
    """A head in training on one batch.

    Attributes:
        module: what is called: the head, or what wraps it to train in several processes.
        precision: of the loss; None for float32.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    batch: TargetBatch
    precision: torch.dtype | None = torch.bfloat16

    def step(self) -> None:
        """Take one whole step."""
        device = self.batch.tokens.device.type
        with torch.autocast(device, self.precision, enabled=self.precision is not None):
            loss = self.module(self.batch).mean
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def tokens(self) -> int:
        """The number of tokens of a step."""
        return self.batch.tokens.numel()


def random_batch(target: Target, head: Eagle3, rows: int, length: int) -> TargetBatch:
    """Return tokens and hidden states of whole rows, all of them learned."""
    generator = torch.Generator(target.device).manual_seed(0)
    shape = (rows, length, len(head.taps) + 1, target.hidden_size)
    states = torch.randn(shape, generator=generator, device=target.device).to(target.dtype)
    tokens = torch.randint(target.vocab_size, (rows, length), generator=generator, device=target.device)
    return TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), states[:, :, :-1], states[:, :, -1])


def optimizer_of(module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")


def measure(training: Training, repeats: int, rate: float) -> dict[str, Any]:
    """Return time, speed, operations and memory of a step."""
    device = training.batch.tokens.device
    for _ in range(WARM_UP - 1):
        training.step()
    with Flops() as flops:
        training.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(timed(training.step, device) for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_second": training.tokens / seconds,
        "flops": flops.total,
        "mfu": flops.total / seconds / rate,
        "peak_bytes": peak,
    }


def tables(result: dict[str, Any]) -> list[str]:
    """Return speed, MFU and memory by length and chunk."""
    rows = []
    for row in result["steps"]:
        if "error" in row:
            cells = [row["error"], NOTHING, NOTHING]
        else:
            memory = NOTHING if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
            cells = [f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}", memory]
        rows.append([f"{row['length']}", f"{row['chunk']}", *cells])
    return [table(["length", "positions with logits at a time", "tokens/s", "MFU", "peak GiB"], rows)]


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "shape", target="embedded@8b", repeats=10)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--steps", type=int, default=3, help="that the head is unrolled")
    parser.add_argument("--peak-tflops", type=float)
    arguments = parser.parse_args(given)
    device = best_device()
    grown = Grown.load(arguments, torch.bfloat16, device, num_hidden_layers=LAYERS)
    target = grown.target
    rate = product_rate(device, product_size(device))
    rate = rate if arguments.peak_tflops is None else arguments.peak_tflops * 1e12
    settings = {"rows": arguments.rows, "unrolled_steps": arguments.steps, "flops_per_second_of_products": rate}
    result: dict[str, Any] = {"conditions": conditions(target, target=grown.words, **settings), "steps": []}
    for length in arguments.lengths:
        for chunk in arguments.chunks:
            row: dict[str, Any] = {"length": length, "chunk": chunk}
            losses.CHUNKS[device.type] = chunk
            try:
                head = grown.untrained(steps=arguments.steps).train()
                batch = random_batch(target, head, arguments.rows, length)
                row |= measure(Training(head, optimizer_of(head, device), batch), arguments.repeats, rate)
                memory = "" if row["peak_bytes"] is None else f"  {row['peak_bytes'] / 2**30:.1f} GiB"
                print(
                    f"length {length:6} chunk {chunk:5} {row['tokens_per_second']:10.0f} tokens/s  "
                    f"MFU {row['mfu']:.1%}{memory}",
                    flush=True,
                )
            except torch.OutOfMemoryError as error:
                row["error"] = str(error).splitlines()[0]
                print(f"length {length:6} chunk {chunk:5} out of memory", flush=True)
            result["steps"].append(row)
            head = batch = None  # type: ignore[assignment]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            write(result, arguments.out)
    print("\n\n".join(tables(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
