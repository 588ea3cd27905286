"""Faults of block drafters that were seen in the field, planted one by one: each is found by what the tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads import DFlash, DFlashConfig, DSpark
from outrider.heads.block.block_layers import BlockMask, CachedBlocks
from outrider.heads.block.dflash import BlockSession
from outrider.heads.decoder_layer import normed, rotary_of
from outrider.targets import Target
from outrider.targets.cache_slots import Placement

from ..closeness import assert_same, both_precisions
from .conftest import anchored, decoded_logits, sequences
from .conftest import made as make

STARTS = [[4, 9], [6, 12], [3, 7]]
Plant = Callable[[pytest.MonkeyPatch, DFlash], None]


def made(target: Target) -> DSpark:
    settings = {"num_layers": 1, "block_size": 5, "markov_rank": 8, "sliding_window": 6, "draft_vocab_size": 40}
    return make(DSpark, target, {"markov": 0.5, "mask": 0.5}, **settings)


def trained(target: Target, drafter: DSpark, tokens: Tensor) -> Tensor:
    """Logits of training, `[3, 2, k, V']`."""
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    states = drafter.states(target, tokens, hidden, anchored(STARTS))
    before = tokens.gather(1, (torch.tensor(STARTS)[:, :, None] + torch.arange(5)).flatten(1)).view(3, 2, 5)
    readings = drafter.markov_head.along(drafter.code(before).flatten(0, 1), states.flatten(0, 1))
    return target.lm_head(states, drafter.output_ids) + drafter.markov_head.markov_w2(readings).view(3, 2, 5, -1)


def apart(found: list[list[Tensor]], expected: Tensor) -> float:
    """The largest difference of the decoder's logits, by round and depth, from those of training."""
    return max(
        float((logits[d] - expected[:, number, d]).abs().max()) for number, logits in enumerate(found) for d in range(5)
    )


def context_holds_the_anchor(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    honest = BlockMask.context
    patch.setattr(BlockMask, "context", lambda sight, anchors, *more: honest(sight, anchors + 1, *more))


def window_is_one_longer(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    honest = Placement.within
    patch.setattr(Placement, "within", lambda placed, window: honest(placed, window + 1))


def positions_are_another_rows(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    honest = CachedBlocks.forward

    def rolled(layers: CachedBlocks, projected: Tensor, hidden: Tensor, cache: Any, positions: Tensor, tree: bool):
        return honest(layers, projected, hidden, cache, positions.roll(1, 0), tree)

    patch.setattr(CachedBlocks, "forward", rolled)


def rotary_has_a_default_base(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    drafter.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    drafter.rotary, drafter._decoding = rotary_of(drafter.config), None


def context_is_normed_twice(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    honest = drafter.fuse
    patch.setattr(drafter, "fuse", lambda hidden: normed(honest(hidden), drafter.hidden_norm))


def layout_is_flipped(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    patch.setattr(drafter, "drafting", lambda output: normed(output, drafter.norm).roll(-1, -2))


def taps_are_one_off(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    drafter.config.taps = tuple(tap - 1 for tap in drafter.taps)


def the_head_reads_the_token_before_the_last(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    honest = drafter.code
    patch.setattr(drafter, "code", lambda tokens: honest((tokens - 1).clamp(min=0)))


def block_entries_stay(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    honest = BlockSession.draft

    def draft(session: BlockSession, root: Tensor) -> Tensor:
        found = honest(session, root)
        session.cache.lengths = session.cache.lengths + 1
        session.cache.host_lengths = [n + 1 for n in session.cache.host_lengths]
        return found

    patch.setattr(BlockSession, "draft", draft)


def block_is_causal(patch: pytest.MonkeyPatch, drafter: DFlash) -> None:
    ones = torch.ones(5, 5, dtype=torch.bool)
    patch.setattr(BlockMask, "own", lambda sight, device: ones.tril())


FAULTS: list[Plant] = [context_holds_the_anchor, window_is_one_longer, positions_are_another_rows]
FAULTS += [rotary_has_a_default_base, context_is_normed_twice, layout_is_flipped, taps_are_one_off]
FAULTS += [the_head_reads_the_token_before_the_last, block_entries_stay, block_is_causal]


@both_precisions
def test_without_a_fault_they_agree(target):
    drafter, tokens = made(target), sequences(3, 22)
    rounds = trained(target, drafter, tokens).unbind(1)
    for found, expected in zip(decoded_logits(drafter, target, tokens, STARTS, 5), rounds, strict=True):
        assert_same(found, expected.unbind(1))


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(target, monkeypatch, plant):
    """Training without the fault, decoding with it; where both share the code, the one as it was before."""
    drafter, tokens = made(target), sequences(3, 22)
    both = trained(target, drafter, tokens), decoded_logits(drafter, target, tokens, STARTS, 5)
    plant(monkeypatch, drafter)
    changed = trained(target, drafter, tokens), decoded_logits(drafter, target, tokens, STARTS, 5)
    assert max(apart(both[1], changed[0]), apart(changed[1], both[0])) > 1e-3


@both_precisions
def test_positions_turn_as_the_targets_do(tiny_llama):
    """Rotary parameters come from the target, not from a default."""
    turning = {"rope_type": "default", "rope_theta": 123456.0}
    drafter = DFlash.build(DFlashConfig(num_layers=1), Target(tiny_llama(rope_parameters=turning)))
    assert drafter.config.rope_parameters["rope_theta"] == 123456.0
    size = drafter.config.head_dim
    assert_same(drafter.rotary.inv_freq, 123456.0 ** -(torch.arange(0, size, 2) / size))
