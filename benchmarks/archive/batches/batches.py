"""Speedup as a function of the batch size: JSON and a plot.

    python -m benchmarks.batches --drafter eagle3=runs/embedded-eagle3/drafter --sizes 1 2 4 8 16 32 64 \\
        --out benchmarks/results/batches-cpu-fp32.json

    python -m benchmarks.batches --target embedded@0.4b --dtype bfloat16 --pack --sizes 1 8 32 --drafter ngram \\
        eagle1=runs/embedded-eagle1/drafter --control

Writes the figures to --out and the plot beside it, as .svg. Prompts of the suites in random batches, ragged, each
completed by the plain target and by every drafter at every depth (and by a pair under its own plan, --pair) in turns;
rows are freed as their sequences end. Every speedup is over the plain target in the same batches, with a bootstrap
interval over batches. With --control each drafter also takes part with the depth decided round by round, up to the
deepest, by costs that are measured at each size, and acceptance that is measured on the small target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from outrider.common.atomic import write_atomically
from outrider.common.progress import progress
from outrider.costs.round_timing import verify_times
from outrider.costs.timing import threads
from outrider.decode import Control, Costs, Decoder, Plan, Sampling
from outrider.eval import Interval
from outrider.eval.acceptance import measure_acceptance
from outrider.eval.batch_timing import BatchAnswer, BatchRacer, batch_count, measure_batches
from outrider.eval.measure import Contestant
from outrider.eval.reports.figures import BatchFigures
from outrider.eval.reports.plots import speedup_by_size, standalone
from outrider.eval.suites import PromptJob, load_suites, make_jobs
from outrider.eval.tuner import CONTROL_WEIGHT
from outrider.pair import Pair
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .decode import joined_prompts
from .grown import Grown, draft_seconds
from .report import command, conditions, interval, options, publish, table


class ControlledRacer(BatchRacer):
    """A racer that follows another plan at each batch size, in `plans`."""

    def __init__(self, name: str, decoder: Decoder, plans: dict[int, Plan], settings: EvalSpec):
        super().__init__(name, decoder, next(iter(plans.values())), settings)
        self.plans = plans

    def __call__(self, job: Sequence[PromptJob], temperature: float) -> BatchAnswer:
        self.plan = self.plans[len(job)]
        return super().__call__(job, temperature)


def controlled(
    target: Target, contestant: Contestant, rates: Sequence[float], sizes: Sequence[int], context: int, repeats: int
) -> dict[int, Plan]:
    """Return the contestant's plan with a controller, by batch size; its costs are measured here, after `context`."""
    drafter, plan = contestant.drafter, contestant.plan
    assert drafter is not None
    found = {}
    for size in sizes:
        passes = verify_times(target, range(plan.depth + 1), size, context, repeats)
        steps = draft_seconds(target, drafter, plan.depth, size, context, repeats)
        costs = Costs(tuple(passes.items()), tuple(steps))
        found[size] = replace(plan, control=Control(costs, tuple(rates), CONTROL_WEIGHT))
    return found


def speedup_lines(points: Sequence[BatchFigures]) -> dict[str, list[tuple[int, Interval]]]:
    """Return speedups by contestant, as `plots.speedup_by_size` draws them; the plain target is not among them."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for point in sorted(points, key=lambda p: p.size):
        if point.tau is not None:
            lines.setdefault(point.contestant, []).append((point.size, point.speedup))
    return lines


def build_contestants(grown: Grown, arguments: argparse.Namespace) -> list[Contestant]:
    """The plain target, every drafter as chains of every depth, and the pair under its plan."""
    found = [Contestant("plain", None, Plan(0))]
    for name, drafter in grown.drafters(arguments.drafter).items():
        found += [Contestant(f"{name}, depth {depth}", drafter, Plan(depth)) for depth in arguments.depths]
    if arguments.pair:
        _, drafter, plan = Pair.load(arguments.pair).open(grown.target)
        found.append(Contestant(f"pair, {plan}", drafter, plan))
    return found


def controlled_racers(
    grown: Grown, contestants: Sequence[Contestant], jobs: Sequence[PromptJob], arguments: argparse.Namespace
) -> Iterator[ControlledRacer]:
    """Yield each drafter with its depth decided round by round, by costs and acceptance that are measured first."""
    settings = EvalSpec(max_new_tokens=arguments.max_new_tokens, seed=arguments.seed)
    context = statistics.median(len(j.prompt.tokens) for j in jobs) + arguments.max_new_tokens // 2
    small = Grown(grown.source, grown.source).drafters(arguments.drafter)
    for name, drafter in small.items():
        rates = measure_acceptance(grown.source, drafter, jobs, settings.max_new_tokens, Sampling(), trees=False).rates
        deepest = next(c for c in contestants if c.name == f"{name}, depth {max(arguments.depths)}")
        plans = controlled(grown.target, deepest, rates, arguments.sizes, int(context), repeats=3)
        yield ControlledRacer(f"{name}, controlled", Decoder(grown.target, deepest.drafter), plans, settings)


def tables(result: dict[str, Any]) -> list[str]:
    """Return speed and τ of each contestant at each batch size."""
    told = all("drafted" in p for p in result["points"])
    rows = []
    for p in result["points"]:
        figures = [interval(p["tokens_per_second"], 0), interval(p["speedup"]), interval(p["tau"])]
        figures += [f"{p['drafted']:.1f}"] if told else []
        rows.append([p["contestant"], str(p["size"]), *figures, f"{p['identical']} of {p['sequences']}"])
    head = ["", "batch", "tokens/s", "speedup", "τ", *(["drafts a round"] if told else []), "text of the plain target"]
    return [table(head, rows)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, "target", "shape", "suites", "limit", "threads", max_new_tokens=96, repeats=1)
    parser.add_argument("--drafter", nargs="*", default=[], help="NAME=FOLDER, or ngram")
    parser.add_argument("--control", action="store_true", help="also with the depth decided round by round")
    parser.add_argument("--pack", action="store_true", help="Target.pack")
    parser.add_argument("--context", type=int, help="tokens of every prompt, joined from those of the suites")
    parser.add_argument("--pair", help="folder of a pair, run under its own plan")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4], help="of chains")
    parser.add_argument("--groups", type=int, default=8, help="batches of each size, or more if the prompts fill more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: the pair's, else float32")
    return parser.parse_args(arguments)


def load(arguments: argparse.Namespace) -> Grown:
    """Return the target of the pair, or the one that is asked for."""
    if not arguments.pair:
        return Grown.load(arguments, arguments.dtype or "float32")
    dtype = {"dtype": arguments.dtype} if arguments.dtype else {}
    target = Pair.load(arguments.pair).load_target(arguments.target, **dtype)
    return Grown(target, target)


def make_prompts(target: Target, arguments: argparse.Namespace) -> list[PromptJob]:
    """Return the prompts of the suites, or as many of the length that is asked for."""
    jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
    if arguments.context is None:
        return jobs
    texts = joined_prompts([list(j.prompt.tokens) for j in jobs], [arguments.context] * len(jobs))
    return [replace(job, prompt=replace(job.prompt, tokens=tuple(text))) for job, text in zip(jobs, texts, strict=True)]


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    grown = load(arguments)
    target = grown.target
    if arguments.pack:
        target.pack()
    jobs = make_prompts(target, arguments)
    contestants = build_contestants(grown, arguments)
    settings = EvalSpec(
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        seed=arguments.seed,
        batch_sizes=arguments.sizes,
    )
    racing = len(contestants) + arguments.control * len(arguments.drafter)
    total = batch_count(jobs, settings, arguments.groups) * arguments.repeats * racing
    decoders = [(c.name, Decoder(target, c.drafter), c.plan) for c in contestants]
    with threads(arguments.threads), progress(Console(stderr=True), "measuring", total, transient=True) as advance:
        more = list(controlled_racers(grown, contestants, jobs, arguments)) if arguments.control else []
        points = measure_batches(decoders, jobs, settings, 0.0, arguments.groups, lambda: advance(1, ""), more)
        about = conditions(
            target,
            target=grown.words,
            passes=target.pass_backend,
            context=arguments.context,
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
