"""What a draft step of EAGLE-1 costs by context, with a sliding window and without: minima over real rounds.

    python -m benchmarks.archive.contexts.draft_steps --out draft-steps-cpu.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from outrider.costs.round_timing import _Drafting
from outrider.costs.timing import threads
from outrider.heads.registry import drafter_config
from outrider.targets import Target

from ...report import command, conditions, options, publish, table

CONTEXTS, WINDOWS, DEPTHS, ROUNDS = (200, 352, 1000, 2000, 3900), (0, 352), (1, 4), 300


def least(target: Target, window: int, context: int) -> dict[str, float]:
    """Return the least milliseconds of drafting chains of each depth."""
    torch.manual_seed(0)
    kind, config = drafter_config({"type": "eagle1", "sliding_window": window})
    drafting = _Drafting(target, kind.build(config, target).eval(), 1, context, max(DEPTHS))
    spent: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for depth in DEPTHS * ROUNDS:
        if drafting.length + 3 * max(DEPTHS) > min(drafting.limit, target.max_context or context):
            drafting.reopen()
        drafting.round(depth)
        began = time.perf_counter()
        drafting.draft(depth)
        spent[depth].append(time.perf_counter() - began)
        drafting.update(depth)
    return {f"depth {depth}": round(1e3 * min(times), 3) for depth, times in spent.items()}


def main(given: Sequence[str] | None = None) -> int:
    asked = options(__doc__, "threads").parse_args(given)
    with threads(asked.threads), torch.inference_mode():
        target = Target.load("embedded", dtype="float32", device="cpu")
        found = {str(w or "all"): {str(c): least(target, w, c) for c in CONTEXTS} for w in WINDOWS}
        result = {"conditions": conditions(target, batch=1, rounds=ROUNDS, figures="minima"), "milliseconds": found}
        rows = [
            [window, f"depth {depth}", *(f"{cell[f'depth {depth}']:.2f}" for cell in by_context.values())]
            for window, by_context in found.items()
            for depth in DEPTHS
        ]
        head = ["attends to", "chain", *(f"{context:,} tokens" for context in CONTEXTS)]
        publish(result, asked.out, [table(head, rows)])
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
