"""Models of Llama's kind that are as the library made them: others may compute in their place what they do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from .taps import Tap

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_HOMES = tuple(f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS)
_PARTS = {nn.Linear, nn.Embedding, nn.ModuleList, SiLUActivation, nn.SiLU}
_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on nothing but the position


def is_of_llama_kind(model: Any) -> bool:
    """Tell whether a model is a Llama, Mistral, Qwen2 or Qwen3 all of whose modules are as the library made them.

    Adapters, quantised weights, hooks, and weights that are split over processes are none of that.
    """
    home = type(model).__module__
    if home not in _HOMES or not type(model).__name__.endswith("ForCausalLM"):
        return False
    config, parameters = model.config, list(model.parameters())
    return (
        all(type(p) is nn.Parameter and type(p.data) is Tensor for p in parameters)
        and len({(p.dtype, p.device) for p in parameters}) == 1
        and all(type(module) in _PARTS or type(module).__module__ == home for module in model.modules())
        and all(is_as_made(module) for module in model.modules())
        and not getattr(config, "is_heterogeneous", False)
        and type(model.model.layers[0].mlp.act_fn) in _PARTS
        and model.model.rotary_emb.rope_type in _ROPES
        and not (model.training and config.attention_dropout)
    )


def is_as_made(module: nn.Module) -> bool:
    """Tell whether nobody has hooked into a module or replaced its `forward`; taps only look at what it gives."""
    if "forward" in vars(module):
        return False
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return all(isinstance(hook, Tap) for hook in hooks)


def layer_windows(model: Any) -> list[int]:
    """Return how far each layer of such a model sees; 0 for all of the text."""
    config = model.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or 0
    return [window if kinds is None or kinds[i] == "sliding_attention" else 0 for i in range(config.num_hidden_layers)]
