"""The decoder's rounds against transformers' own loops, by context and batch size, greedy.

    python -m benchmarks.decode --dtype bfloat16 --drafter eagle3=runs/embedded-eagle3/drafter \\
        draft_model=runs/embedded-draft-model/drafter
    python -m benchmarks.decode --target embedded@8b --drafter eagle3=runs/embedded-eagle3/drafter --draft-like 1b \\
        --dtype bfloat16 --context 1024 8192 --batch 1 4 16 64 --out benchmarks/results/decode-llama-3.1-8b.json

At each --context and --batch, on prompts joined from those of the suites: T_verify(n) / T_verify(1), the time of
drafting, plain tokens/s and its share of the memory-bandwidth floor, tokens/s of the plain target and the drafters in
our engine, of `transformers.generate`, its assisted generation with the same draft model and its prompt lookup at the
same k, the loop's overhead (`overhead.py`), and how long the device waits for the host (`cells.py`).

A target that was grown (`grown.py`) has drafters that were trained for the small one and grow with it. --untrained
takes an EAGLE-3 head that learned nothing; --draft-like grows the small target into a smaller shape, as a draft model
that is always right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from typing import Any

from outrider.costs.round_timing import check_context, ragged_lengths
from outrider.costs.timing import threads
from outrider.eval.suites import load_suites, make_jobs
from outrider.heads import Drafter
from outrider.targets import Target

from .ceilings import bandwidth
from .cells import Cell, CellSettings
from .grown import Grown, run_by
from .loops import Texts
from .report import NOTHING, command, conditions, options, table, write


def load_drafters(grown: Grown, arguments: argparse.Namespace) -> dict[str, Drafter]:
    """Return the drafters that are asked for, by name."""
    found = grown.drafters(arguments.drafter)
    if arguments.untrained:
        found["eagle3"] = grown.untrained().cast(grown.target.dtype)
    if arguments.draft_like:
        found["draft_model"] = grown.draft_model(arguments.draft_like)
    return found


def cell_settings(arguments: argparse.Namespace) -> CellSettings:
    settings = CellSettings(
        arguments.depth,
        arguments.cell_tokens,
        arguments.repeats,
        arguments.cost_repeats,
        tuple(arguments.widths),
        not arguments.no_gaps,
    )
    if not arguments.quick:
        return settings
    widths = (0, 1, settings.depth)
    return CellSettings(settings.depth, new_tokens=12, repeats=1, cost_repeats=2, widths=widths)


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
    target: Target, drafters: dict[str, Drafter], texts: Texts, arguments: argparse.Namespace
) -> Iterator[Cell]:
    """Yield cells, the shortest context and smallest batch first; prompts are joined from `texts`."""
    settings = cell_settings(arguments)
    measured = bandwidth(target.device, arguments.bandwidth_bytes)
    for context in arguments.context:
        for batch in arguments.batch:
            prompts = joined_prompts(texts, ragged_lengths(batch, context))
            yield Cell(target, drafters, prompts, settings, measured)


def cell_table(cell: dict[str, Any]) -> str:
    """Return the loops of a cell; all else that was measured is in the file."""
    head = [f"context {cell['context']}, batch {cell['batch']}", "tokens/s", "steady", "a round", "τ"]
    head += ["over bare passes", "between rounds", "device idle"]
    if "error" in cell["loops"]:
        return f"{head[0]}: {cell['loops']['error']}"
    return table(head, (_loop_cells(cell, name, row) for name, row in cell["loops"].items()))


def _loop_cells(cell: dict[str, Any], name: str, row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [name, row["error"], *[NOTHING] * 6]
    overhead, gaps = cell["loop_overhead"].get(name) or {}, cell["gaps"].get(name) or {}
    figures = [row["tokens_per_second"], row["steady_tokens_per_second"], row["seconds_per_round"], row["tau"]]
    ways = ("{:.1f}", "{:.1f}", "{:.5f} s", "{:.2f}")
    texts = [NOTHING if figure is None else way.format(figure) for way, figure in zip(ways, figures, strict=True)]
    share = overhead.get("share")
    between = gaps.get("between")
    idle = gaps.get("idle_share")
    texts += [NOTHING if share is None else f"{share:.1%}", NOTHING if not between else f"{1e3 * between:.3f} ms"]
    return [name, *texts, NOTHING if idle is None else f"{idle:.1%}"]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    common = ("target", "shape", "runner", "suites", "limit", "depth", "threads")
    parser = options(__doc__, *common, repeats=3)
    parser.add_argument("--drafter", nargs="*", default=[], help="NAME=FOLDER, for the small target")
    parser.add_argument("--untrained", action="store_true", help="an EAGLE-3 head that learned nothing")
    parser.add_argument("--draft-like", help="the shape of a draft model, such as 1b, that is grown as the target is")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    cells = parser.add_argument_group("cells of context and batch size")
    cells.add_argument("--context", nargs="*", type=int, default=[256])
    cells.add_argument("--batch", nargs="*", type=int, default=[1])
    known = CellSettings()
    tokens = "new tokens of each row: 1 + a multiple of depth + 1 ends with a full round"
    cells.add_argument("--cell-tokens", type=int, default=known.new_tokens, help=tokens)
    cells.add_argument("--cost-repeats", type=int, default=known.cost_repeats, help="of single passes")
    cells.add_argument("--widths", nargs="+", type=int, default=known.widths, help="drafts in a pass of the target")
    cells.add_argument("--bandwidth-bytes", type=int, help="to copy and read; default: more than caches hold")
    cells.add_argument("--no-gaps", action="store_true", help="no runs under the profiler")
    cells.add_argument("--quick", action="store_true", help="few repeats: to see that it runs")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    with threads(arguments.threads):
        grown = Grown.load(arguments, arguments.dtype)
        target, drafters = grown.target, load_drafters(grown, arguments)
        run_by(target, arguments.runner)
        check_room(target, arguments)
        jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
        about = conditions(target, target=grown.words, suites=arguments.suites, cells=asdict(cell_settings(arguments)))
        about["cells"] |= {
            "context": arguments.context,
            "batch": arguments.batch,
            "temperature": 0,
            "runner": arguments.runner,
            "timing": "medians; steady: all steps but the first, which reads the prompt; "
            "loops take turns where there is memory for all of them",
        }
        result: dict[str, Any] = {"conditions": about, "cells": []}
        for cell in make_cells(target, drafters, [list(j.prompt.tokens) for j in jobs], arguments):
            found = cell.measure()
            result["cells"].append(found)
            print(cell_table(found), flush=True)
            write(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
