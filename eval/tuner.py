"""Which plan is fastest on this machine: what a round costs, how often drafts are accepted, what follows, and whether it is true.

Tokens/s of a plan are predicted as

    B N / (prefill + (N − 1) / τ · seconds / running)

with B rows, N new tokens of a mean answer (the first comes from the prefill), τ = 1 + Σ_d P(d drafts are accepted) for a chain
(which is 1 + Σ_d Π_{i≤d} alpha_i where drafts are never missing) and 1 + Σ over nodes of the product of the rates on the way
to it for a tree, seconds of a round of the whole batch, and the share of the batch's rows that are still running in a mean
round. The best predicted plans are then measured beside the plain target in turns, and the best *measured* one is chosen.

Rounds are timed in the decoder's own loop, on whole requests. Drafting timed by itself runs with other caches, and the
target's pass by itself knows nothing of captured graphs, so the two together need not be what a round takes. What a pass
takes for each draft more is measured by itself, up to 256 (`eval.costs.verify_times`); what drafting takes is the rest of a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ground.machine import device_name
from ..ground.versions import versions
from .acceptance import Acceptance, deepest, measure_acceptance
from .batches import BatchRunner, Completion, make_groups
from .costs import verify_times
from .measure import PLAIN, Job, check_lengths, make_jobs, race, suite_info, threads
from .statistics import Bootstrap, Interval, Ratio
from .tuning import BatchTuning, Candidate, CostRecord, Tuning, print_batch

if TYPE_CHECKING:
    from rich.console import Console

    from ..decode import Costs, Plan, Tree
    from ..heads import Drafter
    from ..recipes import EvalSpec
    from ..targets import Target
    from .suites import Suite

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TREE_SIZES = (4, 8, 12, 16, 24, 32, 48, 64)
_TIMED_DEPTHS = (1, 2, 4)  # and the deepest; between them rounds are interpolated
_TIMED_GROUPS = 3  # batches by which rounds are timed
_HOPEFUL = 0.9  # trees that cannot reach this part of the best chain's prediction are not timed
_RACING = 2  # chains, and trees, that are measured
_LEAST_GROUPS = 4
# The rates were measured on many prompts, so that a few unlucky rounds should not outvote them: with less a controller falls
# back too early.
CONTROL_WEIGHT = 16.0


# ------------------------------------------------------------ the whole


def tune(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    settings: EvalSpec,
    batch_sizes: Sequence[int] = (1,),
    console: Console | None = None,
) -> Tuning:
    """Find the fastest plan for each batch size.

    Args:
        settings: one of `temperatures`, `max_new_tokens`, `repeats`, `threads` and `seed` are used; `limit` cuts each suite.
        console: shows progress and what is found there.

    Raises:
        BadInputError: no prompts or more than one temperature; a batch size below 1 or above the number of prompts; a prompt that
            does not fit the target's context; answers that end with their first token.
        IncompatibleError: the drafter cannot draft for this target.
    """
    jobs = make_jobs(suites, settings.limit)
    _check(target, jobs, settings, batch_sizes)
    with threads(settings.threads):
        tuner = _Tuner(target, drafter, jobs, settings, console)
        batches = [tuner.batch(size) for size in sorted(set(batch_sizes))]
        return _record(target, drafter, suites, settings, batches)


def _check(target: Target, jobs: Sequence[Job], settings: EvalSpec, batch_sizes: Sequence[int]) -> None:
    from ..ground.errors import BadInputError

    if not jobs:
        raise BadInputError("there are no prompts to tune on; name a suite that has some.")
    if len(settings.temperatures) != 1:
        raise BadInputError(
            f"a plan is tuned for one temperature at a time; got {', '.join(map(str, settings.temperatures))}."
        )
    if not batch_sizes or min(batch_sizes) < 1 or max(batch_sizes) > len(jobs):
        raise BadInputError(
            f"batch sizes must be between 1 and the number of prompts, {len(jobs)}; got {', '.join(map(str, batch_sizes)) or 'none'}. "
            "Take more prompts (a higher limit, more suites) or smaller batches."
        )
    check_lengths(target, jobs, settings)


def _record(
    target: Target, drafter: Drafter, suites: Sequence[Suite], settings: EvalSpec, batches: list[BatchTuning]
) -> Tuning:
    from datetime import UTC, datetime

    import torch

    used = [suite_info(s, settings.limit) for s in suites]
    return Tuning(
        created=datetime.now(UTC).date().isoformat(),
        device=target.device.type,
        device_name=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        versions=versions(),
        drafter=drafter.name,
        temperature=float(settings.temperatures[0]),
        max_new_tokens=settings.max_new_tokens,
        repeats=settings.repeats,
        seed=settings.seed,
        suites={s.name: s.digest for s in used},
        num_prompts=sum(s.num_prompts for s in used),
        batches=batches,
    )


@dataclass(frozen=True)
class Option:
    """A plan and what is predicted of it: tokens per round and sequence, and tokens/s of the whole batch."""

    plan: Plan
    tau: float
    loop: Loop
    predicted: float

    @property
    def name(self) -> str:
        return str(self.plan) if self.plan.depth else PLAIN


class _Tuner:
    """What stays the same from batch size to batch size. Acceptance does: it is measured once."""

    def __init__(self, target: Target, drafter: Drafter, jobs: list[Job], settings: EvalSpec, console: Console | None):
        from ..decode import Decoder, Sampling

        self.target, self.drafter, self.jobs, self.settings, self.console = target, drafter, jobs, settings, console
        self.temperature = float(settings.temperatures[0])
        self.sampling = Sampling(temperature=self.temperature, seed=settings.seed)
        self.plain, self.drafting = Decoder(target), Decoder(target, drafter)
        self.deepest = deepest(drafter)
        with self._progress("acceptance", 1):
            self.seen = measure_acceptance(
                target, drafter, jobs, settings.max_new_tokens, self.sampling, self._takes_trees()
            )

    def _takes_trees(self) -> bool:
        from ..ground.errors import IncompatibleError

        try:
            self.target.check_trees()
        except IncompatibleError as error:
            self._say(f"no trees: {error}")
            return False
        if not self.drafter.abilities.reads_nodes:
            self._say(f"no trees: {self.drafter.name} drafts chains only.")
        return self.drafter.abilities.reads_nodes

    def _say(self, line: str) -> None:
        if self.console is not None:
            from rich.text import Text

            self.console.print(Text(line, style="dim"))

    def _progress(self, what: str, total: int) -> Any:
        from ..ground.progress import progress

        return progress(self.console, what, total, transient=True)

    # -------------------------------------------------------- one batch size

    def batch(self, size: int) -> BatchTuning:
        from ..decode import Plan

        groups = (
            [[job] for job in self.jobs]
            if size == 1
            else make_groups(self.jobs, size, _LEAST_GROUPS, self.settings.seed)
        )
        context = self._context()
        curve = self._curve(size, context)
        depths = [0, *(d for d in _TIMED_DEPTHS if d < self.deepest), self.deepest]
        loops = dict(zip(depths, self._time([Plan(d) for d in depths], groups), strict=True))
        costs = costs_in_loop(curve, loops)
        options = chain_options(costs, loops, self.seen, size)
        trees = self._tree_options(hopeful_trees(costs, options, self.seen, size), groups, size, loops[0])
        controlled = control_option(options[1:], costs, self.seen, self.deepest)
        racing = [options[0], *best(options[1:]), *best(trees), controlled]
        measured = self._race(racing, groups, size)
        chosen, reason = choose(measured)
        candidates = [self._candidate(option, None) for option in (*options, *trees) if option not in racing]
        found = BatchTuning(
            batch_size=size,
            context=context,
            rates=list(self.seen.rates),
            ranks=[list(r) for r in self.seen.ranks],
            costs=CostRecord.of(costs),
            candidates=[*(self._candidate(r.option, r) for r in measured), *candidates],
            chosen=self._candidate(chosen.option, chosen),
            reason=reason,
        )
        if self.console is not None:
            print_batch(found, self.console)
        return found

    def _context(self) -> int:
        """Tokens before the root in the middle of a typical answer."""
        return int(statistics.median(len(j.prompt.tokens) for j in self.jobs)) + self.settings.max_new_tokens // 2

    def _curve(self, size: int, context: int) -> dict[int, float]:
        limit = self.target.max_context
        widths = [n for n in WIDTHS if limit is None or context + 1 + n <= limit]
        with self._progress(f"batch {size}: passes of the target", 1):
            return verify_times(self.target, widths, size, context, repeats=max(5, 20 // size), taps=self.drafter.taps)

    def _time(self, plans: Sequence[Plan], groups: Sequence[list[Job]]) -> list[Loop]:
        """What rounds under each of `plans` take, by batches of typical lengths."""
        runs = self._turns(
            {str(i): plan for i, plan in enumerate(plans)},
            _typical(groups, _TIMED_GROUPS),
            repeats=1,
            what="timing rounds",
        )
        return [loop_of([repeats[0] for repeats in per_group]) for per_group in runs.values()]

    def _tree_options(self, trees: Sequence[Tree], groups: Sequence[list[Job]], size: int, plain: Loop) -> list[Option]:
        """Trees, timed. The plain target is timed along: the machine may have changed its pace since `plain`."""
        from ..decode import Plan

        if not trees:
            return []
        plans = [Plan(tree=tree) for tree in trees]
        again, *loops = self._time([Plan(0), *plans], groups)
        pace = plain.seconds / again.seconds
        return [
            option(
                plan,
                tree.value(self.seen.ranks),
                replace(loop, prefill=pace * loop.prefill, seconds=pace * loop.seconds),
                self.seen.tokens,
                size,
            )
            for plan, tree, loop in zip(plans, trees, loops, strict=True)
        ]

    def _race(self, racing: Sequence[Option], groups: Sequence[list[Job]], size: int) -> list[Measured]:
        runs = self._turns({o.name: o.plan for o in racing}, groups, self.settings.repeats, f"batch {size}: measuring")
        suites = [g[0].suite for g in groups]
        strata = [suites.count(s) for s in dict.fromkeys(suites)] if size == 1 else [len(groups)]
        return measured_options(racing, runs, Bootstrap(strata, seed=self.settings.seed))

    def _turns(
        self, plans: dict[str, Plan], groups: Sequence[list[Job]], repeats: int, what: str
    ) -> dict[str, list[list[Completion]]]:
        runners = [
            BatchRunner(name, self.drafting if plan.depth else self.plain, plan, self.settings)
            for name, plan in plans.items()
        ]
        longest = max(groups, key=lambda g: max(len(j.prompt.tokens) for j in g))
        # First calls are slow; the largest one first, so that the decoder asks for memory once.
        for runner in sorted(runners, key=lambda r: -r.plan.max_nodes):
            runner(longest, self.temperature)
        with self._progress(what, len(groups) * repeats) as advance:
            return race(runners, groups, self.temperature, repeats, lambda: advance(1, ""))

    def _candidate(self, option: Option, measured: Measured | None) -> Candidate:
        values = {
            k: v
            for k, v in option.plan.to_dict().items()
            if k != "control" and v != getattr(type(option.plan), k, None)
        }
        found: dict[str, Any] = {} if measured is None else measured.figures()
        control = option.plan.control
        return Candidate(
            plan={"depth": option.plan.depth} | values,
            weight=None if control is None else control.weight,
            predicted_tau=round(option.tau, 3),
            round_seconds=round(option.loop.seconds, 7),
            predicted=round(option.predicted, 3),
            **found,
        )


def _typical(groups: Sequence[list[Job]], count: int) -> list[list[Job]]:
    """The `count` batches whose prompts are nearest to the median length."""
    lengths = [statistics.mean(len(j.prompt.tokens) for j in group) for group in groups]
    middle = statistics.median(lengths)
    nearest = sorted(range(len(groups)), key=lambda i: abs(lengths[i] - middle))
    return [groups[i] for i in sorted(nearest[:count])]


# ------------------------------------------------------------ costs


@dataclass(frozen=True)
class Loop:
    """What rounds of one shape take in the decoder's loop, for a whole batch.

    Attributes:
        prefill, seconds: of the prefill and of a mean round.
        running: share of the batch's rows that a mean round still serves; the others have finished.
    """

    prefill: float
    seconds: float
    running: float = 1.0


def loop_of(done: Sequence[Completion]) -> Loop:
    """The median over batches that had rounds."""
    from ..ground.errors import BadInputError

    timed = [c for c in done if c.passes]
    if not timed:
        raise BadInputError("the answers to prompts of typical length end with their first token; take other prompts.")
    return Loop(
        prefill=statistics.median(c.prefill for c in timed),
        seconds=statistics.median((c.seconds - c.prefill) / c.passes for c in timed),
        running=sum(len(rounds) for c in timed for rounds in c.rounds) / sum(c.passes * len(c.rounds) for c in timed),
    )


def costs_in_loop(curve: dict[int, float], loops: dict[int, Loop]) -> Costs:
    """Costs whose rounds take what they take in the loop.

    Args:
        curve: seconds of a target pass by itself, by number of drafts.
        loops: of chains, by depth; 0 is plain.

    A plain round is a pass and the `host`; where it is faster than a pass by itself (captured graphs), passes count as what
    they take beyond it. What a chain takes beyond its pass is drafting. Depths between those timed are interpolated. More
    work never takes less time: passes and rounds are the nearest curves that rise (isotonic regression).
    """
    import numpy as np

    from ..decode import Costs

    widths, depths = sorted(curve), sorted(loops)
    alone, rounds = _rising([curve[n] for n in widths]), _rising([loops[d].seconds for d in depths])
    base = min(alone[0], rounds[0])
    passes = Costs(
        tuple((n, round(base + seconds - alone[0], 7)) for n, seconds in zip(widths, alone, strict=True)),
        host=round(rounds[0] - base, 7),
    )
    between = np.interp(range(max(depths) + 1), depths, rounds)
    return replace(
        passes,
        draft=tuple(
            round(max(0.0, float(seconds) - passes.round_time(d)), 7) if d else 0.0 for d, seconds in enumerate(between)
        ),
    )


def _rising(values: Sequence[float]) -> list[float]:
    from scipy.optimize import isotonic_regression

    return [float(v) for v in isotonic_regression(values).x]


# ------------------------------------------------------------ predictions


def tokens_per_second(tau: float, loop: Loop, tokens: float, batch: int) -> float:
    """Of whole requests of `tokens` new tokens each; the formula at the head of this file."""
    return batch * tokens / (loop.prefill + (tokens - 1) / tau * loop.seconds / loop.running)


def option(plan: Plan, tau: float, loop: Loop, tokens: float, batch: int) -> Option:
    return Option(plan, tau, loop, tokens_per_second(tau, loop, tokens, batch))


def chain_options(costs: Costs, loops: dict[int, Loop], seen: Acceptance, batch: int) -> list[Option]:
    """Plain, and chains of every depth up to the deepest that was timed."""
    from ..decode import Plan

    return [
        option(Plan(d), seen.chain(d), _between(costs, loops, d), seen.tokens, batch) for d in range(max(loops) + 1)
    ]


def _between(costs: Costs, loops: dict[int, Loop], depth: int) -> Loop:
    """What rounds of a chain of `depth` take, from those that were timed."""
    import numpy as np

    if depth == 0:
        return loops[0]
    timed = sorted(d for d in loops if d)
    prefill, running = (
        float(np.interp(depth, timed, [getattr(loops[d], name) for d in timed])) for name in ("prefill", "running")
    )
    return Loop(prefill, costs.round_time(depth), running)


def hopeful_trees(costs: Costs, chains: Sequence[Option], seen: Acceptance, batch: int) -> list[Tree]:
    """For each size the tree that is best at the price of a chain's drafting, if it comes near the best chain; [] without rates."""
    wanted = _HOPEFUL * max(o.predicted for o in chains)
    found = []
    for size in TREE_SIZES:
        options = [_cheap_option(costs, chains, tree, seen, batch) for tree in _trees_of(seen.ranks, size)]
        if options and (best_one := max(options, key=lambda o: o.predicted)).predicted >= wanted:
            assert best_one.plan.tree is not None
            found.append(best_one.plan.tree)
    return found


def _trees_of(ranks: Sequence[Sequence[float]], size: int) -> list[Tree]:
    """The best trees of `size` nodes of every depth that has room for them."""
    from ..decode import best_tree
    from ..ground.errors import BadInputError

    found: list[Tree] = []
    for depth in range(1, len(ranks) + 1):
        try:
            found.append(best_tree(ranks[:depth], size))
        except BadInputError:
            continue
    return list(dict.fromkeys(found))


def _cheap_option(costs: Costs, chains: Sequence[Option], tree: Tree, seen: Acceptance, batch: int) -> Option:
    """A tree as if its levels were drafted in the time of a chain's."""
    from ..decode import Plan

    loop = replace(chains[tree.depth].loop, seconds=costs.round_time(tree.depth, len(tree.parents)))
    return option(Plan(tree=tree), tree.value(seen.ranks), loop, seen.tokens, batch)


def best(options: Sequence[Option], count: int = _RACING) -> list[Option]:
    """The `count` best predicted."""
    return sorted(options, key=lambda o: -o.predicted)[:count]


def control_option(chains: Sequence[Option], costs: Costs, seen: Acceptance, most: int) -> Option:
    """Chains up to a little deeper than the best one (`most` at most), their depth decided round by round; predicted as the best fixed depth."""
    from ..decode import Control, Plan

    fixed = best(chains, 1)[0]
    return replace(
        fixed, plan=Plan(min(most, fixed.plan.depth + 2), control=Control(costs, seen.rates, CONTROL_WEIGHT))
    )


# ------------------------------------------------------------ measurements


@dataclass(frozen=True)
class Measured:
    """An option and what it did: τ, and tokens/s as a ratio over batches, beside the plain target's."""

    option: Option
    tau: float
    speed: Ratio
    plain: Ratio
    bootstrap: Bootstrap

    @property
    def tokens_per_second(self) -> float:
        return self.bootstrap.ratio(self.speed).value

    def over(self, other: Measured) -> Interval:
        """How many times as fast as `other`."""
        return self.bootstrap.quotient(self.speed, other.speed)

    def figures(self) -> dict[str, float | None]:
        """Of a `Candidate`."""
        speedup = self.bootstrap.quotient(self.speed, self.plain)
        low, high = (round(speedup.low, 4), round(speedup.high, 4)) if speedup.known else (None, None)
        return {
            "tau": round(self.tau, 3),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "speedup": round(speedup.value, 4),
            "low": low,
            "high": high,
        }


def measured_options(
    racing: Sequence[Option], runs: dict[str, list[list[Completion]]], bootstrap: Bootstrap
) -> list[Measured]:
    """One per option, in their order; the first is plain. A batch's time is that of its median repeat (the faster of two in the middle)."""
    speeds = {
        name: Ratio(
            [sum(map(len, c[0].tokens)) for c in per_group],
            [statistics.median_low([r.seconds for r in c]) for c in per_group],
        )
        for name, per_group in runs.items()
    }
    plain = speeds[racing[0].name]
    return [Measured(o, _tau([c[0] for c in runs[o.name]]), speeds[o.name], plain, bootstrap) for o in racing]


def _tau(done: Sequence[Completion]) -> float:
    rounds = [r for c in done for sequence in c.rounds for r in sequence]
    return 1 + sum(r.accepted for r in rounds) / max(1, len(rounds))


def choose(measured: Sequence[Measured]) -> tuple[Measured, str]:
    """The one to keep, and why: the fastest fixed plan; of a chain the controlled form, unless it is really slower; plain if nothing is faster.

    Args:
        measured: plain first, then the fixed plans, the controlled chain last.
    """
    plain, *fixed, controlled = measured
    fastest = max(fixed, key=lambda m: m.tokens_per_second)
    wanted, reason = _controlled_or_fixed(fastest, controlled)
    if wanted.tokens_per_second > plain.tokens_per_second:
        return wanted, reason
    for other in (fastest, controlled):
        if other.tokens_per_second > plain.tokens_per_second:
            return other, f"{wanted.option.name} is slower than the plain target, this one is not."
    return (
        plain,
        f"Nothing is faster than the plain target here; the best, {fastest.option.name}, reaches {fastest.over(plain).text(unit='×')} of it.",
    )


def _controlled_or_fixed(fastest: Measured, controlled: Measured) -> tuple[Measured, str]:
    quotient = controlled.over(fastest)
    found = f"with a controller {quotient.text(unit='×')} the speed of {fastest.option.name}"
    if fastest.option.plan.is_tree:
        return (controlled, f"The fastest: {found}.") if quotient.value > 1 else (fastest, "The fastest.")
    if quotient.value < 1 and quotient.excludes(1):
        return fastest, f"The fastest: {found}."
    return controlled, f"It falls back where drafts are refused, and what that costs is within the noise: {found}."
