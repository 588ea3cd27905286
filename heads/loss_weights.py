"""Accepted positions: which tokens of a text rounds of decoding reached, and the share of a loss that lies on those.

A round begins after a root and emits tokens: the drafts that were accepted, and the target's own after them. At each of
these depths a draft was judged. So every token of an answer but its first was reached in one round, at one depth d,
from the root d places before it: there a head learns exactly what decoding asks of it.

Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..targets.sequence_packing import Documents


@dataclass(frozen=True)
class AcceptedPositions:
    """What rounds reached in a batch, and the share of each text's weights that lies there.

    Attributes:
        depths: at which depth a round reached each token, `[R, T]`; 0 where none did.
    """

    depths: Tensor
    share: float

    def reached(self, rows: Tensor, places: Tensor, depths: Tensor) -> Tensor:
        """Return which drafts rounds reached, bool: of the tokens at `places` of `rows`, at `depths` from 1 on."""
        return self.depths[rows, places] == depths

    def roots(self) -> Tensor:
        """Return the roots of rounds, `[R, T]` bool: the tokens before those of depth 1."""
        return torch.nn.functional.pad(self.depths == 1, (0, 1))[:, 1:]

    def weighed(
        self,
        weights: Tensor,
        rows: Tensor,
        places: Tensor,
        depths: Tensor,
        documents: Documents | None = None,
        rest: Tensor | None = None,
    ) -> Tensor:
        """Return `weights` of drafts, of which the share has moved to what was reached; the sum of each text stays.

        Draft i of a text whose weights are w has (1 − share) · w_i, and if it was reached also share · w_i · Σ w / Σ w
        of the reached ones. A text of which nothing was reached keeps its weights.

        Args:
            rows, places, depths: as in `reached`; they broadcast to `weights`.
            documents: the texts that rows hold; None where each is one.
            rest: replaces w in the first part, with the same sums; None for w.
        """
        rest = weights if rest is None else rest
        reached = weights * self.reached(rows, places, depths)
        numbers = rows if documents is None else documents.numbers(rows.device)[rows, places]
        texts = numbers.expand_as(weights)
        count = len(self.depths) if documents is None else len(documents) + 1
        index, none = texts.flatten(), weights.new_zeros(count)
        whole, there = (none.index_add(0, index, values.flatten()) for values in (weights, reached))
        is_any = there > 0
        factors = torch.where(is_any, self.share * whole / there.where(is_any, torch.ones_like(there)), 0.0)
        return (1 - self.share * is_any)[texts] * rest + factors[texts] * reached
