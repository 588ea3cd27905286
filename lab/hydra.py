"""Hydra: Medusa's heads, each of which also reads the tokens that were drafted before (arXiv 2402.05109, §3).

Head k also reads the embeddings of the k tokens between h_t and the token that it predicts, the root x_{t+1} and the
drafts x_{t+2} … x_{t+k}; in training those that really followed.

Shapes: B rows, P supervised positions, W nodes, H hidden size, V' draft vocabulary, K heads, C tokens that a head
reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..heads.base import TargetBatch
from ..heads.medusa import HeadsSession, Medusa, MedusaConfig
from ..targets import RaggedCache, Target


@dataclass
class HydraConfig(MedusaConfig):
    """Settings of Hydra's heads: those of Medusa's, and one more.

    Attributes:
        norm_embeddings: an RMS norm without weights on each embedding: many targets' embeddings are much smaller than
            their last hidden states, and new heads take long to learn from them.
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
        return self.conditions(batch.target, batch.tokens[rows[:, None], between.clamp(max=batch.tokens.shape[1] - 1)])

    def conditions(self, target: Target, tokens: Tensor) -> Tensor:
        """Return the conditions `[..., C · H]` of tokens `[..., C]`."""
        embedded = target.embed(tokens).to(self.head(0).dtype)
        if self.config.norm_embeddings:
            embedded = nn.functional.rms_norm(embedded, embedded.shape[-1:], None, 1e-6)
        return embedded.flatten(-2)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> HydraSession:
        return HydraSession(self, target, batch_size)


class HydraSession(HeadsSession):
    """A session that holds the tokens on the way to each node of this round.

    Attributes:
        paths: to the root and to each node read, both ends included, 0 after them, `[B, 1 + n, K]`; n is −1 before a
            round.
    """

    drafter: Hydra

    def __init__(self, drafter: Hydra, target: Target, batch_size: int):
        super().__init__(drafter, target, batch_size)
        self.paths = torch.zeros(batch_size, 0, drafter.config.num_heads, dtype=torch.long, device=target.device)

    def prefill(self, root: Tensor) -> Tensor:
        self.nodes.begin()
        self.paths = nn.functional.pad(root[:, None, None], (0, self.drafter.config.num_heads - 1))
        return self._logits(0, self._answer(self.paths, 0))[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        if parents is None:
            level = self.nodes.descend()
            paths = self.paths[:, -1:].clone()
            paths[:, :, level] = tokens
            self.paths = torch.cat([self.paths, paths], 1)
            return self._logits(level, self._answer(paths, level))
        self.nodes.level = min(self.nodes.level + 1, self.nodes.deepest - 1)  # a pass reads at most one level deeper
        depths = self.nodes.place(parents).clamp(max=self.nodes.level)[:, :, None]
        above = self.paths.gather(1, (parents + 1)[:, :, None].expand(-1, -1, self.paths.shape[2]))
        paths = above.scatter(2, depths, tokens[:, :, None])
        self.paths = torch.cat([self.paths, paths], 1)
        return self._by_depth(paths, depths)

    def _by_depth(self, paths: Tensor, depths: Tensor) -> Tensor:
        """Return logits `[B, W, V']` after nodes of different `depths` `[B, W, 1]`, which the host does not know."""
        shared, heads = self.drafter.config.share_lm_head, range(1, self.nodes.level + 1)
        answers = [self._answer(paths, k) for k in heads]
        if not shared:
            answers = [self._logits(k, x) for k, x in zip(heads, answers, strict=True)]
        chosen = answers[0]
        if len(answers) > 1:
            index = (depths - 1).expand(*depths.shape[:2], chosen.shape[-1])
            chosen = torch.stack(answers).gather(0, index[None])[0]
        return self._logits(0, chosen) if shared else chosen

    def _answer(self, paths: Tensor, index: int) -> Tensor:
        """Return the output `[B, W, H]` of the head at `index` after nodes with these paths `[B, W, K]`."""
        hidden = self.hidden[:, None].expand(-1, paths.shape[1], -1)
        return self.drafter.head(index)(hidden, self.drafter.conditions(self.target, paths[:, :, : index + 1]))

    def _logits(self, index: int, answer: Tensor) -> Tensor:
        return self.drafter.lm_head(index, self.target)(answer)
