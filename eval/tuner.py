"""Find the fastest plan on this machine, for a drafter by itself and for its fusions with drafters without weights.

The costs of rounds and the acceptance of drafts are measured, and from them the speed of every plan is predicted; the
best predicted plans are measured beside the plain target in turns, and the best *measured* one is chosen.

Rounds are timed in the decoder's own loop, on whole requests, with its caches and captured graphs. The price of each
draft more in a pass is measured by itself (`costs.round_timing.verify_times`); drafting is the rest of a round.

τ is predicted as 1 + Σ_d P(d drafts are accepted) for a chain, and for a tree as 1 + Σ over nodes of the product of the
rates on the way to it; `costs.round_timing` has the speed that follows from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from ..common import BadInputError, IncompatibleError
from ..common.machine import device_name
from ..common.progress import announce, duration, progress
from ..common.runtime import versions
from ..costs.round_timing import RoundTimes, costs_in_loop, verify_times
from ..costs.timing import threads
from ..decode import Control, Costs, Decoder, Plan, best_tree
from ..heads import Drafter, fuse
from ..recipes import EvalSpec
from ..targets import Target
from .acceptance import DEEPEST, Acceptance, deepest, measure_acceptance
from .batch_timing import BatchAnswer, BatchRacer, batch_speed, make_groups, median_repeat
from .generation_config import base_sampling, sampled_settings
from .interleaved_runs import race
from .measure import suite_info
from .reports.advice import collapse
from .reports.figures import Interval, Ratio
from .reports.statistics import Bootstrap, strata_of
from .suites import PromptJob, Suite, check_lengths, make_jobs, usual_job
from .tuning_record import BatchTuning, Candidate, CostRecord, Tuning, plan_words, print_batch

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WIDEST_ON_CPU = 64  # the largest tree that is tried; a wider pass would be timed for nothing, and is slow there
_TIMED_DEPTHS = (1, 2, 4)  # and the deepest; between them rounds are interpolated
_TIMED_GROUPS = 3  # batches by which rounds are timed; one where time is short
_FIRST_TOKENS = 8  # of a plan's first answer on a CPU, where nothing is captured
_LEAST_GROUPS = 4
_LEAST_PROMPTS, _LEAST_TOKENS = 6, 32  # however little time there is
_SLOW_PASS, _SLOW_REPEATS = 0.01, 5  # passes that take so many seconds vary little, and are repeated so often
_PASSES = 2 * len(WIDTHS) * (_SLOW_REPEATS + 2)  # how many of one token take as long as those of all widths
TREE_SIZES = (4, 8, 12, 16, 24, 32, 48, 64)
_HOPEFUL = 0.9  # trees that cannot reach this part of the best chain's prediction are not timed
_RACING = 2  # chains, and trees, that are measured
CONTROL_WEIGHT = 16.0  # of rates from many prompts: with less, a few unlucky rounds make a controller fall back
ChainTimes = tuple[Costs, dict[int, RoundTimes]]  # of chains, and rounds by depth; 0 is plain
# Drafters for fusions with a trained one: a copy of the text costs next to nothing where there is one.
STATISTICAL: tuple[dict[str, Any], ...] = ({"type": "ngram", "min_match": 2}, {"type": "suffix", "min_match": 4})


def tune(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    settings: EvalSpec,
    batch_sizes: Sequence[int] = (1,),
    console: Console | None = None,
    statistical: Sequence[dict[str, Any]] = STATISTICAL,
    seconds: float | None = None,
) -> Tuning:
    """Return the fastest plan for each batch size, and the measurements that led to it.

    Args:
        settings: one of `temperatures`, `max_new_tokens`, `repeats`, `threads` and `seed` are used; `limit` cuts each
            suite.
        console: shows progress and results.
        statistical: type and settings of drafters without weights, whose fusions with a trained `drafter` are tried.
        seconds: that it may take, by the plain target's first answers: fewer repeats, then prompts, then tokens are
            taken where more was asked for. None for all that was.

    Raises:
        BadInputError: no prompts or more than one temperature; a batch size below 1 or above the number of prompts; a
            prompt that does not fit the target's context; answers that end with their first token; `statistical` that
            names a kind that cannot be fused.
        IncompatibleError: the drafter cannot draft for this target.
    """
    jobs = make_jobs(suites, settings.limit)
    _check(target, jobs, settings, batch_sizes)
    reason = None if drafter.abilities.reads_nodes else f"{drafter.name} drafts chains only."
    try:
        target.check_trees()
    except IncompatibleError as error:
        reason = str(error)
    if console is not None and reason is not None:
        console.print(Text(f"no trees: {reason}", style="dim"))
    fusions = _fusions(target, drafter, statistical)
    with threads(settings.threads):
        if seconds is not None or console is not None:
            answer = _answer_seconds(target, jobs, settings)
            sizes, whole = tuple(sorted(set(batch_sizes))), target.device.type != "cpu"
            work = _Work(answer, settings.max_new_tokens, sizes, len(fusions), whole)
            if seconds is not None:
                settings = work.fitted(suites, settings, seconds)
                jobs = make_jobs(suites, settings.limit)
            if console is not None:
                announce(console, work.announcement(jobs, settings))
        tuner = _Tuner(target, drafter, jobs, settings, console, reason is None, fusions)
        batches = []
        for size in sorted(set(batch_sizes)):
            batches.append(tuner.batch(size))
            if console is not None:
                print_batch(batches[-1], console)
        return _record(target, drafter, suites, settings, batches)


def _answer_seconds(target: Target, jobs: Sequence[PromptJob], settings: EvalSpec) -> float:
    """Return the seconds of the plain target's answer to a usual prompt, the second of two."""
    plain = BatchRacer("plain", Decoder(target), Plan(0), settings)
    usual = usual_job(jobs)
    answers = [plain([usual], float(settings.temperatures[0])) for _ in range(2)]
    return answers[1].seconds


def _timed_groups(settings: EvalSpec) -> int:
    """Return by how many batches rounds are timed."""
    return _TIMED_GROUPS if settings.repeats > 1 else 1


@dataclass(frozen=True)
class _Work:
    """What a tuning does, counted in answers of the plain target of `tokens` in `answer` seconds.

    `whole`: whether a plan's first answer, which counts for nothing, is as long as the others.
    """

    answer: float
    tokens: int
    sizes: tuple[int, ...]
    fusions: int
    whole: bool = False

    def seconds(self, prompts: int, settings: EvalSpec) -> float:
        """Return about how long it takes."""
        measured = 2 * _RACING + 2 + (_RACING if self.fusions else 0)  # the plain plan and a controller's, too
        plans = (len(_TIMED_DEPTHS) + 2) * (2 + min(1, self.fusions))
        raced = measured * prompts * settings.repeats + plans * _timed_groups(settings)
        raced = len(self.sizes) * (raced + (measured + plans if self.whole else 0))
        answers = prompts * (2 + self.fusions) + raced
        return self.passes + answers * self.answer * settings.max_new_tokens / self.tokens

    @property
    def passes(self) -> float:
        """The seconds of passes by their width."""
        return len(self.sizes) * _PASSES * self.answer / self.tokens

    def fitted(self, suites: Sequence[Suite], settings: EvalSpec, seconds: float) -> EvalSpec:
        """Return settings under which it takes about so long: fewer repeats, then prompts, then tokens."""
        least = max(_LEAST_PROMPTS, *self.sizes)

        def share(changed: EvalSpec) -> float:
            needed = self.seconds(len(make_jobs(suites, changed.limit)), changed)
            return (seconds - self.passes) / (needed - self.passes)

        if share(settings) < 1:
            settings = settings.model_copy(update={"repeats": 1})
        limit = settings.limit or max(len(suite.prompts) for suite in suites)
        while limit > 1 and share(settings) < 1 and len(make_jobs(suites, limit - 1)) >= least:
            limit -= 1
            settings = settings.model_copy(update={"limit": limit})
        if (left := share(settings)) < 1:
            fewer = min(self.tokens, max(_LEAST_TOKENS, int(left * self.tokens)))
            settings = settings.model_copy(update={"max_new_tokens": fewer})
        return settings

    def announcement(self, jobs: Sequence[PromptJob], settings: EvalSpec) -> str:
        """Return what will be done, and for about how long."""
        about = duration(self.seconds(len(jobs), settings))
        return (
            f"tuning on {len(jobs)} prompts, answered with {settings.max_new_tokens} tokens at most: acceptance, "
            f"costs, and the best plans in turns; about {about} by the first answers"
        )


def best_chain(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    settings: EvalSpec,
    times: ChainTimes | None = None,
    most: int = DEEPEST,
) -> tuple[Option, Option, ChainTimes]:
    """Return the chain that is predicted to be the fastest, the plain target, and the times of both.

    At batch size 1 and the first temperature of `settings`. `times` are a drafter's of the same shape; None to take
    them now. `most`: drafts in a chain. Raises as `tune` does.
    """
    settings = sampled_settings(target, settings)
    settings = settings.model_copy(update={"temperatures": settings.temperatures[:1]})
    jobs = make_jobs(suites, settings.limit)
    _check(target, jobs, settings, (1,))
    with threads(settings.threads):
        tuner = _Tuner(target, drafter, jobs, settings, None, False, [], most)
        times = times or tuner.chain_times(tuner.curve(1, deepest(drafter)), [[job] for job in jobs])
        plain, *chains = chain_options(*times, tuner.seen, 1)
    return best(chains, 1)[0], plain, times


def _check(target: Target, jobs: Sequence[PromptJob], settings: EvalSpec, batch_sizes: Sequence[int]) -> None:
    if not jobs:
        raise BadInputError("there are no prompts to tune on; name a suite that has some.")
    if len(settings.temperatures) != 1:
        raise BadInputError(
            f"a plan is tuned for one temperature at a time; got {', '.join(map(str, settings.temperatures))}."
        )
    if not batch_sizes or min(batch_sizes) < 1 or max(batch_sizes) > len(jobs):
        raise BadInputError(
            f"batch sizes must be between 1 and the number of prompts, {len(jobs)}; "
            f"got {', '.join(map(str, batch_sizes)) or 'none'}. "
            "Take more prompts (a higher limit, more suites) or smaller batches."
        )
    check_lengths(target, jobs, settings)


def _record(
    target: Target, drafter: Drafter, suites: Sequence[Suite], settings: EvalSpec, batches: list[BatchTuning]
) -> Tuning:
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


_Fusion = tuple[dict[str, Any], Drafter, Decoder]  # settings of one without weights; the fusion, and its decoder


def _fusions(target: Target, drafter: Drafter, statistical: Sequence[dict[str, Any]]) -> list[_Fusion]:
    """Return the fusions to try: none of a drafter that has no weights, or is a fusion itself."""
    if not drafter.trainable or drafter.abilities.deterministic:
        return []
    fused = [(values, fuse(values, drafter)) for values in statistical]
    return [(values, each, Decoder(target, each)) for values, each in fused]


class _Tuner:
    """The search for plans, with all that does not depend on the batch size: how often drafts are accepted, above all.

    `trees`: whether trees are tried, too. `most`: drafts in a chain.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        jobs: list[PromptJob],
        settings: EvalSpec,
        console: Console | None,
        trees: bool,
        fusions: list[_Fusion],
        most: int = DEEPEST,
    ):
        self.target = target
        self.drafter = drafter
        self.jobs = jobs
        self.settings = settings
        self.fusions = fusions
        self.bars = partial(progress, console, transient=True)
        self.sampling = replace(base_sampling(target, settings), temperature=float(settings.temperatures[0]))
        with self.bars("acceptance", 1):
            self.seen = self._acceptance(drafter, trees, most=most)
        self.plain = Decoder(target)
        self.drafting = Decoder(target, drafter)

    def _acceptance(self, drafter: Drafter, trees: bool, **limits: int) -> Acceptance:
        return measure_acceptance(
            self.target, drafter, self.jobs, self.settings.max_new_tokens, self.sampling, trees, **limits
        )

    def batch(self, size: int) -> BatchTuning:
        """Return the fastest plan at one batch size, and the measurements that led to it."""
        groups = [[job] for job in self.jobs]
        if size > 1:
            groups = make_groups(self.jobs, size, _LEAST_GROUPS, self.settings.seed)
        options, curve, loops, costs = self.chains(groups, size)
        trees = self._tree_options(hopeful_trees(costs, options, self.seen, size), groups, size, loops[0])
        controlled = control_option(options[1:], costs, self.seen, deepest(self.drafter))
        fused = self._fused_options(curve, loops, costs, groups, size)
        racing = [options[0], *best(options[1:]), *best(trees), *best(fused), controlled]
        measured = self._race(racing, groups, size)
        chosen, reason = choose(measured)
        reason = " ".join(part for part in (reason, collapse(self.seen.rates, self.drafter.trained_depth)) if part)
        others = [_candidate(option, None) for option in (*options, *trees, *fused) if option not in racing]
        return BatchTuning(
            batch_size=size,
            context=self.context,
            rates=list(self.seen.rates),
            ranks=[list(r) for r in self.seen.ranks],
            costs=CostRecord.of(costs),
            candidates=[*(_candidate(m.option, m) for m in measured), *others],
            chosen=_candidate(chosen.option, chosen),
            reason=reason,
        )

    @property
    def context(self) -> int:
        """The tokens before the root in the middle of a typical answer."""
        return int(statistics.median(len(j.prompt.tokens) for j in self.jobs)) + self.settings.max_new_tokens // 2

    def chains(
        self, groups: Sequence[list[PromptJob]], size: int
    ) -> tuple[list[Option], dict[int, float], dict[int, RoundTimes], Costs]:
        """Return the plain plan and chains of every depth; passes by their drafts, rounds by depth, and their costs."""
        curve = self.curve(size, _WIDEST_ON_CPU if self.target.device.type == "cpu" else max(WIDTHS))
        costs, loops = self.chain_times(curve, groups)
        return chain_options(costs, loops, self.seen, size), curve, loops, costs

    def chain_times(self, curve: dict[int, float], groups: Sequence[list[PromptJob]]) -> ChainTimes:
        """Return the costs of chains, and what rounds take by depth."""
        most = deepest(self.drafter)
        depths = [0, *(d for d in _TIMED_DEPTHS if d < most), most]
        loops = dict(zip(depths, self._time([Plan(d) for d in depths], groups), strict=True))
        return costs_in_loop(curve, loops, self.drafter.abilities.one_pass), loops

    def curve(self, size: int, widest: int) -> dict[int, float]:
        """Return the seconds of passes of the target by the number of drafts, up to `widest`."""
        limit, context = self.target.max_context, self.context
        widths = [n for n in WIDTHS if n <= widest and (limit is None or context + 1 + n <= limit)]
        with self.bars(f"batch {size}: passes of the target", 1):
            usual = verify_times(self.target, (0,), size, context, repeats=1)[0]
            repeats = _SLOW_REPEATS if usual > _SLOW_PASS else max(_SLOW_REPEATS, 20 // size)
            return verify_times(self.target, widths, size, context, repeats, taps=self.drafter.taps)

    def _time(
        self, plans: Sequence[Plan], groups: Sequence[list[PromptJob]], drafting: Decoder | None = None
    ) -> list[RoundTimes]:
        """Return the times of rounds under each of `plans`, from the batches nearest to the median length.

        `drafting` decodes those that draft; None for the drafter by itself.
        """
        named = {str(i): (self._decoder(plan, drafting), plan) for i, plan in enumerate(plans)}
        lengths = [statistics.mean(len(j.prompt.tokens) for j in group) for group in groups]
        middle = statistics.median(lengths)
        nearest = sorted(range(len(groups)), key=lambda i: abs(lengths[i] - middle))[: _timed_groups(self.settings)]
        answers = self._turns(named, [groups[i] for i in sorted(nearest)], repeats=1, what="timing rounds")
        return [round_times([repeats[0] for repeats in per_group]) for per_group in answers.values()]

    def _tree_options(
        self, hopeful: Sequence[Option], groups: Sequence[list[PromptJob]], size: int, plain: RoundTimes
    ) -> list[Option]:
        """Return trees with their times, at the pace of `plain`: the machine's may have changed since."""
        if not hopeful:
            return []
        loops = _paced(plain, *self._time([Plan(0), *(o.plan for o in hopeful)], groups))
        return [option(o.plan, o.tau, loop, self.seen.tokens, size) for o, loop in zip(hopeful, loops, strict=True)]

    def _fused_options(
        self,
        curve: dict[int, float],
        loops: dict[int, RoundTimes],
        costs: Costs,
        groups: Sequence[list[PromptJob]],
        size: int,
    ) -> list[Option]:
        """Return the chains of the fusion that is predicted to be the fastest, with their times.

        Only its rounds are timed; before that, a fusion's are taken to cost what the drafter's own do.
        """
        found = []
        for statistical, drafter, decoder in self.fusions:
            with self.bars(f"batch {size}: acceptance with {statistical['type']}", 1):
                seen = self._acceptance(drafter, False, at_once=size)
            fastest = best(chain_options(costs, loops, seen, size)[1:], 1)[0]
            found.append((fastest.predicted, seen, statistical, drafter, decoder))
        if not found:
            return []
        _, seen, statistical, drafter, decoder = max(found, key=lambda fusion: fusion[0])
        most = deepest(drafter)
        depths = [*(d for d in _TIMED_DEPTHS if d < most), most]
        timed = self._time([Plan(0), *map(Plan, depths)], groups, decoder)
        fused = {0: loops[0]} | dict(zip(depths, _paced(loops[0], *timed), strict=True))
        chains = chain_options(costs_in_loop(curve, fused), fused, seen, size)[1:]
        return [replace(chain, statistical=statistical) for chain in chains]

    def _race(self, racing: Sequence[Option], groups: Sequence[list[PromptJob]], size: int) -> list[MeasuredOption]:
        fusions = {statistical["type"]: decoder for statistical, _, decoder in self.fusions}
        entries = {
            o.name: (self._decoder(o.plan, fusions[o.statistical["type"]] if o.statistical else None), o.plan)
            for o in racing
        }
        answers = self._turns(entries, groups, self.settings.repeats, f"batch {size}: measuring")
        strata = strata_of([g[0].suite for g in groups]) if size == 1 else [len(groups)]
        return measured_options(racing, answers, Bootstrap(strata, seed=self.settings.seed))

    def _decoder(self, plan: Plan, drafting: Decoder | None = None) -> Decoder:
        """Return the decoder for `plan`: the plain target, or `drafting` (None: the drafter by itself)."""
        return self.plain if plan.depth == 0 else drafting or self.drafting

    def _turns(
        self, entries: dict[str, tuple[Decoder, Plan]], groups: Sequence[list[PromptJob]], repeats: int, what: str
    ) -> dict[str, list[list[BatchAnswer]]]:
        racers = [BatchRacer(name, decoder, plan, self.settings) for name, (decoder, plan) in entries.items()]
        first = self.settings
        if self.target.device.type == "cpu":
            few = max(_FIRST_TOKENS, self.sampling.min_new_tokens)
            first = first.model_copy(update={"max_new_tokens": min(few, first.max_new_tokens)})
        longest = max(groups, key=lambda g: max(len(j.prompt.tokens) for j in g))
        # First calls are slow; the largest one first, so that the decoder asks for memory once.
        for racer in sorted(racers, key=lambda r: -r.plan.max_nodes):
            BatchRacer(racer.name, racer.decoder, racer.plan, first)(longest, self.sampling.temperature)
        with self.bars(what, len(racers) * len(groups) * repeats) as advance:
            return race(racers, groups, self.sampling.temperature, repeats, lambda: advance(1, ""))


def _paced(plain: RoundTimes, again: RoundTimes, *loops: RoundTimes) -> list[RoundTimes]:
    """Return `loops` at the pace of the plain target's rounds in `plain`; beside the loops they took `again`."""
    pace = plain.seconds / again.seconds
    return [replace(loop, prefill=pace * loop.prefill, seconds=pace * loop.seconds) for loop in loops]


def _candidate(option: Option, measured: MeasuredOption | None) -> Candidate:
    """Return the record of an option, with its figures if it was measured."""
    usual = Plan().to_dict()
    values = {k: v for k, v in option.plan.to_dict().items() if k != "control" and v != usual[k]}
    control = option.plan.control
    found = Candidate(
        plan={"depth": option.plan.depth} | values,
        weight=None if control is None else control.weight,
        predicted_tau=round(option.tau, 3),
        round_seconds=round(option.loop.seconds, 7),
        predicted=round(option.predicted, 3),
        statistical=option.statistical,
    )
    if measured is None:
        return found
    speedup = measured.bootstrap.quotient(measured.speed, measured.plain)
    figures = {
        "tau": round(measured.tau, 3),
        "tokens_per_second": round(measured.tokens_per_second, 3),
        "speedup": round(speedup.value, 4),
    }
    if speedup.known:
        figures |= {"low": round(speedup.low, 4), "high": round(speedup.high, 4)}
    return found.model_copy(update=figures)


def round_times(done: Sequence[BatchAnswer]) -> RoundTimes:
    """Return the times of rounds: the median over batches that had some."""
    timed = [c for c in done if c.passes]
    if not timed:
        raise BadInputError("the answers to prompts of typical length end with their first token; take other prompts.")
    return RoundTimes(
        prefill=statistics.median(c.prefill for c in timed),
        seconds=statistics.median((c.seconds - c.prefill) / c.passes for c in timed),
        running=sum(c.num_rounds for c in timed) / sum(c.passes * len(c.rounds) for c in timed),
    )


@dataclass(frozen=True)
class Option:
    """A plan with its prediction: tokens per round and sequence, and tokens/s of the whole batch.

    `statistical`: type and settings of the drafter without weights in a fusion; None for no fusion.
    """

    plan: Plan
    tau: float
    loop: RoundTimes
    predicted: float
    statistical: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The plan in words."""
        return plan_words(self.plan, self.statistical)


def option(plan: Plan, tau: float, loop: RoundTimes, tokens: float, batch: int) -> Option:
    """Return a plan with its predicted speed."""
    return Option(plan, tau, loop, loop.tokens_per_second(tau, tokens, batch))


def chain_options(costs: Costs, loops: dict[int, RoundTimes], seen: Acceptance, batch: int) -> list[Option]:
    """Return the plain plan, and chains of every depth up to the deepest that was timed."""
    timed = sorted(d for d in loops if d)
    times = [loops[0]]
    for depth in range(1, max(loops) + 1):
        prefill, running = (
            float(np.interp(depth, timed, [getattr(loops[d], name) for d in timed])) for name in ("prefill", "running")
        )
        times.append(RoundTimes(prefill, costs.round_time(depth), running))
    return [option(Plan(d), seen.chain(d), loop, seen.tokens, batch) for d, loop in enumerate(times)]


def hopeful_trees(costs: Costs, chains: Sequence[Option], seen: Acceptance, batch: int) -> list[Option]:
    """Return for each size the tree that is best at the price of a chain's drafting, if it comes near the best chain.

    Empty without rates of a tree's children.
    """
    wanted = _HOPEFUL * max(o.predicted for o in chains)
    hopeful = []
    for size in TREE_SIZES:
        sized = []
        for depth in range(1, len(seen.ranks) + 1):
            with suppress(BadInputError):  # no room for so many nodes
                tree = best_tree(seen.ranks[:depth], size)
                loop = replace(chains[tree.depth].loop, seconds=costs.round_time(tree.depth, len(tree.parents)))
                sized.append(option(Plan(tree=tree), tree.value(seen.ranks), loop, seen.tokens, batch))
        hopeful += [fastest for fastest in best(sized, 1) if fastest.predicted >= wanted]
    return hopeful


def best(options: Sequence[Option], count: int = _RACING) -> list[Option]:
    """Return the `count` best predicted."""
    return sorted(options, key=lambda o: -o.predicted)[:count]


def control_option(chains: Sequence[Option], costs: Costs, seen: Acceptance, most: int) -> Option:
    """Return chains whose depth is decided round by round, up to 2 deeper than the best one, which predicts them."""
    fixed = best(chains, 1)[0]
    control = Control(costs, seen.rates, CONTROL_WEIGHT)
    return replace(fixed, plan=Plan(min(most, fixed.plan.depth + 2), control=control))


@dataclass(frozen=True)
class MeasuredOption:
    """An option with its measured τ and tokens/s, a ratio over batches, beside the plain target's."""

    option: Option
    tau: float
    speed: Ratio
    plain: Ratio
    bootstrap: Bootstrap

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all batches."""
        return self.bootstrap.ratio(self.speed).value

    def over(self, other: MeasuredOption) -> Interval:
        """Return the quotient of its speed and that of `other`."""
        return self.bootstrap.quotient(self.speed, other.speed)


def measured_options(
    racing: Sequence[Option], answers: dict[str, list[list[BatchAnswer]]], bootstrap: Bootstrap
) -> list[MeasuredOption]:
    """Return the measurement of each option, in their order; the first is plain."""
    done = {name: [median_repeat(repeats) for repeats in per_group] for name, per_group in answers.items()}
    plain = batch_speed(done[racing[0].name])
    measured = []
    for own in racing:
        batches = done[own.name]
        tau = sum(c.num_emitted for c in batches) / max(1, sum(c.num_rounds for c in batches))
        measured.append(MeasuredOption(own, tau, batch_speed(batches), plain, bootstrap))
    return measured


def choose(measured: Sequence[MeasuredOption]) -> tuple[MeasuredOption, str]:
    """Return the option to keep, and why.

    It is the fastest fixed plan; the controlled chain instead of a fixed one, unless it is clearly slower; and plain
    decoding if nothing is faster.

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
    reached = fastest.over(plain).text(unit="×")
    reason = f"Nothing is faster than the plain target here; the best, {fastest.option.name}, reaches {reached} of it."
    return plain, reason


def _controlled_or_fixed(fastest: MeasuredOption, controlled: MeasuredOption) -> tuple[MeasuredOption, str]:
    quotient = controlled.over(fastest)
    words = f"with a controller {quotient.text(unit='×')} the speed of {fastest.option.name}"
    if fastest.option.plan.is_tree or fastest.option.statistical is not None:
        return (controlled, f"The fastest: {words}.") if quotient.value > 1 else (fastest, "The fastest.")
    if quotient.value < 1 and quotient.excludes(1):
        return fastest, f"The fastest: {words}."
    return controlled, f"It falls back where drafts are refused, and what that costs is within the noise: {words}."
