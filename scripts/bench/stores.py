"""How much faster several processes store hidden states than one, and what each precision takes on the disk.

    python -m outrider.scripts.bench.stores --out scripts/bench/results/stores-cpu.json

One process and several, in turns, each with one thread: the states of random texts, by the target that ships with
Outrider, from the moment when every process has it loaded to the sealed store. The machine must be free.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset

from outrider.distill import FeatureStore
from outrider.distill.features import PRECISIONS
from outrider.distill.launch import crew_in
from outrider.targets import Target

from .conditions import command, conditions, write
from .launched import launched

TAPS = (1, 3, 5)
SHARD_BYTES = 4_000_000


def texts(count: int, length: int, vocab_size: int) -> Dataset:
    """Return random texts of up to so many tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 4, length + 1, (count,), generator=generator).tolist()
    return Dataset.from_dict(
        {"input_ids": [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]}
    )


def work(arguments: argparse.Namespace) -> None:
    """Store once, as one of the processes of a launch, and print the seconds; the first one does."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    target = Target.load("embedded", dtype="float32", device="cpu")
    target.fingerprint()
    data = texts(arguments.texts, arguments.length, target.vocab_size)
    state.wait_for_everyone()
    began = time.perf_counter()
    with crew_in(arguments.work) as crew:
        store = FeatureStore.build(
            arguments.work / "features", target, data, TAPS, arguments.dtype, shard_bytes=SHARD_BYTES, crew=crew
        )
    seconds, tokens = time.perf_counter() - began, sum(map(len, data["input_ids"]))
    if state.is_main_process:
        found = {"seconds": seconds, "tokens_per_second": tokens / seconds, "bytes_per_token": store.num_bytes / tokens}
        print(json.dumps(found | {"tokens": tokens}), flush=True)
    state.wait_for_everyone()
    state.destroy_process_group()


def stored(processes: int, arguments: argparse.Namespace, dtype: str = "auto") -> dict[str, Any]:
    """Return what so many processes took to write a store."""
    options = ["--texts", arguments.texts, "--length", arguments.length, "--dtype", dtype]
    return launched("outrider.scripts.bench.stores", processes, options)


def measure(arguments: argparse.Namespace) -> int:
    """Run all, and write the result."""
    runs: dict[int, list[dict[str, Any]]] = {1: [], arguments.processes: []}
    for _ in range(arguments.repeats):
        for processes, found in runs.items():
            found.append(stored(processes, arguments))
            print(processes, found[-1], flush=True)
    rates = {str(name): median(run["tokens_per_second"] for run in found) for name, found in runs.items()}
    sizes = {name: stored(1, arguments, name)["bytes_per_token"] for name in PRECISIONS}
    target = Target.load("embedded", dtype="float32", device="cpu")
    settings = {"texts": arguments.texts, "longest": arguments.length, "taps": len(TAPS), "shard_bytes": SHARD_BYTES}
    result = {
        "conditions": conditions(target, threads_of_each_process=1, repeats=arguments.repeats, **settings),
        "tokens_per_second_by_processes": rates,
        "times_one": rates[str(arguments.processes)] / rates["1"],
        "bytes_per_token_by_dtype": sizes,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "conditions"}, indent=2))
    write(result, arguments.out)
    return 0


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--length", type=int, default=256, help="most tokens of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="auto", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.work is not None:
        work(arguments)
        return 0
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(command(main))
