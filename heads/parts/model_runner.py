"""Draft models of Llama's kind, read by the layers that heads have: see `decoder_layer.CachedLayers`.

Shapes: B rows, Q new entries, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ...targets import Nodes, RaggedCache
from .decoder_layer import CachedLayers, copied_bytes, normed

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_PARTS = {nn.Linear, nn.Embedding, nn.ModuleList, SiLUActivation, nn.SiLU}
_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on nothing but the position


def runs(model: Any) -> bool:
    """Whether `ModelRunner` computes what `model` does.

    It does for these kinds, if all modules are as the library made them. Adapters, quantised weights, hooks, and
    weights that are split over processes are none of that.
    """
    home = type(model).__module__
    if home not in [f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS] or not type(
        model
    ).__name__.endswith("ForCausalLM"):
        return False
    config, parameters = model.config, list(model.parameters())
    return (
        all(type(p) is nn.Parameter and type(p.data) is Tensor for p in parameters)
        and len({(p.dtype, p.device) for p in parameters}) == 1
        and all(_as_made(module, home) for module in model.modules())
        and not getattr(config, "is_heterogeneous", False)
        and config._attn_implementation == "sdpa"
        and type(model.model.layers[0].mlp.act_fn) in _PARTS
        and model.model.rotary_emb.rope_type in _ROPES
        and not (model.training and config.attention_dropout)
    )


def _as_made(module: nn.Module, home: str) -> bool:
    own = type(module) in _PARTS or type(module).__module__ == home
    return own and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def layer_windows(model: Any) -> list[int]:
    """Return how far each layer of such a model sees; 0 for all of the text."""
    config = model.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or 0
    return [window if kinds is None or kinds[i] == "sliding_attention" else 0 for i in range(config.num_hidden_layers)]


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
