"""Rollouts take the memory that a plan says, however uneven the rows of a batch are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.costs.counting import rehearse
from outrider.heads import Drafter, Pard, PardConfig, PEagle, PEagleConfig, TargetBatch
from outrider.heads.parallel import parallel_drafts
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.targets import PeakBytes, Target

ROWS, LENGTH, ANCHORS, MANY = 3, 2048, 256, 1536


@pytest.fixture(params=["peagle", "pard"])
def made(request: pytest.FixtureRequest, tiny_llama: Callable[..., LlamaForCausalLM]) -> tuple[Drafter, Target]:
    target = Target(tiny_llama(layers=6))
    if request.param == "peagle":
        return PEagle.build(PEagleConfig(num_layers=2, steps=8, draft_vocab_size=32), target, torch.arange(64)), target
    return Pard(
        tiny_llama(layers=2, seed=1).train().requires_grad_(True), PardConfig(steps=8, mask_token_id=63)
    ), target


def uneven(anchors: int = ANCHORS) -> tuple[Tensor, Tensor]:
    """Return tokens and what is learned of them: in each row eight answers in other places, as in chats."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 63, (ROWS, LENGTH), generator=draws)
    learned = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    run, room = anchors // 8, LENGTH // 8
    for row in range(ROWS):
        for begin, late in zip(
            range(0, LENGTH, room), torch.randint(2, room - run, (8,), generator=draws), strict=True
        ):
            learned[row, begin + int(late) :][:run] = True
    return tokens, learned


def measured(drafter: Drafter, target: Target, tokens: Tensor, learned: Tensor) -> int:
    """Return the bytes of a step's tensors, at most at one time."""
    states = torch.randn(ROWS, LENGTH, len(drafter.taps) + 1, target.hidden_size)
    hidden = states[:, :, :-1] if drafter.taps else None
    batch = TargetBatch(target, tokens, learned, hidden, states[:, :, -1])
    with PeakBytes() as memory:
        (drafter.loss(batch).total / ROWS).backward()
    drafter.zero_grad(set_to_none=True)
    return memory.peak


def test_parts_of_masks_save_memory_though_rows_are_uneven(
    made: tuple[Drafter, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All masks at once see all of the text and all other masks; the more there are, the more is hidden of that."""
    tokens, learned = uneven(MANY)
    in_parts = measured(*made, tokens, learned)
    monkeypatch.setattr(parallel_drafts, "_PART", 10**6)
    assert in_parts < 0.75 * measured(*made, tokens, learned)


def test_parts_form_in_ordinary_batches_and_what_they_see_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, learned = uneven(MANY)
    drawn = Rollouts.drawn(learned, tokens, 8, 0.8, 0.2)
    monkeypatch.setattr(parallel_drafts, "_PART", 10**6)
    whole = Rollouts.drawn(learned, tokens, 8, 0.8, 0.2)
    assert len(drawn.parts) > 10
    assert {end - begin for begin, end, _ in drawn.parts[:-1]} == {256}
    assert int(drawn.real.sum()) == int(whole.real.sum())
    seen = [sum((end - begin) * (end - begin + context) for begin, end, context in r.parts) for r in (drawn, whole)]
    assert seen[0] < 0.4 * seen[1]


def test_a_plan_says_what_a_step_with_rollouts_takes(made: tuple[Drafter, Target]) -> None:
    """Within 20%."""
    drafter, target = made
    real = measured(drafter, target, *uneven())
    planned = rehearse(drafter.to("meta"), Target(target.model.to("meta")), ROWS, LENGTH, ANCHORS / LENGTH).peak
    assert planned == pytest.approx(real, rel=0.2)
