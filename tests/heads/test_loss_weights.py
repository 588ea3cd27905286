"""A share of the loss lies on the drafts that served rounds reached, and each text keeps its whole weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads import HEADS, DFlash, Drafter, ReachedPositions, TargetBatch, losses
from outrider.heads.block.block_losses import Anchors, BlockLearning, BlockTargets, eligible_places
from outrider.heads.losses import PositionLosses
from outrider.heads.parallel.parallel_drafts import RolledDrafts, Rollouts, Served, kept_counts
from outrider.targets import Target
from outrider.targets.sequence_packing import Documents

from ..closeness import assert_same, both_precisions
from ..conftest import drafter_in_training, installed
from .conftest import batch as all_of
from .conftest import sequences

DFLASH = {"type": "dflash", "num_layers": 2, "block_size": 4, "taps": [2, 4]}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "steps": 3},
    "eagle1": {"type": "eagle1", "steps": 2, "noise": 0.0},
    "medusa": {"type": "medusa", "num_heads": 3},
    "hydra": {"type": "hydra", "num_heads": 3},
    "mtp": {"type": "mtp", "steps": 3},
    "dflash": DFLASH,
    "dflash2": {**DFLASH, "type": "dflash2", "selector_rank": 8},
    "dspark": {**DFLASH, "type": "dspark", "from_anchor": True},
    "lilicorr": {**DFLASH, "type": "lilicorr", "lilicorr_hidden_size": 16},
    "peagle": {"type": "peagle", "num_layers": 1, "steps": 3, "keep_ratio": 1.0},
    "uno": {"type": "uno", "steps": 3, "keep_ratio": 1.0},
    "pard": {"type": "pard", "model": {"num_hidden_layers": 1}, "steps": 3, "keep_ratio": 1.0, "mask_token_id": 63},
}
KINDS = installed(KINDS)

# Two rows of ten tokens, the last seven of which were answered. Of the first, rounds emitted 3, 1 and 2 tokens; of the
# second nobody knows.
PROMPT, DEPTHS = 3, [0, 0, 0, 0, 1, 2, 3, 1, 1, 2]


def batch(target: Target, drafter: Drafter[Any], share: float | None) -> TargetBatch:
    supervised = torch.arange(len(DEPTHS)).expand(2, -1) >= PROMPT
    found = all_of(target, drafter, sequences(2, len(DEPTHS), 60), supervised)
    if share is not None:
        found.verified = ReachedPositions(torch.tensor([DEPTHS, [0] * len(DEPTHS)]), share)
    return found


def lesson(drafter: Drafter[Any], given: TargetBatch) -> list[Tensor]:
    drafter.zero_grad()
    found = drafter.loss(given)
    found.total.backward()
    return [found.total.detach(), found.count, *(p.grad.clone() for p in drafter.parameters() if p.grad is not None)]


@both_precisions
def test_the_share_moves_to_what_was_reached_by_the_weights_that_were_there():
    """Weights 4, 2, 1, 1 of one text, of which the second and the third were reached: half of 8 goes there, 2 : 1."""
    verified = ReachedPositions(torch.tensor([[0, 1, 2, 1]]), 0.5)
    rows, places, depths = torch.zeros(4, dtype=torch.long), torch.tensor([1, 1, 2, 3]), torch.tensor([2, 1, 2, 2])
    found = verified.weighed(torch.tensor([4.0, 2.0, 1.0, 1.0]), rows, places, depths)
    assert_same(found, torch.tensor([2.0, 1 + 8 / 3, 0.5 + 4 / 3, 0.5]))
    assert_same(found.sum(), 8.0)


@both_precisions
def test_a_whole_share_leaves_nothing_elsewhere_and_none_changes_nothing():
    depths, weights = torch.tensor([[0, 1, 2]]), torch.tensor([[3.0, 1.0], [2.0, 5.0]])  # [S, P]
    arguments = weights, torch.zeros(2, dtype=torch.long), torch.tensor([1, 2]), torch.tensor([[1], [2]])
    found = ReachedPositions(depths, 1.0).weighed(*arguments)
    assert_same(found, torch.tensor([[4.125, 0.0], [0.0, 6.875]]))
    assert torch.equal(ReachedPositions(depths, 0.0).weighed(*arguments), weights)


def test_a_text_of_which_nothing_was_reached_keeps_its_weights():
    """Of two texts of one row, and of two rows, only the one with rounds changes; each keeps its sum."""
    weights, places = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 2, 3])
    verified, ones = ReachedPositions(torch.tensor([[0, 1, 0, 0]]), 0.5), torch.ones(4, dtype=torch.long)
    found = verified.weighed(weights, torch.zeros(4, dtype=torch.long), places, ones, Documents([[2, 2]], 4))
    assert found.tolist() == [0.5, 2.5, 3.0, 4.0]
    found = ReachedPositions(torch.tensor([[0, 1], [0, 0]]), 0.5).weighed(weights, places // 2, places % 2, ones)
    assert found.tolist() == [0.5, 2.5, 3.0, 4.0]


def test_a_share_of_the_anchors_is_drawn_from_roots_and_the_others_as_always():
    """Of 10 anchors among 60 places, rounds of 4 tokens: 5 are roots; the other 5 are the first 5 of the usual draw."""
    tokens, eligible = torch.arange(64)[None], torch.zeros(1, 64, dtype=torch.bool)
    eligible[:, 3:63] = True
    depths = torch.tensor([[0, 0, 0, 0, *[1, 2, 3, 4] * 15]])
    roots = {place for place in range(63) if depths[0, place + 1] == 1}
    found = Anchors.of(eligible, tokens, 10, 7, verified=ReachedPositions(depths, 0.5))
    assert found.usual is not None
    drawn = dict(zip(found.places[0].tolist(), found.usual[0].tolist(), strict=True))
    assert sorted(drawn) == list(drawn)
    evenly = {place for place, is_usual in drawn.items() if is_usual}
    assert evenly < set(Anchors.of(eligible, tokens, 10, 7).places[0].tolist())
    assert len(evenly) == 5
    assert drawn.keys() - evenly <= roots
    assert len(drawn.keys() & roots) >= 5
    none = Anchors.of(eligible, tokens, 10, 7, verified=ReachedPositions(torch.zeros_like(depths), 0.5))
    assert none.usual is None
    assert torch.equal(none.places, Anchors.of(eligible, tokens, 10, 7).places)
    every = Anchors.of(eligible, tokens, 60, 7, verified=ReachedPositions(depths, 0.5))
    assert every.usual is None, "all places are anchors already"


@both_precisions
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 1.0])
def test_blocks_weigh_what_a_texts_tokens_do_and_the_rest_is_spread_without_what_was_drawn_for_rounds(target, share):
    drafter = drafter_in_training(target, DFLASH | {"num_anchors": 2})
    assert isinstance(drafter, DFlash)
    given = batch(target, drafter, share)
    wanted, verified = given.supervised, given.verified
    for step in range(8):
        anchors = Anchors.of(eligible_places(wanted, True), given.tokens, 2, step, verified=verified)
        lessons = BlockTargets.of(anchors, wanted, drafter.max_depth)
        weights = BlockLearning(drafter, given, wanted, lessons).fixed_weights()
        for row in range(2):
            assert_same(weights[lessons.rows == row].sum(), 7.0, 2 * 10)
        if lessons.usual is None:
            continue
        reached = torch.tensor(DEPTHS)[lessons.places] == torch.arange(1, 4)
        unreached = (lessons.rows == 0)[:, None] & ~reached & lessons.counts
        assert bool((weights[unreached & ~lessons.usual[:, None]] == 0).all())
        assert float(weights[unreached].sum()) <= (1 - share) * 7 + 1e-5


def test_a_share_of_the_masks_follows_rounds_and_the_others_are_drawn_as_always():
    """As many masks of each depth as without, none without those before it; half of them where rounds reached."""
    tokens, learned = torch.arange(80)[None], torch.ones(1, 80, dtype=torch.bool)
    depths = torch.tensor([[1, 2, 3, 4, 5] * 16])
    served, drops = Served(ReachedPositions(depths, 0.5), ahead=1), (6, 0.7, 0.2)
    found, usual = Rollouts.drawn(learned, tokens, *drops, 7, served), Rollouts.drawn(learned, tokens, *drops, 7)
    assert found.usual is not None
    assert usual.usual is None
    masks, others = set(), set()
    for anchor, depth, is_usual in torch.stack([found.anchors, found.depths, found.usual], 2)[found.real].tolist():
        masks.add((anchor, depth))
        others |= set() if is_usual else {(anchor, depth)}
    assert all(depth == 1 or (anchor, depth - 1) in masks for anchor, depth in masks)
    reached = {(a, d) for a, d in masks if a + 1 + d < 80 and depths[0, a + 1 + d] == d + 1}
    assert others
    assert others <= reached
    for depth, most in enumerate(kept_counts(80, *drops)):
        if depth:
            assert sum(d == depth for _, d in masks) <= most
            there = int((depths[0, 2 + depth :] == depth + 1).sum())
            assert sum(d == depth for _, d in reached) >= min(int(0.5 * most), there) * (depth < 5) * 0.8
    whole = Rollouts.drawn(learned, tokens, 6, 1.0, 0.2, 7, served)
    assert whole.usual is None, "where nothing is dropped, all masks are there already"
    none = Rollouts.drawn(learned, tokens, *drops, 7, Served(ReachedPositions(torch.zeros_like(depths), 0.5), ahead=1))
    assert torch.equal(none.anchors, usual.anchors)
    assert torch.equal(none.depths, usual.depths)


@both_precisions
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_masks_weigh_what_a_rows_tokens_do(share):
    """The rest is spread over what was drawn evenly, and over what the text itself says."""
    tokens, wanted = torch.arange(80)[None], torch.ones(1, 80, dtype=torch.bool)
    wanted[:, :1] = False
    learned = torch.nn.functional.pad(wanted, (0, 1))[:, 1:]
    served = Served(ReachedPositions(torch.tensor([[1, 2, 3, 4, 5] * 16]), share), ahead=1)
    rollouts = Rollouts.drawn(learned, tokens, 6, 0.7, 0.2, 7, served)
    drafts = RolledDrafts.of(learned, rollouts)
    weights = drafts.weights(wanted, 0.9, served)
    assert_same(weights.sum(), 79.0)
    reached = served.verified.reached(drafts.rows, drafts.places + 1, drafts.depths + 1)
    assert drafts.usual is not None
    assert bool(reached[~drafts.usual].all())
    rest = float(weights[~reached].sum())
    if share == 1:
        assert_same(rest, 0.0, scale=1.0)
    else:
        assert 0.5 * 79 < rest < 0.7 * 79


def compared(monkeypatch: pytest.MonkeyPatch, drafter: Drafter[Any], given: TargetBatch) -> tuple[Tensor, Tensor]:
    """The weights of a feature head's comparison, `[S, P]`, and the tokens that are predicted, `[P]`."""
    seen: list[Tensor] = []

    def noted(last: Tensor, drafted: Any, settings: Any, weights: Tensor, following: Tensor) -> PositionLosses:
        seen.extend([weights, following])
        return compare(last, drafted, settings, weights, following)

    compare = losses.chunked_compare
    monkeypatch.setattr(losses, "chunked_compare", noted)
    drafter.loss(given)
    return seen[0], seen[1]


@both_precisions
def test_each_step_learns_what_rounds_reached_at_its_depth(target, monkeypatch):
    """With the whole share, step i has weights at the tokens of depth i + 1 and nowhere else, as decay has them."""
    drafter = drafter_in_training(target, {"type": "eagle3", "steps": 3, "decay": 0.5})
    weights, following = compared(monkeypatch, drafter, batch(target, drafter, 1.0))
    usual, _ = compared(monkeypatch, drafter, batch(target, drafter, None))
    assert len(following) == 14
    depths = torch.tensor(DEPTHS[PROMPT:])
    reached = (depths == torch.tensor([[1], [2], [3]])) * torch.tensor([[1.0], [0.5], [0.25]])
    assert_same(weights[:, :7], reached * usual[:, :7].sum() / reached.sum())
    assert torch.equal(weights[:, 7:], usual[:, 7:]), "of the second row nothing was reached"


@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)
def test_a_share_of_nothing_is_the_usual_loss_and_weights_stay_in_all(target, values):
    """Bit for bit without a share. With one, gradients change where rounds are; a constant loss has the same total."""
    drafter = drafter_in_training(target, values)
    usual, none, half = (lesson(drafter, batch(target, drafter, share)) for share in (None, 0.0, 0.5))
    assert all(torch.equal(a, b) for a, b in zip(usual, none, strict=True))
    assert int(half[1]) == int(usual[1])
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(usual, half, strict=True))


@both_precisions
@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)
def test_the_loss_of_a_whole_share_is_that_of_drafts_in_served_places(target, values):
    """Changing what follows the deepest round changes only what was never reached, and so nothing of such a loss."""
    drafter, losses = drafter_in_training(target, values), []
    for later in (5, 9):
        given = batch(target, drafter, 1.0)
        tokens = given.tokens[:1].clone()
        tokens[:, 7:] = later
        whole = all_of(target, drafter, tokens, given.supervised[:1])
        whole.verified = ReachedPositions(torch.tensor([[0, 0, 0, 0, 1, 2, 3, 0, 0, 0]]), 1.0)
        losses.append(float(drafter.loss(whole).total.detach()))
    assert_same(losses[0], losses[1])
    assert losses[0] > 0


def test_the_kinds_above_are_those_that_say_that_they_follow_rounds():
    assert {values["type"] for values in KINDS.values()} == {n for n, kind in HEADS.items() if kind.follows_rounds}
