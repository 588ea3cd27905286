"""A target, batches of it, and a head's logits round by round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.heads import Drafter, TargetBatch
from outrider.targets import RowLengths, Target


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=6))


def batch(target: Target, drafter: Drafter, tokens: Tensor, supervised: Tensor | None = None) -> TargetBatch:
    """Return a batch in which all tokens are learned, if it is not said which."""
    out = target.forward(tokens, taps=drafter.taps)
    learned = torch.ones_like(tokens, dtype=torch.bool) if supervised is None else supervised
    return TargetBatch(target, tokens, learned, out.hidden, out.last)


@pytest.fixture
def decoded_logits() -> Callable[..., list[list[Tensor]]]:
    """`decoded_logits(drafter, target, tokens, starts, steps)`: logits `[B, V']` by round and depth, teacher forced.

    Row b's rounds begin after `starts[b][round]` absorbed tokens.
    """

    def decoded(
        drafter: Drafter, target: Target, tokens: Tensor, starts: list[list[int]], steps: int
    ) -> list[list[Tensor]]:
        rows, hidden = torch.arange(len(tokens)), target.forward(tokens, taps=drafter.taps).hidden
        state, found = drafter.open(target, len(tokens), tokens.shape[1] + steps), []
        committed = torch.zeros(len(tokens), dtype=torch.long)
        for reached in torch.tensor(starts).T:
            counts = reached - committed
            # As in the decoder: rows are padded with drafts that were thrown away, here with another place's tokens.
            width = int(counts.max()) + 1
            where = (committed[:, None] + torch.arange(width)).clamp(max=tokens.shape[1] - 1)
            states = None if hidden is None else hidden[rows[:, None], where]
            state.update(tokens[rows[:, None], where], states, RowLengths.of(counts.tolist(), "cpu"))
            logits: list[Tensor] = []

            def choose(
                draft_logits: Tensor, token_ids: Tensor | None, reached: Tensor = reached, logits: list[Tensor] = logits
            ) -> Tensor:
                logits.append(draft_logits)
                return tokens[rows, reached + len(logits)]

            state.propose(tokens[rows, reached], steps, choose)
            found.append(logits)
            committed = reached
        return found

    return decoded
