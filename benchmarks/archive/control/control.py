"""The goodput controller against every fixed depth, suite by suite, and with drafters that are of no use.

    python -m outrider.scripts.bench.control --drafter runs/embedded-eagle3/drafter \\
        --out scripts/bench/results/control-cpu-bf16.json

Costs and acceptance are measured (`eval.tuner`) on every other prompt; the race is run on the rest. Useless drafters:
an untrained head of the same shape, under a controller that was tuned for it, and under the one that was tuned for
the trained drafter, which promises acceptance that never comes. All contestants take turns, greedy, at batch size 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.costs.timing import threads
from outrider.decode import Control, Plan
from outrider.eval.measure import Contestant, DecoderRacer, make_records
from outrider.eval.reports.figures import PromptRecord, speed_ratio
from outrider.eval.reports.statistics import Bootstrap, strata_of
from outrider.eval.suites import Suite, load_suites, make_jobs, race
from outrider.eval.tuner import CONTROL_WEIGHT, tune
from outrider.heads import Drafter, load_drafter
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .conditions import conditions, write

PLAIN, CONTROLLED = "plain", "controlled"
USELESS, DECEIVED = "untrained, controlled", "untrained, promised better"


def halves(suites: Sequence[Suite]) -> tuple[list[Suite], list[Suite]]:
    """Every other prompt of each suite, and the others."""
    return [replace(s, prompts=s.prompts[::2]) for s in suites], [replace(s, prompts=s.prompts[1::2]) for s in suites]


def tuned(target: Target, drafter: Drafter, suites: Sequence[Suite], settings: EvalSpec) -> Control:
    """What a controller goes by."""
    found = tune(target, drafter, suites, settings).batches[0]
    return Control(found.costs.restored(), tuple(found.rates), CONTROL_WEIGHT)


def contestants(drafter: Drafter, untrained: Drafter, control: Control, own: Control, deepest: int) -> list[Contestant]:
    fixed = [Contestant(f"depth {d}", drafter, Plan(d)) for d in range(1, deepest + 1)]
    return [
        *fixed,
        Contestant(CONTROLLED, drafter, Plan(deepest, control=control)),
        Contestant(USELESS, untrained, Plan(deepest, control=own)),
        Contestant(DECEIVED, untrained, Plan(deepest, control=control)),
        Contestant(PLAIN, None, Plan(0)),
    ]


def compare(records: Sequence[PromptRecord], suite: str | None) -> dict[str, Any]:
    """Return tokens/s over the plain target's, and over the best fixed depth's, on a suite (None: all)."""
    rows: dict[str, list[PromptRecord]] = {}
    for record in sorted(records, key=lambda r: r.suite):
        if suite in (None, record.suite):
            rows.setdefault(record.contestant, []).append(record)
    bootstrap = Bootstrap(strata_of([r.suite for r in rows[PLAIN]]))
    speeds = {name: speed_ratio(own) for name, own in rows.items()}

    def over(above: str, below: str) -> dict[str, float]:
        found = bootstrap.quotient(speeds[above], speeds[below])
        return {name: round(getattr(found, name), 4) for name in ("value", "low", "high")}

    over_plain = {name: over(name, PLAIN) for name in rows if name != PLAIN}
    best = max((name for name in rows if name.startswith("depth")), key=lambda name: over_plain[name]["value"])
    return {
        "prompts": len(rows[PLAIN]),
        "over plain": over_plain,
        "best fixed": best,
        f"{CONTROLLED} / best fixed": over(CONTROLLED, best),
    }


def show(found: dict[str, Any]) -> None:
    for suite, row in found.items():
        best, quotient = row["best fixed"], row[f"{CONTROLLED} / best fixed"]
        print(f"{suite:6} controlled / {best}: {quotient['value']:.3f} [{quotient['low']:.3f}, {quotient['high']:.3f}]")
        for name in (best, CONTROLLED, USELESS, DECEIVED):
            over = row["over plain"][name]
            print(
                f"       {name + ' / plain':36} {over['value']:.3f} [{over['low']:.3f}, {over['high']:.3f}]", flush=True
            )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", required=True, help="folder of an eagle3 drafter")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--suites", nargs="+", default=["code", "docs", "prose"])
    parser.add_argument("--limit", type=int, help="prompts per suite, of which half are measured")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--deepest", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)

    target = Target.load(arguments.target, dtype=arguments.dtype)
    drafter = load_drafter(arguments.drafter, target)
    torch.manual_seed(0)
    untrained = (
        type(drafter).build(drafter.config, target, torch.zeros(target.vocab_size)).to(target.device).cast(target.dtype)
    )
    suites = load_suites(arguments.suites, target.require_tokenizer(), arguments.limit)
    settings = EvalSpec(
        suites=arguments.suites,
        max_new_tokens=arguments.max_new_tokens,
        repeats=1,
        threads=arguments.threads,
        temperatures=[0.0],
    )
    tuning, racing = halves(suites)
    control, own = (tuned(target, d, tuning, settings) for d in (drafter, untrained))
    jobs = make_jobs(racing)
    racers = [
        DecoderRacer(target, c, settings) for c in contestants(drafter, untrained, control, own, arguments.deepest)
    ]
    with threads(arguments.threads):
        for racer in racers:
            racer(jobs[0], 0.0)
        records = make_records(race(racers, jobs, 0.0, arguments.repeats), jobs, 0.0, PLAIN)
        told = conditions(
            target,
            drafter=drafter.name,
            batch=1,
            temperature=0,
            deepest=arguments.deepest,
            max_new_tokens=arguments.max_new_tokens,
            repeats=arguments.repeats,
            suites=arguments.suites,
            prompts=len(jobs),
            intervals="95%, bootstrap over prompts within suites",
        )
    found = {suite or "all": compare(records, suite) for suite in (None, *arguments.suites)}
    show(found)
    write(
        {"conditions": told, "control": control.to_dict(), "untrained control": own.to_dict(), "suites": found},
        arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
