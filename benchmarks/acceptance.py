"""τ and acceptance by depth of one decoder, and what several seeds say together, for benchmarks that time nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from scipy.special import stdtrit

from outrider.decode import Decoder, Output, Plan, Round, Sampling, depth_counts
from outrider.eval.reports.figures import Ratio

Rounds = list[list["Round"]]  # of each prompt


def outputs_of(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, plan: Plan, batch: int
) -> Iterator[Output]:
    """Yield the output of each `batch` of prompts, numbered over all: neither text nor acceptance depends on it."""
    for start in range(0, len(prompts), batch):
        group = [list(prompt) for prompt in prompts[start : start + batch]]
        ids = list(range(start, start + len(group)))
        yield decoder.generate(group, max_new_tokens, sampling, plan, sequence_ids=ids)


def rounds_of(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, plan: Plan, batch: int
) -> Rounds:
    """Return all rounds of each prompt. Prompts run `batch` at a time."""
    outputs = outputs_of(decoder, prompts, max_new_tokens, sampling, plan, batch)
    return [rounds for output in outputs for rounds in output.rounds]


def pooled(runs: Sequence[Rounds]) -> Rounds:
    """Return the rounds of several runs over the same prompts, prompt by prompt."""
    return [[r for rounds in prompt for r in rounds] for prompt in zip(*runs, strict=True)]


def tau(rounds: Rounds) -> Ratio:
    return Ratio([sum(r.emitted for r in each) for each in rounds], [len(each) for each in rounds])


def alpha(rounds: Rounds, depth: int) -> Ratio:
    """Return the share of rounds that accepted `depth`, of those that accepted everything before it."""
    counts = [([(0, 0)] * depth) + depth_counts(each)[depth - 1 : depth] for each in rounds]
    return Ratio([of[-1][1] for of in counts], [of[-1][0] for of in counts])


def over_seeds(values: Sequence[float]) -> dict[str, float] | None:
    """Return the mean over seeds and its 95% interval by Student's t; None for one seed, or if a value is missing."""
    if len(values) < 2 or any(map(math.isnan, values)):
        return None
    middle, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    spread = error * float(stdtrit(len(values) - 1, 0.975))
    return {"value": middle, "low": middle - spread, "high": middle + spread}
