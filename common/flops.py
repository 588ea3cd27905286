"""Floating point operations of work, counted as it runs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
FUSED_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu  # the one fused attention that runs without contents
_FUSED_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


class Flops(TorchDispatchMode):
    """A counter of operations, as torch.utils.flop_counter counts.

    Its own mode also tracks modules, which `autograd.grad` inside a loss does not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=made)
        elif (
            packet is aten._grouped_mm
        ):  # tokens by their experts: weights `[experts, in, out]`, or the gradient of those
            self.total += 2 * math.prod(args[0].shape) * args[1].shape[-1]
        elif packet is FUSED_ATTENTION:
            self.total += sdpa_flop_count(*(t.shape for t in args[:3]))
        elif packet is _FUSED_BACKWARD:
            self.total += sdpa_backward_flop_count(*(t.shape for t in args[:4]))
        return made
