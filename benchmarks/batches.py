"""Speedup as a function of the batch size: JSON and a plot.

    python -m benchmarks.batches --drafter eagle3=runs/embedded-eagle3/drafter --sizes 1 2 4 8 16 32 64 \\
        --out benchmarks/results/batches-cpu-fp32.json

Writes the figures to --out and the plot beside it, as .svg. Prompts of the suites in random batches, ragged, each
completed by the plain target and by every drafter at every depth (and by a pair under its own plan, --pair) in turns;
rows are freed as their sequences end. Every speedup is over the plain target in the same batches, with a bootstrap
interval over batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from outrider.common.atomic import write_atomically
from outrider.common.progress import progress
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan
from outrider.eval import Interval
from outrider.eval.batch_timing import batch_count, measure_batches
from outrider.eval.measure import Contestant
from outrider.eval.reports.figures import BatchFigures
from outrider.eval.reports.plots import speedup_by_size, standalone
from outrider.eval.suites import load_suites, make_jobs
from outrider.pair import Pair
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .identity import load_contestants
from .report import command, conditions, interval, options, publish, table


def speedup_lines(points: Sequence[BatchFigures]) -> dict[str, list[tuple[int, Interval]]]:
    """Return speedups by contestant, as `plots.speedup_by_size` draws them; the plain target is not among them."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for point in sorted(points, key=lambda p: p.size):
        if point.tau is not None:
            lines.setdefault(point.contestant, []).append((point.size, point.speedup))
    return lines


def build_contestants(target: Target, arguments: argparse.Namespace) -> list[Contestant]:
    """The plain target, every drafter as chains of every depth, and the pair under its plan."""
    found = []
    for name, drafter in load_contestants(arguments.drafter, target).items():
        if drafter is None:
            found.append(Contestant(name, None, Plan(0)))
        else:
            found += [Contestant(f"{name}, depth {depth}", drafter, Plan(depth)) for depth in arguments.depths]
    if arguments.pair:
        _, drafter, plan = Pair.load(arguments.pair).open(target)
        found.append(Contestant(f"pair, {plan}", drafter, plan))
    return found


def tables(result: dict[str, Any]) -> list[str]:
    """Return speed and τ of each contestant at each batch size."""
    rows = []
    for p in result["points"]:
        figures = [interval(p["tokens_per_second"], 0), interval(p["speedup"]), interval(p["tau"])]
        rows.append([p["contestant"], str(p["size"]), *figures, f"{p['identical']} of {p['sequences']}"])
    return [table(["", "batch", "tokens/s", "speedup", "τ", "text of the plain target"], rows)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, "target", "suites", "limit", "threads", max_new_tokens=96, repeats=1)
    parser.add_argument("--drafter", action="append", default=[], help="NAME=FOLDER, or ngram; repeatable")
    parser.add_argument("--pair", help="folder of a pair, run under its own plan")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4], help="of chains")
    parser.add_argument("--groups", type=int, default=8, help="batches of each size, or more if the prompts fill more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: the pair's, else float32")
    return parser.parse_args(arguments)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    if arguments.pair:
        dtype = {"dtype": arguments.dtype} if arguments.dtype else {}
        target = Pair.load(arguments.pair).load_target(arguments.target, **dtype)
    else:
        target = Target.load(arguments.target, dtype=arguments.dtype or "float32")
    jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
    decoders = [(c.name, Decoder(target, c.drafter), c.plan) for c in build_contestants(target, arguments)]
    settings = EvalSpec(
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        seed=arguments.seed,
        batch_sizes=arguments.sizes,
    )
    total = batch_count(jobs, settings, arguments.groups) * arguments.repeats * len(decoders)
    with threads(arguments.threads), progress(Console(stderr=True), "measuring", total, transient=True) as advance:
        points = measure_batches(decoders, jobs, settings, 0.0, arguments.groups, lambda: advance(1, ""))
        about = conditions(
            target,
            temperature=0,
            sizes=arguments.sizes,
            depths=arguments.depths,
            max_new_tokens=arguments.max_new_tokens,
            repeats=arguments.repeats,
            suites=arguments.suites,
            prompts=len(jobs),
            seed=arguments.seed,
            timing="whole requests, prefills included; contestants take turns on each batch",
            batches="random, ragged; a size whose prompts fill fewer than --groups batches draws prompts again",
            intervals="95%, bootstrap over batches",
            tau="mean tokens emitted per round and sequence",
        )
    result = {"conditions": about, "points": [json.loads(p.model_dump_json()) for p in points]}
    publish(result, arguments.out, tables(result))
    if arguments.out and (drawn := speedup_lines(points)):
        write_atomically(arguments.out.with_suffix(".svg"), standalone(speedup_by_size(drawn, "batch size")))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
