"""Speedup as a function of the batch size: the same prompts in batches of 1, 2, 4, …, with a drafter and without one.

Batches are ragged, sequences finish at different times and free their rows: what a batch gains is measured over whole
requests, down to its last row.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ground.machine import clock
from .measure import Contestant, Job, race
from .statistics import Bootstrap, Interval, Ratio

if TYPE_CHECKING:
    from ..decode import Decoder, Plan, Round
    from ..recipes import EvalSpec
    from ..targets import Target


@dataclass(frozen=True)
class Completion:
    """One batch, completed: tokens and rounds of each prompt, and seconds of the prefill and in all."""

    tokens: list[list[int]]
    rounds: list[list[Round]]
    prefill: float
    seconds: float

    @property
    def passes(self) -> int:
        """Rounds of the longest sequence: passes of the whole batch."""
        return max(map(len, self.rounds))


@dataclass(frozen=True)
class Point:
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
        """As JSON holds it; an interval that does not exist is null."""
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
    jobs: Sequence[Job],
    sizes: Sequence[int],
    settings: EvalSpec,
    least: int = 8,
    tick: Callable[[], None] = lambda: None,
) -> list[Point]:
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
    from ..decode import Decoder
    from ..ground import BadInputError

    plain = next((c.name for c in contestants if c.drafter is None), None)
    if plain is None:
        raise BadInputError(
            "batches: the plain target must take part; every speedup is over it. Add a contestant without a drafter."
        )
    groups = [(size, group) for size in dict.fromkeys(sizes) for group in make_groups(jobs, size, least, settings.seed)]
    random.Random(settings.seed).shuffle(groups)
    runners = [BatchRunner(c.name, Decoder(target, c.drafter), c.plan, settings) for c in contestants]
    largest = max((group for _, group in groups), key=len)
    for runner in runners:
        runner(largest, 0.0)  # first calls are slow
    runs = race(runners, [group for _, group in groups], 0.0, settings.repeats, tick)
    done = {name: [_median(repeats) for repeats in per_group] for name, per_group in runs.items()}
    return [
        _point(name, plain, size, done, [i for i, (own, _) in enumerate(groups) if own == size])
        for size in dict.fromkeys(sizes)
        for name in done
    ]


def make_groups(jobs: Sequence[Job], size: int, least: int, seed: int = 0) -> list[list[Job]]:
    """Batches of `size` prompts, drawn at random: all prompts once, or as often again as gives `least` batches.

    Within one pass over the prompts no two batches share one; those that a pass leaves over are not run.
    """
    from ..ground import BadInputError

    if not 1 <= size <= len(jobs):
        raise BadInputError(f"batches: a size must be between 1 and the number of prompts, {len(jobs)}; got {size}.")
    if least < 1:
        raise BadInputError(f"batches: at least one batch of each size is needed, got {least}.")
    generator = random.Random(seed)
    groups: list[list[Job]] = []
    wanted = max(least, len(jobs) // size)
    while len(groups) < wanted:
        shuffled = generator.sample(list(jobs), len(jobs))
        groups += [shuffled[i : i + size] for i in range(0, len(jobs) - size + 1, size)]
    return groups[:wanted]


class BatchRunner:
    """Completes batches under one plan."""

    def __init__(self, name: str, decoder: Decoder, plan: Plan, settings: EvalSpec):
        self.name, self.decoder, self.plan, self.settings = name, decoder, plan, settings

    def __call__(self, job: Sequence[Job], temperature: float) -> Completion:
        from ..decode import Sampling

        prompts, ids = [j.prompt.tokens for j in job], [j.sequence for j in job]
        sampling = Sampling(temperature=temperature, seed=self.settings.seed)
        began = clock(self.decoder.target.device)
        out = self.decoder.generate(prompts, self.settings.max_new_tokens, sampling, self.plan, sequence_ids=ids)
        seconds = clock(self.decoder.target.device) - began
        return Completion(out.tokens, out.rounds, out.stats.seconds.prefill, seconds)


def _median(repeats: Sequence[Completion]) -> Completion:
    """What happened is the same in every repeat; the time is that of the median one (the faster of two in the middle)."""
    return replace(repeats[0], seconds=statistics.median_low([r.seconds for r in repeats]))


def _point(name: str, plain: str, size: int, done: dict[str, list[Completion]], groups: Sequence[int]) -> Point:
    """Figures over the batches at the indices `groups`."""
    own, base = [done[name][i] for i in groups], [done[plain][i] for i in groups]
    bootstrap = Bootstrap([len(groups)])
    accepted = Ratio(
        [sum(r.accepted for rounds in c.rounds for r in rounds) for c in own],
        [sum(map(len, c.rounds)) for c in own],
        offset=1.0,
    )
    return Point(
        contestant=name,
        size=size,
        groups=len(groups),
        sequences=sum(len(c.tokens) for c in own),
        tokens=sum(len(tokens) for c in own for tokens in c.tokens),
        tokens_per_second=bootstrap.ratio(_speed(own)),
        speedup=bootstrap.quotient(_speed(own), _speed(base)),
        tau=None if name == plain else bootstrap.ratio(accepted),
        rows=_mean_rows(own),
        identical=sum(a == b for c, p in zip(own, base, strict=True) for a, b in zip(c.tokens, p.tokens, strict=True)),
    )


def _speed(done: Sequence[Completion]) -> Ratio:
    return Ratio([sum(map(len, c.tokens)) for c in done], [c.seconds for c in done])


def _mean_rows(done: Sequence[Completion]) -> float:
    """Rows per pass: rounds of all sequences over the rounds of each batch's longest one."""
    passes = sum(c.passes for c in done)
    return round(sum(len(rounds) for c in done for rounds in c.rounds) / passes, 2) if passes else 0.0


def lines(points: Sequence[Point]) -> dict[str, list[tuple[int, Interval]]]:
    """Speedups by contestant, as `plots.speedup_by_batch` draws them; the plain target is not among them."""
    found: dict[str, list[tuple[int, Interval]]] = {}
    for point in sorted(points, key=lambda p: p.size):
        if point.tau is not None:
            found.setdefault(point.contestant, []).append((point.size, point.speedup))
    return found
