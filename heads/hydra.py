"""Hydra: Medusa's heads made sequential (arXiv 2402.05109, §3).

Head k reads h_t, as Medusa's does, and the embeddings of the k tokens between it and the token it predicts: the root
x_{t+1} and the drafts x_{t+2} … x_{t+k}. So what is drafted depends on what was drafted before. Training gives it the
tokens that really followed. The paper's Hydra++ adds a layer of attention over the text, which this one does not have.

Shapes: B rows, P supervised positions, W nodes, H hidden size, V' draft vocabulary, K heads, C tokens that a head
reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..targets import RaggedCache, Target
from .base import TargetBatch
from .medusa import HeadsSession, Medusa, MedusaConfig


@dataclass
class HydraConfig(MedusaConfig):
    """Settings of Hydra's heads: those of Medusa's, and one more.

    Attributes:
        norm_embeddings: an RMS norm without weights on each embedding. Many targets' embeddings are much smaller than
            their last hidden states, and fresh heads take long to hear them.
    """

    norm_embeddings: bool = False


class Hydra(Medusa):
    """A drafter of Hydra's heads, which also read the tokens that were drafted before."""

    name = "hydra"
    config_class = HydraConfig
    config: HydraConfig

    def _conditions(self, index: int) -> int:
        return index + 1

    def _given(self, batch: TargetBatch, index: int, rows: Tensor, begins: Tensor) -> Tensor:
        between = begins.clamp(min=0)[:, None] + torch.arange(1, index + 2, device=begins.device)
        return self._embedded(batch.target, batch.tokens[rows[:, None], between.clamp(max=batch.tokens.shape[1] - 1)])

    def _embedded(self, target: Target, tokens: Tensor) -> Tensor:
        """Return the conditions `[..., C · H]` that stand for tokens `[..., C]`."""
        embedded = target.embed(tokens).to(self.head(0).dtype)
        if self.config.norm_embeddings:
            embedded = torch.nn.functional.rms_norm(embedded, embedded.shape[-1:], None, 1e-6)
        return embedded.flatten(-2)

    def answer(self, target: Target, hidden: Tensor, paths: Tensor, index: int) -> Tensor:
        """Return what the head at `index` makes of states `[B, H]` and nodes with `paths` `[B, W, K]`: `[B, W, H]`."""
        hidden = hidden[:, None].expand(-1, paths.shape[1], -1)
        return self.head(index)(hidden, self._embedded(target, paths[:, :, : index + 1]))

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> HydraSession:
        return HydraSession(self, target, batch_size)


class HydraSession(HeadsSession):
    """A session that holds the tokens on the way to each node of this round.

    Attributes:
        paths: to the root and to each node read, both ends included, 0 after them, `[B, 1 + n, K]`; n is −1 before a
            round.
        passes: of `decode` in this round: no node is deeper.
    """

    drafter: Hydra

    def __init__(self, drafter: Hydra, target: Target, batch_size: int):
        super().__init__(drafter, target, batch_size)
        self.passes = 0
        self.paths = torch.zeros(batch_size, 0, drafter.config.num_heads, dtype=torch.long, device=target.device)

    def prefill(self, root: Tensor) -> Tensor:
        self.passes, self.depths = 0, None
        self.paths = torch.nn.functional.pad(root[:, None, None], (0, self.drafter.config.num_heads - 1))
        return self._logits(0, self._answer(self.paths, 0))[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        if parents is None:
            self.passes = self._checked(self.passes + 1)
            paths = self.paths[:, -1:].clone()
            paths[:, :, self.passes] = tokens
            self.paths = torch.cat([self.paths, paths], 1)
            return self._logits(self.passes, self._answer(paths, self.passes))
        self.passes = min(self.passes + 1, self.drafter.config.num_heads - 1)  # a pass reads at most one level deeper
        depths = self._place(parents).clamp(max=self.passes)[:, :, None]
        above = self.paths.gather(1, (parents + 1)[:, :, None].expand(-1, -1, self.paths.shape[2]))
        paths = above.scatter(2, depths, tokens[:, :, None])
        self.paths = torch.cat([self.paths, paths], 1)
        return self._by_depth(paths, depths)

    def _by_depth(self, paths: Tensor, depths: Tensor) -> Tensor:
        """Return logits `[B, W, V']` after nodes of different `depths` `[B, W, 1]`.

        Each head reads all nodes, as the host does not know which node is whose.
        """
        shared, heads = self.drafter.config.share_lm_head, range(1, self.passes + 1)
        found = [self._answer(paths, k) for k in heads]
        if not shared:
            found = [self._logits(k, x) for k, x in zip(heads, found, strict=True)]
        chosen = found[0]
        if len(found) > 1:
            index = (depths - 1).expand(*depths.shape[:2], chosen.shape[-1])
            chosen = torch.stack(found).gather(0, index[None])[0]
        return self._logits(0, chosen) if shared else chosen

    def _answer(self, paths: Tensor, index: int) -> Tensor:
        return self.drafter.answer(self.target, self.hidden, paths, index)

    def _logits(self, index: int, answer: Tensor) -> Tensor:
        return self.drafter.lm_head(index, self.target)(answer)
