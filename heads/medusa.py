"""Medusa: heads on the target's last hidden state, each of which predicts one token further ahead (arXiv 2401.10774).

Head k reads h_t, the hidden state that gives the target's own x_{t+1}, and predicts x_{t+1+k}. When a round begins,
x_{t+1} is the root: depth k of a proposal comes from head k and the last processed hidden state, whatever was drafted
before it. (Heads that also read what was drafted before are Hydra's, arXiv 2402.05109.)

Shapes: B rows, T positions, P supervised positions, W nodes, H hidden size, V' draft vocabulary, K heads, C vectors
that a head reads beside the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ..targets import RaggedCache, RowLengths, Target
from .base import DrafterLoss, HeadConfig, HeadDrafter, TargetBatch
from .divergences import LossName
from .losses import FIRST_LEARNED, LossSettings, compare_drafts, divergence, metrics_by_depth
from .session import Abilities, NodeDepths, NodeSession, required


@dataclass
class MedusaConfig(HeadConfig):
    """Settings of Medusa's heads; zeros mean "as the target".

    Attributes:
        num_heads: K, and so the deepest proposal.
        num_layers: residual blocks of each head.
        bias: whether the blocks add a bias, as those of published heads do.
        share_lm_head: all heads use the target's own output embedding, which is not trained, instead of a copy each.
        decay: weight of head k is `decay ** (k − 1)`.
        loss: Medusa's own is hard_ce.
    """

    least: ClassVar = {"num_heads": 1, "num_layers": 1}

    num_heads: int = 4
    num_layers: int = 1
    bias: bool = False
    share_lm_head: bool = False
    draft_vocab_size: int = 0
    decay: float = 0.8
    loss: LossName = "hard_ce"
    hidden_size: int = 0
    vocab_size: int = 0
    target_layers: int = 0


class MedusaBlock(nn.Module):
    """A residual block: x + SiLU(W cat[x, conditions] + b). W and b start at zero: a new block changes nothing."""

    def __init__(self, size: int, conditions: int = 0, bias: bool = False):
        super().__init__()
        self.linear = nn.Linear((1 + conditions) * size, size, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, conditions: Tensor | None = None) -> Tensor:
        """Return the block's output `[..., H]` for `x` `[..., H]` and `conditions` `[..., C · H]`."""
        return x + nn.functional.silu(self.linear(x if conditions is None else torch.cat([x, conditions], -1)))


class Head(nn.Module):
    """A head: residual blocks, and an output embedding if it has one of its own.

    `conditions`: how many vectors the first block reads beside the hidden state.
    """

    def __init__(self, config: MedusaConfig, conditions: int = 0):
        super().__init__()
        size, bias = config.hidden_size, config.bias
        self.first = MedusaBlock(size, conditions, bias)
        self.others = nn.ModuleList(MedusaBlock(size, bias=bias) for _ in range(config.num_layers - 1))
        self.lm_head = None if config.share_lm_head else nn.Linear(size, config.draft_vocab_size, bias=False)

    def forward(self, hidden: Tensor, conditions: Tensor | None = None) -> Tensor:
        """Return the output embedding's input `[..., H]` of states `[..., H]` and conditions `[..., C · H]`."""
        x = self.first(hidden.to(self.dtype), conditions)
        for block in self.others:
            x = block(x)
        return x

    @property
    def dtype(self) -> torch.dtype:
        return self.first.linear.weight.dtype


class Medusa(HeadDrafter[MedusaConfig]):
    """A drafter of Medusa's heads, which read nothing but the hidden state."""

    name = "medusa"
    config_class = MedusaConfig
    packs = True
    abilities = Abilities(reads_nodes=True, fixed_shapes=True)

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.heads = nn.ModuleList(Head(config, self._conditions(k)) for k in range(config.num_heads))

    def _conditions(self, index: int) -> int:
        """Return the number of vectors that the head at `index` reads beside the hidden state."""
        return 0

    @property
    def max_depth(self) -> int:
        return self.config.num_heads

    def own_outputs(self) -> list[nn.Linear]:
        return [own for k in range(self.config.num_heads) if (own := self.head(k).lm_head) is not None]

    def head(self, index: int) -> Head:
        """Return the head at `index`, which predicts the token `index` + 2 places after the state it reads."""
        return cast(Head, self.heads[index])

    def lm_head(self, index: int, target: Target) -> Callable[[Tensor], Tensor]:
        """Return the output embedding of the head at `index`, scaled as the target's."""
        own = self.head(index).lm_head
        return (lambda x: target.lm_head(x, self.output_ids)) if own is None else (lambda x: target.scale(own(x)))

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return Σ_k decay^(k−1) · Σ_positions loss_k."""
        wanted = batch.supervised.clone()
        wanted[:, :FIRST_LEARNED] = False
        rows, places = wanted.nonzero(as_tuple=True)
        outputs, here = self.outputs(batch, rows, places)  # [K, P, H], [K, P]
        count = self.config.num_heads
        steps = torch.arange(count, device=wanted.device)[:, None]
        weights = self.config.decay**steps * here  # [K, P]
        heads = [self.lm_head(k, batch.target) for k in range(count)]
        parameters = [own.weight for own in self.own_outputs()]
        loss = divergence(self.config.loss)
        settings = LossSettings(batch.target.lm_head, heads, loss, self.output_ids, parameters)
        result = compare_drafts(batch, rows, places, outputs, settings, weights)
        return DrafterLoss(result.total, wanted.sum(), metrics_by_depth(result, wanted, here))

    def outputs(self, batch: TargetBatch, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heads' outputs `[K, P, H]`, and which tokens each head can predict, `[K, P]`.

        The tokens are those at `places` `[P]` of `rows` `[P]`.
        """
        begins = [places - 2 - k for k in range(self.config.num_heads)]
        outputs = [
            self.head(k)(batch.last[rows, t.clamp(min=0)], self._given(batch, k, rows, t)) for k, t in enumerate(begins)
        ]
        starts = 0 if batch.documents is None else batch.documents.starts(rows.device)[rows, places]
        return torch.stack(outputs), torch.stack([t >= starts for t in begins])

    def _given(self, batch: TargetBatch, index: int, rows: Tensor, begins: Tensor) -> Tensor | None:
        """Return the conditions `[P, C · H]` of the head at `index` for hidden states at `begins` `[P]` of `rows`."""
        return None

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> HeadsSession:
        return MedusaSession(self, target, batch_size)


class HeadsSession(NodeSession):
    """A session that holds the target's hidden state at each row's last processed token."""

    def __init__(self, drafter: Medusa, target: Target, batch_size: int):
        super().__init__(drafter.output_ids)
        self.drafter, self.target = drafter, target
        self.hidden = torch.zeros(batch_size, 0, device=target.device)  # `[B, H]` from the first `update` on
        self.nodes = NodeDepths(drafter.max_depth, drafter.name)

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        hidden = required(hidden, f"{self.drafter.name}: update needs the target's hidden states.")
        last = (counts.tensor - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        self.hidden = hidden[:, :, 0].gather(1, last)[:, 0]

    def carried(self) -> list[Tensor]:
        return [self.hidden]

    def carry(self, tensors: list[Tensor]) -> None:
        (self.hidden,) = tensors

    def reset(self) -> None:
        self.hidden = self.hidden[:, :0]


class MedusaSession(HeadsSession):
    """A session whose drafts at depth k come from head k, whatever was drafted before."""

    def __init__(self, drafter: Medusa, target: Target, batch_size: int):
        super().__init__(drafter, target, batch_size)
        self.logits: list[Tensor] = []  # of heads 1, 2, … in this round, `[B, V']` each

    def prefill(self, root: Tensor) -> Tensor:
        self.logits = []
        self.nodes.begin()
        return self._next()

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        if parents is None:
            self.nodes.descend()
            return self._next()[:, None]
        if len(self.logits) < self.drafter.config.num_heads:  # each pass reads at most one level deeper
            self._next()
        depths = self.nodes.place(parents)
        known = torch.stack(self.logits, 1)
        return known.gather(1, depths.clamp(max=len(self.logits) - 1)[:, :, None].expand(-1, -1, known.shape[2]))

    def _next(self) -> Tensor:
        """Return the logits `[B, V']` of the next head."""
        index = len(self.logits)
        self.logits.append(self.drafter.lm_head(index, self.target)(self.drafter.head(index)(self.hidden)))
        return self.logits[-1]
