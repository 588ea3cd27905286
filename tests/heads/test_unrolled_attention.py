"""The fused way gathers what the plain one does, which is the definition (test_eagle.py), and keeps no
scores.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from outrider.heads import Eagle1, Eagle1Config, Eagle3, Eagle3Config, TargetBatch, unrolled_attention
from outrider.heads.eagle import FeatureDrafter
from outrider.heads.unrolled_attention import attend, fused, plain
from outrider.targets import PeakBytes, Target

ROWS, HEADS, LENGTH, SIZE = 3, 2, 70, 8
BEGINS = {
    "from the start": (0, 0, 0),
    "after a common part": (9, 9, 9),
    "each its own": (0, 7, 40),
    "two alike": (50, 3, 3),
}


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    """Kernels are tried once per process; here once per test."""
    fused.cache_clear()
    yield
    fused.cache_clear()


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=6, hidden=32, num_key_value_heads=2))


def eagle3(target: Target, **changes) -> FeatureDrafter:
    torch.manual_seed(7)
    return Eagle3.build(Eagle3Config(**{"steps": 3, "norm_taps": True} | changes), target).train()


def eagle1(target: Target, **changes) -> FeatureDrafter:
    torch.manual_seed(7)
    return Eagle1.build(Eagle1Config(**{"steps": 3, "noise": 0.0} | changes), target).train()


def gathered(
    way: Callable[..., Tensor], begins: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What a way gathers for random inputs, and its gradients; nothing of queries that mean nothing."""
    generator = torch.Generator().manual_seed(1)
    lengths = [LENGTH - min(begins), LENGTH, LENGTH] + [LENGTH - min(begins)] * 2 * steps
    inputs = [
        torch.randn(ROWS, n, HEADS, SIZE, generator=generator).transpose(1, 2).to(dtype).requires_grad_()
        for n in lengths
    ]
    q, keys, values, *own = inputs
    found = way(q, (keys, values), begins, list(zip(own[::2], own[1::2], strict=True)))
    means = torch.arange(lengths[0]) < LENGTH - torch.tensor(begins)[:, None]
    found = found.masked_fill(~means[:, None, :, None], 0.0)
    slope = torch.randn(found.shape, generator=generator)
    return [found.detach(), *torch.autograd.grad((found * slope).sum(), inputs)]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_values_and_gradients_are_the_plain_ones(begins, steps):
    assert fused("cpu", torch.float32, SIZE) is not None, "else both are the same code"
    for found, expected in zip(gathered(attend, begins, steps), gathered(plain, begins, steps), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_under_autocast_it_works_in_half_precision_and_gradients_are_whole(begins):
    """Mixed precision is not that of fp32, but near it."""
    with torch.autocast("cpu", torch.bfloat16):
        found = gathered(attend, begins, 2)
        x = torch.ones(1, 1, 3, SIZE)
        assert attend(x, (x, x), (0,)).dtype == torch.bfloat16
    for half, whole in zip(found, gathered(plain, begins, 2), strict=True):
        assert (half.float() - whole).norm() < 0.02 * whole.norm()
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])


@pytest.mark.parametrize("begins", [*BEGINS.values(), (300, 300, 300)], ids=[*BEGINS, "late"])
def test_in_half_precision_long_rows_are_near_those_of_fp32(begins, monkeypatch):
    """In values and gradients. Rounding is 0.5%; with a mask, a scale or a sum that is wrong it would be 10%."""
    monkeypatch.setitem(globals(), "LENGTH", 401)
    assert fused("cpu", torch.bfloat16, SIZE) is unrolled_attention._KERNELS["cpu"]
    with torch.autocast("cpu", torch.bfloat16):
        found = gathered(attend, begins, 2)
    for half, exact in zip(found, gathered(plain, begins, 2), strict=True):
        assert (half.float() - exact).norm() < 0.012 * exact.norm()


def test_queries_that_mean_nothing_are_finite_and_change_nothing():
    """A row that begins late has fewer: the others' gradients do not see what is gathered there, and nothing is NaN."""
    q, keys, values, key, value = torch.randn(
        5, 2, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    for own in ([], [(key, value)]):
        found = attend(q, (keys, values), (0, LENGTH - 2), own)
        assert bool(found.isfinite().all())
        assert all(
            gradient.isfinite().all()
            for gradient in torch.autograd.grad(found[:, :, :2].square().sum(), (q, keys, values))
        )


# ------------------------------------------------------------ in training


def batch(target: Target, drafter: FeatureDrafter, rows: int, length: int, begins: tuple[int, ...]) -> TargetBatch:
    """Random features; row b is learned from `begins[b]` on."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, target.vocab_size, (rows, length), generator=generator)
    hidden = torch.randn(rows, length, len(drafter.taps) + 1, target.hidden_size, generator=generator)
    return TargetBatch(
        target, tokens, torch.arange(length) >= torch.tensor(begins)[:, None], hidden[:, :, :-1], hidden[:, :, -1]
    )


def learned(drafter: FeatureDrafter, data: TargetBatch) -> list[Tensor]:
    """The loss, and all its gradients."""
    loss = drafter.loss(data).mean
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in drafter.parameters() if p.requires_grad])]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("begins", [(0, 0), (30, 30), (8, 21)])
@pytest.mark.parametrize("make", [eagle3, eagle1])
def test_a_head_learns_the_same_with_and_without_a_kernel(target, make, begins, layers, monkeypatch):
    """Grouped key heads, rows learned from anywhere on."""
    drafter = make(target, num_layers=layers)
    data = batch(target, drafter, 2, 48, begins)
    found = learned(drafter, data)
    monkeypatch.setattr(unrolled_attention, "fused", lambda *_: None)
    for fast, expected in zip(found, learned(drafter, data), strict=True):
        torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("make", [eagle3, eagle1])
def test_a_steps_memory_grows_with_the_length_of_rows_and_not_with_its_square(target, make, share, half):
    """From 512 tokens to 1024 and 2048. With scores in memory the last step would be of three times and more."""
    drafter, peaks = make(target, num_layers=2), []
    for length in (512, 1024, 2048):
        data = batch(target, drafter, 2, length, (int(share * length), int(share * length) // 2))
        with PeakBytes() as made:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = drafter.loss(data).mean
            loss.backward()
        drafter.zero_grad()
        peaks.append(made.peak)
    assert all(after < 2.1 * before for before, after in pairwise(peaks)), peaks


# ------------------------------------------------------------ kernels


def test_a_kernel_that_torch_no_longer_has_is_done_without(monkeypatch, caplog):
    def gone(*_: object) -> None:
        raise AttributeError(
            "'_OpNamespace' 'aten' object has no attribute '_scaled_dot_product_flash_attention_for_cpu'"
        )

    monkeypatch.setitem(unrolled_attention._KERNELS, "cpu", unrolled_attention.Kernel(gone, gone))
    _falls_back(caplog, "no fused attention for cpu in torch.float32 .*no attribute")


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, caplog):
    """For example one whose causal mask begins elsewhere, or that gives another logarithm."""
    honest = unrolled_attention._KERNELS["cpu"]

    def other(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        result, lse = honest.forward(*inputs)
        return result, lse * 1.4427

    monkeypatch.setitem(unrolled_attention._KERNELS, "cpu", unrolled_attention.Kernel(other, honest.backward))
    _falls_back(caplog, "fused attention in torch.float32 on cpu is off by")


def test_a_kernel_whose_gradients_are_no_numbers_is_not_used(monkeypatch, caplog):
    honest = unrolled_attention._KERNELS["cpu"]

    def broken(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient * float("nan") for gradient in honest.backward(*inputs))

    monkeypatch.setitem(unrolled_attention._KERNELS, "cpu", unrolled_attention.Kernel(honest.forward, broken))
    _falls_back(caplog, "fused attention in torch.float32 on cpu is off by nan")


def _falls_back(caplog, message: str) -> None:
    with caplog.at_level(logging.WARNING):
        found = gathered(attend, (0, 7, 40), 2)
        gathered(attend, (0, 0, 0), 2)
    assert len(caplog.records) == 1, "said once"
    assert re.search(message, caplog.text)
    for a, b in zip(found, gathered(plain, (0, 7, 40), 2), strict=True):
        assert torch.equal(a, b)


def test_devices_of_another_kind_take_the_plain_way():
    assert fused("mps", torch.float32, SIZE) is None
