"""The target's passes by every runner beside the floor that memory sets, and what drafting can gain at such costs.

    python -m benchmarks.passes --target embedded@8b --context 1024 8192 --out passes-llama.json
    python -m benchmarks.passes --target embedded@0.4b --runners packed --batch 1 8 32 --context 512 2048 8192 \\
        --widths 0 1 2 3 4 6 8 15 --drafter eagle1=runs/embedded-eagle1/drafter ngram
    python -m benchmarks.passes --target embedded@mixtral-8x7b --shape hidden_size=1024 num_hidden_layers=12 \\
        --runners eager --widths 0 1 2 3 4 6 8 15

Runners are the candidates of `targets.fast.select`: the library's modules (eager), the same with split attention, with
packed weights, and our kernels, with the way that each product takes. What fails is written down as that, and
the others go on. The floor is the time of reading the weights, of experts those that one token meets, at the bandwidth
that is measured here.

"Break-even" is the acceptance, alike at each depth, from which verifying so many drafts is faster than plain decoding
if they cost nothing. For a drafter (`--drafter`, see `grown.py`) the acceptance on prompts is measured on the small
target, which has the same; from it and from all costs here follow the depth that the controller begins with (0: it does
not draft) and the speedup to be expected there. In a mixture of experts passes are timed twice: as tokens are routed,
and with all tokens of a pass sent to the experts of the first.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from scipy.optimize import brentq
from torch import nn

from outrider.common import BadInputError
from outrider.costs.counting import pass_bytes
from outrider.costs.round_timing import verify_times
from outrider.costs.timing import threads
from outrider.decode import Control, Costs
from outrider.decode.control import Controller, expected_tokens
from outrider.heads import Drafter
from outrider.targets import Target
from outrider.targets.fast import select

from .ceilings import Floor, bandwidth
from .grown import Grown, draft_seconds
from .report import NOTHING, command, conditions, options, table, write

RUNNERS = {runner.name: runner for runner in select.CANDIDATES}


def routers(target: Target) -> list[nn.Module]:
    """Return the modules that choose experts; they return logits, weights and numbers of the experts, `[T, k]` each."""
    return [module for module in target.model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def same_experts(target: Target) -> Iterator[None]:
    """Send all tokens of a pass to the experts of the first one."""

    def replace(_: nn.Module, __: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, *chosen = out
        return (logits, *(each[:1].expand_as(each).contiguous() for each in chosen))

    handles = [router.register_forward_hook(replace) for router in routers(target)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def experts_met(target: Target, tokens: torch.Tensor) -> float:
    """Return how many experts of a layer the tokens `[1, T]` of one pass meet, the mean over layers."""
    met: list[int] = []
    handles = [
        router.register_forward_hook(lambda *seen: met.append(len(seen[2][-1].unique()))) for router in routers(target)
    ]
    with torch.inference_mode():
        target.forward(tokens)
    for handle in handles:
        handle.remove()
    return sum(met) / len(met)


def break_even(quotient: float, depth: int) -> float | None:
    """Return the acceptance at each depth with which a round brings as many tokens as it costs plain ones.

    None if it costs more than all of its tokens do.
    """
    if depth == 0 or quotient >= depth + 1:
        return None
    return max(0.0, brentq(lambda rate: expected_tokens([rate] * depth) - quotient, 0, 1)) if quotient > 1 else 0.0


def measure(
    target: Target, batch: int, context: int, widths: Sequence[int], repeats: int, floor: Floor
) -> list[dict[str, Any]]:
    """Return passes of the runner that the target now has: seconds, over one token's, and the floor's share."""
    times = verify_times(target, widths, batch, context, repeats)
    alike: dict[int, float] = {}
    if routers(target):
        with same_experts(target):
            alike = verify_times(target, widths, batch, context, repeats)
    return [
        {
            "batch": batch,
            "context": context,
            "tokens": width + 1,
            "seconds": seconds,
            "over_one_token": seconds / times[0],
            "share_of_floor": floor.at_read / seconds,
            "break_even": break_even(seconds / times[0], width),
            **({"seconds_same_experts": alike[width]} if alike else {}),
        }
        for width, seconds in times.items()
    ]


def gains(
    target: Target,
    drafter: Drafter,
    rates: Sequence[float],
    passes: Sequence[dict[str, Any]],
    depths: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """Return what drafting costs beside these passes of one batch and context, and what a controller makes of it."""
    batch, context = passes[0]["batch"], passes[0]["context"]
    steps = draft_seconds(target, drafter, max(depths), batch, context, repeats)
    costs = Costs(tuple((row["tokens"] - 1, row["seconds"]) for row in passes), tuple(steps))
    controller, rows = Controller(Control(costs, tuple(rates)), batch, depths, depths), range(batch)
    chosen, speeds = controller.choose(rows), controller.goodput(rows)
    even = {d: break_even(costs.round_time(d) / costs.round_time(0), d) for d in depths}
    return {
        "batch": batch,
        "context": context,
        "draft_seconds": steps,
        "break_even": even,
        "speedups": {d: float(speed / speeds[0]) for d, speed in zip(depths, speeds[1:], strict=True)},
        "chosen_depth": chosen,
    }


def rates_of(grown: Grown, arguments: Namespace) -> dict[str, tuple[float, ...]]:
    """Return the acceptance of each drafter by depth, measured on the small target."""
    from outrider.decode import Sampling  # the suites need `datasets`, which passes by themselves do not
    from outrider.eval.acceptance import measure_acceptance
    from outrider.eval.suites import load_suites, make_jobs

    if not arguments.drafter:
        return {}
    source = grown.source
    jobs = make_jobs(load_suites(arguments.suites, source.require_tokenizer()), arguments.limit)
    small = Grown(source, source).drafters(arguments.drafter)
    settings = arguments.max_new_tokens, Sampling(temperature=0.0)
    return {name: measure_acceptance(source, d, jobs, *settings, trees=False).rates for name, d in small.items()}


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


def tables(result: dict[str, Any]) -> list[str]:
    """Return passes, and what drafters gain."""
    passes, drafting = [], []
    for name, found in result["runners"].items():
        for row in found.get("passes", ()):
            alike = row.get("seconds_same_experts")
            even = row["break_even"]
            cells = [f"{1e3 * row['seconds']:.2f}", f"{row['over_one_token']:.3f}", f"{row['share_of_floor']:.1%}"]
            cells += [NOTHING if even is None else f"{even:.2f}"]
            cells += [] if alike is None else [f"{1e3 * alike:.2f}", f"{result['experts'][str(row['tokens'])]:.1f}"]
            passes.append([name, f"{row['batch']}", f"{row['context']}", f"{row['tokens']}", *cells])
        for drafter, rows in found.get("drafters", {}).items():
            for row in rows:
                best = max(row["speedups"], key=row["speedups"].get)
                even = row["break_even"][best]
                cells = [f"{1e3 * row['draft_seconds'][-1]:.2f}", f"{best}", NOTHING if even is None else f"{even:.2f}"]
                cells += [f"{row['speedups'][best]:.2f}", f"{row['chosen_depth']}"]
                drafting.append([name, drafter, f"{row['batch']}", f"{row['context']}", *cells])
    head = ["runner", "batch", "context", "tokens", "ms", "over one token", "of the floor", "break-even"]
    head += ["ms, same experts", "experts met in text"] if "experts" in result else []
    second = ["runner", "drafter", "batch", "context", "drafting to the end, ms", "best depth", "break-even there"]
    parts = [table(head, passes)] if passes else []
    return parts + ([table([*second, "expected speedup", "the controller's depth"], drafting)] if drafting else [])


def parse(given: Sequence[str] | None) -> Namespace:
    parser = options(
        __doc__, "shape", "suites", "threads", target="embedded@8b", repeats=20, limit=8, max_new_tokens=64
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--widths", type=int, nargs="+", default=[0, 7, 63], help="drafts beside the root")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--drafter", nargs="*", default=[], help="NAME=FOLDER, for the small target, or ngram")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4], help="of chains")
    parser.add_argument("--bytes", type=int, help="that are read to measure the bandwidth")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    if 0 not in arguments.widths:
        raise BadInputError("--widths must have 0, the pass that the others are compared with.")
    with threads(arguments.threads):
        grown = Grown.load(arguments, arguments.dtype)
        target, rates = grown.target, rates_of(grown, arguments)
        drafters = grown.drafters(arguments.drafter)
        floor = Floor(pass_bytes(target), 0, bandwidth(target.device, arguments.bytes))
        about = conditions(target, target=grown.words, repeats=arguments.repeats, suites=arguments.suites)
        result: dict[str, Any] = {"conditions": about, "floor": floor.to_dict(), "rates": rates, "runners": {}}
        if routers(target):
            text = grown.source.require_tokenizer()(__doc__ or "")["input_ids"]
            tokens = torch.tensor([text], device=target.device)
            result["experts"] = {str(w + 1): experts_met(target, tokens[:, : w + 1]) for w in arguments.widths}
        for name in arguments.runners:
            try:
                target.run_eagerly()
                RUNNERS[name].build(target)
                found = result["runners"][name] = {"passes": [], "drafters": {each: [] for each in drafters}}
                for batch, context in ((b, c) for c in arguments.context for b in arguments.batch):
                    rows = measure(target, batch, context, arguments.widths, arguments.repeats, floor)
                    found["passes"] += rows
                    for each, drafter in drafters.items():
                        gained = gains(target, drafter, rates[each], rows, arguments.depths, arguments.repeats)
                        found["drafters"][each].append(gained)
                    write(result, arguments.out)
                found["products"] = chosen(target)
            except Exception as error:  # one runner that fails says nothing of the others
                result["runners"][name] = {"error": f"{type(error).__name__}: {error}"[:500]}
                print(f"{name:16} {result['runners'][name]['error']}", flush=True)
            write(result, arguments.out)
        print("\n\n".join(tables(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
