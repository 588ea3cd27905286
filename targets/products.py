"""Products of matrices on a CPU where a target answers prompts and a drafter learns: by oneDNN, where torch's own choice is slow.

torch gives float32 products to MKL, and MKL leaves an AMD processor's 512-bit registers unused. oneDNN, which is part of torch as well and has the
bfloat16 products, uses them: on one thread of a Zen 5, 512 rows, and sizes of 256 to 2048, it runs 200 to 300 GFLOP/s and MKL 60 to 130.
Both compute in IEEE float32 and add in another order, so that results differ in the last bits; which of them is used depends on the
machine alone, so that a training that is continued there keeps its bits.

Decoding for a user and measuring stay with torch's own products: there a token is compared, bit for bit, with what `transformers` generates.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_torchs = nn.functional.linear

# With fewer rows, or products of fewer numbers, the detour costs what it gains.
MIN_ROWS, MIN_PRODUCTS = 32, 2**20

# How many shapes oneDNN, and torch in front of it, remember: see `_remember_few`.
CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}


@contextmanager
def fast_products(device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, float32 `linear` of plain CPU tensors and its gradients are oneDNN's, on machines that gain from it. Autocast keeps its own.

    `device`: where the work is done; elsewhere than on a CPU nothing changes.

    The function itself is exchanged, for the whole process: a `TorchFunctionMode` would be asked about every operation, and at 128 tokens a step
    would take 6% longer.
    """
    if torch.device(device).type != "cpu":
        yield
        return
    _remember_few()
    before = nn.functional.linear
    if gains():
        nn.functional.linear = _linear
    try:
        yield
    finally:
        nn.functional.linear = before


@cache
def _remember_few() -> None:
    """Keep what oneDNN prepares for a product's shape from filling the memory, unless the user has set these variables.

    It remembers 1024 shapes, half a megabyte each, and batches of text bring new ones all the time: 280 steps of a small head held 3 GB. Preparing
    a shape again costs no measurable time. The variables are read once, at oneDNN's first product in the process, and torch's own bfloat16 products
    are oneDNN's too: where such came earlier, they change nothing.
    """
    for name, few in CAPACITIES.items():
        os.environ.setdefault(name, few)


@cache
def gains() -> bool:
    """Whether this machine runs oneDNN's products faster than torch's own."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _vendor() == "AuthenticAMD"
    )


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _suits(input, weight, bias):
        product: Tensor = _Linear.apply(input, weight, bias)
        return product
    return _torchs(input, weight, bias)


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        all(type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and weight.ndim == 2
        and (
            weight.is_contiguous() or weight.t().is_contiguous()
        )  # of columns of a larger matrix oneDNN's product takes many times as long
        and (rows := x.numel() // max(x.shape[-1], 1)) >= MIN_ROWS
        and rows * weight.numel() >= MIN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """`linear` of inputs `[..., I]`, a weight `[O, I]` and a bias `[O]` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        slope = slope.contiguous()
        rows = slope.flatten(0, -2)  # [M, O]
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(slope, weight.t()) if of_x else None,
            _product(rows.t(), x.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
