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
from .layers import is_as_made
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

    def serves(self, inputs: Tensor, cache: RaggedCache) -> bool:
        """Return whether it can run a pass over `inputs` as the modules would now."""
        prompt = not cache.longest and cache.window is None
        few = inputs.ndim == 2 and inputs.numel() <= MOST_ROWS
        return (
            self._runs
            and few
            and not prompt
            and cache.shift is None
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and self.is_current()
            and is_as_made(self.body)
        )

    def run(
        self, inputs: Tensor, cache: RaggedCache, taps: Sequence[int], offset: int, nodes: Nodes | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass over tokens `[B, Q]` as `Backbone.run` does, with a cache."""
        seen: dict[int, Tensor] | None = {} if taps else None
        positions = cache.place(inputs.shape[1], offset, nodes)
        last = self._layers(cache.max_length).run(inputs, cache, positions, nodes is not None, seen)
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
