"""Tokens/s as the cost model and `outrider lab capacity` predict them, and the decoder's own, over depth × batch size.

    python -m benchmarks.load --drafter eagle1=runs/pair-v1/drafter --out benchmarks/results/load-cpu-bf16.json

The load is closed: so many clients, each of which waits for the others of its batch, as our decoder runs one. In each
pass over the batch sizes, rounds are timed as the tuner does, in turns with the batches that are predicted from them,
so that both have the same machine; passes go on until the time is up. What the ratios of predicted to measured speed
have in common over passes is the model's fault, what they differ by is noise.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from os import getloadavg
from typing import Any

from outrider.costs.round_timing import RoundTimes, costs_in_loop, verify_times
from outrider.costs.timing import threads
from outrider.decode import Costs, Decoder, Plan, Sampling
from outrider.eval.acceptance import Acceptance, measure_acceptance
from outrider.eval.batch_timing import BatchRacer, make_groups
from outrider.eval.interleaved_runs import race
from outrider.eval.suites import PromptJob, load_suites, make_jobs
from outrider.eval.tuner import round_times
from outrider.heads import Drafter, Ngram, load_drafter
from outrider.lab.load_simulation import RequestMix, RequestRecord, StepTimes, Traffic, simulate
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .report import command, conditions, options, publish, table

_TIMED = 3  # batches by which rounds are timed, as the tuner takes
_WIDE = (8, 16, 32, 64)  # passes of one row, by which the simulation reads prompts


@dataclass
class Size:
    """One pass at one batch size: costs, rounds in the loop, and measured tokens/s, by depth."""

    costs: Costs
    loops: dict[int, RoundTimes]
    speeds: dict[int, float]


@dataclass
class Study:
    """A target, a drafter, and the prompts of all passes."""

    target: Target
    drafter: Drafter
    jobs: list[PromptJob]
    asked: Namespace

    def run(self, size: int, seed: int) -> Size:
        """Time rounds of batches of nearly median length, and complete other batches, in turns."""
        asked, depths = self.asked, [0, *self.asked.depths]
        settings = EvalSpec(max_new_tokens=asked.max_new_tokens, temperatures=[0.0])
        plain, drafting = Decoder(self.target), Decoder(self.target, self.drafter)
        racers = [BatchRacer(str(d), drafting if d else plain, Plan(d), settings) for d in depths]
        number = max(_TIMED, asked.prompts // size)
        groups = make_groups(self.jobs, size, number + 3 * _TIMED, seed)
        middle = statistics.median(job.length for job in self.jobs)
        timed = sorted(groups[number:], key=lambda group: abs(_length(group) - middle))[:_TIMED]
        mixed = list(enumerate([*timed, *groups[:number]]))
        random.Random(seed).shuffle(mixed)
        for racer in racers:
            racer(max(groups, key=_length), 0.0)  # first calls are slow
        order, shuffled = zip(*mixed, strict=True)
        done = {
            int(name): [answer for _, (answer,) in sorted(zip(order, of, strict=True), key=itemgetter(0))]
            for name, of in race(racers, shuffled, 0.0, 1).items()
        }
        context = int(middle) + asked.max_new_tokens // 2
        widths = [*depths, *(_WIDE if size == 1 else ())]
        curve = verify_times(self.target, widths, size, context, max(4, 12 // size), self.drafter.taps)
        loops = {d: round_times(of[:_TIMED]) for d, of in done.items()}
        measured = {d: of[_TIMED:] for d, of in done.items()}
        speeds = {d: sum(a.num_tokens for a in of) / sum(a.seconds for a in of) for d, of in measured.items()}
        return Size(costs_in_loop(curve, loops, self.drafter.abilities.one_pass), loops, speeds)


def _length(group: Sequence[PromptJob]) -> float:
    return statistics.mean(job.length for job in group)


def one_pass(study: Study, seen: Acceptance, requests: RequestMix, seed: int) -> list[dict[str, Any]]:
    """Return a row for each batch size and depth: tokens/s by the cost model, by the simulation, and measured."""
    sizes = {size: study.run(size, seed) for size in study.asked.sizes}
    times = StepTimes(tuple(sizes), tuple(found.costs for found in sizes.values()))
    single = sizes[min(sizes)].loops
    rows = []
    for size, found in sizes.items():
        for depth, loop in found.loops.items():
            load = Traffic(study.asked.requests, None, size, max_rows=size, refill=False, seed=seed)
            mix = replace(requests, depth=max(1, depth), prefill=single[max(single)].prefill / single[0].prefill)
            simulated = simulate(mix, times, load, "fixed" if depth else "plain").tokens_per_second
            model = loop.tokens_per_second(seen.chain(depth), seen.tokens, size)
            row = {"size": size, "depth": depth, "model": model, "simulated": simulated}
            rows.append(row | {"measured": found.speeds[depth]})
    return rows


def request_mix(study: Study, seen: Acceptance) -> RequestMix:
    """Return all prompts as requests, each with the drafts that its rounds keep at the deepest plan."""
    plan, tokens = Plan(max(study.asked.depths)), study.asked.max_new_tokens
    decoder = Decoder(study.target, study.drafter)
    records = []
    for job in study.jobs:
        out = decoder.generate([job.prompt.tokens], tokens, Sampling(), plan, sequence_ids=[job.sequence])
        records.append(RequestRecord(job.length, len(out.tokens[0]), tuple(r.accepted for r in out.rounds[0])))
    return RequestMix(tuple(records), plan.depth, seen.rates)


def summary(passes: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return medians over the passes, and the range of each ratio."""
    rows = []
    for cells in zip(*passes, strict=True):
        row = {name: cells[0][name] for name in ("size", "depth")}
        row |= {name: statistics.median(c[name] for c in cells) for name in ("model", "simulated", "measured")}
        for name in ("model", "simulated"):
            ratios = sorted(c[name] / c["measured"] for c in cells)
            row[f"{name}_ratio"] = {"value": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
        rows.append(row)
    return rows


def tables(result: dict[str, Any]) -> list[str]:
    rows = result["rows"]

    def ratio(of: dict[str, float]) -> str:
        return f"{of['value']:.2f} ({of['low']:.2f} to {of['high']:.2f})"

    head = ["batch", "depth", "measured tokens/s", "cost model ÷ measured", "capacity ÷ measured"]
    cells = [
        [
            str(r["size"]),
            str(r["depth"] or "plain"),
            f"{r['measured']:.1f}",
            *map(ratio, (r["model_ratio"], r["simulated_ratio"])),
        ]
        for r in rows
    ]
    words = []
    for name, said in (("model", "the cost model"), ("simulated", "capacity")):
        off = [abs(r[f"{name}_ratio"]["value"] - 1) for r in rows]
        words.append(f"{said} is off by {statistics.median(off):.1%} in the median case, by {max(off):.1%} at most")
    return [table(head, cells), f"{'; '.join(words)} (medians over passes; the range of passes in brackets)."]


def main() -> int:
    parser = options(__doc__, "target", "suites", "threads", limit=16, max_new_tokens=32)
    parser.add_argument("--drafter", default="ngram", help="NAME=FOLDER, or ngram")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=12, help="of a pass, at each size and depth, at least")
    parser.add_argument("--requests", type=int, default=400, help="of each simulation")
    parser.add_argument("--seconds", type=float, default=450, help="after which no other pass begins")
    asked = parser.parse_args()
    began = time.perf_counter()
    load = getloadavg()
    target = Target.load(asked.target)
    name, _, folder = asked.drafter.partition("=")
    drafter = load_drafter(folder, target) if folder else Ngram()
    jobs = make_jobs(load_suites(asked.suites, target.require_tokenizer(), asked.limit))
    study = Study(target, drafter, jobs, asked)
    with threads(asked.threads):
        seen = measure_acceptance(target, drafter, jobs, asked.max_new_tokens, Sampling(), trees=False)
        requests, passes = request_mix(study, seen), list[list[dict[str, Any]]]()
        while not passes or time.perf_counter() - began < asked.seconds * len(passes) / (len(passes) + 1):
            passes.append(one_pass(study, seen, requests, len(passes)))
            used = {k: v for k, v in vars(asked).items() if k not in ("out", "target", "drafter", "threads")}
            used |= {"temperature": 0, "passes": len(passes)}
            used |= {"load_average": [round(one[1], 1) for one in (load, getloadavg())]}
            found = {"conditions": conditions(target, drafter=name, **used), "rows": summary(passes), "passes": passes}
            publish(found, asked.out, tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
