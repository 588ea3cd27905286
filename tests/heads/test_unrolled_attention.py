"""The fused way gathers what the plain one does, which is the definition (test_eagle.py), and keeps no scores."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from outrider.heads import Eagle1, Eagle3, TargetBatch, unrolled_attention
from outrider.heads.eagle import FeatureDrafter
from outrider.heads.unrolled_attention import PackedRows, Span, attend, fused, places_of, plain
from outrider.targets import PeakBytes, Target
from outrider.targets.documents import Documents

from ..closeness import assert_same, both_precisions
from .conftest import made

ROWS = 3
HEADS = 2
LENGTH = 70
SIZE = 8
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


def eagle3(target: Target, **changes) -> FeatureDrafter:
    return made(Eagle3, target, steps=3, norm_taps=True, **changes).train().requires_grad_(True)


def eagle1(target: Target, **changes) -> FeatureDrafter:
    return made(Eagle1, target, steps=3, noise=0.0, **changes).train().requires_grad_(True)


def gathered(
    way: Callable[..., Tensor], begins: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What a way gathers for random inputs, and its gradients; nothing of queries that mean nothing."""
    generator = torch.Generator().manual_seed(1)
    lengths = [LENGTH - min(begins), LENGTH, LENGTH] + [LENGTH - min(begins)] * 2 * steps
    drawn = (torch.randn(ROWS, n, HEADS, SIZE, generator=generator) for n in lengths)
    inputs = [x.transpose(1, 2).to(dtype).requires_grad_() for x in drawn]
    q, keys, values, *own = inputs
    found = way(q, (keys, values), begins, list(zip(own[::2], own[1::2], strict=True)))
    means = torch.arange(lengths[0]) < LENGTH - torch.tensor(begins)[:, None]
    found = found.masked_fill(~means[:, None, :, None], 0.0)
    slope = torch.randn(found.shape, generator=generator)
    return [found.detach(), *torch.autograd.grad((found * slope).sum(), inputs)]


@both_precisions
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_values_and_gradients_are_the_plain_ones(begins, steps, precision):
    assert fused("cpu", precision, SIZE) is not None, "else both are the same code"
    for found, expected in zip(gathered(attend, begins, steps), gathered(plain, begins, steps), strict=True):
        assert_same(found, expected)


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
    generator = torch.Generator().manual_seed(0)
    q, keys, values, key, value = torch.randn(5, 2, HEADS, LENGTH, SIZE, generator=generator).requires_grad_()
    for own in ([], [(key, value)]):
        found = attend(q, (keys, values), (0, LENGTH - 2), own)
        assert bool(found.isfinite().all())
        gradients = torch.autograd.grad(found[:, :, :2].square().sum(), (q, keys, values))
        assert all(gradient.isfinite().all() for gradient in gradients)


KEPT = 50
# Two texts in the first row, one and padding in the second, nothing in the third.
SPANS = [
    Span(0, slice(0, 20), 5, slice(0, 15)),
    Span(0, slice(20, 70), 17, slice(15, 48)),
    Span(1, slice(0, 33), 0, slice(0, 33)),
]


def packed_inputs(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = [KEPT, LENGTH, LENGTH] + [KEPT] * 2 * steps
    return [torch.randn(ROWS, HEADS, n, SIZE, generator=generator).requires_grad_() for n in lengths]


@both_precisions
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_values_and_gradients_of_packed_rows_are_the_plain_ones(steps, precision):
    """Nothing is said of queries that stand in no text, but that they are finite."""
    assert fused("cpu", precision, SIZE) is not None, "else both are the same code"
    means = torch.zeros(ROWS, 1, KEPT, 1)
    for span in SPANS:
        means[span.row, :, span.queries] = 1
    slope, both = torch.randn(ROWS, HEADS, KEPT, SIZE, generator=torch.Generator().manual_seed(2)) * means, []
    for way in (attend, plain):
        tensors = q, keys, values, *own = packed_inputs(steps)
        found = way(q, (keys, values), (), list(zip(own[::2], own[1::2], strict=True)), SPANS)
        assert bool(found.isfinite().all())
        both.append([found.detach() * means, *torch.autograd.grad((found * slope).sum(), tensors)])
    assert_same(*both)


@both_precisions
@pytest.mark.parametrize("window", [8, 20, 33, 69])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_values_and_gradients_within_a_window_are_the_plain_ones(steps, window):
    """Texts of 20, 50 and 33 places: none, some or all of them are longer than it."""
    slope = torch.randn(ROWS, HEADS, KEPT, SIZE, generator=torch.Generator().manual_seed(2))
    means = torch.zeros(ROWS, 1, KEPT, 1)
    for span in SPANS:
        means[span.row, :, span.queries] = 1
    both = []
    for way in (attend, plain):
        tensors = q, keys, values, *own = packed_inputs(steps)
        found = way(q, (keys, values), (), list(zip(own[::2], own[1::2], strict=True)), SPANS, window) * means
        both.append([found.detach(), *torch.autograd.grad((found * slope).sum(), tensors)])
    assert_same(*both)


@both_precisions
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
@pytest.mark.parametrize("steps", [0, 2])
def test_whole_rows_have_windows_too(begins, steps):
    ways = (partial(way, window=12) for way in (attend, plain))
    for found, expected in zip(*(gathered(way, begins, steps) for way in ways), strict=True):
        assert_same(found, expected)


@both_precisions
@pytest.mark.parametrize("way", [attend, plain])
def test_what_lies_before_the_window_changes_nothing(way):
    """A query of a later step stands as many places later, and so does the first place that it attends to."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values, key, value = torch.randn(5, 1, HEADS, LENGTH, SIZE, generator=generator)
    for own in ([], [(key, value)], [(key, value)] * 3):
        found = way(q, (keys, values), (0,), own, window=10)
        place, first = 40, 40 + len(own) + 1 - 10
        scores = torch.cat(
            [torch.einsum("nd,nkd->nk", q[0, :, place], keys[0, :, first : place + 1])]
            + [(q[0, :, place] * k[0, :, place]).sum(-1, keepdim=True) for k, _ in own],
            -1,
        )
        gathered_values = torch.cat([values[0, :, first : place + 1], *(v[0, :, place, None] for _, v in own)], 1)
        expected = (scores * SIZE**-0.5).softmax(-1)[:, None] @ gathered_values
        assert_same(found[0, :, place], expected[:, 0])


@both_precisions
@pytest.mark.parametrize("way", [attend, plain])
def test_a_text_gathers_what_it_would_in_a_row_of_its_own(way):
    q, keys, values, key, value = packed_inputs(1)
    packed = way(q, (keys, values), (), [(key, value)], SPANS)
    for span in SPANS:
        row = slice(span.row, span.row + 1)
        first = keys[row, :, span.entries], values[row, :, span.entries]
        own = key[row, :, span.queries], value[row, :, span.queries]
        alone = way(q[row, :, span.queries], first, (span.begin,), [own])
        assert_same(packed[row, :, span.queries], alone)


def test_later_steps_run_from_before_the_first_learned_token_of_each_text():
    """Texts of 6, 5 and 4 tokens; two places before the first learned one, and nothing where nothing is learned."""
    wanted = torch.zeros(2, 11, dtype=torch.bool)
    wanted[0, [4, 5]] = wanted[0, 8] = True
    places = places_of(wanted, 2, Documents([[6, 5], [4]], 11))
    assert isinstance(places, PackedRows)
    assert places.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert places.at[0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert places.within[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert places.positions_of(1)[0].tolist() == [3, 4, 5, 6, 1, 2, 3, 4, 5]
    assert [span.row for span in places.spans] == [0, 0]
    numbers = torch.arange(22).view(2, 11, 1)
    assert places.cut(numbers, 1)[0, :, 0].tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 10]


def batch(target: Target, drafter: FeatureDrafter, rows: int, length: int, begins: tuple[int, ...]) -> TargetBatch:
    """Random features; row b is learned from `begins[b]` on."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, target.vocab_size, (rows, length), generator=generator)
    hidden = torch.randn(rows, length, len(drafter.taps) + 1, target.hidden_size, generator=generator)
    learned = torch.arange(length) >= torch.tensor(begins)[:, None]
    return TargetBatch(target, tokens, learned, hidden[:, :, :-1], hidden[:, :, -1])


def learned(drafter: FeatureDrafter, data: TargetBatch) -> list[Tensor]:
    """The loss, and all its gradients."""
    loss = drafter.loss(data).mean
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in drafter.parameters() if p.requires_grad])]


@both_precisions
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
        assert_same(fast, expected)


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


CPU = unrolled_attention._KERNELS["cpu"]


def gone(*_: object) -> None:
    raise AttributeError("'_OpNamespace' 'aten' object has no attribute '_scaled_dot_product_flash_attention_for_cpu'")


def other_logarithm(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    result, lse = CPU.forward(*inputs)
    return result, lse * 1.4427


def no_numbers(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(gradient * float("nan") for gradient in CPU.backward(*inputs))


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (gone, gone, "no fused attention for cpu in torch.float32 .*no attribute"),
        (other_logarithm, CPU.backward, r"no fused attention for cpu in torch.float32 \(it is off by"),
        (CPU.forward, no_numbers, r"no fused attention for cpu in torch.float32 \(it is off by nan"),
    ],
    ids=["torch no longer has it", "another result", "gradients are no numbers"],
)
def test_a_kernel_that_fails_or_computes_something_else_is_not_used(monkeypatch, caplog, forward, backward, message):
    monkeypatch.setitem(unrolled_attention._KERNELS, "cpu", unrolled_attention.Kernel(forward, backward))
    with caplog.at_level(logging.WARNING):
        found = gathered(attend, (0, 7, 40), 2)
        gathered(attend, (0, 0, 0), 2)
    assert len(caplog.records) == 1, "said once"
    assert re.search(message, caplog.text)
    for a, b in zip(found, gathered(plain, (0, 7, 40), 2), strict=True):
        assert torch.equal(a, b)


def test_devices_of_another_kind_take_the_plain_way():
    assert fused("mps", torch.float32, SIZE) is None
