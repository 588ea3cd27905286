"""Batches of prompts, timed as whole requests: they are ragged, and sequences finish at different times."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..common import BadInputError
from ..common.machine import clock
from ..decode import Decoder, Plan, Round
from ..recipes import EvalSpec
from .generation_config import base_sampling
from .interleaved_runs import race
from .reports.figures import BatchFigures, Ratio
from .reports.statistics import Bootstrap
from .suites import PromptJob

LEAST_GROUPS = 8  # batches of each size: fewer give no useful interval


@dataclass(frozen=True)
class BatchAnswer:
    """A completed batch: tokens and rounds of each prompt, seconds of the prefill and in all."""

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
    def num_emitted(self) -> int:
        """Tokens that the rounds of all sequences emitted."""
        return sum(r.emitted for rounds in self.rounds for r in rounds)


def make_groups(jobs: Sequence[PromptJob], size: int, least: int, seed: int = 0) -> list[list[PromptJob]]:
    """Return random batches of `size` prompts: one pass over all of them, or as many as `least` batches need.

    Within a pass no two batches share a prompt; those left over are not run.
    """
    if not 1 <= size <= len(jobs):
        raise BadInputError(f"batches: a size must be between 1 and the number of prompts, {len(jobs)}; got {size}.")
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
        self.name = name
        self.decoder = decoder
        self.plan = plan
        self.settings = settings
        self.sampling = base_sampling(decoder.target, settings)

    def __call__(self, job: Sequence[PromptJob], temperature: float) -> BatchAnswer:
        prompts, ids = [j.prompt.tokens for j in job], [j.sequence for j in job]
        sampling = replace(self.sampling, temperature=temperature)
        began = clock(self.decoder.target.device)
        out = self.decoder.generate(prompts, self.settings.max_new_tokens, sampling, self.plan, sequence_ids=ids)
        seconds = clock(self.decoder.target.device) - began
        return BatchAnswer(out.tokens, out.rounds, out.stats.seconds.prefill, seconds)


def median_repeat(repeats: Sequence[BatchAnswer]) -> BatchAnswer:
    """Return the batch with the median time of its repeats; of an even number the faster one in the middle."""
    return replace(repeats[0], seconds=statistics.median_low([r.seconds for r in repeats]))


def batch_speed(done: Sequence[BatchAnswer]) -> Ratio:
    """Return tokens per second over batches."""
    return Ratio([c.num_tokens for c in done], [c.seconds for c in done])


def batch_count(jobs: Sequence[PromptJob], settings: EvalSpec) -> int:
    """Return how many batches are run of all sizes. BadInputError: a size above the number of prompts."""
    return sum(
        len(make_groups(jobs, size, LEAST_GROUPS, settings.seed)) for size in dict.fromkeys(settings.batch_sizes)
    )


def measure_batches(
    decoders: Sequence[tuple[str, Decoder, Plan]],
    jobs: Sequence[PromptJob],
    settings: EvalSpec,
    temperature: float = 0.0,
    least: int = LEAST_GROUPS,
    tick: Callable[[], None] = lambda: None,
) -> list[BatchFigures]:
    """Complete batches of every size with every contestant: its name, decoder and plan.

    The batches of all sizes come in a random order, and each is completed by all contestants in turns.

    Args:
        decoders: one of them without a drafter: the baseline.
        settings: `batch_sizes`, `max_new_tokens`, `repeats`, `sampling` and `seed` are used.
        least: batches of each size; see `make_groups`.
        tick: called after each batch.

    Raises:
        BadInputError: a size below 1 or above the number of prompts.
    """
    plain = next(name for name, decoder, _ in decoders if decoder.drafter is None)
    sizes = list(dict.fromkeys(settings.batch_sizes))
    groups = [(size, group) for size in sizes for group in make_groups(jobs, size, least, settings.seed)]
    random.Random(settings.seed).shuffle(groups)
    racers = [BatchRacer(name, decoder, plan, settings) for name, decoder, plan in decoders]
    for size in sizes:
        widest = max((own for of, own in groups if of == size), key=lambda own: max(len(j.prompt.tokens) for j in own))
        for racer in racers:
            racer(widest, temperature)  # the first calls of a size are slow
    answers = race(racers, [group for _, group in groups], temperature, settings.repeats, tick)
    done = {name: [median_repeat(repeats) for repeats in per_group] for name, per_group in answers.items()}
    figures = []
    for size in sizes:
        own = [i for i, (of, _) in enumerate(groups) if of == size]
        figures += [
            batch_figures(name, plain, size, temperature, done, own, apart=2 * size <= len(jobs)) for name in done
        ]
    return figures


def batch_figures(
    name: str,
    plain: str,
    size: int,
    temperature: float,
    done: dict[str, list[BatchAnswer]],
    groups: Sequence[int],
    apart: bool = True,
) -> BatchFigures:
    """Return the figures over the batches at the indices `groups`.

    apart: whether several hold other prompts. Otherwise all have nearly the same ones, and count as one: no interval.
    """
    own, base = [done[name][i] for i in groups], [done[plain][i] for i in groups]
    bootstrap = Bootstrap([len(groups)]) if apart else Bootstrap([1], clusters=[0] * len(groups))
    passes = sum(c.passes for c in own)
    tau = Ratio([c.num_emitted for c in own], [c.num_rounds for c in own])
    drafted = sum(r.drafted for c in own for each in c.rounds for r in each)
    same = sum(a == b for c, p in zip(own, base, strict=True) for a, b in zip(c.tokens, p.tokens, strict=True))
    return BatchFigures(
        contestant=name,
        temperature=temperature,
        size=size,
        groups=len(groups),
        sequences=sum(len(c.tokens) for c in own),
        tokens=sum(c.num_tokens for c in own),
        tokens_per_second=bootstrap.ratio(batch_speed(own)),
        speedup=bootstrap.quotient(batch_speed(own), batch_speed(base)),
        tau=None if name == plain else bootstrap.ratio(tau),
        # Rounds of all sequences over the rounds of each batch's longest one.
        rows=round(sum(c.num_rounds for c in own) / passes, 2) if passes else 0.0,
        drafted=round(drafted / max(1, sum(c.num_rounds for c in own)), 2),
        identical=None if temperature > 0 else same,
    )
