"""How far a drafter's confidences are to be believed, and the temperatures that mend them.

A confidence head says of each draft how probable it is to be accepted if those before it were; the product along a
chain says how probable it is that the chain gets there. Sequential temperature scaling (DSpark, arXiv 2607.05147)
divides the log-odds of each draft by a temperature of its place: one after the other, each the best for the product so
far, those before it fixed. Temperatures never change which of two drafts at one place is the surer one.

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
from ..heads import Drafter, NodeSession
from ..heads.block.dspark import DSpark
from ..targets import Target

GRID = tuple(float(t) for t in np.round(np.geomspace(0.25, 4.0, 81), 4))
BINS = 10


@dataclass(frozen=True)
class ConfidenceSample:
    """What a drafter said of its drafts, and what became of them.

    Attributes:
        odds: log-odds of each draft, `[N, k]`.
        accepted: drafts of each round that stayed, `[N]`.
    """

    odds: np.ndarray
    accepted: np.ndarray

    def reached(self, temperatures: Sequence[float]) -> np.ndarray:
        """Return how probable each draft was said to be reached and accepted, `[N, len(temperatures)]`."""
        odds = self.odds[:, : len(temperatures)] / np.array(temperatures)
        return (1 / (1 + np.exp(-odds))).cumprod(1)

    def error(self, temperatures: Sequence[float]) -> float:
        """Return the calibration error of what was said of reaching the last draft with a temperature."""
        return calibration_error(self.reached(temperatures)[:, -1], self.accepted >= len(temperatures))


@dataclass(frozen=True)
class Bin:
    """Drafts that were said to be about equally probable: how many, what was said, and what came true, as means."""

    count: int
    said: float
    true: float


@dataclass(frozen=True)
class Calibration:
    """Temperatures, and the calibration error at each place before and after them."""

    temperatures: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    rounds: int


def bins_of(said: np.ndarray, true: np.ndarray, count: int = BINS) -> list[Bin]:
    """Return what was said and what came true, by `count` equal ranges of what was said; empty ones are left out."""
    index = np.minimum((said * count).astype(int), count - 1)
    groups = [(said[index == i], true[index == i]) for i in range(count)]
    return [Bin(len(s), float(s.mean()), float(t.mean())) for s, t in groups if len(s)]


def calibration_error(said: np.ndarray, true: np.ndarray, count: int = BINS) -> float:
    """Return the expected calibration error: the mean distance between what was said and what came true, by bins."""
    return sum(b.count * abs(b.said - b.true) for b in bins_of(said, true, count)) / max(1, len(said))


def fit(told: ConfidenceSample, grid: Sequence[float] = GRID) -> Calibration:
    """Return the temperatures that make the products come true, found from the first draft to the last.

    Raises:
        BadInputError: no rounds.
    """
    if not len(told.odds):
        raise BadInputError("confidences cannot be calibrated without rounds; take prompts with longer answers.")
    found: list[float] = []
    for _ in range(told.odds.shape[1]):
        # Of equal errors the temperature nearest to 1: nothing is changed without a gain.
        found.append(min(grid, key=lambda t: (told.error([*found, t]), abs(np.log(t)))))
    places = range(1, len(found) + 1)
    plain = tuple(told.error([1.0] * j) for j in places)
    return Calibration(tuple(found), plain, tuple(told.error(found[:j]) for j in places), len(told.odds))


# ------------------------------------------------------------ rounds


def collect(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling
) -> ConfidenceSample:
    """Return what a drafter says of its drafts in rounds of the decoder itself, prompt by prompt.

    Raises:
        BadInputError: the drafter says nothing of how sure it is.
    """
    if not isinstance(drafter, DSpark) or not drafter.abilities.confident:
        raise BadInputError(
            f"a {drafter.name} drafter says nothing of how sure it is; take one with a confidence head."
        )
    odds: list[list[float]] = []
    accepted: list[int] = []
    plan = Plan(drafter.max_depth, confidence=1e-30)  # every draft is proposed, and its confidence is asked for
    for number, prompt in enumerate(prompts):
        with _listening(drafter) as heard:
            out = Decoder(target, drafter, static=False).generate(
                [prompt], max_new_tokens, sampling, plan, sequence_ids=[number]
            )
        rounds = out.rounds[0][:-1]  # the last one may have been cut by the text's end
        whole = [
            (heard[i : i + drafter.max_depth], one.accepted)
            for i, one in zip(range(0, len(heard), drafter.max_depth), rounds, strict=False)
            if one.drafted == drafter.max_depth
        ]
        odds += [said for said, _ in whole]
        accepted += [count for _, count in whole]
    return ConfidenceSample(np.array(odds).reshape(-1, drafter.max_depth), np.array(accepted))


@contextmanager
def _listening(drafter: DSpark) -> Iterator[list[float]]:
    """Collect the log-odds of the first row's drafts, without the drafter's temperatures, while this is entered."""
    heard: list[float] = []
    session, temperatures = drafter.session, drafter.config.temperatures

    def listened(*arguments: object) -> NodeSession:
        opened = session(*arguments)  # type: ignore[arg-type]
        confidence = opened.confidence

        def told() -> Tensor:
            found = confidence()
            heard.append(float(torch.logit(found[0].double())))
            return found

        opened.confidence = told  # type: ignore[method-assign]
        return opened

    drafter.session = listened  # type: ignore[method-assign, assignment]
    drafter.config.temperatures = ()
    try:
        yield heard
    finally:
        del drafter.session
        drafter.config.temperatures = temperatures
