"""A head's training step against the length of its row: tokens/s, and the memory that it needs at most.

    python -m outrider.scripts.bench.lengths --out scripts/bench/results/lengths-cpu.json

An EAGLE-3 head with random weights takes whole steps on one row of random hidden states, as long as the rows of a
target of the embedded one's shape would be; the target's layers take no part. Float32 on a CPU, mixed precision on a
GPU. Each length is a process of its own, in several turns, of which the median counts. Memory is what was in use at
most, less what was there when the head had been built: on a GPU that of tensors, else all of the process. Its line over
the lengths is fitted by least squares.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.common.machine import best_device
from outrider.costs.timing import timed
from outrider.targets import Target

from .conditions import command, conditions, write
from .context import Fit
from .memory import peak, reset_peak
from .random_targets import build_target, embedded_shape
from .training import LAYERS, WARM_UP, Training, build_head, optimizer_of, random_batch

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def small_target(lengths: Sequence[int]) -> Target:
    """Return a random target of the embedded one's shape, with as many layers as taps want."""
    shape = embedded_shape(2 * max(lengths)) | {"num_hidden_layers": LAYERS}
    device = best_device()
    return build_target(shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device)


def measure(length: int, steps: int, repeats: int) -> dict[str, Any]:
    """Return what a step on a row of this length takes."""
    target = small_target([length])
    device = target.device
    head = build_head(target, steps)
    used = most_since(device)
    batch = random_batch(target, head, 1, length)
    training = Training(head, optimizer_of(head, device), batch, torch.bfloat16 if device.type == "cuda" else None)
    for _ in range(WARM_UP - 1):
        training.step()
    seconds = median(timed(training.step, device) for _ in range(repeats))
    return {"length": length, "seconds": seconds, "peak_bytes": used()}


def most_since(device: torch.device) -> Callable[[], int]:
    """Return what tells how many bytes more than now were in use at most since now (a CPU's on Linux alone)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        there = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - there
    before = reset_peak()
    return lambda: peak() - before


def in_a_process(length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a process of its own measured of this length."""
    options = ["--one", length, "--steps", arguments.steps, "--repeats", arguments.repeats]
    call = [sys.executable, "-m", "outrider.scripts.bench.lengths", *map(str, options)]
    done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{length:6} tokens: {length / found['seconds']:8,.0f} tokens/s  {found['peak_bytes'] / 2**20:8,.1f} MiB")
    return found


def together(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of several turns of one length."""
    length, seconds = turns[0]["length"], median(turn["seconds"] for turn in turns)
    most = median(turn["peak_bytes"] for turn in turns)
    return {"length": length, "seconds": seconds, "tokens_per_second": length / seconds, "peak_bytes": most}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=3, help="that the head is unrolled")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one, arguments.steps, arguments.repeats)))
        return 0
    turns = [[in_a_process(length, arguments) for length in arguments.lengths] for _ in range(arguments.turns)]
    rows = [together(list(found)) for found in zip(*turns, strict=True)]
    line = Fit.of([row["length"] for row in rows], [row["peak_bytes"] for row in rows])
    target, described = small_target(arguments.lengths), f"the embedded target's shape, {LAYERS} layers, random"
    settings = {"rows": 1, "unrolled_steps": arguments.steps, "turns": arguments.turns, "repeats": arguments.repeats}
    result = {"conditions": conditions(target, target=described, **settings), "lengths": rows, "memory": asdict(line)}
    write(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
