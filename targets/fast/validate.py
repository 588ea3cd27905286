"""Our kernels compared with the library's modules, on the device on which they will run.

A kernel that is wrong on some GPU would silently write another text. So attention of a target's shapes is compared with
sums in float64, where faults hide (one visible entry, negative scores, rows of different lengths, a tree), and whole
passes with the library's. Products are compared when they are tuned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import RaggedCache, RowLengths
from ..cache_slots import Nodes, Placement
from ..target import Target
from .custom_ops import Split, attend
from .trial_passes import PASS_TOLERANCE, PassProbe, distance
from .triton_runner import TritonRunner

_LENGTHS = (0, 3, 150)  # committed entries of the rows
_PARENTS = ((-1, -1, 0, 2), (-1, 0, 0, 1), (-1, 0, 1, 2))
# One part, and several, of which some are empty; every block of queries that a pass may have, for a device may have too
# little of something for the largest.
_SPLITS = (Split(1, 16), Split(4, 16), Split(4, 32), Split(1, 64), Split(4, 64))
_ATTENTION_TOLERANCE = 0.02  # relative; right ones were off by 0.003 in bfloat16


def differs(runner: TritonRunner, target: Target) -> str | None:
    """Return the difference of a target's passes by kernels from the library's, in words; None if there is none."""
    with torch.inference_mode():
        for layer in {heads.window: index for index, heads in enumerate(runner.heads)}.values():
            if (error := attention_error(runner, layer)) > _ATTENTION_TOLERANCE:
                return f"attention of layer {layer} is off by {error:.2g} of its size"
        probe = PassProbe(target, _PARENTS[:2], (0, 5))
        target.fast = runner
        try:
            error = probe.error(target)
        finally:
            target.fast = None
    return f"its hidden states are off by {error:.2g} of their size" if error > PASS_TOLERANCE else None


def attention_error(runner: TritonRunner, layer: int) -> float:
    """Return the largest relative error of a layer's attention on random entries, in a chain and in a tree."""
    heads, weight = runner.heads[layer], runner.body.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)

    rows, queries, room = len(_LENGTHS), 1 + len(_PARENTS[0]), max(_LENGTHS) + 8
    query = numbers(rows * queries, heads.count, heads.size)
    keys, values = numbers(rows, heads.shared, room, heads.size), numbers(rows, heads.shared, room, heads.size)
    keys -= query[:1, :1].mean() + 2 * query[:1, :1].sign()  # far from 0, and mostly negative
    errors, cache = [], RaggedCache(1, rows, room, weight.device)
    cache.advance(RowLengths.of(list(_LENGTHS), weight.device))
    for nodes in (None, Nodes.of_tree(torch.tensor(_PARENTS, device=weight.device), 4)):
        cache.place(queries, 0, nodes)
        right = exact_attention(query, keys, values, cache.placed, heads.scale, heads.window)
        for split in _SPLITS:
            mixed = attend(query, keys, values, cache.placed, heads.scale, heads.window, split)
            errors.append(distance(mixed.double(), right))
    return max(errors)


def exact_attention(
    query: Tensor,  # [M, heads, D]
    keys: Tensor,  # [B, kv_heads, L, D]
    values: Tensor,  # [B, kv_heads, L, D]
    placed: Placement,
    scale: float,
    window: int,
) -> Tensor:
    """Return attention in float64, `[M, heads, D]`, under the masks that the library's modules would get."""
    rows, queries = placed.slots.shape
    used, group = placed.used, query.shape[1] // keys.shape[1]
    seen = placed.visible() & placed.within(window) if window else placed.visible()
    q = query.double().view(rows, queries, -1, query.shape[2]).transpose(1, 2)
    k, v = (entries[:, :, :used].double().repeat_interleave(group, 1) for entries in (keys, values))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(query.shape)
