"""How much faster several processes answer than one, and what of distilling only one process can do.

    python -m benchmarks.distill_processes --out benchmarks/results/distill-processes-cpu.json

One process and several, in turns, each with one thread: the recipe's prompts are answered by the target that ships with
Outrider, from the moment when every process has it loaded to the finished data set. Beside them as many launches of one
process at once, which know nothing of each other: what they answer together is what the machine can give. Then, in one
process, what one alone does for all, by itself: reading the prompts, handing out batches, writing finished ones,
writing the data set. From these follows how long 64 processes would take. The machine must be free.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import PartialState

from outrider.distill import distill, load_responses
from outrider.distill.collect import PromptReading, collect
from outrider.distill.data_set import TrainingRow, save_data_set
from outrider.distill.decoding import batches
from outrider.distill.journal import Answer, Answers, Journal, claim_of
from outrider.distill.prompts import digest_prompts
from outrider.recipes import Recipe
from outrider.targets import Target

from .report import NOTHING, command, conditions, options, publish, table, write

APART = "apart"  # launches that know nothing of each other
NUM_PARTS, NUM_TOKENS = 512, 96  # of which the parts by themselves are measured: batches, tokens of each answer


def recipe(output: Path, limit: int, new_tokens: int, batch_size: int) -> Recipe:
    """Return what is distilled."""
    data = {"prompts": ["embedded:code", "embedded:docs"], "limit": limit, "max_prompt_tokens": 256}
    return Recipe.from_dict(
        {
            "name": "processes",
            "target": {"path": "embedded", "dtype": "float32"},
            "drafter": {},
            "data": {**data, "max_new_tokens": new_tokens, "batch_size": batch_size},
            "output": str(output),
        }
    )


# ------------------------------------------------------------ one run, in a launch of its own


def work(arguments: argparse.Namespace) -> None:
    """Distil once, as one of the processes of a launch, and print the seconds; the first one does."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    made = recipe(arguments.work, arguments.limit, arguments.new_tokens, arguments.batch_size)
    target = Target.load(**made.target.to_load(), device="cpu")
    target.fingerprint()
    state.wait_for_everyone()
    began = time.perf_counter()
    folder = distill(made, target)
    seconds = time.perf_counter() - began
    if state.is_main_process:
        tokens = sum(map(sum, load_responses(folder)["loss_mask"]))
        print(json.dumps({"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}), flush=True)
    state.wait_for_everyone()
    state.destroy_process_group()


def launched(processes: int, given: Sequence[object]) -> dict[str, Any]:
    """Return what the first of so many processes, one thread each, printed in its last line."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", processes]
        launcher += ["--master_port", free.getsockname()[1], "-m", "benchmarks.distill_processes"]
        free.close()
        done = subprocess.run(
            list(map(str, [sys.executable, *launcher, *given, "--work", folder])),
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def distilled(processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what so many processes took to distill."""
    given = ["--limit", arguments.limit, "--new-tokens", arguments.new_tokens, "--batch-size", arguments.batch_size]
    return launched(processes, given)


def apart(processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what so many launches of one process, at once, do together in the time of the slowest."""
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(lambda _: distilled(1, arguments), range(processes)))
    seconds, tokens = max(run["seconds"] for run in found), sum(run["tokens"] for run in found)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


# ------------------------------------------------------------ what one process does for all


def timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def parts(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of what one process does for all: of 1,000 prompts, and of a batch."""
    made = recipe(Path("unused"), arguments.limit, arguments.new_tokens, arguments.batch_size).data
    tokenizer = Target.load("embedded", dtype="float32", device="cpu").require_tokenizer()
    read = timed(
        lambda: digest_prompts(
            collect(made.prompts, tokenizer, made.limit, PromptReading(made.max_prompt_tokens)).prompts
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        journal, count = Journal(Path(folder)), NUM_PARTS * arguments.batch_size
        grouped = batches(range(count), arguments.batch_size, 1)
        answers = [[Answer(i, (list(range(NUM_TOKENS)),)) for i in batch] for batch in grouped]
        keep = timed(lambda: _keep(journal, answers))
        claim = timed(lambda: _claim(journal, len(grouped)))
        save = timed(lambda: _save(journal, Path(folder), count))
    thousand = 1000 / arguments.limit
    return {
        "reading_1000_prompts": read * thousand,
        "claiming_a_batch": claim / len(grouped),
        "keeping_a_batch": keep / len(grouped),
        "writing_1000_rows": save * 1000 / count,
    }


def _keep(journal: Journal, answers: list[list[Answer]]) -> None:
    for number, batch in enumerate(answers):
        journal.add(number, batch)


def _claim(journal: Journal, count: int) -> None:
    for number in range(count):
        with claim_of(journal.folder, number + 10**6):
            journal.has(number)


def _save(journal: Journal, folder: Path, count: int) -> None:
    found = Answers(journal.files(), count)
    rows = (TrainingRow(str(i), "s", found[i].turns[0], [1] * NUM_TOKENS, str(i)) for i in range(count))
    save_data_set(folder / "data", rows, folder, dict, "bench")


def forecast(cost: dict[str, float], seconds: float, arguments: argparse.Namespace, processes: int) -> dict[str, float]:
    """Return how long so many processes would take for the prompts that one answers in `seconds`, on paper.

    Each reads all prompts. The first writes the data set while the others wait. A batch is claimed after one look at
    each that others hold, and lists of finished batches are written one at a time. In the end somebody answers the last
    batch, a quarter of a whole one, while the others wait.
    """
    thousands, num_batches = arguments.limit / 1000, arguments.limit / arguments.batch_size
    serial = thousands * (cost["reading_1000_prompts"] + cost["writing_1000_rows"])
    lists = num_batches * cost["keeping_a_batch"]
    generation = seconds - serial - lists
    claims = num_batches / processes * min(processes, num_batches) * cost["claiming_a_batch"]
    tail = generation / num_batches / 4 if processes > 1 else 0.0
    total = serial + max(generation / processes + claims + tail, lists)
    return {"processes": processes, "seconds": total, "times_one": seconds / total}


def measure(arguments: argparse.Namespace) -> int:
    """Run all, and write the result; the runs so far after each."""
    several = str(arguments.processes)
    kinds = {"1": partial(distilled, 1), several: partial(distilled, arguments.processes)}
    kinds[APART] = partial(apart, arguments.processes)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    turns = [list(kinds), *[["1", several]] * (arguments.repeats - 1)]  # what the machine gives is asked once
    for name in chain.from_iterable(turns):
        runs[name].append(kinds[name](arguments))
        print(name, runs[name][-1], flush=True)
        write({"runs": runs}, arguments.out)
    rates = {name: median(run["tokens_per_second"] for run in found) for name, found in runs.items()}
    one, cost = median(run["seconds"] for run in runs["1"]), parts(arguments)
    target = Target.load("embedded", dtype="float32", device="cpu")
    settings = {"prompts": arguments.limit, "new_tokens": arguments.new_tokens, "batch_size": arguments.batch_size}
    large = argparse.Namespace(**vars(arguments) | {"limit": 200 * arguments.limit})
    result = {
        "conditions": conditions(target, threads_of_each_process=1, **settings),
        "runs": runs,
        "tokens_per_second": rates,
        "times_one": rates[several] / rates["1"],
        "times_one_apart": rates[APART] / rates["1"],
        "seconds_of_what_one_does_for_all": cost,
        "forecast": [forecast(cost, one, arguments, n) for n in (1, 2, 4, 8, 64)],
        "forecast_of_200_times_the_prompts": [forecast(cost, 200 * one, large, n) for n in (1, 2, 8, 64)],
    }
    publish(result, arguments.out, tables(result))
    return 0


def tables(result: dict[str, Any]) -> list[str]:
    """Return the runs, what one process does for all, and what follows for more processes."""
    rows = []
    for count, runs in result["runs"].items():
        seconds = ", ".join(f"{run['seconds']:.1f}" for run in runs)
        rows.append([count, seconds, f"{result['tokens_per_second'][count]:,.0f}"])
    alone = result["seconds_of_what_one_does_for_all"].items()
    often = {f["processes"]: f"{f['times_one']:.2f}" for f in result["forecast_of_200_times_the_prompts"]}
    forecasts = (
        [str(n := once["processes"]), f"{once['times_one']:.2f}", often.get(n, NOTHING)] for once in result["forecast"]
    )
    return [
        table(["processes", "seconds of each run", "tokens/s, median"], rows),
        f"A launch of several is {result['times_one']:.2f} times as fast as one process, and as many launches of one, "
        f"apart, {result['times_one_apart']:.2f} times: more this machine does not give.",
        table(
            ["what one process does for all", "ms"],
            ([name.replace("_", " "), f"{1000 * seconds:,.2f}"] for name, seconds in alone),
        ),
        table(["processes, computed", "times one, these prompts", "times one, 200 times as many"], forecasts),
    ]


def main() -> int:
    parser = options(__doc__, limit=160, repeats=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments)
        return 0
    return measure(arguments)


if __name__ == "__main__":
    raise SystemExit(command(main))
