"""Hydra: Medusa's heads made sequential (arXiv 2402.05109, §3).

Head k reads h_t, as Medusa's does, and the embeddings of the k tokens between it and the token it predicts: the root x_{t+1}
and the drafts x_{t+2} … x_{t+k}. So what is drafted depends on what was drafted before. Training gives it the tokens that
really followed. The paper's Hydra++ adds a layer of attention over the text, which this one does not have.

Shapes: B rows, P supervised positions, W nodes, H hidden size, V' draft vocabulary, K heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..targets import Target
from .base import TargetBatch
from .medusa import Medusa, MedusaConfig, State


@dataclass
class HydraConfig(MedusaConfig):
    """Settings of Hydra's heads: those of Medusa's, and one more.

    Attributes:
        norm_embeddings: an RMS norm without weights on each embedding. Many targets' embeddings are much smaller than their last
            hidden states, and fresh heads take long to hear them.
    """

    norm_embeddings: bool = False


@dataclass
class _State(State):
    paths: Tensor | None = (
        None  # [B, 1 + n, K], the tokens on the way to the root and to each node read, both ends included; 0 behind them
    )
    passes: int = 0  # of `extend` in this round: no node is deeper


class Hydra(Medusa):
    """Hydra's heads."""

    name = "hydra"
    config_class = HydraConfig
    config: HydraConfig

    def _conditions(self, index: int) -> int:
        return index + 1

    def _given(self, batch: TargetBatch, index: int, rows: Tensor, begins: Tensor) -> Tensor:
        between = begins.clamp(min=0)[:, None] + torch.arange(1, index + 2, device=begins.device)
        return self._embedded(batch.target, batch.tokens[rows[:, None], between.clamp(max=batch.tokens.shape[1] - 1)])

    def _embedded(self, target: Target, tokens: Tensor) -> Tensor:
        """Conditions `[..., C · H]` from tokens `[..., C]`."""
        embedded = target.embed(tokens).to(self.head(0).dtype)
        if self.config.norm_embeddings:
            embedded = torch.nn.functional.rms_norm(embedded, embedded.shape[-1:], None, 1e-6)
        return embedded.flatten(-2)

    # ------------------------------------------------------------ decoding

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        return _State(target)

    def begin(self, state: State, root: Tensor) -> Tensor:
        assert isinstance(state, _State)
        state.paths, state.depths, state.passes = (
            torch.nn.functional.pad(root[:, None, None], (0, self.config.num_heads - 1)),
            None,
            0,
        )
        return self.lm_head(0, state.target)(self._outputs(state, state.paths, 0))[:, 0]

    def extend(self, state: State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        assert isinstance(state, _State)
        assert state.paths is not None
        if parents is None:
            state.passes = self._checked(state.passes + 1)
            paths = state.paths[:, -1:].clone()
            paths[:, :, state.passes] = tokens
            state.paths = torch.cat([state.paths, paths], 1)
            return self.lm_head(state.passes, state.target)(self._outputs(state, paths, state.passes))
        state.passes = min(state.passes + 1, self.config.num_heads - 1)  # each pass reads at most one level deeper
        depths = self._place(state, parents).clamp(max=state.passes)[:, :, None]
        paths = state.paths.gather(1, (parents + 1)[:, :, None].expand(-1, -1, state.paths.shape[2])).scatter(
            2, depths, tokens[:, :, None]
        )
        state.paths = torch.cat([state.paths, paths], 1)
        return self._by_depth(state, paths, depths)

    def _by_depth(self, state: _State, paths: Tensor, depths: Tensor) -> Tensor:
        """Logits `[B, W, V']` behind nodes of different `depths` `[B, W, 1]`: each head reads all nodes, as the host does not know which is whose."""
        heads = range(1, state.passes + 1)
        found = [self._outputs(state, paths, k) for k in heads]
        if not self.config.share_lm_head:
            found = [self.lm_head(k, state.target)(x) for k, x in zip(heads, found, strict=True)]
        chosen = (
            found[0]
            if len(found) == 1
            else torch.stack(found).gather(0, (depths - 1).expand(*depths.shape[:2], found[0].shape[-1])[None])[0]
        )
        return self.lm_head(0, state.target)(chosen) if self.config.share_lm_head else chosen

    def _outputs(self, state: _State, paths: Tensor, index: int) -> Tensor:
        """What the head at `index` makes of nodes with `paths` `[B, W, K]`: `[B, W, H]`."""
        assert state.hidden is not None
        hidden = state.hidden[:, None].expand(-1, paths.shape[1], -1)
        return self.head(index)(hidden, self._embedded(state.target, paths[:, :, : index + 1]))

    def reset(self, state: State) -> None:
        super().reset(state)
        assert isinstance(state, _State)
        state.paths, state.passes = None, 0
