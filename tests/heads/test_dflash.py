"""DFlash: what is trained is what is decoded, a block sees what it should and nothing else, and nothing stays of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import DFlash, DFlashConfig
from outrider.heads.block.block_losses import Anchors, BlockTargets, decay_weights, eligible_places, pace_weights
from outrider.heads.block.dflash import default_taps
from outrider.heads.divergences import DIVERGENCES
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from .conftest import (
    VOCAB,
    anchored,
    assert_rounds_have,
    assert_sum_of_rows,
    batch,
    features,
    sequences,
)
from .conftest import made as make

LENGTH = 22
VARIANTS: dict[str, dict[str, Any]] = {
    "infill": {},
    "infill, causal": {"causal": True},
    "from anchor": {"from_anchor": True, "block_size": 5},
    "from anchor, causal, window": {"from_anchor": True, "causal": True, "sliding_window": 7},
    "window from the anchor": {"sliding_window": 6, "window_from": "anchor", "mask_token_id": 63},
    "one layer, pruned vocabulary": {"num_layers": 1, "draft_vocab_size": 20},
    "two taps, as many key heads": {"taps": (0, 6), "num_key_value_heads": 4},
    "two slots": {"block_size": 2},
    "one slot": {"block_size": 1, "from_anchor": True},
}


def made(target: Target, **changes: Any) -> DFlash:
    return make(DFlash, target, {"mask": 1.0}, **{"num_layers": 2, "block_size": 6} | changes)


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> DFlash:
    return made(target, **VARIANTS[request.param])


def trained_logits(target: Target, drafter: DFlash, tokens: Tensor, hidden: Tensor, places: list[list[int]]) -> Tensor:
    """Logits of the blocks at `places`, `[B, n, k, V']`."""
    return target.lm_head(drafter.states(target, tokens, hidden, anchored(places)), drafter.output_ids)


@both_precisions
def test_logits_in_training_are_the_decoders(target, drafter):
    """All anchors of padded rows at once, against rounds of ragged rows that begin there; fp32."""
    tokens = sequences(3, LENGTH)
    starts = [[1, 3, 4, 9, 10], [5, 6, 9, 12, 13], [2, 3, 6, 7, 15]]
    depth = drafter.max_depth
    trained = trained_logits(target, drafter, tokens, features(target, drafter, tokens), starts)
    rounds = drafter, target, tokens, starts, min(depth, 5)
    assert_rounds_have(lambda number, row, d: trained[row, number, d], *rounds)


@both_precisions
def test_many_blocks_are_read_as_each_alone(target, drafter):
    """More than fit into one product, at every place of the text."""
    tokens = sequences(2, 80)
    hidden = features(target, drafter, tokens)
    places = list(range(1, 79))
    together = trained_logits(target, drafter, tokens, hidden, [places, places])
    for place in (1, 2, 40, 41, 42, 77, 78):
        alone = trained_logits(target, drafter, tokens, hidden, [[place]] * 2)
        assert_same(together[:, place - 1], alone[:, 0])


@both_precisions
def test_nothing_but_the_context_before_the_anchor_is_seen(target, drafter):
    """Taps from the anchor on, tokens other than the anchor's, other blocks and rows leave a block bit for bit."""
    tokens = sequences(3, LENGTH)
    hidden, place = features(target, drafter, tokens), 9
    places = [[4, place, 15]] * 3
    before = trained_logits(target, drafter, tokens, hidden, places)[:, 1]
    changed, others = hidden.clone(), tokens.clone()
    changed[:, place:] = torch.randn_like(changed[:, place:])
    others[:, place + 1 :] = 5
    others[:, :place] = 6
    after = trained_logits(target, drafter, others, changed, places)[:, 1]
    assert torch.equal(before, after)
    elsewhere = trained_logits(target, drafter, tokens, hidden, [[2, place, 11]] * 3)[:, 1]
    assert_same(before, elsewhere)  # another row of the same products
    changed = hidden.clone()
    changed[1:] = torch.randn_like(changed[1:])
    assert torch.equal(before[0], trained_logits(target, drafter, tokens, changed, places)[0, 1])


def test_the_token_and_the_state_just_before_are_seen(target, drafter):
    """The comparisons above are empty if nothing has an effect."""
    tokens = sequences(3, LENGTH)
    hidden, place = features(target, drafter, tokens), 9
    before = trained_logits(target, drafter, tokens, hidden, [[place]] * 3)
    changed = hidden.clone()
    changed[:, place - 1] = torch.randn_like(changed[:, place - 1])
    assert (trained_logits(target, drafter, tokens, changed, [[place]] * 3) != before).any(-1).all()
    others = tokens.clone()
    others[:, place] = (others[:, place] + 1) % VOCAB
    assert (trained_logits(target, drafter, others, hidden, [[place]] * 3) != before).any(-1).all()


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize(("window_from", "reaches"), [("anchor", [4, 4, 4, 4, 4]), ("slot", [5, 6, 7, 8, 9])])
def test_a_window_reaches_as_far_as_its_convention_says(target, window_from, reaches, from_anchor):
    """Window 5 + 1 before the anchor at 10: from the anchor from place 4 on, from slot i from place 5 + i on."""
    block = {"from_anchor": from_anchor, "block_size": 5 + (not from_anchor)}
    drafter = made(target, num_layers=1, sliding_window=6, window_from=window_from, causal=True, **block)
    tokens, place = sequences(1, LENGTH), 10
    hidden = features(target, drafter, tokens)
    before = trained_logits(target, drafter, tokens, hidden, [[place]])
    first = [place] * drafter.max_depth
    for t in range(place):
        changed = hidden.clone()
        changed[:, t] = torch.randn_like(changed[:, t])
        moved = (trained_logits(target, drafter, tokens, changed, [[place]]) != before).any(-1)[0, 0]
        first = [min(f, t) if m else f for f, m in zip(first, moved.tolist(), strict=True)]
    # Slot i predicts draft i in the layout that is filled in, and draft i + 1 from the anchor on.
    expected = reaches if from_anchor or window_from == "anchor" else [r + 1 for r in reaches]
    assert first == [min(r, place) for r in expected]


@both_precisions
@pytest.mark.parametrize("causal", [True, False])
def test_slots_of_a_block_see_each_other_as_the_config_says(target, causal):
    """Causal: the first slots are what a shorter block has. Otherwise every slot knows how many there are."""
    long, tokens = made(target, block_size=6, causal=causal), sequences(3, LENGTH)
    short = made(target, block_size=4, causal=causal)
    short.load_state_dict(long.state_dict())
    hidden, places = features(target, long, tokens), [[9]] * 3
    first = trained_logits(target, long, tokens, hidden, places)[:, :, :3]
    cut = trained_logits(target, short, tokens, hidden, places)
    if causal:
        assert_same(first, cut)
    else:
        assert (first - cut).abs().max() > 1e-3


def test_the_block_is_read_once_whatever_is_drafted(target, drafter, monkeypatch):
    passes, blocks = [], drafter.blocks
    monkeypatch.setattr(drafter, "blocks", lambda *arguments: passes.append(1) or blocks(*arguments))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    depth = drafter.max_depth
    tree = Tree((-1, -1, 0, 0, 1, 2)) if depth > 2 else Tree((-1, -1))
    for plan in (Plan(depth), Plan(depth, 3, 7), Plan(tree=tree)):
        passes.clear()
        out = Decoder(target, drafter).generate(prompts, 12, Sampling(0.0), plan)
        assert len(passes) == max(map(len, out.rounds))


@both_precisions
@pytest.mark.parametrize("weighting", ["decay", "dpace", "overlap"])
@pytest.mark.parametrize(("loss", "changes"), [("hard_ce", {}), ("soft_ce", {"draft_vocab_size": 20}), ("tv", {})])
def test_the_loss_is_a_weighted_mean_over_each_rows_drafts(target, loss, changes, weighting):
    """Written as loops over rows, anchors and drafts; rows count as many tokens as they have to learn."""
    drafter = made(target, loss=loss, weighting=weighting, gamma=3.0, **changes).train()
    tokens, supervised = sequences(2, 14), torch.zeros(2, 14, dtype=torch.bool)
    supervised[0, 5:9] = supervised[0, 11:] = True
    supervised[1, 3:12] = True
    seen = batch(target, drafter, tokens, supervised)
    found = drafter.loss(seen)
    logits, kept = target.model(tokens).logits, drafter.token_ids
    total, alphas = 0.0, {}
    for row in range(2):
        sums = weights = 0.0
        for a in range(1, 13):
            if not (supervised[row, a] and supervised[row, a + 1]):
                continue
            q = trained_logits(target, drafter, tokens, seen.hidden, [[a]] * 2)[row, 0].log_softmax(-1)
            run = [j for j in range(1, 6) if a + j < 14 and supervised[row, a + 1 : a + j + 1].all()]
            labels = [int(tokens[row, a + j]) for j in run]
            places = [(kept == label).nonzero().flatten() for label in labels]
            right = [float(q[j - 1, p[0]].exp()) if len(p) else 0.0 for j, p in zip(run, places, strict=True)]
            p = torch.stack([logits[row, a + j - 1].softmax(-1) for j in run])[:, kept]
            overlap = torch.minimum(p, q[: len(run)].exp()).sum(-1).tolist()
            alphas |= {(row, a, j): o for j, o in zip(run, overlap, strict=True)}
            eased = [0.5 + 0.5 * r for r in (right if weighting == "dpace" else overlap)]
            products = [torch.tensor(eased[:m]).prod().item() for m in range(1, len(run) + 1)]
            for i, j in enumerate(run):
                hard = -float(q[j - 1, places[i][0]]) if len(places[i]) else 0.0
                divergence = DIVERGENCES.get(loss)
                value = hard if divergence is None else float(divergence((p[i] / p[i].sum()).log()[None], q[j - 1 : j]))
                fixed = float(decay_weights(5, 3.0)[i]) if weighting == "decay" else 1.0
                sums += value * (fixed if weighting == "decay" else sum(products[i:]))
                weights += fixed
        total += float(supervised[row].sum()) * sums / weights
    assert_same(found.total, total)
    assert int(found.count) == int(supervised.sum())
    first = [o for (_, _, j), o in alphas.items() if j == 1]
    assert_same([float(x) for x in found.metrics["alpha_d1"]], [sum(first), len(first)])


@both_precisions
def test_gradients_are_those_of_the_whole_loss(target):
    """A few blocks at a time and with slopes put in: as autograd gives them of all logits at once."""
    drafter = made(target, loss="soft_ce", mask_token_id=None).train().requires_grad_(True)
    tokens = sequences(2, 30)
    seen = batch(target, drafter, tokens)
    drafter.loss(seen).mean.backward()
    slopes = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    wanted = seen.supervised.clone()
    wanted[:, :2] = False
    anchors = Anchors.of(eligible_places(wanted, True), tokens, 512)
    lessons = BlockTargets.of(anchors, wanted, drafter.max_depth)
    logits = target.lm_head(drafter.states(target, tokens, seen.hidden, anchors)).flatten(0, 1)
    p = lessons.before_tokens(target.lm_head(seen.last)).softmax(-1)
    losses = -(p * logits.log_softmax(-1)).sum(-1)
    weights = lessons.per_row(lessons.counts * decay_weights(5, 1 + 15 / 7), wanted)
    ((losses * weights).sum() / wanted.sum()).backward()
    for name, p in drafter.named_parameters():
        assert_same(slopes[name], p.grad, msg=name)
    assert float(slopes["mask"].abs().sum()) > 0


@both_precisions
def test_a_batch_can_be_put_together_in_any_way(target):
    assert_sum_of_rows(made(target, num_anchors=4).train(), target)


def test_anchors_are_drawn_evenly_from_eligible_places():
    tokens = torch.arange(40)[None] + torch.arange(500)[:, None]
    eligible = torch.zeros(500, 40, dtype=torch.bool)
    eligible[:, 10:20] = True
    found = Anchors.of(eligible, tokens, 3)
    assert found.places.shape == (500, 3)
    assert (found.places.diff(dim=1) > 0).all()
    counts = torch.bincount(found.places.flatten(), minlength=40)[10:20]
    assert counts.sum() == 1500
    assert float(((counts - 150.0) ** 2 / 150).sum()) < 30  # chi-square with 9 degrees of freedom


def test_an_anchor_is_a_token_of_the_target_with_one_to_learn_after_it():
    supervised = torch.tensor([[True, True, False, True, True, False, True]])
    assert eligible_places(supervised, strict=True)[0].nonzero().flatten().tolist() == [3]
    assert eligible_places(supervised, strict=False)[0].nonzero().flatten().tolist() == [2, 3, 5]


def test_drafts_count_while_all_before_them_do():
    supervised = torch.tensor([[False, True, True, True, False, True, True, True]])
    lessons = BlockTargets.of(anchored([[1, 2, 5, 6]]), supervised, 3)
    assert lessons.counts.int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]


@both_precisions
def test_golden_pace_weights():
    """D-PACE, arXiv 2605.18810: q = 3/5, 1/2, 1/5 and α = 1/2 give 44/25, 24/25, 9/25; and they are a derivative."""
    probs, counts = torch.tensor([[0.6, 0.5, 0.2]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    expected = torch.tensor([[44 / 25, 24 / 25, 9 / 25]], dtype=torch.float64)
    assert_same(pace_weights(probs, counts), expected)
    logs = torch.tensor([[0.8, 0.75, 0.6]], dtype=torch.float64).log().requires_grad_(True)
    (slope,) = torch.autograd.grad(logs.exp().cumprod(1).sum(), logs)
    assert_same(slope, expected)
    cut = pace_weights(probs, torch.tensor([[True, True, False]]))
    assert_same(cut, torch.tensor([[1.4, 0.6, 0.0]], dtype=torch.float64))


@both_precisions
def test_lk_nla_weighed_by_overlap_without_a_floor_learns_the_expected_length():
    """Its gradient is that of −Σ_m Π_{i≤m} α_i, the drafts that a round accepts (AngelSpec's end-to-end loss)."""
    target = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    start = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(2), requires_grad=True)
    alpha = torch.minimum(target, start.log_softmax(-1)).exp().sum(-1)  # [A, k]
    weights = pace_weights(alpha.detach(), torch.ones(2, 3, dtype=torch.bool), floor=0.0)
    lost = DIVERGENCES["lk_nla"](target.flatten(0, 1), start.log_softmax(-1).flatten(0, 1)).view(2, 3)
    (found,) = torch.autograd.grad((weights * lost).sum(), start)
    (expected,) = torch.autograd.grad(-alpha.cumprod(1).sum(), start)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [(36, 5, (2, 10, 18, 26, 34)), (12, 1, (7,)), (32, 2, (2, 30)), (12, 3, (2, 6, 10))],
)
def test_default_taps_are_spread_as_the_paper_says(layers, count, taps):
    assert default_taps(layers, count) == taps


def test_an_unused_row_of_the_embedding_is_the_mask(tiny_llama, tiny_tokenizer):
    size = len(tiny_tokenizer)
    drafter = DFlash.build(DFlashConfig(num_layers=1), Target(tiny_llama(vocab=size + 8), tiny_tokenizer))
    assert drafter.config.mask_token_id == size
    assert drafter.mask is None
    learned = DFlash.build(DFlashConfig(num_layers=1), Target(tiny_llama(vocab=size), tiny_tokenizer))
    assert learned.config.mask_token_id is None
    assert learned.mask is not None


def test_a_mask_that_texts_have_is_refused(tiny_target):
    for token in (tiny_target.eos_ids[0], tiny_target.tokenizer.pad_token_id):
        with pytest.raises(BadInputError, match="ends or pads texts"):
            DFlash.build(DFlashConfig(mask_token_id=token), tiny_target)


@both_precisions
@pytest.mark.parametrize("window", [7, 512])
def test_logits_are_those_of_the_librarys_dflash(target, window):
    """Random weights through `transformers`' own assistant and candidate generator, round by round; fp32.

    Its window does not count the slot itself (distances up to the window, inclusive), so that it is one less than ours.
    """
    drafter = made(target, mask_token_id=63, sliding_window=window + 1)
    config = drafter.config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same = (*sizes, "rms_norm_eps", "rope_parameters", "block_size", "mask_token_id")
    theirs = MuseGlimmerAssistantConfig(
        **{name: getattr(config, name) for name in same},
        num_hidden_layers=2,
        sliding_window=window,
        target_layer_ids=[t - 1 for t in drafter.taps],
    )
    model = MuseGlimmerAssistantModel(theirs).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(k, k): v for k, v in drafter.state_dict().items() if k != "token_ids"})
    seen: list[tuple[int, Tensor]] = []
    model.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((int(kwargs["position_ids"][0, -6]), out.last_hidden_state)),
        with_kwargs=True,
    )
    prompt = sequences(1, 12)
    with torch.inference_mode():
        theirs = {"assistant_model": model, "speculation_type": "dflash"}
        text = target.model.generate(prompt, **theirs, max_new_tokens=24, do_sample=False)
        places = [place for place, _ in seen]
        expected = trained_logits(target, drafter, text, features(target, drafter, text), [places])[0]
        assert len(places) > 5
        for (place, output), mine in zip(seen, expected, strict=True):
            assert_same(target.lm_head(output[0, 1:]), mine, msg=f"block at {place}")
