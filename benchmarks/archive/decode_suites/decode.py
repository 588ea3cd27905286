"""Speed of the decoder against transformers' own loops, interleaved in one run, greedy.

    python -m benchmarks.decode --eagle3 runs/embedded-eagle3/drafter \\
        --draft-model runs/embedded-draft-model/drafter \\
        --dtype bfloat16 --out benchmarks/results/decode-cpu-bf16.json
    python -m benchmarks.decode --shape llama-3.1-8b --out benchmarks/results/decode-llama-3.1-8b.json
    python -m benchmarks.decode --shape qwen3-8b --layers 1 --hidden 64 --vocab 512 \\
        --context 96 --batch 1 2 --quick

On the suites, batch 1: the plain target and the drafters in our engine, `transformers.generate`, transformers'
assisted generation with the same draft model and its prompt lookup at the same k. Every quotient is one of tokens/s
on the same prompts, with a bootstrap interval over prompts. Beside them what our loop costs over the bare passes of
the models (`overhead.py`).

At each --context and --batch: T_verify(n) / T_verify(1), the time of drafting, plain tokens/s and its share of the
memory-bandwidth floor, tokens/s of all loops at forced acceptance (`forced.py`; labelled so), the loop's overhead,
and how long the device waits for the host (`cells.py`).

--shape takes a target of that shape with random weights (`random_targets.py`), an untrained EAGLE-3 head and a random
draft model for it; --layers, --hidden and --vocab shrink them for a try on a CPU. There are no suites then.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from typing import Any

import torch

from outrider.common import BadInputError
from outrider.common.machine import best_device, clock
from outrider.costs.rounds import check_context, ragged_lengths
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan
from outrider.eval.interleaved_runs import Racer, TimedCompletion, race
from outrider.eval.measure import GENERATE, Contestant, DecoderRacer, GenerateRacer, make_records, summarise
from outrider.eval.reports.figures import Baselines, Figures, PromptRecord, speed_ratio
from outrider.eval.reports.statistics import Bootstrap, strata_of
from outrider.eval.suites import PromptJob, load_suites, make_jobs
from outrider.heads import Drafter, DraftModel, Ngram, load_drafter
from outrider.recipes import EvalSpec
from outrider.targets import Target
from outrider.targets.fast import use_fastest_pass
from outrider.targets.split_attention import steady_kernels

from . import random_targets as models
from .ceilings import bandwidth
from .cells import Cell, CellSettings
from .loops import Ours, Texts, assist
from .overhead import loop_overhead
from .report import NOTHING, command, conditions, interval, options, shown, table, write

ASSISTED, LOOKUP = "transformers.assisted", "transformers.prompt_lookup"
OURS = [("eagle3", "plain"), ("eagle3 tree", "plain"), ("eagle3 tree", "eagle3"), ("draft_model", "plain")]
THEIRS = [("plain", GENERATE), ("draft_model", ASSISTED), ("ngram", LOOKUP), ("eagle3", GENERATE)]
QUOTIENTS = [*OURS, ("ngram", "plain"), *THEIRS]  # of tokens/s


class Drafting:
    """`transformers.generate` that drafts, with an assistant or by prompt lookup, on one job of a race."""

    def __init__(self, name: str, target: Target, max_new_tokens: int, **options: Any):
        self.name, self.target, self.max_new_tokens, self.options = name, target, max_new_tokens, options

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        tokens = torch.tensor([job.prompt.tokens], device=self.target.device)
        mask = torch.ones_like(tokens)
        began = clock(self.target.device)
        model: Any = self.target.model
        with torch.inference_mode(), steady_kernels():
            out = model.generate(
                tokens, attention_mask=mask, max_new_tokens=self.max_new_tokens, do_sample=False, **self.options
            )
        return TimedCompletion(out[0, tokens.shape[1] :].tolist(), {"total": clock(self.target.device) - began})


def load_drafters(target: Target, arguments: argparse.Namespace) -> dict[str, Drafter]:
    folders = {"eagle3": arguments.eagle3, "draft_model": arguments.draft_model}
    found = {name: load_drafter(folder, target) for name, folder in folders.items() if folder}
    for name, drafter in found.items():
        if drafter.name != name:
            raise BadInputError(
                f"--{name.replace('_', '-')} {folders[name]}: expected a drafter of type {name}, found {drafter.name}."
            )
    return found


def build_racers(target: Target, drafters: dict[str, Drafter], arguments: argparse.Namespace) -> list[Racer]:
    depth, count = arguments.depth, arguments.max_new_tokens
    settings = EvalSpec(max_new_tokens=count, seed=0)
    plan, tree = Plan(depth), Plan(depth + 1, arguments.width, arguments.nodes)
    found = [Contestant("plain", None, Plan(depth=0)), Contestant("ngram", Ngram(), plan)]
    racers: list[Racer] = [Drafting(LOOKUP, target, count, prompt_lookup_num_tokens=depth)]
    for name, drafter in drafters.items():
        found.append(Contestant(name, drafter, plan))
        if name == "eagle3":
            found.append(Contestant("eagle3 tree", drafter, tree))
        if isinstance(drafter, DraftModel):
            racers.append(Drafting(ASSISTED, target, count, assistant_model=assist(drafter.model, depth)))
    return [*(DecoderRacer(target, c, settings) for c in found), GenerateRacer(target, settings), *racers]


def quotients(records: dict[str, list[PromptRecord]]) -> dict[str, Any]:
    """Return tokens/s of one contestant over another's, on the same prompts."""
    bootstrap = Bootstrap(strata_of([r.suite for r in records["plain"]]))
    return {
        f"{above} / {below}": shown(bootstrap.quotient(speed_ratio(records[above]), speed_ratio(records[below])))
        for above, below in QUOTIENTS
        if above in records and below in records
    }


def race_suites(
    target: Target, drafters: dict[str, Drafter], jobs: list[PromptJob], arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[Figures]]:
    """Return quotients of tokens/s, and every contestant's figures."""
    racers = build_racers(target, drafters, arguments)
    for racer in racers:
        racer(jobs[0], 0.0)
    records = make_records(race(racers, jobs, 0.0, arguments.repeats), jobs, 0.0, "plain")
    rules = {(r.name, 0.0): "greedy" for r in racers}
    by_name: dict[str, list[PromptRecord]] = {}
    for record in sorted(records, key=lambda r: r.suite):
        by_name.setdefault(record.contestant, []).append(record)
    return quotients(by_name), summarise(records, rules, Baselines(plain="plain", generate=GENERATE))


def measure_overheads(
    target: Target, drafters: dict[str, Drafter], jobs: list[PromptJob], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the overhead of plain rounds and of each drafter's, on prompts of the suites, at the acceptance there."""
    batches = [
        [list(job.prompt.tokens)]
        for suite in dict.fromkeys(j.suite for j in jobs)
        for job in [j for j in jobs if j.suite == suite][: arguments.overhead_prompts]
    ]
    plan, count = Plan(arguments.depth), arguments.max_new_tokens
    loops = [Ours("plain", Decoder(target), Plan(0), count)]
    loops += [Ours(name, Decoder(target, drafter), plan, count) for name, drafter in drafters.items()]
    return {loop.name: loop_overhead(loop, batches, arguments.repeats).to_dict() for loop in loops}


def cell_settings(arguments: argparse.Namespace) -> CellSettings:
    settings = CellSettings(
        arguments.depth,
        tuple(arguments.shares),
        arguments.cell_tokens,
        arguments.repeats,
        arguments.cost_repeats,
        tuple(arguments.widths),
    )
    if not arguments.quick:
        return settings
    widths = (0, 1, settings.depth)
    return CellSettings(
        settings.depth, settings.forced_shares[:1], new_tokens=12, repeats=1, cost_repeats=2, widths=widths
    )


def check_room(target: Target, arguments: argparse.Namespace) -> None:
    """Raise BadInputError for a context that leaves no room for what is written after it."""
    settings = cell_settings(arguments)
    after = max(settings.new_tokens + settings.depth, *settings.widths, 2 * settings.depth + 64) + 1
    for context in arguments.context:
        check_context(target, context, after)


def joined_prompts(texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Texts:
    """Make prompts of these lengths from texts in a row; prompt i begins with text i, and texts may be used again."""
    prompts = []
    for row, length in enumerate(lengths):
        start = row % len(texts)
        tokens = (token for text in cycle([*texts[start:], *texts[:start]]) for token in text)
        prompts.append(list(islice(tokens, length)))
    return prompts


def make_cells(
    target: Target, drafters: dict[str, Drafter], texts: Texts | None, arguments: argparse.Namespace
) -> Iterator[Cell]:
    """Yield cells, the shortest context and smallest batch first; prompts are joined from `texts`, or random."""
    settings = cell_settings(arguments)
    use_fastest_pass(target)  # single passes are timed before the first decoder is made
    measured = bandwidth(target.device, arguments.bandwidth_bytes)
    for context in arguments.context:
        for batch in arguments.batch:
            lengths = ragged_lengths(batch, context)
            if texts is None:
                prompts = models.random_prompts(target.vocab_size, lengths, settings.new_tokens + settings.depth)
            else:
                prompts = joined_prompts(texts, lengths)
            yield Cell(target, drafters, prompts, texts is None, settings, measured, lookup=not arguments.no_lookup)


def random_models(arguments: argparse.Namespace) -> tuple[Target, dict[str, Drafter], dict[str, Any]]:
    """Return a target of --shape, its drafters, and the words for it in the conditions."""
    shape = models.shape_of(arguments.shape, arguments.layers, arguments.hidden, arguments.vocab)
    target = models.build_target(shape, getattr(torch, arguments.dtype), best_device())
    drafters: dict[str, Drafter] = {"eagle3": models.build_eagle3(target)}
    if not arguments.no_draft_model:
        drafters["draft_model"] = models.build_draft_model(arguments.shape, target, arguments.layers, arguments.hidden)
    weights = (
        f"random; output embedding = input embedding moved by {models.STEP} rows, "
        f"input embeddings of standard deviation {models.EMBEDDING:g}: "
        f"greedy text is known, and no near-tie of bf16 can end a forced acceptance"
    )
    sizes = {name: sum(p.numel() for p in d.parameters()) for name, d in drafters.items()}
    described = {
        "target": {"shape": arguments.shape, "config": shape, "weights": weights},
        "drafters": {name: {"parameters": size, "weights": "random"} for name, size in sizes.items()},
    }
    return target, drafters, described


def tables(result: dict[str, Any]) -> list[str]:
    """Return the tables of the race on the suites."""
    head = ["a round's overhead", "processor time", "wall time", "ms per round", "ms of its passes alone"]
    return [
        table(["tokens/s", "quotient"], ([n, interval(r)] for n, r in result["tokens_per_second_ratios"].items())),
        table(head, ([name, *_overhead_cells(row)] for name, row in result["loop_overhead"].items())),
        _overall(result["figures"]),
        _by_suite(result["figures"]),
    ]


def _overhead_cells(row: dict[str, Any]) -> list[str]:
    shares = (row["of_processor_time"], row)
    percents = [
        f"{100 * s['share']:+.1f}%" + ("" if s["low"] is None else f" [{100 * s['low']:+.1f}, {100 * s['high']:+.1f}]")
        for s in shares
    ]
    return percents + [f"{1000 * row[key]:.2f}" for key in ("loop_seconds_per_round", "bare_seconds_per_round")]


def _overall(figures: Sequence[dict[str, Any]]) -> str:
    head = ["all suites", "shape", "T", "rule", "τ", "acceptance by depth", "tokens/s", "speedup"]
    rows = [
        [
            f["contestant"],
            NOTHING,
            f"{f['temperature']:g}",
            f["rule"],
            interval(f["tau"]),
            ", ".join(f"{a['alpha']['value']:.2f}" for a in f["alpha"]) or NOTHING,
            interval(f["tokens_per_second"], 0),
            interval(f["speedup"]),
            NOTHING if f["identical"] is None else f"{f['identical']} of {f['num_prompts']} prompts",
        ]
        for f in figures
        if f["suite"] == "all"
    ]
    return table([*head, "text of the plain target"], rows)


def _by_suite(figures: Sequence[dict[str, Any]]) -> str:
    suites = list(dict.fromkeys(f["suite"] for f in figures if f["suite"] != "all"))
    cells = {(f["contestant"], f["temperature"], f["suite"]): f for f in figures}
    rows = []
    for contestant, temperature in dict.fromkeys((c, t) for c, t, _ in cells):
        of_suites = [cells.get((contestant, temperature, suite)) for suite in suites]
        texts = [f"{interval(f['tau'])}; {interval(f['speedup'])}" if f else NOTHING for f in of_suites]
        rows.append([contestant, f"{temperature:g}", *texts])
    return table(["τ; speedup", "T", *suites], rows)


def show_cell(cell: dict[str, Any]) -> None:
    """Print the loops of a cell; all else that was measured is in the file."""
    head = [f"context {cell['context']}, batch {cell['batch']}", "tokens/s", "steady", "a round", "τ"]
    head += ["over bare passes", "device idle"]
    if "error" in cell["loops"]:
        print(f"{head[0]}: {cell['loops']['error']}", flush=True)
    else:
        print(table(head, (_loop_cells(cell, name, row) for name, row in cell["loops"].items())), flush=True)


def _loop_cells(cell: dict[str, Any], name: str, row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [name, row["error"], *[NOTHING] * 5]
    overhead, gaps = cell["loop_overhead"].get(name) or {}, cell["gaps"].get(name) or {}
    figures = [row["tokens_per_second"], row["steady_tokens_per_second"], row["seconds_per_round"], row["tau"]]
    ways = ("{:.1f}", "{:.1f}", "{:.5f} s", "{:.2f}")
    texts = [NOTHING if figure is None else way.format(figure) for way, figure in zip(ways, figures, strict=True)]
    shares = (overhead.get("share"), gaps.get("idle_share"))
    return [name, *texts, *(NOTHING if share is None else f"{share:.1%}" for share in shares)]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    common = ("target", "suites", "limit", "depth", "threads")
    parser = options(__doc__, *common, max_new_tokens=128, repeats=3, shape=None)
    parser.add_argument("--eagle3", help="folder of an eagle3 drafter")
    parser.add_argument("--draft-model", help="folder of a draft model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32; of a --shape bfloat16")
    parser.add_argument("--width", type=int, default=4, help="of the dynamic tree, which is one deeper than chains")
    parser.add_argument("--nodes", type=int, default=12, help="of the dynamic tree")
    parser.add_argument("--cells-only", action="store_true", help="use the suites as text for the cells only")
    parser.add_argument("--overhead-prompts", type=int, default=4, help="per suite, for the overhead of the loop")
    cells = parser.add_argument_group("cells of context and batch size")
    cells.add_argument("--context", nargs="*", type=int, help="default: 256; of a --shape 1024 8192")
    cells.add_argument("--batch", nargs="*", type=int, help="default: 1; of a --shape 1 4 16 64")
    known = CellSettings()
    acceptance = "forced acceptance at each depth, given the one before"
    cells.add_argument("--shares", nargs="+", type=float, default=known.forced_shares, help=acceptance)
    tokens = "new tokens of each row: 1 + a multiple of depth + 1 ends with a full round"
    cells.add_argument("--cell-tokens", type=int, default=known.new_tokens, help=tokens)
    cells.add_argument("--cost-repeats", type=int, default=known.cost_repeats, help="of single passes")
    cells.add_argument("--widths", nargs="+", type=int, default=known.widths, help="drafts in a pass of the target")
    cells.add_argument("--bandwidth-bytes", type=int, help="to copy and read; default: more than caches hold")
    attention = "Target.use_split_attention; transformers' loops keep their own"
    cells.add_argument("--split-attention", action="store_true", help=attention)
    cells.add_argument("--compile", action="store_true", help="Target.compile")
    cells.add_argument("--no-lookup", action="store_true", help="without n-gram and prompt lookup")
    cells.add_argument("--quick", action="store_true", help="few repeats: to see that it runs")
    parser.add_argument("--no-draft-model", action="store_true", help="of a --shape")
    arguments = parser.parse_args(given)
    of_shape = {"dtype": "bfloat16", "context": [1024, 8192], "batch": [1, 4, 16, 64]}
    of_folder = {"dtype": "float32", "context": [256], "batch": [1]}
    for name, value in (of_folder if arguments.shape is None else of_shape).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.suites = arguments.suites if arguments.shape is None else []
    return arguments


def told(arguments: argparse.Namespace, prompts: int, raced: bool) -> dict[str, Any]:
    """Return the settings of the race on the suites, if there is one, and those of the cells."""
    race = {
        "batch": 1,
        "temperature": 0,
        "depth": arguments.depth,
        "tree": {"depth": arguments.depth + 1, "width": arguments.width, "nodes": arguments.nodes},
        "max_new_tokens": arguments.max_new_tokens,
        "repeats": arguments.repeats,
        "suites": arguments.suites,
        "prompts": prompts,
    }
    cells = asdict(cell_settings(arguments)) | {
        "context": arguments.context,
        "batch": arguments.batch,
        "temperature": 0,
        "compiled": arguments.compile,
        "timing": "medians; steady: all steps but the first, which reads the prompt; "
        "loops take turns where there is memory for all of them",
    }
    return (race if raced else {}) | {"cells": cells}


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    with threads(arguments.threads):
        if arguments.shape:
            target, drafters, described = random_models(arguments)
        else:
            target = Target.load(arguments.target, dtype=arguments.dtype)
            drafters, described = load_drafters(target, arguments), {}
        if arguments.split_attention:
            target.use_split_attention()
        if arguments.compile:
            target.compile()
        check_room(target, arguments)
        suites = load_suites(arguments.suites, target.require_tokenizer()) if arguments.suites else []
        jobs = make_jobs(suites, arguments.limit)
        raced = bool(jobs) and not arguments.cells_only
        result: dict[str, Any] = {"conditions": conditions(target, **described, **told(arguments, len(jobs), raced))}
        if raced:
            compared, figures = race_suites(target, drafters, jobs, arguments)
            overheads = measure_overheads(target, drafters, jobs, arguments) if target.device.type == "cpu" else {}
            result |= {
                "tokens_per_second_ratios": compared,
                "loop_overhead": overheads,
                "figures": [json.loads(f.model_dump_json()) for f in figures],
            }
            write(result, arguments.out, tables(result))
            print("\n\n".join(tables(result)), flush=True)
        result["cells"] = []
        for cell in make_cells(target, drafters, [list(j.prompt.tokens) for j in jobs] or None, arguments):
            found = cell.measure()
            show_cell(found)
            result["cells"].append(found)
            write(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
