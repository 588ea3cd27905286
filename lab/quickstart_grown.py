"""The quickstart's last stage: the same target and head at the largest size that this machine measures in its time.

Both are grown (`lab.grow`), so texts and accepted drafts are those of the embedded target, and a pass costs what it
costs at that size. Which size is decided before anything is grown, from the seconds that products take here per weight;
a size whose passes turn out too slow for the time is left for the next smaller one. The plans follow from passes and
drafting that are timed at that size, and from the acceptance that the tuner counted on prompts which are not measured.
The shortest prompts come first, since reading one takes a processor as long as many tokens of its answer; how many are
asked is decided by the clock.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from ..common import BadInputError, OutriderError
from ..common.atomic import clear_away
from ..common.digests import write_json
from ..common.machine import free_bytes
from ..costs.round_timing import draft_times, verify_times
from ..costs.timing import WARM_UP, rotated, timed
from ..decode import Costs, Plan, best_tree
from ..decode.control import expected_tokens
from ..eval.measure import Contestant, measure
from ..eval.reports.figures import Figures
from ..eval.reports.render import write_report
from ..eval.reports.report import Report
from ..eval.suites import Suite, make_suite
from ..eval.tuning_record import BatchTuning
from ..heads import Drafter, fuse, load_drafter
from ..recipes import EvalSpec
from ..targets import Target
from ..targets.fast import use_fastest_pass
from ..targets.packed_weights import packed_copy, why_not
from .grow import grown_bytes, shape_config
from .grow_drafter import grow_drafter

if TYPE_CHECKING:
    from ..scripts.quickstart import Workplace

_LEAST_PROMPTS, _LEAST_TOKENS = 2, 8  # of each suite, and of an answer
_GROWING, _TIMING = 60, 60  # passes over one token, in whose time weights are made and packed, and rounds' parts timed
_DRAFTED = 1.2  # requests with the head, and with n-grams beside it, in the time of a plain one
_SPARE = 1.2  # of the weights' memory: caches, and what passes work with
_WIDTHS = (0, 2, 4, 8, 16)
_DEPTH = 6
_REPEATS = 4
_TREES = (4, 6, 8, 12, 16)


def size_name(shape: str) -> str:
    """Return a shape's name as people write it."""
    return {"tinyllama-1.1b": "TinyLlama 1.1B"}.get(shape, shape.upper())


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
            f"at {size_name(self.shape)}, the same text: plain {plain.tokens_per_second.value:.1f} tokens/s, with the "
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
        growing = pace.request(weights, 0, _GROWING)
        quick = growing + measuring_seconds(weights, prompts, tokens, pace) <= seconds or shape == shapes[-1]
        if quick and (room is None or needed <= room):
            return shape, weights
    return None


def measuring_seconds(weights: int, prompts: int, tokens: tuple[int, int], pace: WeightPace) -> float:
    """Return the seconds of timing what rounds cost, of a first request, and of `prompts`: of each contestant."""
    each = 3 * pace.request(weights, tokens[0], 0) + (1 + _DRAFTED) * pace.request(weights, 0, tokens[1])
    return pace.request(weights, 0, _TIMING) + (1 + prompts) * each


def best_plans(found: BatchTuning, costs: Costs) -> list[tuple[Plan, dict[str, Any] | None]]:
    """Return the plans that promise most at these costs: of the head alone, and of a fusion with what is named."""
    best: dict[bool, tuple[float, Plan, dict[str, Any] | None]] = {}
    for tau, share, plan, statistical in _options(found):
        seconds = share * costs.draft_time(plan.depth) + costs.verify_time(plan.max_nodes)
        speed, fused = tau / seconds, statistical is not None
        if fused not in best or speed > best[fused][0]:
            best[fused] = speed, plan, statistical
    return [(plan, statistical) for _, (_, plan, statistical) in sorted(best.items())]


def _options(found: BatchTuning) -> Iterator[tuple[float, float, Plan, dict[str, Any] | None]]:
    """Yield chains, trees, and chains of fusions: τ as the tuner's prompts promise it, the plan, and what is fused.

    The second is the share of rounds in which the head drafts: of a fusion's those that find nothing in the text.
    """
    for depth in range(1, len(found.rates) + 1):
        yield expected_tokens(found.rates[:depth]), 1.0, Plan(depth), None
        for nodes in _TREES:
            with suppress(BadInputError):  # no rates, or no room for so many nodes
                tree = best_tree([tuple(level) for level in found.ranks[:depth]], nodes)
                yield tree.value(found.ranks), 1.0, Plan(tree=tree), None
    small = found.costs.restored()
    for candidate in found.candidates:
        if candidate.statistical is not None:
            plan = Plan.from_dict(candidate.plan)
            drafting = candidate.round_seconds - small.verify_time(plan.depth) - small.host
            whole = small.draft_time(plan.depth)
            share = min(1.0, max(0.0, drafting / whole)) if whole else 1.0
            yield candidate.predicted_tau, share, plan, candidate.statistical


@dataclass(frozen=True)
class GrownMeasurement:
    """What is measured, of what, and until when.

    Attributes:
        source, head: the small target, and its head. found: their tuning.
        suites: with the shortest prompts first. settings: of the requests.
        until: when the measurement should end, by `time.perf_counter`.
    """

    source: Target
    head: Drafter
    found: BatchTuning
    suites: Sequence[Suite]
    settings: EvalSpec
    until: float
    console: Console | None = None

    @property
    def left(self) -> float:
        """Seconds until it should end."""
        return self.until - time.perf_counter()

    @property
    def least(self) -> int:
        """How many prompts are wanted at least."""
        return _LEAST_PROMPTS * len(self.suites)

    @property
    def context(self) -> int:
        """The tokens of a mean prompt of those."""
        lengths = [len(p.tokens) for s in self.suites for p in s.prompts[:_LEAST_PROMPTS]]
        return sum(lengths) // len(lengths)

    def run(self, shapes: Sequence[str], pace: WeightPace) -> GrownRun | None:
        """Measure at the largest of `shapes` that fits memory and time; return None where none fits the memory.

        Args:
            pace: of products with the weights that are taken.
        """
        tokens = self.context, self.settings.max_new_tokens
        while (fitting := fitting_shape(self.source, shapes, self.left, self.least, tokens, pace)) is not None:
            shape, weights = fitting
            target = self._target(shape, pace)
            seconds = verify_times(target, (0,), context=self.context, repeats=1)[0]
            slower = seconds / pace.request(weights, 0, 1)
            pace = replace(pace, token=slower * pace.token, prompt=max(1.0, slower) * pace.prompt)
            if shape == shapes[-1] or measuring_seconds(weights, self.least, tokens, pace) <= self.left:
                return self._at(target, shape, weights, pace)
            shapes = shapes[shapes.index(shape) + 1 :]
            self._say(f"a pass at {size_name(shape)} takes {seconds:.2f} s, too long for the time; a smaller size")
            del target
            gc.collect()  # its weights, before others are made
        return None

    def _target(self, shape: str, pace: WeightPace) -> Target:
        """Return the target at a size, in the way that its passes will run."""
        target = Target.load(f"{self.source.source['path']}@{shape}", dtype=pace.dtype, device=self.source.device)
        use_fastest_pass(target)
        if pace.packed:
            target.pack()
        return target

    def _at(self, target: Target, shape: str, weights: int, pace: WeightPace) -> GrownRun:
        """Find the plans at a size, and measure as many prompts as the time allows."""
        # Of a whole vocabulary a quarter, as published heads (32,000 tokens of 128,256), and all of the small target's.
        outputs = max(self.source.vocab_size, target.vocab_size // 4) if self.head.output_ids is None else None
        grown = grow_drafter(self.head, self.source, target, outputs).cast(target.dtype)
        repeats = _REPEATS if pace.request(weights, 0, _TIMING) < self.left / 2 else 1
        passes = verify_times(target, _WIDTHS, context=self.context, repeats=repeats, taps=grown.taps)
        depth = min(_DEPTH, len(self.found.rates))
        drafting = draft_times(target, grown, depth, context=self.context, repeats=repeats, whole=True)
        costs = Costs(tuple(passes.items()), tuple(drafting))
        entrants = [
            Contestant.of(grown.name, grown, plan)
            if fused is None
            else Contestant.of(f"{grown.name} + {fused['type']}", fuse(fused, grown), plan)
            for plan, fused in best_plans(self.found, costs)
        ]
        tokens = self._answer(weights, pace)
        if measuring_seconds(weights, len(self.suites), (self.context, tokens), pace) > self.left:
            entrants = entrants[:1]  # the head alone
        settings = {"max_new_tokens": tokens, "limit": None, "dtype": "auto", "threads": None}
        report = measure(
            target,
            entrants,
            self.suites,
            self.settings.model_copy(update=settings),
            generate_baseline=False,
            console=self.console,
            until=self.until,
        )
        return GrownRun(shape, weights, pace, costs, report)

    def _answer(self, weights: int, pace: WeightPace) -> int:
        """Return how long answers are: as asked for, or shorter where passes are so slow."""
        most = tokens = self.settings.max_new_tokens
        left = self.left + pace.request(weights, 0, _TIMING)  # which is done
        while tokens > _LEAST_TOKENS and measuring_seconds(weights, self.least, (self.context, tokens), pace) > left:
            tokens //= 2
        if tokens < most:
            self._say(f"a pass takes {pace.request(weights, 0, 1):.2f} s: answers of {tokens} tokens instead of {most}")
        return tokens

    def _say(self, words: str) -> None:
        if self.console is not None:
            self.console.print(Text(words, style="dim"))


def shortest_first(suite: Suite) -> Suite:
    """Return the suite with its shortest prompts first."""
    return make_suite(suite.name, sorted(suite.prompts, key=lambda prompt: len(prompt.tokens)))


@dataclass(frozen=True)
class GrownStage:
    """The last stage of the quickstart, see `scripts.quickstart.QuickstartStage`.

    Attributes:
        seconds: that the measurement may take.
        shapes: sizes that are tried, the largest first.
        tokens: of an answer.
    """

    title: str = "at real size, the same text"
    seconds: float = 60.0
    shapes: tuple[str, ...] = ("8b", "tinyllama-1.1b", "0.4b")
    tokens: int = 32

    def run(self, place: Workplace) -> str:
        """Measure target and head of version 1 at the largest size whose memory and measurement fit."""
        until = time.perf_counter() + self.seconds
        clear_away(place.out / "grown")  # an earlier story's
        head = load_drafter(place.out / "drafter", place.target)
        suites = [shortest_first(suite) for suite in place.suites(place.target, place.budget.suite_prompts)]
        settings = place.recipe.eval.model_copy(update={"max_new_tokens": self.tokens})
        found = place.tuning.batches[0]
        measurement = GrownMeasurement(place.target, head, found, suites, settings, until, place.console)
        try:
            run = measurement.run(self.shapes, measure_weights(place.target.device))
        except (OutriderError, RuntimeError) as error:  # the earlier stages stand; torch lacks memory as a RuntimeError
            return f"no size could be measured: {str(error).splitlines()[0]}"
        if run is None:
            return f"no size of {', '.join(self.shapes)} fits the memory here"
        write_report(run.report, place.out / "grown")
        write_json(place.out / "grown.json", run.to_dict())
        return run.sentence()

    def rows(self, place: Workplace) -> tuple[list[tuple[str, Figures]], str]:
        """Return the closing table's rows at that size, and their conditions; none where nothing was measured."""
        if not (place.out / "grown").is_dir():
            return [], ""
        report = Report.load(place.out / "grown")
        size = size_name(str(report.conditions.target["path"]).rpartition("@")[2])
        drafting = [c for c in report.contestants if c.kind == "drafter"]
        rows = [(f"v1 at {size}: {c.label}", report.headline(c.name)) for c in drafting]
        prompts = sum(suite.num_prompts for suite in report.conditions.suites)
        return rows, f"; at {size} {prompts} of them, {report.conditions.dtype}"


STAGE = GrownStage()


_LAYERS = 8
_WIDTH = 4096
_PASSES = (1, 5)
_PROMPT = 128
_TURNS = 6
_ENOUGH = 3.0  # seconds of turns in one dtype


@dataclass(frozen=True)
class WeightPace:
    """How fast products of real size are, by one kind of weights."""

    dtype: torch.dtype  # of the weights
    packed: bool  # whether they are packed (`targets.packed_weights`)
    token: float  # seconds per weight of a pass over one token
    prompt: float  # seconds per weight over each token of a prompt

    def request(self, weights: int, prompt: int, passes: float) -> float:
        """Return the seconds of a prompt of so many tokens and `passes` passes, of a model with so many weights."""
        return weights * (prompt * self.prompt + passes * self.token)


@torch.no_grad()
def measure_weights(device: torch.device, width: int = _WIDTH) -> WeightPace:
    """Measure which weights answer a request soonest, half of its passes over one token and half over five.

    They are those of layers that no cache holds; on a GPU in bfloat16.

    Times are the least of several turns, of fewer on a slow machine: what else it does only adds.
    """
    kinds = []
    for dtype in (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16):
        skipped = [
            nn.utils.skip_init(nn.Linear, width, width, bias=False, device=device, dtype=dtype) for _ in range(_LAYERS)
        ]
        layers = nn.Sequential(*skipped)
        for weight in layers.parameters():
            nn.init.constant_(weight, 1 / width)
        rows = {n: torch.ones(n, width, device=device, dtype=dtype) for n in (*_PASSES, _PROMPT)}
        works = {("plain", n): partial(layers if n in _PASSES else layers[0], x) for n, x in rows.items()}
        if why_not(layers) is None:
            copied = packed_copy(layers)
            works |= {("packed", n): partial(copied, rows[n]) for n in _PASSES}
        seconds, began = dict.fromkeys(works, math.inf), time.perf_counter()
        for turn in range(-WARM_UP, _TURNS):
            for key in rotated(list(works), turn):
                seconds[key] = min(seconds[key], timed(works[key], device))
            if turn >= 0 and time.perf_counter() - began > _ENOUGH:
                break
        kind = min(dict.fromkeys(name for name, _ in works), key=lambda name: sum(seconds[name, n] for n in _PASSES))
        prompt = seconds["plain", _PROMPT] / _PROMPT / width**2
        kinds.append(WeightPace(dtype, kind == "packed", seconds[kind, 1] / _LAYERS / width**2, prompt))
    return min(kinds, key=lambda kind: kind.request(1, _PROMPT, _PROMPT / 4))
