"""What sessions keep between passes: ragged runs of tokens and states, and the nodes of a growing tree.

Shapes: B rows, P and Q tokens, W nodes read at once, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...targets import Counts, Nodes


def joined(before: Tensor, counts: Counts, after: Tensor) -> Tensor:
    """The first `counts` entries of each row of `before` `[B, P, ...]`, and behind them `after` `[B, Q, ...]`: `[B, P' + Q, ...]`; the rest means nothing."""
    before = before[:, : max(counts.values)]
    both = torch.cat([before, after], 1)
    if min(counts.values) == before.shape[1]:
        return both
    index = torch.arange(both.shape[1], device=both.device).expand(len(both), -1)
    index = torch.where(index < counts.tensor[:, None], index, index - counts.tensor[:, None] + before.shape[1]).clamp(
        max=both.shape[1] - 1
    )
    return both.gather(1, index.view(*index.shape, *[1] * (both.dim() - 2)).expand_as(both))


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """`x` `[B, T, H]` at indices `[B or 1, T']`, the nearest one where they leave it: `[B, T', H]`."""
    index = index.clamp(0, x.shape[1] - 1)
    return x.gather(1, index[:, :, None].expand(len(x), -1, x.shape[2]))


class Branches:
    """The drafted nodes that a drafter has read in this round, in the order of reading: where each stands and whom it sees.

    Args:
        before: uncommitted entries of the drafter's cache that lie before the nodes; all nodes see them.
    """

    def __init__(self, rows: int, before: int, device: torch.device | str):
        # Index 0 is the root, node i is index i + 1.
        self._depths = torch.full((rows, 1), before - 1, device=device)  # [B, 1 + n]
        self._sees = torch.ones(rows, 1, before, dtype=torch.bool, device=device)  # [B, 1 + n, before + n]

    def grow(self, parents: Tensor) -> Nodes:
        """Add nodes below the nodes `parents` `[B, W]` (−1: the root); returns their places for the pass that reads them."""
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
        return self._add(self._depths.gather(1, parents + 1) + 1, parents, own)

    def grow_chain(self, after: Tensor, length: int) -> Nodes:
        """Add a chain of `length` nodes, whose first stands below the node `after` `[B]` (−1: the root)."""
        own = torch.ones(length, length, dtype=torch.bool, device=after.device).tril()
        depths = self._depths.gather(1, after[:, None] + 1) + 1 + torch.arange(length, device=after.device)
        return self._add(depths, after[:, None].expand(-1, length), own)

    def _add(self, depths: Tensor, below: Tensor, own: Tensor) -> Nodes:
        """Nodes at `depths` `[B, W]` that see what the nodes `below` `[B, W]` see, and each other as `own` `[W, W]` says."""
        rows, width = depths.shape
        inherited = self._sees.gather(1, (below + 1)[:, :, None].expand(-1, -1, self._sees.shape[2]))
        sees = torch.cat([inherited, own.expand(rows, -1, -1)], 2)
        self._depths = torch.cat([self._depths, depths], 1)
        self._sees = torch.cat([nn.functional.pad(self._sees, (0, width)), sees], 1)
        return Nodes(depths, sees)
