"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass (arXiv 2602.01469).

EAGLE-3 reads its own outputs, draft after draft. This head reads, after the last true pair of hidden states and token,
pairs of masks: a vector in place of the hidden states and a token in place of the draft. Its network is EAGLE-3's.

Shapes: B rows, T positions, E masks of a row, P drafts, K taps, H hidden size, V' draft vocabulary, S drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ...targets.fused_layers import CachedLayers, FusedLayer
from ..base import DrafterLoss, TargetBatch
from ..eagle import Eagle3, Eagle3Config
from ..session import Abilities, PendingInputs, required
from ..vocabulary import begin_mask, unused_token
from .parallel_drafts import ParallelSession, RolledLayers, Rollouts, place_texts, rollout_loss


@dataclass
class PEagleConfig(Eagle3Config):
    """Settings of a P-EAGLE head: EAGLE-3's, and those of its masks.

    Attributes:
        num_layers: the paper's 4; one drafts much worse without feedback.
        steps: S, the drafts of a pass. The paper trains 8, also where fewer are drafted.
        decay: weight of draft d is `decay ** (d − 1)`; the paper has none.
        keep_ratio: the part of the rollouts that goes on to the next depth; at least `keep_least` of all.
        mask_token_id: as in `DFlashConfig`.
    """

    shares = ("keep_ratio", "keep_least")

    num_layers: int = 4
    steps: int = 8
    decay: float = 1.0
    keep_ratio: float = 0.8
    keep_least: float = 0.2
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_loss or self.sliding_window:
            raise BadInputError(
                "peagle: feature_loss and sliding_window are of heads that read their own outputs; leave them out."
            )

    def sizes(self, target: Target) -> dict[str, Any]:
        mask = unused_token(target) if self.mask_token_id is None else self.mask_token_id
        return super().sizes(target) | {"mask_token_id": mask}


class PEagle(Eagle3):
    """An EAGLE-3 head that drafts in one pass."""

    name = "peagle"
    config_class = PEagleConfig
    abilities = Abilities(reads_nodes=True, fixed_shapes=True, one_pass=True)
    config: PEagleConfig

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.taps) * config.hidden_size))
        self.mask = nn.Parameter(torch.zeros(config.hidden_size)) if config.mask_token_id is None else None

    @property
    def max_depth(self) -> int:
        return self.config.steps

    @classmethod
    def build(cls, config: PEagleConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        head = super().build(config, target, token_counts)
        begin_mask(head.mask, head.config.mask_token_id, target)
        return head

    def masks(self, target: Target, first: FusedLayer | None = None) -> tuple[Tensor, Tensor]:
        """Return a mask's pair: its embedding `[1, 1, H]`, and its fused hidden input, `[1, 1, H]`."""
        hidden = self.fuse(self.mask_hidden.view(1, 1, len(self.taps), -1), first)
        if self.mask is not None:
            return self.mask.expand(1, 1, -1), hidden
        token = torch.full((1, 1), self.config.mask_token_id or 0, device=hidden.device)
        return target.embed(token).to(hidden.dtype), hidden

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        # The pair at t predicts x_{t + 2}, a mask d places after it x_{t + 2 + d}.
        return rollout_loss(self, batch, 2, self.roll, partial(self.logits, target=batch.target), self.output_weights())

    def roll(self, batch: TargetBatch, rollouts: Rollouts) -> Tensor:
        """Return the last layer's output at each pair (f_t, x_{t + 1}) and at each mask, `[B, T + E, H]`."""
        assert batch.hidden is not None
        layers = RolledLayers(self.own_layers, self.config, self.rotary, rollouts)
        first, (mask, masked) = layers.layers[0], self.masks(batch.target)
        shape = (len(batch.tokens), rollouts.anchors.shape[1], -1)
        embedded = batch.target.embed(batch.tokens.roll(-1, 1)).to(masked.dtype)
        embedded = torch.cat([embedded, mask.expand(shape)], 1)
        hidden = torch.cat([self.disturb(self.fuse(batch.hidden)), masked.expand(shape)], 1)
        return layers.forward(*self.enter(self.prepare(embedded, first), hidden, first))

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> PEagleSession:
        length = max_length + spare + self.config.steps
        cache = self.new_cache(target, batch_size, length)
        return PEagleSession(self, target, cache, self.decoding_layers(length))

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return super().state_bytes(target, batch_size, max_length + spare + self.config.steps)


class PEagleSession(ParallelSession):
    """A session that reads the pairs that the target has processed since the last round, and the masks after them."""

    def __init__(self, head: PEagle, target: Target, cache: RaggedCache, layers: CachedLayers):
        super().__init__(head, head.max_depth, cache, partial(head.logits, target=target))
        self.drafter = head
        self.target = target
        self.layers = layers

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.note(tokens, required(hidden, "peagle: update needs the target's hidden states."), counts)

    def run_pass(self, unread: PendingInputs, root: Tensor, masks: int) -> tuple[Tensor, RowLengths]:
        first, shape = self.layers.layers[0], (len(root), masks, -1)
        following = unread.tokens.roll(-1, 1).scatter(1, (unread.counts.tensor - 1)[:, None], root[:, None])  # [B, Q]
        mask, masked = self.drafter.masks(self.target, first)
        embedded = self.target.embed(following).to(masked.dtype)
        embedded = torch.cat([embedded, mask.expand(shape)], 1)  # [B, Q + k − 1, H]
        hidden = torch.cat([self.drafter.fuse(unread.hidden, first), masked.expand(shape)], 1)
        positions = place_texts(self.cache, unread.counts, following.shape[1], masks)
        entered = self.drafter.enter(self.drafter.prepare(embedded, first), hidden, first)
        return self.layers.forward(*entered, self.cache, positions, True), unread.counts
