"""Attention of few queries over many keys: heads that share keys are folded into queries, and keys are cut into parts.

One block per head would leave most of a GPU idle. The parts are read side by side, and their softmaxes are merged
(flash-decoding, https://pytorch.org/blog/flash-decoding). Keys are never repeated for the heads that share them.
In `transformers` it is registered as "outrider", and folding without cutting keys as "outrider_folded": torch's
kernels for CPUs take each head by itself, and in bfloat16 a single query for each costs more than two do.

Shapes: B rows, H heads, G heads that share keys, K = H / G, Q queries, L keys, D head size, P parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME, FOLDED = "outrider", "outrider_folded"
_MOST_QUERIES = 64
_ALIGNED = 16  # keys; the GPU's kernel requires masks whose rows begin at multiples of it, those of a part too
_LEAST_PART = 128  # keys
_LONG = 1024  # keys from which a head's own attention is cut, too: merging parts takes five launches
_BLOCKS = 256  # a part for each; two per multiprocessor of a large GPU


# The setting is the process's, and threads leave `steady_kernels` in any order: the last one restores it.
_lock = Lock()
_inside = 0
_was_on = True


@contextmanager
def steady_kernels() -> Iterator[None]:
    """Attend without cuDNN inside, which makes a difference on a GPU only.

    cuDNN is torch's first choice on recent GPUs. It makes a plan for every new shape, which takes tens of milliseconds
    for each new length of a prompt, and its masked kernels have open faults (pytorch issues 193893 and 196678).
    """
    global _inside, _was_on
    with _lock:
        if not _inside:
            _was_on = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                torch.backends.cuda.enable_cudnn_sdp(_was_on)


def float_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `visible` `[B, Q, used]` as a mask `[B, 1, Q, used]` to add to scores: eager attention takes no bools.

    Half of the least number hides as well as the least number does, which a GPU's kernel would turn into −inf: it
    multiplies the masked scores by log2(e), and gives 0 for the logarithm of an empty sum.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min / 2)[:, None]


def num_parts(blocks: int, length: int) -> int:
    """Return the number of equal parts to cut `length` keys into, where `blocks` blocks run side by side anyway."""
    parts = 1
    while blocks * parts < _BLOCKS and length % (2 * parts * _ALIGNED) == 0 and length // (2 * parts) >= _LEAST_PART:
        parts *= 2
    return parts


def split_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, K, L, D]
    value: Tensor,  # [B, K, L, D']
    attention_mask: Tensor | None,  # [B, 1, Q, L], added to the scores
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the library's attention functions do; returns `[B, Q, H, D']` and no weights.

    A prompt, or a pass without a mask, is left to the library's own SDPA.
    """
    queries = query.shape[2]
    shared = key.shape[1]
    length = key.shape[2]
    if attention_mask is None or attention_mask.dtype == torch.bool or queries > _MOST_QUERIES or length % _ALIGNED:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    mixed = _in_parts(query, key, value, attention_mask, scaling, num_parts(len(query) * shared, length))
    return mixed.transpose(1, 2).contiguous(), None


def _in_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, parts: int) -> Tensor:
    """Return attention `[B, H, Q, D']` over keys that are cut into equal parts; `mask` `[B, 1, Q, L]` is added."""
    rows, heads, queries, size = query.shape
    shared, length = key.shape[1], key.shape[2]
    folded = query.reshape(rows * shared, 1, heads // shared * queries, size).expand(-1, parts, -1, -1)
    # Views, [B·K, P, L / P, D].
    keys, values = (t.flatten(0, 1).unflatten(1, (parts, length // parts)) for t in (key, value))
    folded_mask = _folded_mask(mask, heads // shared, shared, parts)
    out, sums = attend(folded, keys, values, folded_mask, size**-0.5 if scale is None else scale)
    mixed = (out * (sums - sums.amax(1, keepdim=True)).softmax(1)[..., None]).sum(1) if parts > 1 else out[:, 0]
    return mixed.to(query.dtype).view(rows, heads, queries, -1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return each part's mixed values, `[N, P, M, D']`, and its weights' sums as logarithms, `[N, P, M]` in fp32."""
    if query.device.type == "cuda":
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, compute_log_sumexp=True, scale=scale
        )
        return out, sums[..., : query.shape[2]]
    scores = (query @ key.transpose(-1, -2)).float() * scale + mask
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp().to(value.dtype) @ value, sums


_last: tuple[Any, tuple[int, ...], Tensor] | None = None


def _folded_mask(mask: Tensor, group: int, shared: int, parts: int) -> Tensor:
    """Return `mask` `[B, 1, Q, L]` for folded heads and parts, `[B·K, P, G·Q, L / P]`; one is kept for all layers."""
    global _last
    shape = (group, shared, parts)
    if _last is not None and _last[0]() is mask and _last[1] == shape:
        return _last[2]
    rows, _, queries, length = mask.shape
    cut = mask.unflatten(3, (parts, length // parts)).permute(0, 1, 3, 2, 4)  # [B, 1, P, Q, L / P]
    repeated = cut[:, :, :, None].expand(rows, shared, parts, group, queries, -1)
    whole = repeated.reshape(rows * shared, parts, group * queries, -1)
    _last = (weakref.ref(mask), shape, whole)
    return whole


def fold_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return attention of queries `[B, H, Q, D]` over keys and values `[B, K, L, D]`, in the queries' shape.

    Heads that share keys become further queries: nothing is repeated for them, and a GPU need not take the slow kernel
    that it has for shared keys with a mask. There long texts are cut into parts. The mask is `[B, 1, Q, L]`, bool or
    added to the scores.
    """
    rows, heads, count, size = q.shape
    shared, length = k.shape[1], k.shape[2]
    cut = q.device.type == "cuda" and count <= _MOST_QUERIES and length >= _LONG and length % _ALIGNED == 0
    if cut and mask is not None:
        added = float_mask(mask[:, 0].expand(rows, -1, -1), q.dtype) if mask.dtype == torch.bool else mask
        return _in_parts(q, k, v, added, scale, num_parts(rows * shared, length))
    folded = q.reshape(rows, shared, -1, size)
    queries = folded.shape[2]
    if mask is not None and 1 < count < queries:
        mask = mask.repeat(1, 1, queries // count, 1)
    if queries == 1 and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        folded = folded.expand(-1, -1, 2, -1)
    mixed = torch.nn.functional.scaled_dot_product_attention(folded, k, v, mask, scale=scale)
    return mixed[:, :, :queries].reshape(rows, heads, count, -1)


def folded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `split_attention` does, with keys in one part."""
    queries = query.shape[2]
    unmasked = attention_mask is None and queries > 1
    if unmasked or queries > _MOST_QUERIES or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return fold_heads(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make split attention, and attention of folded heads, known to `transformers` under their names."""
    for name, attention in ((NAME, split_attention), (FOLDED, folded_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)
