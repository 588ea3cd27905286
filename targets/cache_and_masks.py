"""The kinds of a model's layers: which can be served, what each keeps in a cache, and which attention masks it needs.

Shapes: B rows, Q new tokens per row, `used` slots of the cache that the pass reads.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.errors import IncompatibleError
from .cache import LayerShape, RaggedCache
from .cache_slots import Nodes
from .recurrent import HYBRID, KINDS, MODELS, OVERWRITING, RecurrentCache, has_states
from .split_attention import NAME as SPLIT_ATTENTION
from .split_attention import float_mask

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers that masks serve
_NOTHING = {"mlp", "moe"}  # kinds of layers that keep nothing of a text
_NO_LIMIT = (0.0, math.inf)  # of the steps of Mamba layers


@dataclass(frozen=True)
class CacheLayout:
    """The cache entries and states that the layers of a model keep of a text."""

    shapes: tuple[LayerShape | None, ...]  # of each layer; None for one that keeps nothing
    kinds: tuple[str, ...] | None  # of all layers, where some of them keep states
    overwrites: bool = False  # whether the model writes over the states that a pass of one token is given

    @classmethod
    def blank(cls, config: PreTrainedConfig) -> CacheLayout:
        """Return the layout of a model whose layers have not been seen writing yet."""
        kinds = tuple(config.layer_types) if has_states(config) else None
        return cls((None,) * int(config.num_hidden_layers), kinds, config.model_type in OVERWRITING)

    @property
    def row_bytes(self) -> int:
        return sum(shape.row_bytes for shape in self.shapes if shape is not None)

    @property
    def entry_bytes(self) -> int:
        return sum(shape.entry_bytes for shape in self.shapes if shape is not None)

    def allocate(self, batch_size: int, max_length: int, device: torch.device, joined: bool = False) -> RaggedCache:
        """Make a cache for `batch_size` rows of up to `max_length` entries; layers of known shape are allocated."""
        if self.kinds is None:
            return RaggedCache(len(self.shapes), batch_size, max_length, device, self.shapes, joined)
        return RecurrentCache(self.kinds, batch_size, max_length, device, self.shapes, self.overwrites)

    def num_bytes(self, batch_size: int, max_length: int) -> int:
        """Return the bytes that `allocate` allocates."""
        if self.kinds is None:
            return batch_size * (self.row_bytes + self.entry_bytes * max_length)
        per_entry = self.entry_bytes + RecurrentCache.TOKEN_BYTES
        return batch_size * (self.row_bytes + per_entry * RecurrentCache.room(max_length))


def runtime_key(model: PreTrainedModel, config: PreTrainedConfig) -> Hashable:
    """Return everything that a model's cache layout and footprint depend on.

    A model may be moved, cast, cut, or given another attention after it was wrapped, and be run under autocast.
    """
    weight = next(model.parameters())
    kind = weight.device.type
    cast = kind != "meta" and torch.is_autocast_enabled(kind)
    return (
        weight.dtype,
        weight.device,
        int(config.num_hidden_layers),
        getattr(config, "_attn_implementation", None),
        torch.get_autocast_dtype(kind) if cast else None,
    )


def check_layers(model: PreTrainedModel, body: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise IncompatibleError for a model with layers that neither our caches nor 4-D masks can serve.

    These are other recurrent states, states that move by other steps token by token, and ALiBi, which is read off a
    padding mask.
    """
    other = set(getattr(config, "layer_types", None) or ()) - ATTENTION - _NOTHING
    if config.model_type in MODELS:
        other -= KINDS
    elif getattr(body, "_is_stateful", False) and not other:
        other.add("recurrent")
    if getattr(config, "alibi", False) or config.model_type == "bloom":
        other.add("ALiBi")
    if config.model_type == "cpmant":
        other.add("prefix")  # it reads 32 tokens of its own before every text
    if other:
        raise IncompatibleError(
            f"{type(model).__name__} uses {', '.join(sorted(other))} layers; the decoder handles "
            f"{', '.join(sorted(ATTENTION))}, and recurrent layers of {', '.join(MODELS)}. Take a target of these "
            "kinds."
        )
    if windows := sorted({"sliding_window", "attention_chunk_size"} & set(config.per_layer_attributes or ())):
        raise IncompatibleError(
            f"{type(model).__name__} has layers that differ in their {windows[0]}; the decoder masks all layers of a "
            "kind alike. Take a target whose layers have one."
        )
    limits = {tuple(getattr(layer, "time_step_limit", None) or _NO_LIMIT) for layer in body.modules()}
    if limit := min(limits - {_NO_LIMIT}, default=None):
        raise IncompatibleError(
            f"{type(model).__name__} keeps the steps of its recurrent layers within {limit} where it reads several "
            "tokens at once, and not where it reads one, as the library runs it: its text would depend on the drafts. "
            "Set time_step_min to 0 in its config.json (or time_step_limit to [0, Infinity]), so that none are limited."
        )


def needs_mask(config: PreTrainedConfig, cache: RaggedCache, num_new: int, offset: int, nodes: Nodes | None) -> bool:
    """Return whether a pass of `num_new` tokens needs a mask of ours, before the cache places the tokens.

    Without one the library masks as for one plain text, or lets SDPA do without, which is faster. That is right for
    a pass on an empty cache, and for one token of one row that sees everything there is, if all layers attend to all
    entries by a function that takes no mask for "sees everything".
    """
    if nodes is not None or cache.window is not None or cache.first:
        return True
    windowed = getattr(config, "sliding_window", None) or getattr(config, "layer_types", None)
    plain = not windowed and getattr(config, "_attn_implementation", None) in ("sdpa", SPLIT_ATTENTION)
    return not (cache.longest == offset == 0 or (cache.batch_size == num_new == 1 and plain))


def attention_masks(
    config: PreTrainedConfig, cache: RaggedCache, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Return the attention mask of a placed pass: one `[B, 1, Q, used]`, or one for each kind of layer."""
    visible = cache.visible()
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return float_mask(visible & cache.placed.within(window) if window else visible, dtype)
    seen = {
        "full_attention": lambda: visible,
        "sliding_attention": lambda: visible & cache.placed.within(window),
        "chunked_attention": lambda: visible & cache.placed.in_chunk(config.attention_chunk_size),  # Llama 4
    }
    wanted = masked_kinds(config)
    # Masks come first, and always in one order: some models take the first that there is (MiniMax M3).
    masks = {kind: float_mask(see(), dtype) for kind, see in seen.items() if kind in wanted}
    without = {*kinds, *(["linear_attention"] if HYBRID in kinds else [])} - wanted
    return masks | dict.fromkeys(sorted(without))


def masked_kinds(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of a model's layers that take a mask.

    Recurrent layers take none: they read tokens in order. A hybrid layer takes one for its attention.
    """
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return kinds & ATTENTION | ({"full_attention"} if HYBRID in kinds else set())
