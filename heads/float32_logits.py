"""A drafter's logits in float32 where the rest is multiplied in half precision, for the gradients of losses.

A divergence's gradient is the difference of two distributions. Logits that are rounded to bfloat16 are off by up to
1/32 where they reach 8, and the better a drafter is, the more of the difference that is: of soft cross-entropy's
gradient 5% at an acceptance of 0.87 and 26% at 0.97, of those that follow acceptance 22% and 51%. Sums that are written
in float32 lose 0.2%. The target's logits stay as they are: rounded, they are the law that it is served with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

HALF = (torch.bfloat16, torch.float16)


class Float32Logits(TorchFunctionMode):
    """A mode in which `torch.nn.functional.linear` returns float32, whatever autocast or its inputs' dtype are.

    A GPU multiplies in half precision as before, and writes the sums as they are; elsewhere the products are made in
    float32. Float64, and weights that are no plain tensors (quantised ones), are left alone.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not linear or type(args[1]) not in (Tensor, torch.nn.Parameter):
            return func(*args, **(kwargs or {}))
        return float32_linear(*args, **(kwargs or {}))


def float32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the products `[..., V]` of `hidden` `[..., H]` and `weight` `[V, H]`, in float32 or float64."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if dtype not in HALF or torch.float64 in (hidden.dtype, weight.dtype):
        return linear(hidden, weight, bias)
    with torch.autocast(device, enabled=False):
        rows: Tensor = _Products.apply(hidden.flatten(0, -2), weight, dtype)
        products = rows.view(*hidden.shape[:-1], -1)
        return products if bias is None else products + bias.float()


class _Products(torch.autograd.Function):
    """Products of `[P, H]` and `[V, H]`, whose sums `[P, V]` are written in float32; in half precision backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden.to(dtype), weight)
        if hidden.is_cuda:
            return torch.mm(hidden.to(dtype), weight.to(dtype).t(), out_dtype=torch.float32)
        return linear(hidden.float(), weight.float())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        rounded = slope.to(hidden.dtype)
        of_hidden = rounded @ weight.to(hidden.dtype) if ctx.needs_input_grad[0] else None
        return of_hidden, rounded.t() @ hidden if ctx.needs_input_grad[1] else None, None
