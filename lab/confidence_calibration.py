"""The calibration of a drafter's confidences by temperatures.

A confidence head predicts the probability that a draft is accepted if those before it were; the product along a chain
is the probability of accepting all of it. Sequential temperature scaling (DSpark, arXiv 2607.05147) divides the
log-odds of each draft by a temperature of its place: one after the other, each the best for the product so far, with
those before it fixed.

Shapes: N rounds, k drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..common import BadInputError
from ..decode import Decoder, Plan, Sampling
from ..heads import Drafter
from ..heads.block.dspark import DSpark, MarkovSession
from ..targets import Target

GRID = tuple(float(t) for t in np.round(np.geomspace(0.25, 4.0, 81), 4))
BINS = 10


@dataclass(frozen=True)
class ConfidenceSample:
    """The log-odds of a drafter's drafts, `[N, k]`, and the accepted drafts of each round, `[N]`."""

    odds: np.ndarray
    accepted: np.ndarray

    def reached(self, temperatures: Sequence[float]) -> np.ndarray:
        """Return the predicted probability of accepting each draft and all before it, `[N, len(temperatures)]`."""
        odds = self.odds[:, : len(temperatures)] / np.array(temperatures)
        return (1 / (1 + np.exp(-odds))).cumprod(1)

    def error(self, temperatures: Sequence[float]) -> float:
        """Return the calibration error at the last draft that has a temperature."""
        return calibration_error(self.reached(temperatures)[:, -1], self.accepted >= len(temperatures))


@dataclass(frozen=True)
class Bin:
    """Drafts of about equal confidence: their number, mean confidence, and accepted share."""

    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and the calibration error at each place before and after them."""

    temperatures: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    rounds: int


def bins_of(predicted: np.ndarray, observed: np.ndarray, count: int = BINS) -> list[Bin]:
    """Return the drafts by `count` equal ranges of their confidence; empty ones are left out."""
    index = np.minimum((predicted * count).astype(int), count - 1)
    groups = [(predicted[index == i], observed[index == i]) for i in range(count)]
    return [Bin(len(p), float(p.mean()), float(o.mean())) for p, o in groups if len(p)]


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Return the expected calibration error: the mean distance between confidence and accepted share, by bins."""
    bins = bins_of(predicted, observed)
    return sum(b.count * abs(b.predicted - b.observed) for b in bins) / max(1, len(predicted))


def fit(sample: ConfidenceSample, grid: Sequence[float] = GRID) -> Calibration:
    """Return the temperatures that make the products come true, from the first draft to the last.

    Raises:
        BadInputError: no rounds.
    """
    if not len(sample.odds):
        raise BadInputError("confidences cannot be calibrated without rounds; take prompts with longer answers.")
    temperatures: list[float] = []
    for _ in range(sample.odds.shape[1]):
        # Of equal errors the temperature nearest to 1: nothing is changed without a gain.
        temperatures.append(min(grid, key=lambda t: (sample.error([*temperatures, t]), abs(np.log(t)))))
    places = range(1, len(temperatures) + 1)
    before, after = (tuple(sample.error(t[:j]) for j in places) for t in ([1.0] * len(temperatures), temperatures))
    return Calibration(tuple(temperatures), before, after, len(sample.odds))


def collect(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> ConfidenceSample:
    """Return a drafter's confidences in the decoder's own rounds, prompt by prompt.

    Raises:
        BadInputError: the drafter has no confidence head.
    """
    if not isinstance(drafter, DSpark) or not drafter.abilities.confident:
        raise BadInputError(
            f"a {drafter.name} drafter says nothing of how sure it is; take one with a confidence head."
        )
    odds: list[list[float]] = []
    accepted: list[int] = []
    depth = drafter.max_depth
    plan = Plan(depth, confidence=1e-30)  # every draft is proposed, and its confidence is computed
    for number, prompt in enumerate(prompts):
        with _recording(drafter) as recorded:
            decoder = Decoder(target, drafter, static=False)
            out = decoder.generate([prompt], max_new_tokens, sampling, plan, sequence_ids=[number])
        rounds = out.rounds[0][:-1]  # the last one may have been cut by the text's end
        for i, one in zip(range(0, len(recorded), depth), rounds, strict=False):
            if one.drafted == depth:
                odds.append(recorded[i : i + depth])
                accepted.append(one.accepted)
    return ConfidenceSample(np.array(odds).reshape(-1, depth), np.array(accepted))


@contextmanager
def _recording(drafter: DSpark) -> Iterator[list[float]]:
    """Collect the log-odds of the first row's drafts, without the drafter's temperatures."""
    recorded, temperatures = list[float](), drafter.config.temperatures

    class RecordingSession(MarkovSession):
        def confidence(self) -> Tensor:
            predicted = super().confidence()
            recorded.append(float(torch.logit(predicted[0].double())))
            return predicted

    drafter.session_class = RecordingSession  # type: ignore[misc]
    drafter.config.temperatures = ()
    try:
        yield recorded
    finally:
        del drafter.session_class
        drafter.config.temperatures = temperatures
