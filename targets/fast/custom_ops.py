"""The kernels as operations of torch, one launch each: known to fake tensors, and counted by dispatch modes.

Shapes: M tokens of all rows (B·Q), C numbers of an input, N outputs, D head size, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import custom_op

from ..cache_slots import Placement
from . import kernels

_PROGRAMS = 264  # that run at the same time: two for each multiprocessor of a large GPU
_BLOCK_L = 64  # entries that a program of attention reads at once
_MOST_PARTS = 64


@dataclass(frozen=True)
class Tiles:
    """How a product is cut into programs."""

    tokens: int  # in a program; 0 for one token, without tensor cores
    outputs: int  # in a program
    width: int  # numbers of the input that are read at once
    warps: int = 4
    stages: int = 3  # reads that are under way at once


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel on the device that its tensors are on."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)


@custom_op("outrider::product", mutates_args={"out"})
def product(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    gated: bool,
    added: bool,
    tiles: Sequence[int],
) -> None:
    """Write `x` `[M, C]`, normed if there is a norm, times `weight`, plus bias, gated or added, to `out` `[M, N]`."""
    how = Tiles(*tiles)
    tokens = x.shape[0]
    width = x.shape[1]
    outputs = out.shape[1]
    flags = {"WIDTH": width, "NORMED": norm is not None, "BIASED": bias is not None, "GATED": gated, "ADDED": added}
    blocks = {"BLOCK_N": how.outputs, "BLOCK_C": how.width, "num_warps": how.warps, "num_stages": how.stages}
    tensors = (x, weight, x if norm is None else norm, x if bias is None else bias, out)
    columns = triton.cdiv(outputs, how.outputs)
    if not how.tokens:
        launch(kernels.multiply_vector, (columns, tokens), *tensors, outputs, eps, **flags, **blocks)
        return
    grid = (columns, triton.cdiv(tokens, how.tokens))
    launch(kernels.multiply_tokens, grid, *tensors, tokens, outputs, eps, **flags, **blocks, BLOCK_M=how.tokens)


@custom_op("outrider::gate", mutates_args=())
def gate(both: Tensor) -> Tensor:
    """Return SiLU of the first half of `[M, 2N]`, times the second, `[M, N]`."""
    tokens, outputs = both.shape[0], both.shape[1] // 2
    out = both.new_empty(tokens, outputs)
    block = min(1024, triton.next_power_of_2(outputs))
    # Tokens first: a grid may be long in its first dimension only.
    launch(kernels.gate, (tokens, triton.cdiv(outputs, block)), both, out, outputs, BLOCK_N=block)
    return out


@product.register_fake
def _(*arguments: Any) -> None:
    return None


@gate.register_fake
def _(both: Tensor) -> Tensor:
    return both.new_empty(both.shape[0], both.shape[1] // 2)


@custom_op("outrider::place_heads", mutates_args={"keys", "values"})
def place_heads(
    joined: Tensor,  # [M, heads + 2 kv_heads, D]
    norms: Sequence[Tensor],  # of queries and of keys, [D] each, or none
    frequencies: Tensor,  # by which positions turn, [D / 2]
    positions: Tensor,  # [B, Q]
    slots: Tensor,  # [B, Q]
    keys: Tensor,  # of the cache, [B, kv_heads, L, D]
    values: Tensor,  # of the cache, [B, kv_heads, L, D]
    eps: float,
    scaling: float,
) -> Tensor:
    """Store the keys and values in `joined`; return its queries `[M, heads, D]`, turned."""
    tokens, every, size = joined.shape
    heads, kv_heads = every - 2 * keys.shape[1], keys.shape[1]
    query = joined.new_empty(tokens, heads, size)
    query_norm, key_norm = norms or (joined, joined)
    launch(
        kernels.place_heads,
        (tokens, every),
        *(joined, query_norm, key_norm, frequencies, positions, slots, query, keys, values),
        *(*positions.stride(), *slots.stride(), *keys.stride()[:2], *values.stride()[:2]),
        *(positions.shape[1], eps, scaling),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        NORMED=bool(norms),
        num_warps=1,
    )
    return query


@place_heads.register_fake
def _(joined: Tensor, norms: Any, frequencies: Any, positions: Any, slots: Any, keys: Tensor, *rest: Any) -> Tensor:
    return joined.new_empty(joined.shape[0], joined.shape[1] - 2 * keys.shape[1], joined.shape[2])


@dataclass(frozen=True)
class Split:
    """How attention is cut into programs: parts of a row's entries, and blocks of its queries."""

    parts: int
    block: int

    @classmethod
    def of(cls, rows: int, kv_heads: int, queries: int, room: int) -> Split:
        """Return the split that fills a GPU with `queries` of each key/value head, over at most `room` entries."""
        block = max(16, min(64, triton.next_power_of_2(queries)))
        programs = rows * kv_heads * triton.cdiv(queries, block)
        wanted = triton.next_power_of_2(triton.cdiv(_PROGRAMS, programs))
        return cls(min(wanted, _MOST_PARTS, triton.next_power_of_2(triton.cdiv(room, _BLOCK_L))), block)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, placed: Placement, scale: float, window: int, split: Split
) -> Tensor:
    """Return attention `[M, heads, D]` of queries `[M, heads, D]` over a placed pass's entries `[B, kv_heads, L, D]`.

    `window` 0 is full attention.
    """
    nodes = placed.nodes
    rows, queries = placed.slots.shape
    sees = None if nodes is None else nodes.sees.expand(rows, -1, -1)
    depths = None if nodes is None else nodes.depths.expand(rows, -1)
    where = (placed.lengths, placed.slots, placed.positions, sees, depths)
    out, mixed, sums = attend_parts(query, keys, values, *where, scale, window, *astuple(split))
    return out if split.parts == 1 else merge_parts(mixed, sums, query, queries)


@custom_op("outrider::attend_parts", mutates_args=())
def attend_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    slots: Tensor,
    positions: Tensor,
    sees: Tensor | None,
    depths: Tensor | None,
    scale: float,
    window: int,
    parts: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend within each part; see the kernel.

    Returns the result `[M, heads, D]` if there is one part; else each part's mixed values
    `[B, kv_heads, P, group · Q, D]`, and the logarithms of their weights, `[B, kv_heads, P, group · Q]`.
    """
    (rows, kv_heads) = keys.shape[:2]
    queries = slots.shape[1]
    size = query.shape[2]
    group = query.shape[1] // kv_heads
    out, mixed, sums = _made(query, rows, kv_heads, parts)
    tree = sees is not None
    launch(
        kernels.attend_parts,
        (rows * kv_heads, parts, triton.cdiv(group * queries, block)),
        *(query, keys, values, lengths, slots, positions, sees if tree else slots, depths if tree else slots),
        *(mixed, sums, out, *keys.stride()[:2], *values.stride()[:2], *slots.stride(), *positions.stride()),
        *(*(sees.stride()[:2] if sees is not None else (0, 0)), 0 if depths is None else depths.stride(0)),
        *(queries, sees.shape[2] if sees is not None else 0, scale),
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        PARTS=parts,
        TREE=tree,
        WINDOW=window,
        BLOCK_M=block,
        BLOCK_L=_BLOCK_L,
        num_warps=8 if block > 32 else 4,
    )
    return out, mixed, sums


@attend_parts.register_fake
def _(query: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _made(query, keys.shape[0], keys.shape[1], rest[-2])


def _made(query: Tensor, rows: int, kv_heads: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of attention; of two forms one is empty."""
    per_head = query.shape[0] * query.shape[1] // (rows * kv_heads)  # group · Q
    if parts == 1:
        return torch.empty_like(query), query.new_empty(0), query.new_empty(0)
    shape = (rows, kv_heads, parts, per_head)
    mixed = query.new_empty(*shape, query.shape[2], dtype=torch.float32)
    return query.new_empty(0), mixed, query.new_empty(shape, dtype=torch.float32)


@custom_op("outrider::merge_parts", mutates_args=())
def merge_parts(mixed: Tensor, sums: Tensor, like: Tensor, queries: int) -> Tensor:
    """Merge the parts that `attend_parts` gave into a result in the shape and type of `like` `[M, heads, D]`."""
    tokens, heads, size = like.shape
    kv_heads, parts = mixed.shape[1:3]
    out = torch.empty_like(like)
    sizes = {"KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "SIZE": size, "PARTS": parts}
    launch(kernels.merge_parts, (tokens, heads), mixed, sums, out, queries, **sizes)
    return out


@merge_parts.register_fake
def _(mixed: Tensor, sums: Tensor, like: Tensor, queries: int) -> Tensor:
    return torch.empty_like(like)
