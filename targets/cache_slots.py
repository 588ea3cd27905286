"""The places of a pass's tokens in a cache, in their texts, and in a tree of drafts; and which others they attend to.

Shapes: B rows, Q new tokens per row, `used` slots of the cache that the pass reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Nodes:
    """The tokens of a pass as nodes of a tree that grows after the committed entries."""

    depths: Tensor  # place in the text, counted from the first uncommitted token, [B, Q]
    sees: Tensor  # uncommitted entries that each token sees, itself too, earlier passes' first, [B, Q, offset + Q] bool

    @classmethod
    def of_tree(cls, parents: Tensor, depth: int) -> Nodes:
        """Return a root and the nodes after it, `[B, 1 + N]` tokens, none deeper than `depth`.

        `parents` are each node's parent among the nodes, `[B, N]`; −1 for the root.
        """
        rows, count = parents.shape[0], parents.shape[1] + 1
        above = torch.nn.functional.pad(parents + 1, (1, 0))  # the root is its own parent
        here = torch.arange(count, device=parents.device).expand(rows, -1)
        sees = torch.zeros(rows, count, count, dtype=torch.bool, device=parents.device)
        depths = torch.zeros_like(here)
        for _ in range(depth + 1):
            sees.scatter_(2, here[:, :, None], True)
            depths = depths + (here > 0)
            here = above.gather(1, here)
        return cls(depths, sees)

    @classmethod
    def of_chain(cls, length: int, device: torch.device | str) -> Nodes:
        """Return a root and a chain of `length` after it, in one row for all."""
        return cls(
            torch.arange(length + 1, device=device)[None],
            torch.ones(1, length + 1, length + 1, dtype=torch.bool, device=device).tril(),
        )


@dataclass(frozen=True)
class Placement:
    """The slots of a cache that a pass writes, and its tokens' positions in their texts.

    Attributes:
        index: the slots to write: one slice, where it is the same for all rows; else the rows
            `[B, 1]` and their slots `[B, Q]`.
        nodes: None for a chain. Else the depths of all uncommitted entries, `[B, offset + Q]`, and which of them the
            tokens see.
    """

    lengths: Tensor  # committed entries per row, [B]
    used: int  # how many slots the pass reads
    slots: Tensor  # that it writes, [B, Q]
    positions: Tensor  # [B, Q]
    index: slice | tuple[Tensor, Tensor]
    nodes: Nodes | None = None

    def visible(self, first: int = 0) -> Tensor:
        """Return the slots that each token may see, `[B, Q, used]` bool; entries before `first` see themselves only."""
        slots = self._all_slots()
        seen = slots <= self.slots[:, :, None] if self.nodes is None else self._seen_by_nodes(self.nodes.sees)
        if not first:
            return seen
        return (seen & (self._places() >= first)[:, None]) | (slots == self.slots[:, :, None])

    def within(self, window: int) -> Tensor:
        """Return the slots at most `window` − 1 places before each token, `[B, Q, used]` bool."""
        return self._places()[:, None] > self.positions[:, :, None] - window

    def in_chunk(self, size: int) -> Tensor:
        """Return the slots in the same part of `size` places as each token, `[B, Q, used]` bool."""
        return self._places()[:, None] // size == self.positions[:, :, None] // size

    def _seen_by_nodes(self, sees: Tensor) -> Tensor:
        """Return the slots that nodes see, `[B, Q, used]`, from the uncommitted entries that they see, `[B, Q, N]`."""
        after, count = self._after_committed(), sees.shape[2]
        own = sees.gather(2, after.clamp(0, count - 1)[:, None].expand(-1, sees.shape[1], -1))
        return (after < 0)[:, None] | (own & (after < count)[:, None])

    def _places(self) -> Tensor:
        """Return the place of each slot's token in its text, `[B or 1, used]`: for nodes that is not their slot."""
        places = self._all_slots()[None]
        if self.nodes is None:
            return places
        after, depths = self._after_committed(), self.nodes.depths
        own = self.lengths[:, None] + depths.gather(1, after.clamp(0, depths.shape[1] - 1))
        return torch.where(after < 0, places, own)

    def _after_committed(self) -> Tensor:
        """Return each slot's number among the uncommitted ones, from 0, `[B, used]`; negative for committed ones."""
        return self._all_slots() - self.lengths[:, None]

    def _all_slots(self) -> Tensor:
        return torch.arange(self.used, device=self.lengths.device)
