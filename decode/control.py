"""How deep to draft, round by round: what a round costs, what it brings, and when plain decoding is better.

The depth of a round depends on earlier rounds alone, never on the tokens it drafts, so it changes no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import BadInputError

if TYPE_CHECKING:  # a plan is read without torch
    import torch
    from torch import Tensor

_FORGET = 0.95  # per round: what a sequence did long ago predicts less
_ENTER, _SWITCH = 1.03, 1.02  # gains below these are noise: they change nothing
_FIRST_WAIT, _LONGEST_WAIT = 8, 64  # plain rounds until drafting is tried again
_LEAST_RATE, _MOST_RATE = 0.02, 0.98
_BY_CONFIDENCE = "confidence"


@dataclass(frozen=True)
class Costs:
    """The seconds that the parts of a round take on one machine at one batch size.

    Attributes:
        verify: (n, time of a target pass over the root and n drafts), n ascending from 0; linear in between and flat
            after the last.
        draft: time of drafting 0, 1, 2, … levels; the last step's price is taken for deeper ones.
        host: the rest of a round.
    """

    verify: tuple[tuple[int, float], ...]
    draft: tuple[float, ...] = (0.0,)
    host: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", tuple((int(n), float(t)) for n, t in self.verify))
        object.__setattr__(self, "draft", tuple(map(float, self.draft)))
        widths = [n for n, _ in self.verify]
        if not widths or widths[0] != 0 or widths != sorted(set(widths)):
            raise BadInputError(f"costs: verify needs ascending numbers of drafts from 0 on, got {widths}.")
        if not self.draft or self.draft[0] != 0:
            raise BadInputError("costs: draft begins with the 0 seconds of drafting nothing.")
        if min(t for _, t in self.verify) <= 0 or min(self.draft) < 0 or self.host < 0:
            raise BadInputError("costs: times must be positive.")

    def verify_time(self, drafts: float) -> float:
        """Return the time of a target pass over the root and `drafts` drafts."""
        widths, times = zip(*self.verify, strict=True)
        return float(np.interp(drafts, widths, times))

    def draft_time(self, depth: int) -> float:
        """Return the time of drafting `depth` levels."""
        if depth < len(self.draft):
            return self.draft[depth]
        step = self.draft[-1] - self.draft[-2] if len(self.draft) > 1 else 0.0
        return self.draft[-1] + step * (depth - len(self.draft) + 1)

    def round_time(self, depth: int, nodes: float | None = None) -> float:
        """Return the time of a whole round that drafts `depth` levels and verifies `nodes` drafts (None: a chain)."""
        return self.draft_time(depth) + self.verify_time(depth if nodes is None else nodes) + self.host


def expected_tokens(rates: Sequence[float]) -> float:
    """Return the expected tokens of a round: 1 + Σ_d Π_{i≤d} rate_i.

    `rates[d − 1]` is the probability that the draft at depth d is accepted, given that the one before it was.
    """
    return 1 + float(np.cumprod(rates).sum())


@dataclass(frozen=True)
class Control:
    """A rule for each round: draft as deep as brings the most expected tokens per second, or not at all.

    Attributes:
        costs: of this machine at this batch size.
        rates: acceptance expected at depth 1, 2, … given the depth before, until a sequence has shown its own.
        weight: how many rounds these rates count for.
    """

    costs: Costs
    rates: tuple[float, ...]
    weight: float = 8.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise BadInputError(f"control: rates are probabilities, one per depth; got {list(self.rates)}.")
        if self.weight <= 0:
            raise BadInputError(f"control: weight must be above 0, got {self.weight}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Control:
        """Build a control from what `to_dict` returned."""
        rest = values | {"costs": Costs(**values["costs"])}
        return Schedule(**rest) if rest.pop("by", None) == _BY_CONFIDENCE else cls(**rest)

    def to_dict(self) -> dict[str, Any]:
        """Return the control as plain values that JSON can hold."""
        costs = asdict(self.costs) | {"verify": list(map(list, self.costs.verify)), "draft": list(self.costs.draft)}
        return {"costs": costs, "rates": list(self.rates), "weight": self.weight}


@dataclass(frozen=True)
class Schedule(Control):
    """A rule for each round of a batch: of all rows' drafts, verify those of which the drafter is most confident.

    Drafts are taken in the order of how probable they are to be reached and accepted, while the expected tokens per
    second of the round rise; the first that does not raise them ends it (DSpark, arXiv 2607.05147). Only then is it
    lossless: a search past that draft would look at confidences that depend on the tokens it decides about. For
    drafters with a confidence; the plan decides how deep is drafted.
    """

    _made: dict[tuple[int, int, torch.device], Tensor] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def lengths(self, reach: Tensor) -> Tensor:
        """Return how many drafts of each row are verified, `[B]`.

        `reach`: how probable each draft is to be reached and accepted; it falls along a row, `[B, N]`.
        """
        from torch import nn, zeros_like

        rows, drafts = reach.shape
        sure, order = reach.flatten().double().sort(descending=True, stable=True)
        gained = nn.functional.pad(sure.cumsum(0), (1, 0)) + rows
        speed = gained / self._seconds(rows, drafts, reach.device)
        rising = (speed[1:] > speed[:-1]).long().cumprod(0).bool()
        taken = zeros_like(rising).scatter(0, order, rising)
        return taken.view(rows, drafts).sum(1)

    def _seconds(self, rows: int, drafts: int, device: torch.device) -> Tensor:
        """Return the seconds of rounds that verify 0, 1, … drafts of all rows together.

        Made once: a round of fixed shapes may not copy from the host.
        """
        import torch

        key = rows, drafts, device
        if key not in self._made:
            seconds = [self.costs.round_time(drafts, m / rows) for m in range(rows * drafts + 1)]
            self._made[key] = torch.tensor(seconds, dtype=torch.float64, device=device)
        return self._made[key]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"by": _BY_CONFIDENCE}


def _odds(rate: np.ndarray) -> np.ndarray:
    rate = np.clip(rate, _LEAST_RATE, _MOST_RATE)
    return rate / (1 - rate)


class Controller:
    """Chooses the depth of each round of one generation.

    Acceptance is estimated per sequence: the odds of `control.rates`, times one factor for how the sequence has done so
    far at all depths together, then corrected per depth. Rows of a batch share one pass, so they share a depth: the one
    at which the sum of their expected tokens per second is highest.

    Args:
        depths: to choose from, beside 0: of a chain 1 to its depth, of a tree the whole tree only.
        nodes: how many drafts are verified at each of these depths.
    """

    def __init__(self, control: Control, sequences: int, depths: Sequence[int], nodes: Sequence[int]):
        self.control = control
        self.depths = (0, *depths)
        self.times = np.array([control.costs.round_time(d, n) for d, n in zip(self.depths, (0, *nodes), strict=True)])
        deepest = max(self.depths)
        prior = np.clip(control.rates, _LEAST_RATE, _MOST_RATE)
        self.prior = np.concatenate([prior, np.full(max(0, deepest - len(prior)), prior[-1])])[:deepest]
        self.reached = np.zeros((sequences, deepest))
        self.kept = np.zeros((sequences, deepest))
        self.depth: int | None = None  # of the last round
        self.rested = 0
        self.wait = _FIRST_WAIT
        self.trying = False

    def rates(self, rows: Sequence[int]) -> np.ndarray:
        """Return the acceptance expected at each depth, `[rows, D]`."""
        reached = self.reached[rows]
        kept = self.kept[rows]
        weight = self.control.weight
        total = reached.sum(1)
        expected = np.where(total > 0, (reached * self.prior).sum(1) / np.maximum(total, 1e-9), self.prior[0])
        rate = (weight * expected + kept.sum(1)) / (weight + total)
        odds = (_odds(rate) / _odds(expected))[:, None] * _odds(self.prior)
        return (weight * odds / (1 + odds) + kept) / (weight + reached)

    def goodput(self, rows: Sequence[int]) -> np.ndarray:
        """Return the expected tokens per second of the sequences `rows` at each of `depths`."""
        along = np.concatenate([np.zeros((len(rows), 1)), np.cumprod(self.rates(rows), 1)], 1).cumsum(1)
        return (len(rows) + along[:, list(self.depths)].sum(0)) / self.times

    def choose(self, rows: Sequence[int]) -> int:
        """Return the depth of the next round of the sequences `rows`; 0 is a plain round."""
        if self.depth == 0 and self.rested < self.wait:
            self.rested += 1
            return 0
        goodput = self.goodput(rows)
        best = int(goodput[1:].argmax()) + 1
        if self.depth == 0:
            # Plain rounds show nothing of drafts, so one round tries again; each failure doubles the wait.
            self.trying = True
            self.wait = min(2 * self.wait, _LONGEST_WAIT)
            self.rested = 0
            return self._take(best)
        if goodput[best] < goodput[0] * (_ENTER if self.trying or self.depth is None else 1):
            self.trying, self.rested = False, 1
            return self._take(0)
        if self.trying:
            self.trying, self.wait = False, _FIRST_WAIT
        current = best if self.depth is None else self.depths.index(self.depth)
        return self._take(best if goodput[best] > _SWITCH * goodput[current] else current)

    def _take(self, index: int) -> int:
        self.depth = self.depths[index]
        return self.depth

    def note(self, row: int, tried: int, accepted: int) -> None:
        """Record a round of sequence `row`, which kept `accepted` of the drafts up to depth `tried`."""
        if not tried:
            return
        self.reached[row] *= _FORGET
        self.kept[row] *= _FORGET
        self.reached[row, : min(tried, accepted + 1)] += 1
        self.kept[row, :accepted] += 1
