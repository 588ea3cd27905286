"""What looking for numbers that are none costs a round: the finite check against none, in turns, in one process.

The target is the embedded one, far smaller than any that is served: what a check costs beside a pass is largest there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch

from outrider.decode import Decoder, Plan, Sampling
from outrider.decode import round as stage
from outrider.heads import Drafter, drafter_config
from outrider.targets import Target

TURNS, NEW_TOKENS = 60, 48
CASES = {"plain": 0, "eagle3, depth 4": 4}


@dataclass
class RoundCost:
    """Microseconds of the processor that a round takes, medians, and the median of the ratios of two turns.

    Attributes:
        low, high: 95% interval of that median, by the ranks of a sign test.
    """

    case: str
    without: float
    checked: float
    ratio: float
    low: float
    high: float


def run_rounds() -> list[RoundCost]:
    """Measure every case, greedy and sampled."""
    target = Target.load("embedded", dtype="float32")
    drafters = {"plain": None, "eagle3, depth 4": _head(target)}
    return [
        _cost(f"{case}, temperature {temperature:g}", Decoder(target, drafter), CASES[case], temperature)
        for case, drafter in drafters.items()
        for temperature in (0.0, 1.0)
    ]


def _head(target: Target) -> Drafter:
    torch.manual_seed(0)
    head, config = drafter_config({"type": "eagle3", "steps": 3, "draft_vocab_size": 2048})
    return head.build(config, target, torch.ones(target.vocab_size))


def _cost(case: str, decoder: Decoder, depth: int, temperature: float) -> RoundCost:
    prompt, sampling, plan = list(range(100, 164)), Sampling(temperature=temperature), Plan(depth=depth)

    def turn() -> float:
        began = time.thread_time()
        found = decoder.generate([prompt], NEW_TOKENS, sampling, plan, ignore_eos=True)
        return (time.thread_time() - began) / (len(found.rounds[0]) + 1) * 1e6

    pairs = [_pair(turn, number % 2 == 0) for number in range(-3, TURNS)][3:]
    ratios = sorted(checked / without for checked, without in pairs)
    low = int(TURNS / 2 - 0.98 * TURNS**0.5)
    checked, without = (statistics.median(part) for part in zip(*pairs, strict=True))
    ratio, lowest, highest = statistics.median(ratios), ratios[low], ratios[TURNS - 1 - low]
    return RoundCost(case, round(without, 1), round(checked, 1), round(ratio, 4), round(lowest, 4), round(highest, 4))


def _pair(turn: Callable[[], float], checked_first: bool) -> tuple[float, float]:
    """Return the times of two turns, with the check and without."""
    if checked_first:
        checked = turn()
    with patch.object(stage, "_marked_not_finite", lambda verdict, peaks: verdict):
        without = turn()
    return (checked if checked_first else turn()), without
