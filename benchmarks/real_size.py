"""What drafters buy on a target of real size, by plain and by packed weights, and what their costs allow.

    python -m benchmarks.real_size --target embedded@1b --dtype bfloat16 --fusion eagle1 --depths 2 4 6 \\
        --drafter eagle1=runs/embedded-eagle1/drafter ngram --out benchmarks/results/real-size-1b-cpu-bf16.json
    python -m benchmarks.real_size --target embedded@0.4b --limit 1 --max-new-tokens 24 --repeats 1 --depths 4

Target and drafters are grown (`grown.py`). On the suites, batch 1, whole requests: trained drafters at every depth,
others at the deepest, by the library's modules ("plain weights"), by packed ones (`targets.packed_weights`), or both in
turns; on a GPU by the way that is fastest there. Every speedup is over the target alone by the same weights, with a
bootstrap interval over prompts. With --control each drafter also runs with its depth decided round by round, up to the
deepest, by the costs that are measured here and the acceptance that is measured on the small target.

Beside it what bounds them: the bytes of a pass over the bandwidth that is measured here (the floor), passes over
several tokens, the time of drafting, and what the loop takes beside its passes (`overhead.py`). "Allowed" is τ · T(1) /
(draft(d) + T(d + 1)): the speedup if rounds cost nothing but their passes.

Drafters come from `outrider train embedded-eagle1` (embedded-eagle3, embedded-medusa, embedded-hydra, …: three to six
minutes each on two cores, in runs/NAME/drafter), or all from `outrider compare embedded-eagle1 embedded-eagle3 …
--budget 360`, with the same data and training time.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outrider.common import BadInputError
from outrider.costs.counting import pass_bytes
from outrider.costs.round_timing import draft_times, verify_times
from outrider.costs.timing import threads
from outrider.decode import Control, Costs, Decoder, Plan, Sampling
from outrider.eval.acceptance import measure_acceptance
from outrider.eval.generation_config import base_sampling
from outrider.eval.interleaved_runs import TimedCompletion, race
from outrider.eval.measure import Contestant, DecoderRacer, longest_first, make_records, warm_up
from outrider.eval.reports.figures import Baselines, Figures, PromptRecord, speed_ratio
from outrider.eval.reports.statistics import Bootstrap, strata_of
from outrider.eval.suites import PromptJob, load_suites, make_jobs
from outrider.eval.summary import summarise
from outrider.eval.tuner import CONTROL_WEIGHT
from outrider.heads import Drafter, Fusion, Ngram
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .ceilings import bandwidth
from .grown import Grown, run_by
from .loops import Ours
from .overhead import loop_overhead
from .report import NOTHING, command, conditions, interval, number, options, publish, raced, shown, table, write

PLAIN = "plain"
FUSION = "fusion"
WEIGHTS = ("plain weights", "packed weights")
Kinds = dict[str, Any]  # packed weights by the name of the kind of weights; None for the library's modules


@contextmanager
def weights(target: Target, packed: Any) -> Iterator[None]:
    """Let a target run its passes inside by `packed` weights, None for the library's modules."""
    before, target.packed = target.packed, packed
    try:
        yield
    finally:
        target.packed = before


def known_kinds(target: Target) -> Kinds:
    """Return the kinds of weights; on a GPU, where none are packed, the way that is fastest is the only one."""
    if target.device.type == "cuda":
        return {target.pass_backend: None}
    target.pack()
    packed, target.packed = target.packed, None
    return dict(zip(WEIGHTS, (None, packed), strict=True))


class WeightedRacer(DecoderRacer):
    """A contestant that completes prompts by one kind of weights."""

    def __init__(self, target: Target, contestant: Contestant, settings: EvalSpec, kind: str, packed: Any):
        self.name = f"{kind}: {contestant.name}"
        self.plan = contestant.plan
        self.settings = settings
        self.target = target
        self.packed = packed
        self.sampling = base_sampling(target, settings)
        with weights(target, packed):
            self.decoder = Decoder(target, contestant.drafter, fast=False)

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        with weights(self.target, self.packed):
            return super().__call__(job, temperature)


def make_drafters(grown: Grown, arguments: argparse.Namespace) -> dict[str, Drafter]:
    """Return the drafters that are asked for, and the fusion of one with n-grams."""
    found = grown.drafters(arguments.drafter, arguments.draft_vocab)
    if arguments.fusion:
        if arguments.fusion not in found:
            raise BadInputError(f"--fusion {arguments.fusion}: name one of --drafter ({', '.join(found) or 'none'}).")
        found[FUSION] = Fusion(Ngram(), found[arguments.fusion])
    return found


def entrants(drafters: dict[str, Drafter], arguments: argparse.Namespace) -> list[Contestant]:
    """Return the target alone, and every drafter as chains of every depth, and as trees if they are asked for."""
    found = [Contestant(PLAIN, None, Plan(0))]
    for name, drafter in drafters.items():
        trained = name != FUSION and not drafter.abilities.deterministic
        depths = arguments.depths if trained else [max(arguments.depths)]  # a copied text costs nothing to draft
        found += [Contestant.of(f"{name}, depth {depth}", drafter, Plan(depth)) for depth in depths]
        if arguments.nodes and trained and drafter.abilities.reads_nodes:
            plan = Plan(max(arguments.depths), arguments.width, arguments.nodes)
            found.append(Contestant.of(f"{name}, {arguments.nodes} nodes", drafter, plan))
    return found


def measure_costs(target: Target, kinds: Kinds, drafters: dict[str, Drafter], arguments: argparse.Namespace) -> Any:
    """Return the seconds of passes and of drafting by each kind of weights: the least of turns, as others may run."""
    widths, depth = sorted({0, 1, *arguments.depths, 7, 15}), max(arguments.depths)
    costs: dict[str, Any] = {kind: {"verify": {}, "draft": {}} for kind in kinds}
    for _ in range(arguments.cost_turns):
        for kind, which in kinds.items():
            with weights(target, which):
                passes = verify_times(target, widths, context=arguments.context, repeats=arguments.cost_repeats)
                _keep_least(costs[kind]["verify"], {str(n + 1): seconds for n, seconds in passes.items()})
                for name, drafter in drafters.items():
                    if drafter.abilities.deterministic or name == FUSION:
                        continue  # its time depends on the text
                    deepest = min(depth, drafter.max_depth or depth)
                    steps = draft_times(
                        target, drafter, deepest, context=arguments.context, repeats=arguments.cost_repeats, whole=True
                    )
                    kept = costs[kind]["draft"].setdefault(name, {})
                    _keep_least(kept, {str(d): seconds for d, seconds in enumerate(steps)})
    return costs


def controlled(
    grown: Grown, contestants: Sequence[Contestant], jobs: list[PromptJob], costs: Any, arguments: argparse.Namespace
) -> dict[str, list[Contestant]]:
    """Return by kind of weights each drafter with its depth decided round by round; its acceptance is measured here."""
    found: dict[str, list[Contestant]] = {kind: [] for kind in costs}
    for name, drafter in Grown(grown.source, grown.source).drafters(arguments.drafter).items():
        deepest = next(c for c in contestants if c.name == f"{name}, depth {max(arguments.depths)}")
        seen = measure_acceptance(grown.source, drafter, jobs, arguments.max_new_tokens, Sampling(), trees=False)
        for kind, own in costs.items():
            passes = tuple((int(tokens) - 1, seconds) for tokens, seconds in own["verify"].items())
            control = Control(
                Costs(passes, tuple(own["draft"].get(name, {"0": 0.0}).values())), seen.rates, CONTROL_WEIGHT
            )
            found[kind].append(
                replace(deepest, name=f"{name}, controlled", plan=replace(deepest.plan, control=control))
            )
    return found


def overheads(
    target: Target, kinds: Kinds, drafters: dict[str, Drafter], jobs: list[PromptJob], arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Return what the loop takes beside its passes, plain and with the first drafter whose passes can be told."""
    batches = [[list(job.prompt.tokens)] for job in jobs[: arguments.overhead_prompts]]
    if not batches or target.device.type == "cuda":  # there rounds are captured as a whole
        return {}
    heads = {
        n: d for n, d in drafters.items() if d.abilities.reads_nodes and not d.abilities.deterministic and n != FUSION
    }
    found: dict[str, dict[str, Any]] = {}
    for kind, which in kinds.items():
        with weights(target, which):
            loops = [Ours(PLAIN, Decoder(target, fast=False), Plan(0), arguments.max_new_tokens)]
            for name, drafter in list(heads.items())[:1]:
                decoder = Decoder(target, drafter, fast=False)
                loops.append(Ours(name, decoder, Plan(min(arguments.depths)), arguments.max_new_tokens))
            found[kind] = {loop.name: loop_overhead(loop, batches, 1).to_dict() for loop in loops}
    return found


def _keep_least(kept: dict[str, float], seconds: dict[str, float]) -> None:
    kept |= {key: min(value, kept.get(key, value)) for key, value in seconds.items()}


def race_weights(
    target: Target,
    kinds: Kinds,
    contestants: dict[str, list[Contestant]],
    jobs: list[PromptJob],
    settings: EvalSpec,
) -> tuple[dict[str, list[Figures]], dict[str, Any] | None]:
    """Return every contestant's figures by each kind of weights, and the quotient of the target's own speeds."""
    turns = zip(*contestants.values(), strict=True)
    racers = [
        WeightedRacer(target, contestant, settings, kind, kinds[kind])
        for each in turns
        for kind, contestant in zip(contestants, each, strict=True)
    ]
    records: dict[str, list[PromptRecord]] = {kind: [] for kind in kinds}
    rules: dict[tuple[str, float], str] = {}
    for temperature in settings.temperatures:
        for racer in racers:
            warm_up(racer, longest_first(jobs) if target.device.type == "cuda" else jobs[:1], temperature)
        answers = race(racers, jobs, temperature, settings.repeats)
        for kind in kinds:
            own = {name.removeprefix(f"{kind}: "): done for name, done in answers.items() if name.startswith(kind)}
            records[kind] += make_records(own, jobs, temperature, PLAIN)
            rules |= {(name, temperature): done[0][0].rule for name, done in own.items()}
    figures = {kind: summarise(records[kind], rules, Baselines(plain=PLAIN, generate=None)) for kind in kinds}
    alone = [
        sorted((r for r in records[kind] if r.contestant == PLAIN and not r.temperature), key=lambda r: r.suite)
        for kind in reversed(kinds)
    ]
    if len(alone) < 2 or not alone[0]:
        return figures, None
    bootstrap = Bootstrap(strata_of([r.suite for r in alone[0]]))
    return figures, shown(bootstrap.quotient(*map(speed_ratio, alone)))


def rows_of(figures: dict[str, list[Figures]], contestants: Sequence[Contestant], result: dict[str, Any]) -> Any:
    """Return one row for each contestant, temperature and kind of weights."""
    plans = {contestant.name: contestant.plan for contestant in contestants}
    rows = []
    for kind, all_figures in figures.items():
        for f in (f for f in all_figures if f.suite == "all"):
            row = {"weights": kind, **raced(f), "temperature": f.temperature, "rule": f.rule}
            costs, plan = result["costs"][kind], plans[f.contestant]
            draft = costs["draft"].get(f.contestant.partition(",")[0], {}).get(str(plan.depth))
            if f.tau and draft is not None and not plan.is_tree and plan.control is None:
                seconds = draft + costs["verify"][str(plan.depth + 1)]
                row["allowed"] = number(f.tau.value * costs["verify"]["1"] / seconds)
            rows.append(row)
    return rows


def tables(result: dict[str, Any]) -> list[str]:
    """Return passes, drafting, and the race."""
    floor, costs = result["floor_seconds"], result["costs"]
    passes = [
        [kind, tokens, f"{1000 * seconds:.1f}", f"{seconds / own['verify']['1']:.2f}", f"{floor / seconds:.0%}"]
        for kind, own in costs.items()
        for tokens, seconds in own["verify"].items()
    ]
    drafts = [
        [kind, name, depth, f"{1000 * seconds:.1f}", f"{seconds / own['verify']['1']:.2f}"]
        for kind, own in costs.items()
        for name, steps in own["draft"].items()
        for depth, seconds in steps.items()
        if depth != "0"
    ]
    race_rows = [
        [
            row["contestant"],
            row["weights"],
            f"{row['temperature']:g}",
            interval(row["tau"]),
            interval(row["tokens_per_second"], 1),
            interval(row["speedup"]),
            f"{row['allowed']:.2f}" if "allowed" in row else NOTHING,
            NOTHING if row["identical"] is None else f"{row['identical']} of {row['prompts']}",
        ]
        for row in result["figures"]
    ]
    quotient = result["packed_over_plain"]
    beside = [
        [kind, name, f"{row['share']:+.1%}", f"{row['of_processor_time']['share']:+.1%}"]
        for kind, own in result["loop_overhead"].items()
        for name, row in own.items()
    ]
    return [
        f"A pass over one token reads {result['pass_bytes'] / 1e9:.2f} GB; at "
        f"{result['read_bytes_per_second'] / 1e9:.1f} GB/s that is {1000 * floor:.1f} ms, the floor."
        + (f" The target alone, packed over plain weights: {interval(quotient)}." if quotient else ""),
        table(["passes", "tokens", "ms", "over one token", "of the floor"], passes),
        table(["drafting", "drafter", "depth", "ms", "over a pass"], drafts),
        table(["a round beside its passes", "", "wall time", "processor time"], beside),
        table(["", "weights", "T", "τ", "tokens/s", "speedup", "allowed", "text of the plain target"], race_rows),
    ]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    common = ("shape", "runner", "suites", "threads")
    parser = options(__doc__, *common, target="embedded@1b", limit=8, max_new_tokens=96, repeats=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="that race; both are timed")
    parser.add_argument("--drafter", nargs="*", default=["ngram"], help="NAME=FOLDER, for the small target, or ngram")
    parser.add_argument("--draft-vocab", type=int, help="outputs of a grown head, such as 32000")
    parser.add_argument("--fusion", help="the NAME of a drafter that goes on where n-grams find nothing")
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4], help="of chains")
    parser.add_argument("--control", action="store_true", help="also with the depth decided round by round")
    parser.add_argument("--width", type=int, default=4, help="of dynamic trees, as deep as the deepest chain")
    parser.add_argument("--nodes", type=int, default=0, help="of dynamic trees; 0 for none")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--context", type=int, default=256, help="tokens before the passes that are timed alone")
    parser.add_argument("--cost-repeats", type=int, default=5, help="of single passes, in each turn")
    parser.add_argument("--cost-turns", type=int, default=3)
    parser.add_argument("--overhead-prompts", type=int, default=1, help="for what the loop takes; 0 for none")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    with threads(arguments.threads):
        grown = Grown.load(arguments, arguments.dtype)
        target, drafters = grown.target, make_drafters(grown, arguments)
        run_by(target, arguments.runner)
        known = known_kinds(target)
        kinds = {kind: known[kind] for kind in known if kind in arguments.weights or kind not in WEIGHTS}
        entered = entrants(drafters, arguments)
        jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
        settings = EvalSpec(
            max_new_tokens=arguments.max_new_tokens, repeats=arguments.repeats, temperatures=arguments.temperatures
        )
        read = bandwidth(target.device).read
        result: dict[str, Any] = {
            "conditions": conditions(
                target,
                target=grown.words,
                drafters=[re.sub(r"=/.*/", "=", drafter) for drafter in arguments.drafter],
                max_new_tokens=arguments.max_new_tokens,
                repeats=arguments.repeats,
                suites=arguments.suites,
                prompts=len(jobs),
                context=arguments.context,
                timing="whole requests, prefills included; contestants take turns on each prompt; passes alone: the "
                f"least of {arguments.cost_turns} medians",
                intervals="95%, bootstrap over prompts",
            ),
            "read_bytes_per_second": read,
            "pass_bytes": pass_bytes(target),
            "floor_seconds": pass_bytes(target) / read,
            "costs": measure_costs(target, known, drafters, arguments),
            "loop_overhead": overheads(target, kinds, drafters, jobs, arguments),
        }
        write(result, arguments.out)
        contestants = {kind: list(entered) for kind in kinds}
        if arguments.control:
            costs = {kind: result["costs"][kind] for kind in kinds}
            for kind, more in controlled(grown, entered, jobs, costs, arguments).items():
                contestants[kind] += more
        figures, result["packed_over_plain"] = race_weights(target, kinds, contestants, jobs, settings)
    everyone = next(iter(contestants.values()))
    result["figures"] = rows_of(figures, everyone, result)
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
