"""What two ways of computing the same may differ by: a fault of 1e-9 is found, and no order of a sum is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .closeness import EXACT, WHOLE_PASS, assert_same, both_precisions, computing_in, precisions, terms, tolerance


@both_precisions
def test_targets_compute_in_the_precision_of_a_test_in_the_librarys_norms_and_softmax_too(tiny_llama, precision):
    model = tiny_llama(layers=1)
    assert {weight.dtype for weight in [*model.parameters(), *model.buffers()]} == {precision}
    assert model(torch.tensor([[1, 2, 3]])).logits.dtype == precision
    assert torch.ones(2, dtype=torch.float32).float().softmax(-1, dtype=torch.float32).dtype == precision
    norm, x = model.model.norm, torch.randn(4, 32)
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    assert_same(norm(x), expected * norm.weight.double(), 32)


def test_float64_ends_with_its_test():
    with pytest.raises(ZeroDivisionError), computing_in(torch.float64):
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32


@precisions(torch.float64)
def test_a_fault_beyond_the_tolerance_is_found_wherever_it_stands(precision):
    found = {"logits": [torch.linspace(-3, 3, 7), torch.tensor([float("-inf"), 1.0])], "count": 3}
    assert_same({"logits": [values + EXACT / 2 for values in found["logits"]], "count": 3}, found)
    moved = [found["logits"][0], found["logits"][1] + 2 * EXACT]
    with pytest.raises(AssertionError, match=r"logits \[1\]: Tensor-likes are not close"):
        assert_same(found | {"logits": moved}, found)
    with pytest.raises(AssertionError, match="count"):
        assert_same(found | {"count": 4}, found)
    with pytest.raises(AssertionError):
        assert_same(found["logits"][0][:1], found["logits"][0])


def sums(values: Tensor) -> list[Tensor]:
    """Sums of the columns in several orders: as torch adds, one after the other, in blocks and backwards."""
    blocks = values.view(-1, 8, values.shape[-1])
    return [values.sum(0), *(order.cumsum(0)[-1] for order in (values, values.flip(0), blocks.sum(0), blocks.sum(1)))]


@pytest.mark.parametrize("length", [8, 64, 4096])
def test_sums_in_any_order_are_the_same_and_in_float64_a_billionth_is_a_difference(length):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(length, 200, generator=generator)
    exact = values.double().sum(0)
    for found in sums(values):
        assert_same(found, exact, length)
    with pytest.raises(AssertionError):
        assert_same(exact * (1 + 1e-9), exact, length)
    for half in sums(values.bfloat16().float()):
        assert_same(half.bfloat16(), values.bfloat16().double().sum(0), length)


def test_the_length_of_a_pass_is_that_of_the_models_that_are_tried(tiny_llama):
    assert 0.5 < terms(tiny_llama(layers=6), tiny_llama(layers=2), places=20) / WHOLE_PASS < 2
    assert tolerance(torch.float32, WHOLE_PASS) < 1e-3 < tolerance(torch.bfloat16, WHOLE_PASS)
