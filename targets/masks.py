"""Attention masks for passes over a ragged cache.

Shapes: B rows, Q new tokens per row, `used` slots of the cache that the pass reads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .attention import NAME as SPLIT_ATTENTION
from .cache import RaggedCache
from .cache_slots import Nodes
from .recurrent import HYBRID

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers that masks serve


def needs_mask(config: PreTrainedConfig, cache: RaggedCache, num_new: int, offset: int, nodes: Nodes | None) -> bool:
    """Return whether a pass of `num_new` tokens needs a mask of ours. Asked before the cache places the tokens.

    Without one the library masks as for one plain text, or lets SDPA do without, which is faster. That is right for
    a pass on an empty cache, and for one token of one row that sees everything there is.
    """
    if nodes is not None or cache.window is not None or cache.first:
        return True
    empty = cache.longest == offset == 0
    alone = cache.batch_size == num_new == 1 and _attends_plainly(config)
    return not (empty or alone)


def _attends_plainly(config: PreTrainedConfig) -> bool:
    """Return whether every layer attends to all entries, by a function that takes no mask for "sees everything"."""
    windowed = getattr(config, "sliding_window", None) or getattr(config, "layer_types", None)
    return not windowed and getattr(config, "_attn_implementation", None) in ("sdpa", SPLIT_ATTENTION)


def attention_masks(
    config: PreTrainedConfig, cache: RaggedCache, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Return what a placed pass gives its model as mask: one `[B, 1, Q, used]`, or one by kind of layer."""
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
    """Return the kinds of a model's layers for which there are masks.

    Recurrent layers take none: they see what was read, in its order. A hybrid layer takes one for its attention.
    """
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return kinds & ATTENTION | ({"full_attention"} if HYBRID in kinds else set())


def float_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `visible` `[B, Q, used]` as a mask `[B, 1, Q, used]` to add to scores.

    Eager attention takes a bool mask without complaint and computes something wrong. Half of the least number hides as
    well as all of it. A GPU's kernel multiplies the masked scores by log2(e): the least number would become −inf, and
    the logarithm of a sum of nothing is 0 there.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min / 2)[:, None]
