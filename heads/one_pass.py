"""Decoding with a drafter whose round is one pass, whatever is drafted from it.

Shapes: B rows, k drafts, W nodes, H hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..common import BadInputError
from ..targets import RaggedCache
from .session import NodeSession
from .tree_state import required


class OnePassSession(NodeSession):
    """A session that knows what every draft of a round may be when the round begins.

    Attributes:
        cache: its own.
        head: makes logits of states.
        logits: of this round's drafts, `[B, k, V']`; None before `prefill`.
        depths: of the root and of each node of a tree that was read, `[B, 1 + n]`.
        level: of the last node of a chain that was read, 0 for the root.
    """

    def __init__(
        self, cache: RaggedCache, head: Callable[[Tensor], Tensor], output_ids: Tensor | None, drafts: int, name: str
    ):
        super().__init__(output_ids, drafts)
        self.cache, self.head, self.drafts, self.name = cache, head, drafts, name
        self.logits: Tensor | None = None
        self.depths, self.level = self._at_root(), 0

    @abstractmethod
    def draft(self, root: Tensor) -> Tensor:
        """Return the states that say the drafts after `root` `[B]`, `[B, k, H]`: the pass of this round."""

    def prefill(self, root: Tensor) -> Tensor:
        self.logits = self.head(self.draft(root))
        self.depths, self.level = self._at_root(), 0
        return self.logits[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        logits = required(self.logits, "decode: a round begins with the root; call prefill.")
        if parents is None:
            self.level = self._checked(self.level + 1)
            return logits[:, self.level, None]
        depths = self._place(parents).clamp(max=self.drafts - 1)
        return logits.gather(1, depths[:, :, None].expand(-1, -1, logits.shape[2]))

    def _at_root(self) -> Tensor:
        return torch.zeros_like(self.cache.lengths)[:, None]

    def _place(self, parents: Tensor) -> Tensor:
        """Note nodes below `parents` `[B, W]`; return their depths, 1 for a child of the root."""
        depths = self.depths.gather(1, parents + 1) + 1
        self.depths = torch.cat([self.depths, depths], 1)
        return depths

    def _checked(self, level: int) -> int:
        """Return `level` if a draft stands below it."""
        if level >= self.drafts:
            raise BadInputError(f"a block of this {self.name} drafter has {self.drafts} drafts; lower the depth.")
        return level

    def caches(self) -> list[RaggedCache]:
        return [self.cache]

    def carry(self, tensors: list[Tensor]) -> None:
        """Nothing is carried from round to round but the cache."""

    def reset(self) -> None:
        super().reset()
        self.logits = None

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
