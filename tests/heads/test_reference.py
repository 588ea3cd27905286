"""EAGLE-3's fast training step computes what the plain one does: in float64 the same loss and gradients to 1e-10."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads import Eagle3, TargetBatch, losses
from outrider.heads.reference import eagle3_loss
from outrider.targets import Target
from outrider.targets.documents import Documents

from .conftest import VOCAB, made

WIDTH = 15
# The lengths of each row's texts; a row of one text is padded.
PACKINGS: dict[str, list[list[int]]] = {
    "rows of one text": [[15], [9], [4]],
    "two texts in a row": [[6, 9], [15]],
    "many texts and padding": [[3, 5, 2, 4], [1, 13], [7]],
}
HEADS: dict[str, dict[str, Any]] = {
    "as published": {},
    "one step": {"steps": 1},
    "pruned vocabulary": {"draft_vocab_size": 20},
    "EAGLE-3.1": {"norm_taps": True, "norm_output": True, "draft_vocab_size": 33},
    "two layers, one key head": {"num_layers": 2, "num_key_value_heads": 1},
    "other norms": {"num_layers": 2, "norm_before_fc": True, "norm_before_residual": True},
}


def answered(lengths: list[list[int]]) -> Tensor:
    """Which tokens are learned: in most texts those after a prompt, in some all, in some none."""
    learned = torch.zeros(len(lengths), WIDTH, dtype=torch.bool)
    number = 0
    for row, texts in enumerate(lengths):
        begin = 0
        for length in texts:
            prompt = (2, 0, length, 5)[number % 4]
            learned[row, begin + prompt : begin + length] = True
            begin += length
            number += 1
    return learned


def plainly(head: Eagle3, batch: TargetBatch, lengths: list[list[int]]) -> Tensor:
    """The sum of the plain step's losses over the texts."""
    assert batch.hidden is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, texts in enumerate(lengths):
        begin = 0
        for length in texts:
            text = row, slice(begin, begin + length)
            parts = batch.tokens[text], batch.hidden[text], batch.last[text], batch.supervised[text]
            total = total + eagle3_loss(head, batch.target, *parts)
            begin += length
    return total


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_loss_and_gradients_are_the_plain_ones(tiny_llama, monkeypatch, lengths, changes):
    """Comparisons in chunks, too."""
    monkeypatch.setattr(losses, "CHUNK", 7)
    target = Target(tiny_llama().double())
    head = made(Eagle3, target, **{"steps": 3, "decay": 0.7} | changes).double().train().requires_grad_(True)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (len(lengths), WIDTH), generator=generator)
    shape = (len(lengths), WIDTH, len(head.taps) + 1, target.hidden_size)
    states = torch.randn(shape, dtype=torch.float64, generator=generator)
    documents = Documents(lengths, WIDTH) if any(len(texts) > 1 for texts in lengths) else None
    hidden, last = states[:, :, :-1], states[:, :, -1]
    batch = TargetBatch(target, tokens, answered(lengths), hidden, last, documents=documents)
    expected = plainly(head, batch, lengths)
    found = head.loss(batch).total
    weights = list(head.parameters())
    slopes = torch.autograd.grad(expected, weights), torch.autograd.grad(found, weights)
    assert float(expected.detach()) > 10
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    for (name, _), own, plain in zip(head.named_parameters(), slopes[1], slopes[0], strict=True):
        assert float(plain.abs().max()) > 0, name
        torch.testing.assert_close(own, plain, rtol=1e-10, atol=1e-10 * float(plain.abs().max()), msg=name)


@pytest.mark.parametrize(("precision", "within"), [(None, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_gradients_in_less_precision_are_the_plain_ones_within_rounding(tiny_llama, changes, precision, within):
    """Of norms, gates and rotations that a backward pass computes again, too; the states are of that precision."""
    plain_target, target = Target(tiny_llama().double()), Target(tiny_llama())
    plain_head = made(Eagle3, plain_target, **{"steps": 3} | changes).double().train().requires_grad_(True)
    head = copy.deepcopy(plain_head).float()
    lengths = [[15], [9]]
    tokens = torch.randint(0, VOCAB, (2, WIDTH), generator=torch.Generator().manual_seed(3))
    shape = (2, WIDTH, len(head.taps) + 1, target.hidden_size)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(precision or torch.float32)
    given, wide = ((s[:, :, :-1], s[:, :, -1]) for s in (states, states.double()))
    with torch.autocast("cpu", precision, enabled=precision is not None):
        found = head.loss(TargetBatch(target, tokens, answered(lengths), *given)).total
    expected = plainly(plain_head, TargetBatch(plain_target, tokens, answered(lengths), *wide), lengths)
    found.backward()
    expected.backward()
    for (name, own), plain in zip(head.named_parameters(), plain_head.parameters(), strict=True):
        assert (own.grad - plain.grad).norm() < within * plain.grad.norm(), name
