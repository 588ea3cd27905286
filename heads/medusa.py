"""Medusa: heads on the target's last hidden state, each of which guesses one token further ahead (Medusa-1, arXiv 2401.10774).

Head k reads h_t, the hidden state that gives the target's own x_{t+1}, and predicts x_{t+1+k}. When a round begins, x_{t+1} is
the root, which the target has chosen but not processed: depth k of a proposal comes from head k and the last absorbed hidden
state, whatever was drafted before it. The target stays as it is; in Medusa-2 it learns with the heads, through a LoRA (train/joint.py).

Shapes: B rows, T positions, P supervised positions, W nodes, H hidden size, V' draft vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..ground import BadInputError, IncompatibleError
from ..targets import Counts, Target
from .base import DrafterLoss, TargetBatch
from .losses import LossName, chunked_compare, divergence, metrics_by_depth
from .parts.head_drafter import HeadConfig, HeadDrafter
from .session import Abilities


@dataclass
class MedusaConfig(HeadConfig):
    """Settings of Medusa's heads; zeros mean "as the target".

    Attributes:
        num_heads: K, and so the deepest proposal.
        num_layers: residual blocks of each head.
        share_lm_head: all heads use the target's own output embedding, which is not trained, instead of a copy each.
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        decay: weight of head k is `decay ** (k − 1)`.
        loss: see `losses.divergence`. Medusa's own is hard_ce.
        target_layers: of the target: its last hidden state is read.
    """

    num_heads: int = 4
    num_layers: int = 1
    share_lm_head: bool = False
    draft_vocab_size: int = 0
    decay: float = 0.8
    loss: LossName = "hard_ce"
    hidden_size: int = 0
    vocab_size: int = 0
    target_layers: int = 0

    def __post_init__(self) -> None:
        divergence(self.loss)
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise BadInputError(f"drafter: {name} must be at least 1, got {getattr(self, name)}.")


class Block(nn.Module):
    """x + SiLU(W cat[x, conditions]). W starts at zero: a new block changes nothing."""

    def __init__(self, size: int, conditions: int = 0):
        super().__init__()
        self.linear = nn.Linear((1 + conditions) * size, size, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor, conditions: Tensor | None = None) -> Tensor:
        """`x` `[..., H]`, `conditions` `[..., C · H]`."""
        return x + nn.functional.silu(self.linear(x if conditions is None else torch.cat([x, conditions], -1)))


class Head(nn.Module):
    """Residual blocks, of which the first reads `conditions` vectors beside the hidden state, and an output embedding if it has one of its own."""

    def __init__(self, config: MedusaConfig, conditions: int = 0):
        super().__init__()
        self.first = Block(config.hidden_size, conditions)
        self.others = nn.ModuleList(Block(config.hidden_size) for _ in range(config.num_layers - 1))
        self.lm_head = (
            None if config.share_lm_head else nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        )

    def forward(self, hidden: Tensor, conditions: Tensor | None = None) -> Tensor:
        """What the output embedding reads, `[..., H]`, from hidden states `[..., H]` and conditions `[..., C · H]`."""
        x = self.first(hidden.to(self.dtype), conditions)
        for block in self.others:
            x = block(x)
        return x

    @property
    def dtype(self) -> torch.dtype:
        return self.first.linear.weight.dtype


@dataclass
class State:
    target: Target
    hidden: Tensor | None = None  # [B, H], the target's at the last token it has processed
    logits: list[Tensor] = field(default_factory=list)  # of heads 1, 2, … in this round, [B, V'] each
    depths: Tensor | None = None  # of the root and of each node of a tree, [B, 1 + n]; None in a chain


class Medusa(HeadDrafter):
    """Medusa's heads."""

    name = "medusa"
    config_class = MedusaConfig
    trains_target = True
    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.heads = nn.ModuleList(Head(config, self._conditions(k)) for k in range(config.num_heads))

    def _conditions(self, index: int) -> int:
        """How many vectors the head at `index`, counted from 0, reads beside the hidden state."""
        return 0

    @property
    def max_depth(self) -> int:
        return self.config.num_heads

    def _own_outputs(self) -> list[nn.Linear]:
        return [own for k in range(self.config.num_heads) if (own := self.head(k).lm_head) is not None]

    def _copy_output(self, target: Target) -> None:
        if not self.config.share_lm_head and target.model.get_output_embeddings().bias is not None:
            raise IncompatibleError(
                f"{self.name}: this target's output embedding has a bias, which copies of it lack; set share_lm_head."
            )
        super()._copy_output(target)

    def head(self, index: int) -> Head:
        """Counted from 0: predicts the token `index` + 2 places behind the hidden state it reads."""
        found = self.heads[index]
        assert isinstance(found, Head)
        return found

    def lm_head(self, index: int, target: Target) -> Callable[[Tensor], Tensor]:
        """The output embedding of the head at `index`: `[..., H]` to logits `[..., V']`, with the target's own scaling."""
        own = self.head(index).lm_head
        return (lambda x: target.lm_head(x, self.output_ids)) if own is None else (lambda x: target.scale(own(x)))

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Σ_k decay^(k−1) · Σ_positions loss_k."""
        wanted = batch.supervised.clone()
        wanted[:, :2] = False  # the first head's first prediction is x_2
        rows, places = wanted.nonzero(as_tuple=True)
        outputs, here = self.outputs(batch, rows, places)
        count = self.config.num_heads
        decay = self.config.decay ** torch.arange(count, device=wanted.device)
        result = chunked_compare(
            batch.last[rows, places - 1],
            outputs,
            batch.target.lm_head,
            [self.lm_head(k, batch.target) for k in range(count)],
            divergence(self.config.loss),
            self.output_ids,
            decay[:, None] * here,
            following=batch.tokens[rows, places],
            parameters=[own.weight for own in self._own_outputs()],
        )
        return DrafterLoss(result.total, wanted.sum(), metrics_by_depth(result, wanted, here))

    def outputs(self, batch: TargetBatch, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of each head for the tokens at `places` `[P]` of `rows` `[P]`, which it predicts: `[K, P, H]`; and which of them it can, `[K, P]`."""
        begins = [places - 2 - k for k in range(self.config.num_heads)]
        found = [
            self.head(k)(batch.last[rows, t.clamp(min=0)], self._given(batch, k, rows, t)) for k, t in enumerate(begins)
        ]
        return torch.stack(found), torch.stack([t >= 0 for t in begins])

    def _given(self, batch: TargetBatch, index: int, rows: Tensor, begins: Tensor) -> Tensor | None:
        """What the head at `index` reads beside the hidden states at `begins` `[P]` of `rows` `[P]`, `[P, C · H]`."""
        return None

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True)

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> State:
        return State(target)

    def absorb(
        self, state: State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        assert hidden is not None
        last = (counts.tensor - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        state.hidden = hidden[:, :, 0].gather(1, last)[:, 0]

    def begin(self, state: State, root: Tensor) -> Tensor:
        state.logits, state.depths = [], None
        return self._next(state)

    def extend(self, state: State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        if parents is None:
            return self._next(state)[:, None]
        if len(state.logits) < self.config.num_heads:  # each pass reads at most one level deeper
            self._next(state)
        depths = self._place(state, parents)
        known = torch.stack(state.logits, 1)
        return known.gather(1, depths.clamp(max=len(state.logits) - 1)[:, :, None].expand(-1, -1, known.shape[2]))

    def _next(self, state: State) -> Tensor:
        """Logits `[B, V']` of the next head."""
        assert state.hidden is not None
        index = self._checked(len(state.logits))
        state.logits.append(self.lm_head(index, state.target)(self.head(index)(state.hidden)))
        return state.logits[-1]

    def _checked(self, index: int) -> int:
        if index >= self.config.num_heads:
            raise BadInputError(
                f"this {self.name} drafter has {self.config.num_heads} heads, so it drafts no deeper than that; lower the depth."
            )
        return index

    def _place(self, state: State, parents: Tensor) -> Tensor:
        """Note nodes below `parents` `[B, W]`; their depths, 1 for a child of the root."""
        if state.depths is None:
            state.depths = torch.zeros_like(parents[:, :1])
        depths = state.depths.gather(1, parents + 1) + 1
        state.depths = torch.cat([state.depths, depths], 1)
        return depths

    def carried(self, state: State) -> list[Tensor]:
        assert state.hidden is not None
        return [state.hidden]

    def carry(self, state: State, tensors: list[Tensor]) -> None:
        state.hidden = tensors[0]

    def reset(self, state: State) -> None:
        state.hidden, state.logits, state.depths = None, [], None

    def select(self, state: State, rows: list[int]) -> None:
        if state.hidden is not None:
            state.hidden = state.hidden[rows]
