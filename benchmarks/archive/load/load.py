"""Tokens/s as `outrider capacity` predicts them, beside the decoder's own, over depth × batch size.

    python -m benchmarks.load --drafter eagle3=runs/embedded-eagle3/drafter --sizes 1 2 4 8 \\
        --out benchmarks/results/load-cpu-fp32.json

The tuner times rounds at every batch size, as for a pair; a report at batch 1 gives the requests. The load is closed:
so many clients, each of which waits for the others of its batch, which is how our decoder runs one. Predicted are the
plain target and chains of every depth; measured are the same, in batches, taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.common.safe_load import read_json
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan
from outrider.eval.batch_timing import measure_batches
from outrider.eval.load_simulation import Load, StepTimes, Workload, simulate
from outrider.eval.measure import Contestant, measure
from outrider.eval.suites import load_suites, make_jobs
from outrider.eval.tuner import tune
from outrider.eval.tuning_record import BatchTuning
from outrider.heads import Drafter
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .grown import Grown
from .report import command, conditions, options, publish, shown, table


def predicted_beside_measured(
    target: Target,
    drafter: Drafter,
    arguments: argparse.Namespace,
    console: Console | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a row for each batch size and depth, and the deviations of predictions from measurements.

    Args:
        earlier: a result whose costs of rounds and measured speeds are taken: only the predictions are made again.
    """
    suites = load_suites(arguments.suites, target.require_tokenizer(), arguments.limit)
    settings = EvalSpec(
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        temperatures=[0.0],
        batch_sizes=arguments.sizes,
    )
    batches = [BatchTuning.model_validate(batch) for batch in (earlier or {}).get("tuning", [])]
    batches = batches or tune(target, drafter, suites, settings, arguments.sizes, console, statistical=()).batches
    deepest = max(arguments.depths)
    alone = settings.model_copy(update={"batch_sizes": [], "repeats": 1})
    report = measure(target, [Contestant.of("drafter", drafter, Plan(deepest))], suites, alone, False, console)
    times, workload = StepTimes.of(batches), Workload.of(report, "drafter")
    decoders = [("plain", Decoder(target), Plan(0))]
    decoders += [(f"depth {depth}", Decoder(target, drafter), Plan(depth)) for depth in arguments.depths]
    rows = (earlier or {}).get("rows") or [
        {
            "size": figures.size,
            "depth": int(figures.contestant.removeprefix("depth ")) if figures.contestant != "plain" else 0,
            "measured": shown(figures.tokens_per_second),
            "tau": None if figures.tau is None else shown(figures.tau),
        }
        for figures in measure_batches(decoders, make_jobs(suites), settings, 0.0, arguments.groups)
    ]
    for row in rows:
        size, depth = row["size"], row["depth"]
        load = Load(arguments.requests, None, size, max_rows=size, refill=False)
        found = simulate(replace(workload, depth=depth), times, load, "fixed" if depth else "plain")
        ratio = found.tokens_per_second / row["measured"]["value"]
        row |= {"predicted": found.tokens_per_second, "ratio": ratio, "predicted_tau": found.tau}
    off = [abs(row["ratio"] - 1) for row in rows]
    summary = {"largest_deviation": max(off), "median_deviation": statistics.median(off)}
    return {"rows": rows, "summary": summary, "tuning": [b.model_dump(mode="json") for b in batches]}


def tables(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(row["size"]),
            str(row["depth"]) if row["depth"] else "plain",
            f"{row['predicted']:.1f}",
            f"{row['measured']['value']:.1f}",
            f"{row['ratio']:.2f}",
            "–" if row["tau"] is None else f"{row['predicted_tau']:.2f}",
            "–" if row["tau"] is None else f"{row['tau']['value']:.2f}",
        ]
        for row in result["rows"]
    ]
    head = ["batch", "depth", "predicted tokens/s", "measured", "ratio", "predicted τ", "τ"]
    s = result["summary"]
    about = f"Deviation of predictions: median {s['median_deviation']:.1%}, largest {s['largest_deviation']:.1%}."
    return [table(head, rows), about]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options(__doc__, "target", "suites", "threads", limit=8, max_new_tokens=64, repeats=2)
    parser.add_argument("--drafter", default="ngram", help="NAME=FOLDER, or ngram")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--groups", type=int, default=8, help="batches of each size, at least")
    parser.add_argument("--requests", type=int, default=2000, help="of each simulation")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--again", type=Path, help="a result, whose predictions are made again from its costs")
    return parser.parse_args(arguments)


def main(given: list[str] | None = None) -> int:
    arguments = parse(given)
    target = Target.load(arguments.target, dtype=arguments.dtype)
    ((name, drafter),) = Grown(target, target).drafters([arguments.drafter]).items()
    with threads(arguments.threads):
        earlier = None if arguments.again is None else read_json(arguments.again)
        found = predicted_beside_measured(target, drafter, arguments, Console(stderr=True), earlier)
        own = ("out", "target", "drafter", "dtype", "threads", "again")
        about = {k: v for k, v in vars(arguments).items() if k not in own}
        about = earlier["conditions"] if earlier else conditions(target, temperature=0, drafter=name, **about)
        found = {"conditions": about} | found
    publish(found, arguments.out, tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
