"""Draft models of Llama's kind, read by the layers that heads have: see `decoder_layer.CachedLayers`.

Shapes: B rows, Q new entries, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...targets import Nodes, RaggedCache
from ...targets.layers import is_of_llama_kind, layer_windows
from ..decoder_layer import CachedLayers, copied_bytes, normed


def runs(model: Any) -> bool:
    """Whether `ModelRunner` computes what `model` does: it is of Llama's kind, and attends by SDPA."""
    return is_of_llama_kind(model) and model.config._attn_implementation == "sdpa"


class ModelRunner(CachedLayers):
    """A model that `runs`."""

    def __init__(self, model: Any, max_length: int):
        body, config = model.model, model.config
        super().__init__(list(body.layers), config, body.rotary_emb, max_length, layer_windows(model))
        self.model = model

    def serves(self, model: Any, max_length: int) -> bool:
        """Whether it is long enough for `model`, whose weights have not changed since."""
        return self.fits(model.model.layers, max_length)

    @staticmethod
    def num_bytes(model: Any, max_length: int) -> int:
        """Return what one of `model` allocates."""
        layers = model.model.layers
        return copied_bytes(layers, layers[0].self_attn.head_dim, max_length)

    def read(self, tokens: Tensor, cache: RaggedCache, offset: int, nodes: Nodes | None) -> Tensor:
        """Return the last hidden states `[B, Q, H]` of `tokens` `[B, Q]`, normed; places as for `Target.forward`."""
        return self.read_placed(tokens, cache, cache.place(tokens.shape[1], offset, nodes), nodes is not None)

    def read_placed(self, tokens: Tensor, cache: RaggedCache, positions: Tensor, in_tree: bool = True) -> Tensor:
        """Return the last hidden states `[B, Q, H]`, normed, of `tokens` `[B, Q]` for which the cache has a place."""
        hidden = nn.functional.embedding(tokens, self.model.model.embed_tokens.weight)
        output = self.through(self.layers[0].enter(hidden), hidden, cache, positions, in_tree)
        return normed(output, self.model.model.norm)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits as `Target.lm_head` does: these models have no scaling of their own."""
        return self.model.lm_head(hidden)
