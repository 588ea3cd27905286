"""What looking for numbers that are none costs a round: the finite check against none, in turns, in one process.

The target is the embedded one, far smaller than any that is served: what a check costs beside a pass is largest there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.decode import Decoder, Plan, Sampling, round
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
    return RoundCost(
        case,
        *(_rounded(statistics.median(part), 1) for part in zip(*((w, c) for c, w in pairs), strict=True)),
        *(_rounded(value, 4) for value in (statistics.median(ratios), ratios[low], ratios[TURNS - 1 - low])),
    )


def _pair(turn: Callable[[], float], checked_first: bool) -> tuple[float, float]:
    """Return the times of two turns, with the check and without."""
    if checked_first:
        checked = turn()
    with _unchecked():
        without = turn()
    return (checked if checked_first else turn()), without


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}f}")


@contextmanager
def _unchecked() -> Iterator[None]:
    judged = round._marked_not_finite
    round._marked_not_finite = lambda verdict, peaks: verdict
    try:
        yield
    finally:
        round._marked_not_finite = judged
