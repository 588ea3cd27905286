"""How near two ways of computing the same must be, on any make of processor.

In float64 within 1e-10 of the largest value: rounding is a millionth of that, and a fault is far more. In float32 and
bfloat16 by how far rounding can take two sums apart. Each of n additions is off by at most eps / 2 of what it adds,
whatever the order of the sum, its blocks, its threads and its fused products: so two sums of n terms differ by at most
n · eps · Σ|terms|. What one processor gives is nearer √n, since roundings have both signs; what is left of the linear
bound covers what later layers make of a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EXACT = 1e-10  # of the largest value, in float64
# Of a target of six layers and a head of two, 32 wide, over 20 places, whose nine weights a layer read 32 or 64.
WHOLE_PASS = 8 * (8 * 32 + 64 + 9 * 20)
LEAST = 1e-5  # what is all smaller counts as that large: what should be zero is what was rounded elsewhere


def precisions(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Have a test tried in each: the fixture `precision` lets its targets, drafters and losses be of float64."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return pytest.mark.parametrize("precision", dtypes, indirect=True, ids=names)


both_precisions = precisions(torch.float64, torch.float32)


class Float64(TorchFunctionMode):
    """A mode in which all that asks for float32, the library's norms and our losses too, is given float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch._grouped_mm or func is nn.functional.grouped_mm:  # experts', which takes no float64
            return _grouped(*args, **kwargs)
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _grouped(rows: Tensor, weights: Tensor, *, offs: Tensor, **more: Any) -> Tensor:
    """Return each group of rows, up to its offset, times its weight."""
    assert not any(value is not None for value in more.values()), more
    groups = rows.tensor_split(offs[:-1].long().cpu())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let what is made meanwhile be of float64, if that is asked for, and else as it would be."""
    if dtype != torch.float64:
        yield
        return
    as_default = torch.set_default_dtype
    with pytest.MonkeyPatch.context() as patch, Float64():
        patch.setattr(torch, "set_default_dtype", lambda dtype: as_default(_widened(dtype)))
        as_default(torch.float64)
        try:
            yield
        finally:
            as_default(torch.float32)


def terms(*models: nn.Module, places: int = 0) -> int:
    """Return how many terms are added, one sum after the other, in what models compute of so many places.

    A weight's products are sums as long as its last dimension, and its gradient is one over all places, as is what
    attention mixes.
    """
    return sum(weight.shape[-1] + places for model in models for weight in model.parameters() if weight.ndim)


def tolerance(dtype: torch.dtype, sums: int, roundings: int = 1) -> float:
    """Return how far apart two ways may be, as a share of the largest value.

    Args:
        sums: terms that are added on the way to a value. Those of products of bfloat16 are added in float32.
        roundings: how often a value is rounded to `dtype` on its way, where that is less than float32.
    """
    if dtype == torch.float64:
        return EXACT
    wide = max(1, sums) * torch.finfo(torch.float32).eps
    return wide if dtype == torch.float32 else wide + roundings * torch.finfo(dtype).eps


def spread(dtype: torch.dtype, sums: int) -> float:
    """Return by what share of their root mean square many sums of so many terms differ: roundings have both signs."""
    return sums**0.5 * torch.finfo(dtype).eps


def assert_same(
    found: Any,
    expected: Any,
    sums: int = WHOLE_PASS,
    *,
    roundings: int = 1,
    scale: float = LEAST,
    apart: float = 0.0,
    msg: str = "",
) -> None:
    """Assert that two ways gave the same numbers: tensors, arrays, floats, or sequences and mappings of them.

    The less precise of the two says how near; whole numbers are equal.

    Args:
        sums, roundings: as in `tolerance`; a whole pass's, unless it is said.
        scale: of the terms, where they cancel; the largest value's if that is larger.
        apart: by what share of the largest value they differ without any rounding, because one is an approximation.
    """
    for ours, theirs, name in _pairs(found, expected, msg):
        dtype = max((ours.dtype, theirs.dtype), key=lambda dtype: dtype.is_floating_point and torch.finfo(dtype).eps)
        near = tolerance(dtype, sums, roundings) + apart if dtype.is_floating_point else 0.0
        ours, theirs = ours.detach().double(), theirs.detach().double()
        largest = max(scale, _largest(theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=near * largest, msg=partial("{}: {}".format, name))


def _largest(values: Tensor) -> float:
    """Return the magnitude of the largest value that is finite."""
    return float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0


def _pairs(found: Any, expected: Any, name: str) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Give tensors beside each other, and where they stand."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key in expected:
            yield from _pairs(found[key], expected[key], f"{name} {key}".strip())
    elif isinstance(expected, Sequence):
        for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            yield from _pairs(ours, theirs, f"{name} [{i}]".strip())
    else:
        ours = torch.as_tensor(found)  # numbers of Python have the test's precision, or that of what they stand beside
        plain = ours.is_floating_point() and not isinstance(expected, Tensor | np.ndarray)
        theirs = torch.as_tensor(expected, dtype=ours.dtype if plain else None)
        assert ours.shape == theirs.shape, f"{name} {tuple(ours.shape)} beside {tuple(theirs.shape)}"
        yield ours, theirs, name
