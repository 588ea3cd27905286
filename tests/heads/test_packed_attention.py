"""Texts of a packed row gather what they would alone, by the kernel and by the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.heads.unrolled_attention import PackedRows, Span, attend, fused, places_of, plain
from outrider.targets.documents import Documents

ROWS, HEADS, LENGTH, KEPT, SIZE = 3, 2, 70, 50, 8
# Two texts in the first row, one and padding in the second, nothing in the third.
SPANS = [
    Span(0, slice(0, 20), 5, slice(0, 15)),
    Span(0, slice(20, 70), 17, slice(15, 48)),
    Span(1, slice(0, 33), 0, slice(0, 33)),
]


def inputs(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = [KEPT, LENGTH, LENGTH] + [KEPT] * 2 * steps
    return [torch.randn(ROWS, HEADS, n, SIZE, generator=generator).requires_grad_() for n in lengths]


def gathered(way: Callable[..., Tensor], steps: int) -> list[Tensor]:
    """What a way gathers, and its gradients; nothing of queries that stand in no text."""
    tensors = inputs(steps)
    q, keys, values, *own = tensors
    found = way(q, (keys, values), (), list(zip(own[::2], own[1::2], strict=True)), SPANS)
    assert bool(found.isfinite().all())
    means = torch.zeros(ROWS, 1, KEPT, 1)
    for span in SPANS:
        means[span.row, :, span.queries] = 1
    generator = torch.Generator().manual_seed(2)
    slope = torch.randn(found.shape, generator=generator) * means
    return [found.detach() * means, *torch.autograd.grad((found * slope).sum(), tensors)]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_values_and_gradients_are_the_plain_ones(steps: int) -> None:
    assert fused("cpu", torch.float32, SIZE) is not None, "else both are the same code"
    for found, expected in zip(gathered(attend, steps), gathered(plain, steps), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [attend, plain])
def test_a_text_gathers_what_it_would_in_a_row_of_its_own(way: Callable[..., Tensor]) -> None:
    q, keys, values, key, value = inputs(1)
    packed = way(q, (keys, values), (), [(key, value)], SPANS)
    for span in SPANS:
        row = slice(span.row, span.row + 1)
        first = keys[row, :, span.entries], values[row, :, span.entries]
        own = key[row, :, span.queries], value[row, :, span.queries]
        alone = way(q[row, :, span.queries], first, (span.begin,), [own])
        torch.testing.assert_close(packed[row, :, span.queries], alone, rtol=1e-5, atol=1e-6)


def test_later_steps_run_from_before_the_first_learned_token_of_each_text() -> None:
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
