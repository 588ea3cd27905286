"""Batches of prompts, timed as whole requests: they are ragged, and sequences finish at different times."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..common import BadInputError
from ..common.machine import clock
from ..decode import Decoder, Plan, Round, Sampling
from ..recipes import EvalSpec
from .reports.figures import Ratio
from .suites import PromptJob


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
    """Return the batch with the median time of its repeats; of an even number the faster one in the middle."""
    return replace(repeats[0], seconds=statistics.median_low([r.seconds for r in repeats]))


def batch_speed(done: Sequence[BatchAnswer]) -> Ratio:
    """Return tokens per second over batches."""
    return Ratio([c.num_tokens for c in done], [c.seconds for c in done])
