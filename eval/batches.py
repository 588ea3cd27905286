"""Speedup as a function of the batch size: the same prompts in batches of 1, 2, 4, …, with a drafter and without one.

Batches are ragged, sequences finish at different times and free their rows: what a batch gains is measured over whole
requests, down to its last row.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..common import BadInputError
from ..common.machine import clock
from ..decode import Decoder, Plan, Round, Sampling
from ..recipes import EvalSpec
from ..targets import Target
from .measure import Contestant
from .reports.intervals import Interval, Ratio
from .reports.statistics import Bootstrap
from .turns import PromptJob, race


@dataclass(frozen=True)
class BatchAnswer:
    """One batch, completed: tokens and rounds of each prompt, and seconds of the prefill and in all."""

    tokens: list[list[int]]
    rounds: list[list[Round]]
    prefill: float
    seconds: float

    @property
    def passes(self) -> int:
        """Rounds of the longest sequence: passes of the whole batch."""
        return max(map(len, self.rounds))

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(map(len, self.tokens))

    @property
    def num_rounds(self) -> int:
        """Rounds of all sequences."""
        return sum(map(len, self.rounds))

    @property
    def num_accepted(self) -> int:
        """Accepted drafts of all sequences."""
        return sum(r.accepted for rounds in self.rounds for r in rounds)


@dataclass(frozen=True)
class BatchPoint:
    """What one contestant reaches at one batch size.

    Attributes:
        speedup: tokens/s ÷ tokens/s of the plain target in the same batches; the interval is over batches.
        tau: mean tokens per round and sequence, with the target's own: 1 + mean accepted; None for the plain target.
        rows: mean rows that were still running, over all rounds: the batch as the device saw it.
        identical: sequences whose tokens equal the plain target's, of `sequences`.
    """

    contestant: str
    size: int
    groups: int
    sequences: int
    tokens: int
    tokens_per_second: Interval
    speedup: Interval
    tau: Interval | None
    rows: float
    identical: int

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON holds them; an interval that does not exist is null."""
        intervals = {name: _interval(getattr(self, name)) for name in ("tokens_per_second", "speedup", "tau")}
        return asdict(self) | intervals


def _interval(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    known = interval.known
    return {
        "value": round(interval.value, 4),
        "low": round(interval.low, 4) if known else None,
        "high": round(interval.high, 4) if known else None,
    }


def measure_batches(
    target: Target,
    contestants: Sequence[Contestant],
    jobs: Sequence[PromptJob],
    sizes: Sequence[int],
    settings: EvalSpec,
    least: int = 8,
    tick: Callable[[], None] = lambda: None,
) -> list[BatchPoint]:
    """Complete batches of every size with every contestant, greedily.

    The batches of all sizes come in a random order, and each is completed by all contestants in turns.

    Args:
        contestants: one of them without a drafter: the baseline.
        settings: `max_new_tokens`, `repeats` and `seed` are used.
        least: batches of each size; see `make_groups`.
        tick: called after each batch.

    Raises:
        BadInputError: a size below 1 or above the number of prompts, or no baseline.
    """
    plain = next((c.name for c in contestants if c.drafter is None), None)
    if plain is None:
        raise BadInputError(
            "batches: the plain target must take part; every speedup is over it. Add a contestant without a drafter."
        )
    groups = [(size, group) for size in dict.fromkeys(sizes) for group in make_groups(jobs, size, least, settings.seed)]
    random.Random(settings.seed).shuffle(groups)
    racers = [BatchRacer(c.name, Decoder(target, c.drafter), c.plan, settings) for c in contestants]
    largest = max((group for _, group in groups), key=len)
    for racer in racers:
        racer(largest, 0.0)  # first calls are slow
    answers = race(racers, [group for _, group in groups], 0.0, settings.repeats, tick)
    done = {name: [median_repeat(repeats) for repeats in per_group] for name, per_group in answers.items()}
    return [
        _point(name, plain, size, done, [i for i, (own, _) in enumerate(groups) if own == size])
        for size in dict.fromkeys(sizes)
        for name in done
    ]


def make_groups(jobs: Sequence[PromptJob], size: int, least: int, seed: int = 0) -> list[list[PromptJob]]:
    """Return batches of `size` prompts, drawn at random: all prompts once, or as often as gives `least` batches.

    Within one pass over the prompts no two batches share one; those that a pass leaves over are not run.
    """
    if not 1 <= size <= len(jobs):
        raise BadInputError(f"batches: a size must be between 1 and the number of prompts, {len(jobs)}; got {size}.")
    if least < 1:
        raise BadInputError(f"batches: at least one batch of each size is needed, got {least}.")
    generator = random.Random(seed)
    groups: list[list[PromptJob]] = []
    wanted = max(least, len(jobs) // size)
    while len(groups) < wanted:
        shuffled = generator.sample(list(jobs), len(jobs))
        groups += [shuffled[i : i + size] for i in range(0, len(jobs) - size + 1, size)]
    return groups[:wanted]


class BatchRacer:
    """A racer that completes batches under one plan."""

    def __init__(self, name: str, decoder: Decoder, plan: Plan, settings: EvalSpec):
        self.name, self.decoder, self.plan, self.settings = name, decoder, plan, settings

    def __call__(self, job: Sequence[PromptJob], temperature: float) -> BatchAnswer:
        prompts, ids = [j.prompt.tokens for j in job], [j.sequence for j in job]
        sampling = Sampling(temperature=temperature, seed=self.settings.seed)
        began = clock(self.decoder.target.device)
        out = self.decoder.generate(prompts, self.settings.max_new_tokens, sampling, self.plan, sequence_ids=ids)
        seconds = clock(self.decoder.target.device) - began
        return BatchAnswer(out.tokens, out.rounds, out.stats.seconds.prefill, seconds)


def median_repeat(repeats: Sequence[BatchAnswer]) -> BatchAnswer:
    """Return what happened, which is the same in every repeat, in the time of the median one.

    Of an even number of repeats it is the faster of the two in the middle.
    """
    return replace(repeats[0], seconds=statistics.median_low([r.seconds for r in repeats]))


def _point(name: str, plain: str, size: int, done: dict[str, list[BatchAnswer]], groups: Sequence[int]) -> BatchPoint:
    """Return the figures over the batches at the indices `groups`."""
    own, base = [done[name][i] for i in groups], [done[plain][i] for i in groups]
    bootstrap = Bootstrap([len(groups)])
    tau = Ratio([c.num_accepted for c in own], [c.num_rounds for c in own], offset=1.0)
    return BatchPoint(
        contestant=name,
        size=size,
        groups=len(groups),
        sequences=sum(len(c.tokens) for c in own),
        tokens=sum(c.num_tokens for c in own),
        tokens_per_second=bootstrap.ratio(batch_speed(own)),
        speedup=bootstrap.quotient(batch_speed(own), batch_speed(base)),
        tau=None if name == plain else bootstrap.ratio(tau),
        rows=_mean_rows(own),
        identical=sum(a == b for c, p in zip(own, base, strict=True) for a, b in zip(c.tokens, p.tokens, strict=True)),
    )


def batch_speed(done: Sequence[BatchAnswer]) -> Ratio:
    """Return tokens per second over batches."""
    return Ratio([c.num_tokens for c in done], [c.seconds for c in done])


def _mean_rows(done: Sequence[BatchAnswer]) -> float:
    """Return the rows per pass: rounds of all sequences over the rounds of each batch's longest one."""
    passes = sum(c.passes for c in done)
    return round(sum(c.num_rounds for c in done) / passes, 2) if passes else 0.0


def speedup_lines(points: Sequence[BatchPoint]) -> dict[str, list[tuple[int, Interval]]]:
    """Return speedups by contestant, as `plots.speedup_by_size` draws them; the plain target is not among them."""
    found: dict[str, list[tuple[int, Interval]]] = {}
    for point in sorted(points, key=lambda p: p.size):
        if point.tau is not None:
            found.setdefault(point.contestant, []).append((point.size, point.speedup))
    return found
