"""P-EAGLE: what is trained is what is decoded, rollouts see what they should, and what is drawn is nested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.heads import Eagle3, Eagle3Config, PEagle
from outrider.heads.parallel.parallel_drafts import Rollouts, kept_counts
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from .conftest import (
    assert_rounds_have,
    assert_sum_of_rows,
    batch,
    entries_of,
    every,
    part_of,
    rolled,
    sequences,
)
from .conftest import made as make

LENGTH = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, pruned vocabulary": {"num_layers": 1, "draft_vocab_size": 20},
    "mask token, normed taps": {"mask_token_id": 63, "norm_taps": True, "norm_before_residual": True},
    "one draft": {"steps": 1},
}


def made(target: Target, **changes: Any) -> PEagle:
    return make(PEagle, target, {"mask": 1.0}, **{"num_layers": 2, "steps": 5} | changes)


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> PEagle:
    return made(target, **VARIANTS[request.param])


@both_precisions
def test_logits_in_training_are_the_decoders(target, drafter):
    """All rollouts of all places in one pass, in several parts, against ragged rounds that begin there; fp32."""
    tokens = sequences(3, LENGTH)
    starts = [[1, 3, 4, 9], [5, 6, 9, 12], [2, 3, 6, 7]]
    steps = drafter.max_depth
    data, masks = batch(target, drafter, tokens), every(LENGTH, steps)
    rollouts = rolled(masks, 3, 3 * max(1, steps - 1))
    assert len(rollouts.parts) == -(-len(masks) // rollouts.size)
    assert rollouts.real.all(), "the parts are full"
    trained = drafter.logits(drafter.roll(data, rollouts), target)

    def expected(number: int, row: int, d: int) -> Tensor:
        place = starts[row][number] - 1
        return trained[row, LENGTH + masks.index((place, d)) if d else place]

    assert_rounds_have(expected, drafter, target, tokens, starts, steps)


@both_precisions
def test_what_was_dropped_changes_nothing_that_is_left(target, drafter):
    """Rows of different numbers of masks, filled up: each entry is what it is among all of them."""
    tokens, steps = sequences(3, LENGTH), max(2, drafter.max_depth)
    data = batch(target, drafter, tokens)
    masks = every(LENGTH, steps)
    whole = drafter.roll(data, rolled(masks, 3))
    learned = torch.ones(3, LENGTH, dtype=torch.bool)
    learned[0, :12] = learned[2, 9:] = False
    some = Rollouts.drawn(learned, tokens, steps, 0.8, 0.2)
    found = drafter.roll(data, some)
    assert_same(found[:, :LENGTH], whole[:, :LENGTH])
    assert not some.real.all()
    for row, entry in some.real.nonzero().tolist():
        mask = int(some.anchors[row, entry]), int(some.depths[row, entry])
        expected = whole[row, LENGTH + masks.index(mask)]
        assert_same(found[row, LENGTH + entry], expected)


@both_precisions
@pytest.mark.parametrize("size", [5, 8, 64])
def test_parts_change_nothing_whatever_rows_they_are_of(target, drafter, size):
    """Rows of other numbers of masks, whose rollouts end nowhere together: each part holds some of every row."""
    tokens, steps = sequences(3, LENGTH), drafter.max_depth
    data = batch(target, drafter, tokens)
    learned = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(size)) < torch.tensor([[0.9], [0.4], [0.7]])
    rows = [[(t, d) for t in row.nonzero()[:, 0].tolist() for d in range(1, steps)] for row in learned]
    whole, parts = (Rollouts.of(rows, n, "cpu") for n in (10_000, size))
    assert len(whole.parts) == 1
    assert len(parts.parts) >= len(rows[0]) // size
    assert all(end - begin <= size for begin, end, _ in parts.parts)
    expected, found = (drafter.roll(data, made)[:, LENGTH:] for made in (whole, parts))
    for row in range(3):
        assert int(parts.real[row].sum()) == len(rows[row])
        assert_same(found[row, parts.real[row]], expected[row, whole.real[row]])


@both_precisions
def test_a_rollout_sees_the_text_up_to_its_anchor_and_no_other_rollout(target, drafter):
    tokens, place = sequences(3, LENGTH), 8
    data = batch(target, drafter, tokens)
    before = drafter.roll(data, rolled([(4, 1), (place, 1), (place, 2)], 3))[:, LENGTH + 1 :]
    data.hidden[:, place + 1 :] = torch.randn_like(data.hidden[:, place + 1 :])
    data.tokens[:, place + 2 :] = 5
    after = drafter.roll(data, rolled([(5, 1), (place, 1), (place, 2)], 3))[:, LENGTH + 1 :]
    assert_same(before, after)
    data.hidden[:, place] = torch.randn_like(data.hidden[:, place])
    assert (drafter.roll(data, rolled([(5, 1), (place, 1), (place, 2)], 3))[:, LENGTH + 1 :] != after).any(-1).all()


@both_precisions
def test_true_pairs_are_eagle_3s(target):
    """Depth 1 of every rollout is EAGLE-3's first step; with one draft the losses are the same, too."""
    drafter = made(target, steps=1)
    plain = Eagle3.build(Eagle3Config(num_layers=2, steps=1), target).eval().requires_grad_(False)
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if "mask" not in k})
    tokens = sequences(3, LENGTH)
    supervised = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.7
    data = batch(target, drafter, tokens, supervised)
    for row in range(3):  # of several rows ours is the mean of each, times its tokens: here all count alike
        alone = part_of(data, slice(row, row + 1))
        assert_same(drafter.loss(alone).total, float(plain.loss(alone).total))
        assert drafter.loss(alone).count == plain.loss(alone).count
    found = drafter.roll(data, rolled([(0, 1)], 3))[:, :LENGTH]
    assert_same(found, plain.unroll(target, tokens, data.hidden)[0])


@both_precisions
def test_the_loss_is_a_mean_over_what_was_drawn(target, drafter):
    tokens, supervised = sequences(2, LENGTH), torch.zeros(2, LENGTH, dtype=torch.bool)
    supervised[0, 5:16] = supervised[1, 9:] = True
    data = batch(target, drafter, tokens, supervised)
    found = drafter.loss(data)
    learned = nn.functional.pad(supervised, (0, 2))[:, 2:]
    some = Rollouts.drawn(learned, tokens, drafter.max_depth, 0.8, 0.2)
    output, logits = drafter.roll(data, some), target.model(tokens).logits
    total = 0.0
    for row in range(2):
        losses = []
        for anchor, depth, entry in entries_of(some, learned, row):
            q = drafter.logits(output[row, entry], target).log_softmax(-1)
            p = logits[row, anchor + depth + 1][drafter.token_ids].softmax(-1)
            losses.append(-float((p * q).sum()))
        total += int(supervised[row].sum()) * sum(losses) / len(losses)
    assert_same(found.total, total)
    assert int(found.metrics["loss_d1"][1]) == int(supervised.sum())


def test_golden_counts():
    """(n − d)·max(r^d, r_min): 8, 4, 2, 1 of 8 at r = .7 and r_min = .2."""
    assert kept_counts(8, 4, 0.7, 0.2) == [8, 4, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_drawn_rollouts_are_whole(seed):
    """With a mask come all masks of its rollout before it, and all of them say tokens that are to be learned."""
    generator = torch.Generator().manual_seed(seed)
    learned = torch.rand(4, 60, generator=generator) < 0.8
    tokens = torch.randint(0, 64, (4, 60), generator=generator)
    found = Rollouts.drawn(learned, tokens, 6, 0.8, 0.2)
    for row in range(4):
        masks = [tuple(mask) for mask in torch.stack([found.anchors, found.depths], 2)[row, found.real[row]].tolist()]
        assert masks == sorted(set(masks))
        for anchor, depth in masks:
            assert learned[row, anchor]
            assert learned[row, anchor + depth]
            assert depth == 1 or (anchor, depth - 1) in masks
        counts = [sum(d == depth for _, d in masks) for depth in range(1, 6)]
        most = kept_counts(int(learned[row].sum()), 6, 0.8, 0.2)[1:]
        assert all(c <= m for c, m in zip(counts, most, strict=True))
        assert counts[0] == most[0] or counts[0] == int((learned[row, :-1] & learned[row, 1:]).sum())


def test_without_drops_everything_is_drawn():
    learned, tokens = torch.ones(1, 12, dtype=torch.bool), torch.arange(12)[None]
    found = Rollouts.drawn(learned, tokens, 4, 1.0, 0.2)
    masks = list(zip(found.anchors[0].tolist(), found.depths[0].tolist(), strict=True))
    assert masks == [(t, d) for t in range(12) for d in range(1, 4) if t + d < 12]


@both_precisions
def test_a_batch_can_be_put_together_in_any_way(target):
    assert_sum_of_rows(made(target).train(), target)
