"""The quickstart's last stage: the same target and head at the largest size that this machine measures in its time.

Both are grown (`targets.grow`), so texts and accepted drafts are those of the embedded target, and a pass costs what it
costs at that size. Which size is decided before anything is grown, from the seconds that products take here per weight;
the plans follow from passes and drafting that are timed at that size, and from the acceptance that the tuner counted on
prompts which are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..common import BadInputError
from ..common.machine import free_bytes
from ..costs.machine_speed import WeightPace
from ..costs.round_timing import draft_times, verify_times
from ..decode import Costs, Plan, best_tree
from ..decode.control import expected_tokens
from ..eval.measure import Contestant, measure
from ..eval.reports.report import Report
from ..eval.suites import Suite
from ..eval.tuning_record import BatchTuning
from ..heads import Drafter, fuse
from ..heads.grow_with_target import grow_drafter
from ..recipes import EvalSpec
from ..targets import Target
from ..targets.grow import grown_bytes, shape_config

LEAST_PROMPTS = 2  # of each suite
_GROWING = 120  # passes over one token, in whose time the weights are made and packed, and passes and drafting timed
_DRAFTED = 1.2  # requests with the head, and with n-grams beside it, in the time of a plain one
_SPARE = 1.2  # of the weights' memory: caches, and what passes work with
_WIDTHS, _DEPTH, _REPEATS = (0, 1, 2, 4, 8, 16), 4, 5
_TREES = (4, 6, 8, 12, 16)


@dataclass(frozen=True)
class GrownRun:
    """What was measured at a size.

    Attributes:
        shape: its name. weights: how many it has. pace: of products with them.
        costs: of rounds with the head. report: the measurement: the head first, then its fusion with n-grams, if any.
    """

    shape: str
    weights: int
    pace: WeightPace
    costs: Costs
    report: Report

    def sentence(self) -> str:
        """Return the figures in words."""
        plain, head, *fused = (self.report.headline(name) for name in self._names())
        verify = dict(self.costs.verify)
        kind = f"{str(self.pace.dtype).removeprefix('torch.')}, {'packed' if self.pace.packed else 'plain'} weights"
        words = [
            f"at {self.shape.upper()}, the same text: plain {plain.tokens_per_second.value:.1f} tokens/s, with the "
            f"head {head.tokens_per_second.value:.1f}: {head.speedup.text(unit='×')}",
            *(f"head and {f.contestant.rpartition(' ')[2]} {f.speedup.text(unit='×')}" for f in fused),
            f"a pass over 5 tokens takes {verify[4] / verify[0]:.2f} of one over 1 ({kind})",
        ]
        return "; ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return what the report does not hold, as JSON holds it."""
        costs = {"verify": {n + 1: seconds for n, seconds in self.costs.verify}, "draft": list(self.costs.draft)}
        return {"shape": self.shape, "weights": self.weights, "packed": self.pace.packed} | costs

    def _names(self) -> list[str]:
        drafting = [c.name for c in self.report.contestants if c.kind == "drafter"]
        return [self.report.baselines.plain, *drafting]


def fitting_shape(
    target: Target, shapes: Sequence[str], seconds: float, prompts: int, tokens: tuple[int, int], pace: WeightPace
) -> tuple[str, int] | None:
    """Return the first of `shapes` whose memory and measurement fit, and how many weights it has.

    The last one may take longer; None where its memory does not fit either.

    Args:
        shapes: the largest first.
        prompts: that are measured at least. tokens: of a mean prompt, and of an answer.
    """
    room = free_bytes(target.device)
    for shape in shapes:
        weights = grown_bytes(target.model, shape_config(shape)) // target.dtype.itemsize
        needed = _SPARE * weights * pace.dtype.itemsize * (1 + pace.packed)
        growing = _GROWING * weights * pace.token
        each = 3 * pace.request(weights, tokens[0], 0) + (1 + _DRAFTED) * pace.request(weights, 0, tokens[1])
        quick = growing + (1 + prompts) * each <= seconds or shape == shapes[-1]
        if quick and (room is None or needed <= room):
            return shape, weights
    return None


def best_plans(found: BatchTuning, costs: Costs) -> list[tuple[Plan, dict[str, Any] | None]]:
    """Return the plans that promise most at these costs: of the head alone, and of a fusion with what is named.

    A fusion's rounds are taken to cost what the head's do; where it finds its drafts in the text they cost less.
    """
    best: dict[bool, tuple[float, Plan, dict[str, Any] | None]] = {}
    for tau, plan, statistical in _options(found):
        speed, fused = tau / costs.round_time(plan.depth, plan.max_nodes), statistical is not None
        if fused not in best or speed > best[fused][0]:
            best[fused] = speed, plan, statistical
    return [(plan, statistical) for _, (_, plan, statistical) in sorted(best.items())]


def _options(found: BatchTuning) -> Iterator[tuple[float, Plan, dict[str, Any] | None]]:
    """Yield τ as the tuner's prompts promise it, the plan, and what is fused: chains, trees, and chains of fusions."""
    for depth in range(1, len(found.rates) + 1):
        yield expected_tokens(found.rates[:depth]), Plan(depth), None
        for nodes in _TREES:
            with suppress(BadInputError):  # no rates, or no room for so many nodes
                tree = best_tree([tuple(level) for level in found.ranks[:depth]], nodes)
                yield tree.value(found.ranks), Plan(tree=tree), None
    for candidate in found.candidates:
        if candidate.statistical is not None:
            yield candidate.predicted_tau, Plan.from_dict(candidate.plan), candidate.statistical


def measure_grown(
    shape: str,
    weights: int,
    pace: WeightPace,
    source: Target,
    head: Drafter,
    found: BatchTuning,
    suites: Sequence[Suite],
    settings: EvalSpec,
    until: float,
    console: Console | None = None,
) -> GrownRun:
    """Grow target and head, find their plans, and measure as many prompts as the time allows, two of a suite at least.

    Args:
        head: for `source`, the small target. found: its tuning.
        until: when the measurement should end, by `time.perf_counter`.
    """
    target = Target.load(f"{source.source['path']}@{shape}", dtype=pace.dtype, device=source.device)
    grown = grow_drafter(head, source, target)
    grown.cast(target.dtype)
    if pace.packed:
        target.pack()
    context = int(sum(map(_tokens, suites)) / len(suites))
    passes = verify_times(target, _WIDTHS, context=context, repeats=_REPEATS, taps=grown.taps)
    drafting = draft_times(target, grown, min(_DEPTH, len(found.rates)), context=context, repeats=_REPEATS, whole=True)
    costs = Costs(tuple(passes.items()), tuple(drafting))
    plans = best_plans(found, costs)
    entrants = [
        Contestant.of(grown.name, grown, plan)
        if fused is None
        else Contestant.of(f"{grown.name} + {fused['type']}", fuse(fused, grown), plan)
        for plan, fused in plans
    ]
    each = (1 + len(plans)) * pace.request(weights, context, 0) + (1 + _DRAFTED) * settings.max_new_tokens * passes[0]
    fitting = int((until - time.perf_counter()) / each - 1) // len(suites)  # one to warm up
    limit = max(LEAST_PROMPTS, min(fitting, *(len(s.prompts) for s in suites)))
    settings = settings.model_copy(update={"limit": limit, "dtype": "auto", "threads": None})
    report = measure(target, entrants, suites, settings, generate_baseline=False, console=console)
    return GrownRun(shape, weights, pace, costs, report)


def _tokens(suite: Suite) -> float:
    """Return the tokens of a mean prompt."""
    return sum(len(p.tokens) for p in suite.prompts) / len(suite.prompts)
