"""A target's passes over few tokens by packed weights, on a CPU; prompts stay the library's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache import RaggedCache
from .cache_slots import Nodes
from .fused_layers import LlamaRunner, runs
from .packed_weights import PackedModel
from .product_choice import MOST_ROWS


class PackedPasses(PackedModel):
    """A packed model that runs its layers in few operations, where these compute what its modules do.

    Python takes as long for a layer's modules as its products of one token: a third of a pass at 135M.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self._runs = runs(model)
        self._runner: LlamaRunner | None = None

    def run(
        self, tokens: Tensor, cache: RaggedCache, taps: Sequence[int], offset: int, nodes: Nodes | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return what `Backbone.run` does, with a cache; None for passes that are left to the modules."""
        prompt = not cache.longest and cache.window is None
        shown = tokens.ndim == 2 and tokens.numel() <= MOST_ROWS and not prompt and cache.shift is None
        if not self._runs or not shown or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        seen: dict[int, Tensor] | None = {} if taps else None
        positions = cache.place(tokens.shape[1], offset, nodes)
        last = self._layers(cache.max_length).run(tokens, cache, positions, nodes is not None, seen)
        return last, torch.stack([seen[tap] for tap in taps], 2) if seen else None

    def shallow(self, layers: int, count: int) -> Self:
        cut = super().shallow(layers, count)
        cut._runner = None
        return cut

    def _layers(self, length: int) -> LlamaRunner:
        """Return the layers, with angles for so many positions."""
        runner = self._runner
        if runner is None:
            runner = LlamaRunner(self.model, length, self.body)
        elif runner.max_length < length:
            runner = runner.longer(runner.body.rotary_emb, length)
        self._runner = runner
        return runner
