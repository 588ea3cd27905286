"""What sessions keep between passes: ragged runs of tokens and states, and the nodes of a growing tree.

Shapes: B rows, P and Q tokens, W nodes read at once, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..targets import Nodes, RowLengths

T = TypeVar("T")


def padded(rows: Sequence[Sequence[int]], device: torch.device, fill: int = 0) -> Tensor:
    """Return lists of different lengths as one tensor `[B, W]`, with `fill` after the shorter ones."""
    width = max(map(len, rows))
    filled = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).reshape(len(rows), width)


def joined(before: Tensor, counts: RowLengths, after: Tensor) -> Tensor:
    """Join two ragged runs: each row's first `counts` entries of `before` `[B, P, ...]`, then `after` `[B, Q, ...]`.

    Returns:
        `[B, P' + Q, ...]`, P' the largest count; what stands after the end of a shorter row means nothing.
    """
    before = before[:, : max(counts.values)]
    both = torch.cat([before, after], 1)
    if min(counts.values) == before.shape[1]:
        return both
    index, own = torch.arange(both.shape[1], device=both.device).expand(len(both), -1), counts.tensor[:, None]
    index = torch.where(index < own, index, index - own + before.shape[1]).clamp(max=both.shape[1] - 1)
    return both.gather(1, index.view(*index.shape, *[1] * (both.dim() - 2)).expand_as(both))


def take_positions(x: Tensor, index: Tensor) -> Tensor:
    """Return `x` `[B, T, H]` at indices `[B or 1, T']`, the nearest one where they leave it: `[B, T', H]`."""
    index = index.clamp(0, x.shape[1] - 1)
    return x.gather(1, index[:, :, None].expand(len(x), -1, x.shape[2]))


def required(value: T | None, missing: str) -> T:
    """Return `value`, which a session was given before it was asked; else the error says what is `missing`."""
    if value is None:
        raise RuntimeError(missing)
    return value


@dataclass
class PendingInputs:
    """What the target has processed and a head has not: a token is read with its successor, which `prefill` may bring.

    Attributes:
        tokens: `[B, Q]`.
        hidden: the target's hidden states at them, `[B, Q, ...]`.
        counts: how many of them are each row's.
    """

    tokens: Tensor
    hidden: Tensor
    counts: RowLengths

    def then(self, more: PendingInputs) -> PendingInputs:
        """Return this run, and after it `more`."""
        return PendingInputs(
            joined(self.tokens, self.counts, more.tokens),
            joined(self.hidden, self.counts, more.hidden),
            self.counts.plus(more.counts),
        )

    def trimmed(self) -> PendingInputs:
        """Return it without what is no row's. (The counts are read on the host.)"""
        longest = max(self.counts.values)
        return PendingInputs(self.tokens[:, :longest], self.hidden[:, :longest], self.counts)

    def select(self, rows: list[int]) -> PendingInputs:
        """Return these rows of it."""
        return PendingInputs(self.tokens[rows], self.hidden[rows], self.counts.select(rows))

    def tensors(self) -> list[Tensor]:
        """Return its tensors, from which `PendingInputs.of` makes it again."""
        return [self.tokens, self.hidden, self.counts.tensor]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> PendingInputs:
        """Make one from the tensors of another."""
        tokens, hidden, counts = tensors
        return cls(tokens, hidden, RowLengths(counts))


class TreeMask:
    """The drafted nodes that a session has read in this round, in that order: where each stands and whom it sees.

    Args:
        before: uncommitted entries of the session's cache that lie before the nodes; all nodes see them.
    """

    def __init__(self, rows: int, before: int, device: torch.device | str):
        # Index 0 is the root, node i is index i + 1.
        self._depths = torch.full((rows, 1), before - 1, device=device)  # [B, 1 + n]
        self._sees = torch.ones(rows, 1, before, dtype=torch.bool, device=device)  # [B, 1 + n, before + n]

    def grow(self, parents: Tensor) -> Nodes:
        """Add nodes below the nodes `parents` `[B, W]` (−1: the root); return their places for the pass over them."""
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
        return self._add(self._depths.gather(1, parents + 1) + 1, parents, own)

    def grow_chain(self, after: Tensor, length: int) -> Nodes:
        """Add a chain of `length` nodes, whose first stands below the node `after` `[B]` (−1: the root)."""
        own = torch.ones(length, length, dtype=torch.bool, device=after.device).tril()
        depths = self._depths.gather(1, after[:, None] + 1) + 1 + torch.arange(length, device=after.device)
        return self._add(depths, after[:, None].expand(-1, length), own)

    def _add(self, depths: Tensor, below: Tensor, own: Tensor) -> Nodes:
        """Add nodes at `depths` `[B, W]`, which see what `below` `[B, W]` see, and each other by `own` `[W, W]`."""
        rows, width = depths.shape
        inherited = self._sees.gather(1, (below + 1)[:, :, None].expand(-1, -1, self._sees.shape[2]))
        sees = torch.cat([inherited, own.expand(rows, -1, -1)], 2)
        self._depths = torch.cat([self._depths, depths], 1)
        self._sees = torch.cat([nn.functional.pad(self._sees, (0, width)), sees], 1)
        return Nodes(depths, sees)
