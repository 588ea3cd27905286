"""What tests of the decoder share: prompts, a target, and drafters that are nearly it, or are it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from outrider.heads import Drafter, DraftModel, Session
from outrider.targets import RowLengths, Target


def random_prompts(*lengths: int, vocab: int = 64) -> list[list[int]]:
    """Return prompts of these lengths; prompts of one length are alike."""
    return [torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def scaled(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Return a copy whose weights are multiplied by `factor`: often right, not always."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(factor)
    return other


def fresh_session(target: Target, drafter: Drafter, text: list[int]) -> Session:
    """Return a session that has read `text` at once."""
    tokens, counts = torch.tensor([text]), RowLengths.of([len(text)], "cpu")
    cache = target.new_cache(1, len(text) + 8)
    hidden = target.forward(tokens, cache, drafter.taps).hidden
    cache.advance(counts)
    session = drafter.open(target, 1, len(text) + 8, cache=cache)
    session.update(tokens, hidden, counts)
    return session


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=4))


@pytest.fixture
def itself(target) -> DraftModel:
    """The target as its own drafter: every draft is right."""
    return DraftModel(copy.deepcopy(target.model))
