"""Logits in float32 on a device that multiplies in half precision."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outrider.heads.losses import float32_linear


def test_a_gpu_multiplies_in_half_precision_and_writes_float32():
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        hidden = torch.empty(2, 3, 8, device="cuda")
        logits = float32_linear(hidden, torch.empty(5, 8, device="cuda"))
    assert (logits.dtype, logits.shape, logits.device.type) == (torch.float32, (2, 3, 5), "cuda")
