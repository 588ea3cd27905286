"""The target's pass over 1, 8 and 64 tokens by every runner, as graphs, beside the floor that memory sets.

    python -m benchmarks.passes --shape llama-3.1-8b --context 1024 8192 --out passes-llama.json
    python -m benchmarks.passes --shape qwen3-8b --layers 2 --hidden 64 --vocab 512 --context 64 --repeats 2

Runners are the candidates of `targets.fast.select`: the library's modules (eager), the same with split attention, the
same compiled, and our kernels, with the way that each product takes. What fails is written down as that, and the others
go on. The floor is the time of reading the weights, at the bandwidth that is measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from outrider.common.machine import best_device
from outrider.costs.counting import pass_bytes
from outrider.costs.rounds import verify_times
from outrider.targets import Target
from outrider.targets.fast.select import CANDIDATES

from .ceilings import Floor, bandwidth
from .random_targets import build_target, shape_of
from .report import command, conditions, options, write

RUNNERS = {candidate.name: candidate for candidate in CANDIDATES}


def measure(target: Target, widths: Sequence[int], context: int, repeats: int, floor: Floor) -> list[dict[str, Any]]:
    """Return the passes of the runner that the target now has: seconds, over one token's, and the floor's share."""
    times = verify_times(target, widths, context=context, repeats=repeats)
    return [
        {
            "context": context,
            "tokens": width + 1,
            "seconds": seconds,
            "over_one_token": seconds / times[widths[0]],
            "share_of_floor": floor.at_read / seconds,
        }
        for width, seconds in times.items()
    ]


def chosen(target: Target) -> dict[str, Any]:
    """Return the ways of products that were tried, with milliseconds, and the one that is taken."""
    matmuls = getattr(target.fast, "matmuls", None)
    if matmuls is None:
        return {}
    return {
        f"{name}, {tokens} tokens": {
            "taken": str(matmuls.chosen[name, tokens]),
            "milliseconds": {str(way): time for way, time in times.items()},
        }
        for (name, tokens), times in matmuls.timings.items()
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "shape", repeats=20)
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--widths", type=int, nargs="+", default=[0, 7, 63], help="drafts beside the root")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--bytes", type=int, help="that are read to measure the bandwidth")
    arguments = parser.parse_args(given)
    shape = shape_of(arguments.shape, arguments.layers, arguments.hidden, arguments.vocab)
    target = build_target(shape, torch.bfloat16, best_device())
    floor = Floor(pass_bytes(target), 0, bandwidth(target.device, arguments.bytes))
    result: dict[str, Any] = {
        "conditions": conditions(target, target={"shape": arguments.shape, "config": shape}, repeats=arguments.repeats),
        "floor": floor.to_dict(),
        "runners": {},
    }
    for name in arguments.runners:
        try:
            target.run_eagerly()
            RUNNERS[name].build(target)
            rows = [
                row
                for context in arguments.context
                for row in measure(target, arguments.widths, context, arguments.repeats, floor)
            ]
            result["runners"][name] = {"passes": rows, "products": chosen(target)}
            for row in rows:
                print(
                    f"{name:16} context {row['context']:6} {row['tokens']:3} tokens {1e3 * row['seconds']:8.3f} ms "
                    f"T/T(1) {row['over_one_token']:.3f}  {row['share_of_floor']:.1%} of the floor",
                    flush=True,
                )
        except Exception as error:  # one runner that fails says nothing of the others
            result["runners"][name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(f"{name:16} {result['runners'][name]['error']}", flush=True)
        write(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
