"""The fast pass held against the library's modules, on the device on which it will run.

A kernel that is wrong on some GPU would write another text without a word. So before a target takes the fast pass,
attention of the target's shapes is held against sums in float64, at places where faults hide (one visible entry,
negative scores, rows of different lengths, a tree), and whole passes against the library's. Products are looked at
when their ways are tried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache import RaggedCache, RowLengths
from ..placement import Nodes, Placement
from .body import FastBody
from .operations import Split, attend
from .select import Fast

_LENGTHS = (0, 3, 150)  # committed entries of the rows
_PARENTS = ((-1, -1, 0, 2), (-1, 0, 0, 1), (-1, 0, 1, 2))
# One part, and several, of which some are empty; every block of queries that a pass may have, for a device may have too
# little of something for the largest.
_SPLITS = (Split(1, 16), Split(4, 16), Split(4, 32), Split(1, 64), Split(4, 64))
_OF_ATTENTION, _OF_PASSES = 0.02, 0.08  # relative; in bfloat16 they were 0.003 and 0.02
_PROMPT = 70


def differs(fast: FastBody, target: Any) -> str | None:
    """Return what the fast pass of a target computes otherwise than the library; None if nothing."""
    with torch.inference_mode():
        for layer in {heads.window: index for index, heads in enumerate(fast.heads)}.values():
            if (error := attention_error(fast, layer)) > _OF_ATTENTION:
                return f"attention of layer {layer} is off by {error:.2g} of its size"
        if (error := pass_error(fast, target)) > _OF_PASSES:
            return f"its hidden states are off by {error:.2g} of their size"
    return None


def attention_error(fast: FastBody, layer: int) -> float:
    """Return the largest relative error of a layer's attention on random entries, in a chain and in a tree."""
    heads, weight = fast.heads[layer], fast.body.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)

    rows, queries, room = len(_LENGTHS), 1 + len(_PARENTS[0]), max(_LENGTHS) + 8
    query = numbers(rows * queries, heads.count, heads.size)
    keys, values = numbers(rows, heads.shared, room, heads.size), numbers(rows, heads.shared, room, heads.size)
    keys -= query[:1, :1].mean() + 2 * query[:1, :1].sign()  # far from 0, and mostly negative
    errors = []
    for tree in (False, True):
        placed = _placed(weight.device, queries, tree)
        right = exact_attention(query, keys, values, placed, heads.scale, heads.window)
        for split in _SPLITS:
            found = attend(query, keys, values, placed, heads.scale, heads.window, split)
            errors.append(_distance(found.double(), right))
    return max(errors)


def _placed(device: torch.device, queries: int, tree: bool) -> Placement:
    lengths = torch.tensor(_LENGTHS, device=device)
    slots = lengths[:, None] + torch.arange(queries, device=device)
    nodes = Nodes.of_tree(torch.tensor(_PARENTS, device=device), 4) if tree else None
    positions = slots if nodes is None else lengths[:, None] + nodes.depths
    rows = torch.arange(len(_LENGTHS), device=device)[:, None]
    return Placement(lengths, max(_LENGTHS) + 8, slots, positions, (rows, slots), nodes)


def exact_attention(
    query: Tensor,  # [M, heads, D]
    keys: Tensor,  # [B, kv_heads, L, D]
    values: Tensor,  # [B, kv_heads, L, D]
    placed: Placement,
    scale: float,
    window: int,
) -> Tensor:
    """Return attention in float64, `[M, heads, D]`, by the masks that the library's modules would be given."""
    rows, queries = placed.slots.shape
    used, group = placed.used, query.shape[1] // keys.shape[1]
    seen = placed.visible() & placed.within(window) if window else placed.visible()
    q = query.double().view(rows, queries, -1, query.shape[2]).transpose(1, 2)
    k, v = (entries[:, :, :used].double().repeat_interleave(group, 1) for entries in (keys, values))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(query.shape)


def pass_error(fast: Fast, target: Any) -> float:
    """Return the largest relative error of passes after a prompt: two single tokens, and a tree."""
    limit = min(_PROMPT, (target.max_context or 2**20) - 8)
    device = target.device
    tokens = (torch.arange(2 * limit, device=device) * 7919 % target.vocab_size).view(2, limit)
    caches = [target.new_cache(2, limit + 8) for _ in range(2)]
    for cache in caches:
        target.run(tokens, cache)
        cache.advance(RowLengths.of([limit, limit - 5], device))
    tree = Nodes.of_tree(torch.tensor(_PARENTS[:2], device=device), 3)
    errors = [_error(fast, target, caches, tokens[:, :1], None, 1) for _ in range(2)]
    return max([*errors, _error(fast, target, caches, tokens[:, :5], tree, 0)])


def _error(fast: Fast, target: Any, caches: list[RaggedCache], tokens: Tensor, nodes: Nodes | None, keep: int) -> float:
    right = target.run(tokens, caches[0], nodes=nodes)[0].float()
    found = fast.run(tokens, caches[1], nodes=nodes)[0].float()
    for cache in caches:
        cache.advance(RowLengths.of([keep, keep], tokens.device))
    return _distance(found, right)


def _distance(found: Tensor, right: Tensor) -> float:
    """Return how far numbers are from the right ones, relative to these; infinity where one of them is no number."""
    distance = ((found - right).norm() / right.norm()).item()
    return distance if distance == distance else float("inf")
