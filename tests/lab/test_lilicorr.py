"""LiLiCorr: what is trained is what is decoded, and its scores are those of the published code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Plan
from outrider.lab.lilicorr import Correlator, LiLiCorr, LiLiCorrConfig
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..heads.conftest import (
    anchored,
    answered_twice,
    assert_drafts_are_candidates,
    assert_rounds_have,
    batch,
    features,
    loss_by_loops,
    opened,
    sequences,
)
from ..heads.conftest import made as make

LENGTH = 22
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "convolutions, causal, window": {"conv_kernel_size": 3, "conv_group_size": 8, "causal": True, "sliding_window": 7},
    "from anchor, pruned vocabulary": {"from_anchor": True, "draft_vocab_size": 20},
    "as wide as its target": {"lilicorr_hidden_size": 0, "lilicorr_factor_dim": 7, "lilicorr_candidate_topk": 5},
    "one candidate": {"lilicorr_candidate_topk": 1},
}
# What vLLM's own class gives for `golden_head` on `golden_inputs`, by row, draft and candidate of the draft before.
GOLDEN = [
    *[[-3.1753, 4.0268, 5.1437, -1.8020]] * 4,
    *([6.1025, -6.5036, 4.0620, 2.0166], [1.8663, -3.7920, -3.1118, -4.3363]),
    *([1.4876, -3.3485, -3.6106, -4.4611], [5.9910, -6.7390, 3.0902, 1.0744]),
    *([3.2179, 3.6674, 5.9989, -1.1775], [-4.5794, -5.7903, -6.7731, -0.3084]),
    *([-2.3368, -0.6672, 2.6683, -6.1454], [-4.1258, -1.6078, 0.4659, -6.8399]),
]


def made(target: Target, **changes: Any) -> LiLiCorr:
    sizes = {"candidate_topk": 4, "hidden_size": 16, "num_heads": 2}
    settings = {"num_layers": 2, "block_size": 6} | {f"lilicorr_{name}": size for name, size in sizes.items()}
    return make(LiLiCorr, target, {"mask": 1.0, "conv": 0.3, "lilicorr": 0.3}, **settings | changes)


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> LiLiCorr:
    return made(target, **VARIANTS[request.param])


def block_logits(target: Target, drafter: LiLiCorr, tokens: Tensor, row: int, place: int) -> tuple[Tensor, Tensor]:
    """Logits of training at one anchor, teacher forced, before and after candidates are scored, `[k, V']` each."""
    hidden = features(target, drafter, tokens)
    states = drafter.states(target, tokens, hidden, anchored([[place]] * len(tokens)))[row]
    logits, kept = target.lm_head(states, drafter.output_ids), drafter.token_ids
    anchor = drafter.fuse(hidden)[row, place - 1]
    candidates, scores = (x[0] for x in drafter.lattice(target, states, logits, anchor[None]))
    chosen = torch.full_like(logits[0].float(), -torch.inf)
    for draft in range(drafter.max_depth):
        before = tokens[row, place + draft] if draft and place + draft < tokens.shape[1] else -1
        found = (kept[candidates[draft - 1]] == before).nonzero().flatten().tolist()
        chosen[draft, candidates[draft]] = scores[draft, found[0] if found else 0]
    return logits[0], chosen


def likely_text(target: Target, drafter: LiLiCorr, tokens: Tensor, row: int, place: int) -> None:
    """Write candidates of the block at a place into the text after it, others at each depth."""
    for draft in range(min(4, drafter.max_depth)):
        scores = block_logits(target, drafter, tokens, row, place)[1][draft]
        places = scores.isfinite().nonzero()[:, 0]
        tokens[row, place + 1 + draft] = drafter.token_ids[places[draft % len(places)]]


@both_precisions
def test_logits_in_training_are_the_decoders(target, drafter):
    """In texts of candidates, and of other tokens, which pass for the first candidate."""
    tokens = sequences(3, LENGTH)
    starts = [[1, 6, 11], [5, 10, 16], [2, 7, 15]]
    depth = 5
    for row in range(3):
        likely_text(target, drafter, tokens, row, starts[row][row])
    trained = [[block_logits(target, drafter, tokens, row, place)[1] for place in starts[row]] for row in range(3)]
    assert_rounds_have(lambda number, row, d: trained[row][number][d], drafter, target, tokens, starts, depth)


def fill(shape: tuple[int, ...], phase: float) -> Tensor:
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.37 * count**2 + phase).float().view(shape)


def golden_head() -> Correlator:
    sizes = {"candidate_topk": 4, "hidden_size": 8, "num_heads": 2, "mlp_ratio": 1.5, "factor_dim": 5}
    settings = {f"lilicorr_{name}": size for name, size in sizes.items()}
    head = Correlator(LiLiCorrConfig(hidden_size=6, block_size=4, rms_norm_eps=1e-5, **settings))
    for number, (_, weight) in enumerate(sorted(head.named_parameters())):
        weight.data.copy_(fill(weight.shape, float(number)))
    return head


def golden_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_probs = (2 * fill((2, 3, 4), 0.2)).sort(-1, descending=True).values - 2
    return 9 * fill((2, 3, 4, 6), 0.1), log_probs, fill((2, 3, 6), 0.3), fill((2, 6), 0.4)


@torch.no_grad()
def test_golden_scores_of_vllm():
    """Of two rows of inputs alike in all but their numbers, the second; vLLM 0.32's own head gave them."""
    found = golden_head()(*golden_inputs())[1]
    torch.testing.assert_close(found.flatten(0, 1), torch.tensor(GOLDEN), atol=1e-4, rtol=0)  # its last digit


@both_precisions
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize(("loss", "changes"), [("hard_ce", {}), ("soft_ce", {"draft_vocab_size": 20})])
def test_the_loss_is_dflashs_and_the_scores(target, loss, changes, weighting):
    """Written as loops; of what followed and is no candidate the transformer learns nothing."""
    wide = {"lilicorr_candidate_topk": 16}
    drafter = made(target, loss=loss, weighting=weighting, gamma=3.0, **wide, **changes).train()
    tokens, supervised = answered_twice()
    found = drafter.loss(batch(target, drafter, tokens, supervised))
    total, learned, dropped = loss_by_loops(target, drafter, tokens, block_logits)
    assert min(learned, dropped) > 3
    assert_same(found.total, total)


def test_a_draft_after_a_token_that_is_no_candidate_teaches_nothing(target):
    """Of texts without any candidate only the first draft of each block would, and its label is none either."""
    drafter = made(target, lilicorr_candidate_topk=1).train().requires_grad_(True)
    tokens = sequences(2, 14)
    hidden = features(target, drafter, tokens)
    every = anchored([list(range(1, 13))] * 2)
    first = target.lm_head(drafter.states(target, tokens, hidden, every)).argmax(-1)
    assert not (first[:, :, 0] == tokens[:, 2:]).any()
    drafter.loss(batch(target, drafter, tokens)).mean.backward()
    assert all(p.grad is None or not p.grad.any() for p in drafter.lilicorr.parameters())


def test_the_candidate_before_a_draft_changes_its_scores_and_no_other(target):
    drafter, tokens = made(target), sequences(1, LENGTH)
    likely_text(target, drafter, tokens, 0, 8)
    before = block_logits(target, drafter, tokens, 0, 8)[1]
    for j in range(1, 5):
        candidates, others = before[j - 1].isfinite().nonzero()[:, 0], tokens.clone()
        others[0, 8 + j] = candidates[(candidates == tokens[0, 8 + j]).int().argmin()]
        moved = (block_logits(target, drafter, others, 0, 8)[1] != before).any(-1).tolist()
        assert moved == [d == j for d in range(5)]


@pytest.mark.parametrize("plan", [Plan(5), Plan(4, 3, 9)], ids=["chain", "tree"])
def test_drafts_are_candidates_alone(target, plan, monkeypatch):
    drafter = made(target)
    assert_drafts_are_candidates(target, drafter, plan, 4, monkeypatch)


@both_precisions
def test_anchors_are_each_rows_own_and_stay_with_it(target):
    """Rows of different lengths, read at once or in parts, and in another order."""
    drafter = made(target)
    texts = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    root = torch.tensor([10, 11, 12])
    alone = [opened(drafter, target, [text]).prefill(root[i : i + 1]) for i, text in enumerate(texts)]
    session = opened(drafter, target, texts)
    assert_same(session.prefill(root), torch.cat(alone))
    session.select([2, 0])
    assert_same(session.prefill(root[[2, 0]]), torch.cat([alone[2], alone[0]]))


def test_a_target_in_bfloat16_has_the_same_candidates_in_training(tiny_llama):
    """Of its rounded logits, in which several may be alike."""
    target = Target(tiny_llama(layers=6).bfloat16())
    drafter, tokens = made(target), sequences(1, LENGTH)
    session = opened(drafter, target, [tokens[0, :9].tolist()])
    logits = [session.prefill(tokens[:, 9]), *(session.decode(tokens[:, j : j + 1])[:, 0] for j in range(10, 14))]
    theirs = block_logits(target, drafter, tokens, 0, 9)[1]
    for ours, trained in zip(logits, theirs, strict=True):
        assert torch.equal(ours[0].isfinite(), trained.isfinite())
