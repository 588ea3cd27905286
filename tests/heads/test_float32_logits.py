"""Gradients of losses in mixed precision, beside those in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from outrider.heads.divergences import DIVERGENCES
from outrider.heads.losses import Float32Logits, LossSettings, chunked_compare, divergence, float32_linear

POSITIONS, WIDTH, VOCABULARY = 96, 64, 512


def gradients(
    drafted: Tensor, targeted: Tensor, weight: Tensor, loss: str, chunk: int, half: bool, dtype: torch.dtype
) -> tuple[float, list[Tensor]]:
    """Return the mean acceptance, and the gradients by the drafter's states and by its output embedding."""
    states = drafted.to(dtype).requires_grad_()
    outputs = weight.to(dtype).requires_grad_()
    law = linear(targeted.bfloat16(), weight.bfloat16()).to(dtype)  # of a target that is served in bfloat16
    settings = LossSettings(lambda x: x, lambda x: linear(x, outputs), divergence(loss), None, [outputs], chunk)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        compared = chunked_compare(law, states, settings)
    found = torch.autograd.grad(compared.total, [states, outputs])
    return float(compared.alpha.mean()), [slope.double() for slope in found]


@pytest.mark.parametrize("chunk", [0, 40])
@pytest.mark.parametrize(("distance", "acceptance"), [(0.2, 0.6), (0.05, 0.9), (0.02, 0.96)])
@pytest.mark.parametrize("loss", DIVERGENCES)
def test_mixed_precision_loses_less_than_a_hundredth_of_the_gradient(loss, distance, acceptance, chunk):
    """However good the drafter is; what both read is rounded alike, so that the loss's own part alone is compared."""
    torch.manual_seed(0)
    rounded = [x.bfloat16().double() for x in (torch.randn(POSITIONS, WIDTH), 0.5 * torch.randn(VOCABULARY, WIDTH))]
    states, weight = rounded
    targeted = (states + distance * torch.randn(POSITIONS, WIDTH)).bfloat16().double()
    given = (states, targeted, weight, loss, chunk)
    alpha, exact = gradients(*given, half=False, dtype=torch.float64)
    assert alpha > acceptance
    _, mixed = gradients(*given, half=True, dtype=torch.float32)
    for a, b in zip(mixed, exact, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_products_of_a_gpu_are_those_of_its_inputs_in_float32():
    hidden = torch.randn(2, 30, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(100, 256, device="cuda", dtype=torch.bfloat16)
    expected = linear(hidden.double(), weight.double())
    assert (float32_linear(hidden, weight).double() - expected).norm() < 1e-4 * expected.norm()


def test_float64_and_other_functions_are_left_alone():
    hidden, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    with Float32Logits():
        assert linear(hidden, weight).dtype == torch.float64
        assert (hidden.bfloat16() @ weight.bfloat16().t()).dtype == torch.bfloat16
