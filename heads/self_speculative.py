"""The target's own first layers as its drafter, with a trained exit after them (LayerSkip, arXiv 2404.16710).

The first E layers read the entries that the target has in its cache, and write those of the drafts after them. The
verification writes the same entries once more, for all layers: a rejected draft leaves nothing, and there is no second
cache. What is trained is x + MLP(norm(x)) for the hidden state x after the target's own final norm; then comes the
target's output embedding. LayerSkip also trains the target's early layers; here the target stays as it is.

Shapes: B rows, T positions, P supervised positions, W nodes, H hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from ..targets import Backbone, RaggedCache, RowLengths, Target
from .base import DrafterLoss, HeadConfig, HeadDrafter, TargetBatch, teacher_forced_loss
from .divergences import LossName
from .losses import own_precision
from .session import Abilities, NodeSession, required


@dataclass
class SelfSpeculativeConfig(HeadConfig):
    """Settings of an early exit; zeros mean "as the target".

    Attributes:
        exit_layer: E, how many of the target's first layers draft; 0 for a sixth of them.
        num_blocks: residual MLPs of the exit.
        intermediate_size: of each of them; 0 for the hidden size.
        share_lm_head: use the target's own output embedding, which is not trained, instead of a copy that is.
        depths: depths up to which the simulated tau multiplies alphas (metrics only).
    """

    least: ClassVar = {"num_blocks": 0}

    exit_layer: int = 0
    num_blocks: int = 1
    intermediate_size: int = 0
    share_lm_head: bool = True
    draft_vocab_size: int = 0
    loss: LossName = "soft_ce"
    depths: int = 4
    hidden_size: int = 0
    vocab_size: int = 0
    target_layers: int = 0

    def sizes(self, target: Target) -> dict[str, Any]:
        own = {
            "exit_layer": self.exit_layer or max(1, target.num_layers // 6),
            "intermediate_size": self.intermediate_size or target.hidden_size,
        }
        return super().sizes(target) | own


class ExitBlock(nn.Module):
    """A residual block: x + W_down (SiLU(W_gate n) · W_up n) with n = norm(x).

    W_down starts at zero: a new block changes nothing.
    """

    def __init__(self, size: int, intermediate_size: int):
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=1e-6)
        self.gate_up = nn.Linear(size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output `[..., H]` for states `[..., H]`."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class SelfSpeculative(HeadDrafter[SelfSpeculativeConfig]):
    """A drafter made of the target's first layers and an exit."""

    name = "self_speculative"
    needs_layers = True
    packs = True
    config_class = SelfSpeculativeConfig
    abilities = Abilities(reads_nodes=True, fixed_shapes=True)

    def __init__(self, config: SelfSpeculativeConfig):
        super().__init__(config)
        size = config.hidden_size
        self.blocks = nn.ModuleList(ExitBlock(size, config.intermediate_size) for _ in range(config.num_blocks))
        self.lm_head = None if config.share_lm_head else nn.Linear(size, config.draft_vocab_size, bias=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.exit_layer,)

    @classmethod
    def build(cls, config: SelfSpeculativeConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        drafter = super().build(config, target, token_counts)
        drafter.check(target)
        return drafter

    @classmethod
    def fitted(cls, config: SelfSpeculativeConfig, target: Target) -> SelfSpeculativeConfig:
        config = super().fitted(config, target)
        if not 1 <= config.exit_layer <= target.num_layers:
            raise BadInputError(
                f"self_speculative: exit_layer must be between 1 and the target's {target.num_layers} layers, "
                f"got {config.exit_layer}."
            )
        return config

    def own_outputs(self) -> list[nn.Linear]:
        return [] if self.lm_head is None else [self.lm_head]

    def check(self, target: Target) -> None:
        self.check_sizes(target)  # of a target that has no such layer, this says more
        super().check(target)
        if not target.rewinds:
            raise IncompatibleError(
                f"{type(target.model).__name__} has recurrent layers, whose states cannot take drafts back, so its "
                "first layers cannot draft in its cache; take another drafter, such as draft_model or ngram."
            )

    def exit(self, hidden: Tensor) -> Tensor:
        """Return the output embedding's input of early states after the target's final norm, `[..., H]`."""
        x = hidden.to(self.dtype) if self.dtype is not None else hidden
        for block in self.blocks:
            x = block(x)
        return x

    def output(self, hidden: Tensor, target: Target) -> Tensor:
        """Return draft logits `[..., V']` of `exit`'s output, with the target's own scaling."""
        return target.lm_head(hidden, self.output_ids) if self.lm_head is None else target.scale(self.lm_head(hidden))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its weights, if there are any."""
        return next((weight.dtype for weight in self.parameters()), None)

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the divergence at every position that predicts a supervised token."""
        parameters = [own.weight for own in self.own_outputs()]
        head = partial(self.output, target=batch.target)
        return teacher_forced_loss(self, batch, self._early(batch), head, parameters, self.config.depths, self.exit)

    def _early(self, batch: TargetBatch) -> Tensor:
        """Return the states after layer E and the target's final norm, `[B, T, H]`."""
        taps = required(batch.hidden, "self_speculative: the loss needs the target's early hidden states.")
        hidden, target = taps[:, :, 0], batch.target
        if self.config.exit_layer == target.num_layers:
            return hidden  # the last tap is normed
        with own_precision(hidden.device):
            return target.final_norm(hidden.to(target.dtype))

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> SelfSpeculativeSession:
        return SelfSpeculativeSession(self, target, (batch_size, max_length + spare), cache)


class LentCacheSession(NodeSession):
    """A session of layers that read and write in the target's own cache.

    Args:
        size: rows and entries of a cache of its own, made when it is first needed, if none is lent.
        lent: the target's cache.
    """

    def __init__(
        self, layers: Backbone, size: tuple[int, int], lent: RaggedCache | None, output_ids: Tensor | None = None
    ):
        super().__init__(output_ids)
        self.layers = layers
        self.size = size
        self.lent = lent

    @cached_property
    def cache(self) -> RaggedCache:
        return self.layers.new_cache(*self.size) if self.lent is None else self.lent

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        if self.lent is None:
            self.layers.run(tokens, self.cache)
            self.cache.advance(counts)

    def caches(self) -> list[RaggedCache]:
        return [self.cache] if self.lent is None else []


class SelfSpeculativeSession(LentCacheSession):
    """A session of the target's first layers."""

    def __init__(self, drafter: SelfSpeculative, target: Target, size: tuple[int, int], lent: RaggedCache | None):
        super().__init__(target.shallow(drafter.config.exit_layer), size, lent, drafter.output_ids)
        self.drafter, self.target = drafter, target
        self.written = 0  # uncommitted entries: the root and the drafts that were read

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.written, self.tree = 0, None
        super().update(tokens, hidden, counts, path)

    def prefill(self, root: Tensor) -> Tensor:
        self.written, self.tree = 0, None
        return self.decode(root[:, None])[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        nodes = self.grow(parents, 1)
        early, _ = self.layers.run(tokens, self.cache, offset=self.written, nodes=nodes)
        self.written += tokens.shape[1]
        return self.drafter.output(self.drafter.exit(early), self.target)

    def reset(self) -> None:
        super().reset()
        self.written = 0
