"""What drafting costs at each depth: drafters that go token by token beside those that say a whole block in one pass.

    python -m outrider.scripts.bench.block_costs --out block-costs.json

New drafters with the sizes of the embedded recipes: what a draft says does not change what it costs. All are timed in
turns, whole rounds of drafting (what a drafter makes of the last round included), one thread.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from outrider.costs.rounds import draft_times
from outrider.heads import (
    DFlash,
    DFlashConfig,
    Drafter,
    DraftModel,
    DraftModelConfig,
    DSpark,
    DSparkConfig,
    Eagle3,
    Eagle3Config,
    Pard,
    PardConfig,
    PEagle,
    PEagleConfig,
)
from outrider.targets import Target

from .conditions import command, conditions, write

SMALL = {"num_hidden_layers": 2}


def new_drafters(target: Target, depth: int) -> dict[str, Drafter]:
    """Return a drafter of each kind, for chains of `depth`."""
    counts = torch.arange(target.vocab_size)
    pruned: dict[str, Any] = {"draft_vocab_size": target.vocab_size // 2}
    masked: dict[str, Any] = {"mask_token_id": 1, "num_layers": 2}
    return {
        "eagle3": Eagle3.build(Eagle3Config(**pruned, norm_taps=True, norm_output=True), target, counts),
        "draft_model": DraftModel.build(DraftModelConfig(model=SMALL), target),
        "dflash": DFlash.build(DFlashConfig(block_size=depth + 1, **pruned, **masked), target, counts),
        "dspark": DSpark.build(DSparkConfig(block_size=depth, markov_rank=64, **pruned, **masked), target, counts),
        "peagle": PEagle.build(PEagleConfig(steps=depth, norm_taps=True, **pruned, **masked), target, counts),
        "pard": Pard.build(PardConfig(model=SMALL, steps=depth, mask_token_id=1), target),
    }


def measure(target: Target, depth: int, batch: int, turns: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds of drafting by depth for each drafter: the median over turns, and each turn's."""
    drafters = new_drafters(target, depth)
    found: dict[str, list[list[float]]] = {name: [] for name in drafters}
    for turn in range(turns + 1):
        for name, drafter in drafters.items():
            times = draft_times(target, drafter, depth, batch, repeats=repeats, whole=True)[1:]
            if turn:  # the first warms up
                found[name].append([round(1000 * seconds, 4) for seconds in times])
    return {
        name: {"median": [statistics.median(column) for column in zip(*rows, strict=True)], "turns": rows}
        for name, rows in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load("embedded", dtype="float32", device="cpu")
    found = measure(target, arguments.depth, arguments.batch, arguments.turns, arguments.repeats)
    for name, row in found.items():
        print(f"{name:12} " + " ".join(f"{ms:6.2f}" for ms in row["median"]))
    settings = {"depth": arguments.depth, "batch": arguments.batch, "turns": arguments.turns}
    write({"conditions": conditions(target, **settings), "milliseconds": found}, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(command(main))
