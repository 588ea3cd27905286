"""The hash of `rng` in one launch (Triton); the keys are broadcast to `[A, B, C]`.

Composed of torch's operations a hash of three keys takes 60 launches, and a round of a sampled chain of three drafts
needs five of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from ..targets.fast import custom_ops

_BLOCK = 256
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)  # splitmix64's two multipliers
_SECOND = tl.constexpr(0x94D049BB133111EB)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def mix(state):
    """Apply splitmix64's finaliser to uint64."""
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    return state ^ (state >> 31)


@triton.jit
def further(state, key, a, b, c, stride_a, stride_b, stride_c, num_c):
    """Hash one more key into the state."""
    place = key + a * stride_a + b * stride_b + c * stride_c
    value = tl.load(place, mask=c < num_c, other=0).to(tl.uint64, bitcast=True)
    return mix(state + (value + 1) * _GOLDEN)


@triton.jit(do_not_specialize=["stream"])
def hash_keys(
    seed,  # []
    first,  # the keys, [A, B, C] each; those beyond KEYS are not read
    second,
    third,
    fourth,
    out,  # [A, B, C]
    stream,
    num_c,
    first_a,
    first_b,
    first_c,
    second_a,
    second_b,
    second_c,
    third_a,
    third_b,
    third_c,
    fourth_a,
    fourth_b,
    fourth_c,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Hash seed, stream and keys, and write the middle of the cell of 2^-53 that the hash names."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, a = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    begun = tl.load(seed + c * 0).to(tl.uint64, bitcast=True) * 1000003
    state = mix(begun + stream + _GOLDEN)
    state = further(state, first, a, b, c, first_a, first_b, first_c, num_c)
    if KEYS > 1:
        state = further(state, second, a, b, c, second_a, second_b, second_c, num_c)
    if KEYS > 2:
        state = further(state, third, a, b, c, third_a, third_b, third_c, num_c)
    if KEYS > 3:
        state = further(state, fourth, a, b, c, fourth_a, fourth_b, fourth_c, num_c)
    uniform = ((state >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    tl.store(out + (a * tl.num_programs(1) + b) * num_c + c, uniform, mask=c < num_c)


@custom_op("outrider::uniforms", mutates_args=())
def uniforms(seed: Tensor, stream: int, keys: Sequence[Tensor]) -> Tensor:
    """Return the uniforms of one to four keys of at most three dimensions; see `rng.uniforms`."""
    shape = torch.broadcast_shapes(*(key.shape for key in keys))
    a, b, c = (1,) * (3 - len(shape)) + shape
    views = [key.expand(a, b, c) for key in keys]
    strides = [view.stride() for view in views] + [(0, 0, 0)] * (4 - len(views))
    out = torch.empty(shape, dtype=torch.float64, device=seed.device)
    if out.numel():
        grid = (triton.cdiv(c, _BLOCK), b, a)
        every = (seed, *views, *[seed] * (4 - len(views)), out, stream, c, *(step for key in strides for step in key))
        custom_ops.launch(hash_keys, grid, *every, KEYS=len(views), BLOCK=_BLOCK)
    return out


@uniforms.register_fake
def _(seed: Tensor, _stream: int, keys: Sequence[Tensor]) -> Tensor:
    shape = torch.broadcast_shapes(*(key.shape for key in keys))
    return torch.empty(shape, dtype=torch.float64, device=seed.device)
