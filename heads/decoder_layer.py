"""Decoder layers of Llama's kind: their weights and settings, and `LayerDrafter`, a head with such layers.

`targets.fused_layers` computes them. Queries attend as training unrolls a head on its own output
(`unrolled_attention.UnrolledLayers`), or as decoding does, over a cache (`CachedLayers`).

Shapes: B rows, T positions, Q new entries, H hidden size, N heads, D head size, W width of an attention's input.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ..common import BadInputError, IncompatibleError
from ..targets import LayerShape, RaggedCache, Target, TensorShape
from ..targets.fused_layers import CachedLayers, InputProjection, copied_bytes
from ..targets.layers import ROPES, usual_layer
from .base import HeadConfig, HeadDrafter

_log = logging.getLogger(__name__)


@dataclass
class LayerConfig(HeadConfig):
    """Sizes of the layers; zeros mean "as the target".

    Attributes:
        rope_parameters: rotary positions, as `transformers` names them, of the type default, linear, llama3 or yarn; {}
            for the target's, as far as a head has them: all dimensions of its heads turn.
    """

    least: ClassVar = {"num_layers": 1}

    num_layers: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise BadInputError(
                "drafter: head_dim must be even, as rotary positions turn pairs of its dimensions, "
                f"got {self.head_dim}."
            )
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise BadInputError(
                "drafter: num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}."
            )

        theta = self.rope_parameters.get("rope_theta", 1.0)
        if not (isinstance(theta, (int, float)) and 0 < theta < float("inf")):
            raise BadInputError(f"drafter: rope_parameters.rope_theta must be a number above 0, got {theta!r:.80}.")

    def sizes(self, target: Target) -> dict[str, Any]:
        theirs = usual_layer(target.config)
        _check_widths(target, theirs, bool(self.num_attention_heads))
        heads = self.num_attention_heads or theirs.num_attention_heads
        width = getattr(theirs, "intermediate_size", None) or 0
        width = max(width) if isinstance(width, (list, tuple)) else width  # some have one for each layer
        longest = self.max_position_embeddings or target.max_context or 4096
        return super().sizes(target) | {
            "intermediate_size": self.intermediate_size or int(width) or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or getattr(theirs, "num_key_value_heads", None) or heads,
            "head_dim": self.head_dim or getattr(theirs, "head_dim", None) or target.hidden_size // heads,
            "rope_parameters": _given_rope(self.rope_parameters, longest) or _plain_rope(theirs, longest),
            "max_position_embeddings": longest,
        }

    @property
    def rope(self) -> dict[str, Any]:
        """Its rotary positions in full, of which training, decoding and every export are made.

        What layers never read is no part of them, though files of older heads hold it: partial_rotary_factor, sections
        of mrope, and "dynamic", which is the default up to max_position_embeddings.
        """
        is_dynamic = self.rope_parameters.get("rope_type") == "dynamic"
        given = self.rope_parameters | ({"rope_type": "default"} if is_dynamic else {})
        return full_rope(given, self.max_position_embeddings)

    def llama(self) -> LlamaConfig:
        """Return the config of the library's rotary positions and MLP, which do not read the number of heads."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=1,  # the library refuses one that does not divide the hidden size
            head_dim=self.head_dim,
            rope_parameters=self.rope,
            max_position_embeddings=self.max_position_embeddings,
        )


def _check_widths(target: Target, theirs: PreTrainedConfig, heads_given: bool) -> None:
    """Raise IncompatibleError if the output embedding does not read hidden states, or the config names no heads."""
    name, width = type(target.model).__name__, target.model.get_output_embeddings().weight.shape[1]
    if width != target.hidden_size:
        raise IncompatibleError(
            f"{name} has hidden states of {target.hidden_size} numbers, and an output embedding that reads {width}: no "
            "head can be trained on them; take a draft model."
        )
    if not heads_given and not hasattr(theirs, "num_attention_heads"):
        raise IncompatibleError(f"{name} has no attention heads whose number a head could take; take a draft model.")


def full_rope(rope: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return what a head has of rotary parameters, every value written out.

    `longest`: its max_position_embeddings.

    Raises BadInputError for a type that heads do not have, or one without what it needs.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in list(ROPES):  # a file may say anything, a list too
        raise BadInputError(
            f"rope_parameters: a head's rotary positions are of the type {', '.join(ROPES)}, found {kind!r:.80}, whose "
            "angles depend on more than the position, or are unknown."
        )
    needed, optional = ROPES[kind]
    given = {"rope_theta": 10000.0, "original_max_position_embeddings": longest}
    given |= {name: value for name, value in rope.items() if value is not None}
    if missing := [name for name in needed if name not in given]:
        raise BadInputError(f"rope_parameters: {kind} needs {', '.join(missing)}.")
    full = {name: given[name] for name in ("rope_theta", *needed, *optional) if name in given}
    if "factor" in full:
        full["factor"] = float(full["factor"])  # vLLM stops at a whole number
    return {"rope_type": kind} | full


def _given_rope(rope: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return rotary parameters that a recipe names, in full; {} for none."""
    full = full_rope(rope, longest) if rope else {}
    if others := sorted(rope.keys() - full.keys() - {"type"}):
        raise BadInputError(
            f"drafter.rope_parameters: a head's have no {', '.join(others)} (all dimensions of its heads turn, by the "
            "position alone); leave that out."
        )
    return full


def _plain_rope(config: Any, longest: int = 4096) -> dict[str, Any]:
    """Return the target's rotary parameters as far as a head has them, in full; a warning names the others.

    Raises IncompatibleError where layers of a target differ, and none of them attends to all places.
    """
    theirs = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(part, dict) for part in theirs.values()):  # by kinds of layers; a head attends to all places
        if not (full := theirs.get("full_attention")):
            raise IncompatibleError(
                f"the target's rotary positions differ by kinds of layers ({', '.join(theirs)}), and none is called "
                "full_attention: name the head's in drafter.rope_parameters, e.g. {rope_type: default, rope_theta: …}."
            )
        theirs = full
    theta = theirs.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    rope = full_rope((theirs if theirs.get("rope_type") in ROPES else {}) | {"rope_theta": theta}, longest)
    same = {"type": theirs.get("rope_type"), "partial_rotary_factor": 1, "max_position_embeddings": longest}
    left = {name: value for name, value in theirs.items() if value not in (None, rope.get(name), same.get(name))}
    if left:
        _warn_once(f"the head's rotary positions are {rope}; of the target's it has not: {left}.")
    return rope


@lru_cache
def _warn_once(said: str) -> None:
    _log.warning(said)


def norm_of(config: LayerConfig, width: int = 0) -> LlamaRMSNorm:
    """Return a new norm, to be applied by `normed`; `width` 0 is the hidden size."""
    return LlamaRMSNorm(width or config.hidden_size, config.rms_norm_eps)


def rotary_of(config: LayerConfig) -> LlamaRotaryEmbedding:
    """Return the module for `angles`."""
    return LlamaRotaryEmbedding(config.llama())


class Attention(nn.Module):
    """The weights of one attention, under the library's names."""

    def __init__(self, config: LayerConfig, width: int):
        super().__init__()
        self.kv_heads, self.size = config.num_key_value_heads, config.head_dim
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=False)

    def kept(self, device: torch.device) -> LayerShape:
        """Return the shape of its entries in a cache."""
        store = TensorShape((self.kv_heads, self.size), self.k_proj.weight.dtype, device)
        return LayerShape(store, store)


class Layer(nn.Module):
    """The weights of one decoder layer, under the library's names; `FusedLayer` runs it.

    Args:
        width: of its attention's input; 0 for the hidden size.
        normed: whether there is a norm before attention.
    """

    def __init__(self, config: LayerConfig, width: int = 0, normed: bool = True):
        super().__init__()
        self.input_layernorm = norm_of(config) if normed else None
        self.self_attn = Attention(config, width or config.hidden_size)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = LlamaMLP(config.llama())


L = TypeVar("L", bound=LayerConfig)


class LayerDrafter(HeadDrafter[L]):
    """A head with decoder layers of its own, and in decoding a cache for them."""

    layers: nn.ModuleList  # of `Layer`s
    rotary: LlamaRotaryEmbedding
    _decoding: CachedLayers | None = None

    @property
    def input_projection(self) -> InputProjection | None:
        """The linear layer before the first layer, for `FusedLayer.project`; None for none."""
        return None

    @property
    def own_layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def new_cache(self, target: Target, batch_size: int, entries: int) -> RaggedCache:
        """Return an empty cache for its layers."""
        shapes = [layer.self_attn.kept(target.device) for layer in self.own_layers]
        return RaggedCache(len(shapes), batch_size, entries, target.device, shapes)

    def decoding_layers(self, max_length: int) -> CachedLayers:
        """Return its layers for decoding; they are kept until weights have changed."""
        if self._decoding is None or not self._decoding.is_made_of(self.own_layers):
            self._decoding = self._copy_layers(max_length)
        elif self._decoding.max_length < max_length:
            self._decoding = self._decoding.longer(self.rotary, max_length)
        return self._decoding

    def decoding_bytes(self, target: Target, batch_size: int, entries: int, max_length: int) -> int:
        """Return how many bytes a new cache and `decoding_layers` allocate."""
        shapes = [layer.self_attn.kept(target.device) for layer in self.own_layers]
        cache = sum(batch_size * entries * shape.entry_bytes for shape in shapes)
        made = self._decoding
        if made is None or not made.is_made_of(self.own_layers):
            return cache + self._copied_bytes(max_length)
        if made.max_length >= max_length:
            return cache
        return cache + self._copied_bytes(max_length) - self._copied_bytes(0)  # the angles alone

    def _copy_layers(self, max_length: int) -> CachedLayers:
        return CachedLayers(self.own_layers, self.config, self.rotary, max_length, projection=self.input_projection)

    def _copied_bytes(self, max_length: int) -> int:
        """Return how many bytes `_copy_layers` allocates."""
        return copied_bytes(self.own_layers, self.config.head_dim, max_length, self.input_projection)
