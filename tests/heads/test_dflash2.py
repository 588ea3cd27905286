"""DFlash2: what is trained is what is decoded, and what it adds to DFlash begins as nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Plan
from outrider.heads import DFlash, DFlash2, DFlash2Config, DFlashConfig
from outrider.heads.block.dflash2 import BlockConvolution
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from .conftest import (
    anchored,
    answered_twice,
    assert_drafts_are_candidates,
    assert_rounds_have,
    batch,
    features,
    loss_by_loops,
    opened,
    proposed,
    sequences,
)
from .conftest import made as make

LENGTH = 22
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three taps, causal, window": {"conv_kernel_size": 3, "causal": True, "sliding_window": 7},
    "from anchor, pruned vocabulary": {"from_anchor": True, "draft_vocab_size": 20},
    "more candidates than tokens": {"draft_vocab_size": 4},
}


def made(target: Target, **changes: Any) -> DFlash2:
    settings = {"num_layers": 2, "block_size": 6, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 5}
    return make(DFlash2, target, {"mask": 1.0, "conv": 0.3, "codebook": 1.0}, **settings | changes)


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> DFlash2:
    return made(target, **VARIANTS[request.param])


def block_logits(target: Target, drafter: DFlash2, tokens: Tensor, row: int, place: int) -> tuple[Tensor, Tensor]:
    """Logits of training at one anchor before and after the selector, teacher forced, `[k, V']` each."""
    hidden = features(target, drafter, tokens)
    states = drafter.states(target, tokens, hidden, anchored([[place]] * len(tokens)))[row, 0]
    beyond = torch.nn.functional.pad(tokens, (0, drafter.max_depth))  # a block may pass the end of the text
    logits, selector = target.lm_head(states, drafter.output_ids), drafter.candidate_selector
    context = selector.predecessor_codebook(beyond[row, place : place + drafter.max_depth])
    scores = logits + (context * selector.hidden_projection(states)) @ selector.successor_codebook.weight.T
    least = logits.sort(-1).values[:, -min(drafter.config.selector_top_k, logits.shape[-1])]
    return logits, scores.masked_fill(logits < least[:, None], -torch.inf)


@both_precisions
def test_logits_in_training_are_the_decoders(target, drafter):
    tokens = sequences(3, LENGTH)
    starts = [[1, 4, 9], [5, 6, 12], [2, 7, 15]]
    depth = 5
    trained = [[block_logits(target, drafter, tokens, row, place)[1] for place in starts[row]] for row in range(3)]
    assert_rounds_have(lambda number, row, d: trained[row][number][d], drafter, target, tokens, starts, depth)


@pytest.mark.parametrize("top_k", [5, 64])
def test_a_new_drafter_has_dflashs_logits(target, top_k):
    """Bit for bit: convolutions begin as the identity, the successors' codebook at zero."""
    sizes = {"num_layers": 2, "block_size": 5, "draft_vocab_size": 0}
    torch.manual_seed(7)
    drafter = DFlash2.build(DFlash2Config(**sizes, conv_group_size=8, selector_top_k=top_k), target).eval()
    plain = DFlash.build(DFlashConfig(**sizes), target).eval()
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if k in plain.state_dict()})
    for tokens in ([1, 2, 3], [9, 8, 7, 6, 5]):
        theirs, ours = (opened(one, target, [tokens]) for one in (plain, drafter))
        rounds = [
            [s.prefill(torch.tensor([4])), *(s.decode(torch.tensor([[t]]))[:, 0] for t in (5, 6, 7))]
            for s in (theirs, ours)
        ]
        for before, after in zip(*rounds, strict=True):
            assert int(after.isfinite().sum()) == top_k
            kept = after.isfinite()
            assert torch.equal(after[kept], before[kept])
            assert before[kept].min() >= before[~kept].max() if top_k < 64 else True


def test_slots_before_reach_a_convolution_and_no_other_block_does(target):
    """With two taps slot i reads slots i and i − 1 of its own block; kernels depend on slot i alone."""
    drafter = made(target)
    conv, size = drafter.layers[0].attention_conv, target.hidden_size
    assert isinstance(conv, BlockConvolution)
    states, x = torch.randn(2, 1, 12, size, generator=torch.Generator().manual_seed(1))
    before = conv(states, x, 1)
    for place in range(12):
        changed = x.clone()
        changed[:, place] += 1
        moved = (conv(states, changed, 1) != before).any(-1)[0].nonzero()[:, 0].tolist()
        assert moved == ([place] if place % 6 == 5 else [place, place + 1])
        changed = states.clone()
        changed[:, place] += 1
        assert (conv(changed, x, 1) != before).any(-1)[0].nonzero()[:, 0].tolist() == [place]


@both_precisions
def test_golden_convolution(target):
    """One group, by hand: slot 1 of (1, 2), (3, 4) is 3·(1 + .5) + 1·.25 and 4·(1 + .5) + 2·.25."""
    config = DFlash2Config(hidden_size=2, block_size=2, conv_group_size=2)
    conv = BlockConvolution(config)
    conv.base_kernel.data[1] = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    conv.kernel_projection.weight.data[2:] = torch.tensor([[0.5, 0.0], [0.25, 0.0]])  # of the output side
    states, x = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert_same(conv(states, x, 1), torch.tensor([[[1.0, 2.0], [4.75, 6.5]]]))
    assert_same(conv(states, x, 0), x)


@both_precisions
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize(("loss", "changes"), [("hard_ce", {}), ("soft_ce", {"draft_vocab_size": 20})])
def test_the_loss_is_dflashs_and_the_selectors(target, loss, changes, weighting):
    """Written as loops; of what followed and is no candidate the selector learns nothing."""
    drafter = made(target, loss=loss, weighting=weighting, gamma=3.0, **changes).train()
    tokens, supervised = answered_twice()
    found = drafter.loss(batch(target, drafter, tokens, supervised))
    total, _, dropped = loss_by_loops(target, drafter, tokens, block_logits)
    assert dropped > 3
    assert_same(found.total, total)


def test_the_token_before_a_draft_changes_its_scores_and_no_other(target):
    drafter, tokens = made(target), sequences(1, LENGTH)
    before = block_logits(target, drafter, tokens, 0, 8)[1]
    for j in range(1, 5):
        others = tokens.clone()
        others[0, 8 + j] = (others[0, 8 + j] + 1) % 64
        moved = (block_logits(target, drafter, others, 0, 8)[1] != before).any(-1).tolist()
        assert moved == [d == j for d in range(5)]


def test_a_selector_that_knows_the_pairs_is_always_right(target):
    """Scores that single out one candidate after each token: T = 0 drafts are a chain of pairs."""
    drafter = made(target, selector_top_k=64, selector_rank=64)
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    selector = drafter.candidate_selector
    selector.predecessor_codebook.weight.copy_(torch.eye(64))
    selector.successor_codebook.weight.copy_(1e4 * torch.eye(64)[follows.argsort()])
    selector.hidden_projection = torch.nn.Linear(target.hidden_size, 64)  # with a bias: 1 for all states
    torch.nn.init.zeros_(selector.hidden_projection.weight)
    torch.nn.init.ones_(selector.hidden_projection.bias)
    session = opened(drafter, target, [[1, 2, 3]])
    drafted = proposed(session, [4], 5)[0]
    assert all(follows[a] == b for a, b in pairwise([4, *drafted]))


@pytest.mark.parametrize("plan", [Plan(5), Plan(4, 3, 9)], ids=["chain", "tree"])
def test_drafts_are_candidates_alone(target, plan, monkeypatch):
    drafter = made(target, selector_top_k=3)
    assert_drafts_are_candidates(target, drafter, plan, 3, monkeypatch)


def test_a_target_in_bfloat16_has_the_same_candidates_in_training(tiny_llama):
    """Of its rounded logits, in which several may be alike."""
    target = Target(tiny_llama(layers=6).bfloat16())
    drafter, tokens = made(target), sequences(1, LENGTH)
    session = opened(drafter, target, [tokens[0, :9].tolist()])
    logits = [session.prefill(tokens[:, 9]), *(session.decode(tokens[:, j : j + 1])[:, 0] for j in range(10, 14))]
    hidden = features(target, drafter, tokens)
    states = drafter.states(target, tokens, hidden, anchored([[9]]))[0, 0]
    candidates = drafter.candidates(target.lm_head(states))[1]
    for ours, theirs in zip(logits, candidates, strict=True):
        assert set(ours[0].isfinite().nonzero()[:, 0].tolist()) == set(theirs.tolist())
