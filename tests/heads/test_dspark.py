"""DSpark: what is trained is what is decoded, and its heads are what the paper says."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder, Plan, Sampling
from outrider.heads import DFlash, DFlashConfig, DSpark, DSparkConfig
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from .conftest import VOCAB, anchored, assert_rounds_have, batch, opened, sequences
from .conftest import made as make

LENGTH = 22
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated, infill": {"markov_head": "gated", "from_anchor": False, "block_size": 6},
    "rnn, pruned vocabulary": {"markov_head": "rnn", "draft_vocab_size": 20},
    "no markov head": {"markov_rank": 0},
}


def made(target: Target, **changes: Any) -> DSpark:
    settings = {"num_layers": 1, "block_size": 5, "markov_rank": 8} | changes
    return make(DSpark, target, {"markov": 0.5, "confidence": 0.5}, **settings)


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> DSpark:
    return made(target, **VARIANTS[request.param])


def block_states(target: Target, drafter: DSpark, tokens: Tensor, place: int) -> Tensor:
    """States of the drafts after one anchor, `[B, 1, k, H]`."""
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    return drafter.states(target, tokens, hidden, anchored([[place]] * len(tokens)))


def block_logits(target: Target, drafter: DSpark, tokens: Tensor, row: int, place: int) -> Tensor:
    """Logits of training at one anchor, teacher forced, `[k, V']`."""
    states = block_states(target, drafter, tokens, place)[row]
    beyond = torch.nn.functional.pad(tokens, (0, drafter.max_depth))  # a block may pass the end of the text
    before = beyond[row, place : place + drafter.max_depth][None]
    logits, head = target.lm_head(states, drafter.output_ids), drafter.markov_head
    return (logits if head is None else logits + head.markov_w2(head.along(head.markov_w1(before), states)))[0]


@both_precisions
def test_logits_in_training_are_the_decoders(target, drafter):
    tokens = sequences(3, LENGTH)
    starts = [[1, 4, 9], [5, 6, 12], [2, 7, 15]]
    depth = 5
    trained = [[block_logits(target, drafter, tokens, row, place) for place in starts[row]] for row in range(3)]
    assert_rounds_have(lambda number, row, d: trained[row][number][d], drafter, target, tokens, starts, depth)


@both_precisions
def test_the_loss_is_the_papers(target, drafter):
    """0.1 CE + 0.9 Σ|p − q| + BCE(c, Σ min(p, q)), each weighing exp(−(j − 1)/4); written as loops."""
    drafter.train()
    tokens, supervised = sequences(2, 14), torch.zeros(2, 14, dtype=torch.bool)
    supervised[0, 5:12] = supervised[1, 3:8] = True
    found = drafter.loss(batch(target, drafter, tokens, supervised))
    target_logits = target.model(tokens).logits
    kept = drafter.token_ids
    total = 0.0
    for row, begin, end in ((0, 5, 12), (1, 3, 8)):
        sums = weights = 0.0
        for a, j in product(range(begin, end - 1), range(1, 6)):
            if a + j >= end:
                continue
            logits = block_logits(target, drafter, tokens, row, a)
            q = logits[j - 1].softmax(-1)
            p = target_logits[row, a + j - 1].softmax(-1)[kept]
            label = (kept == tokens[row, a + j]).nonzero()
            hard = -float(q[label[0, 0]].log()) if len(label) else 0.0
            value = 0.1 * hard + 0.9 * float((p / p.sum() - q).abs().sum())
            states = block_states(target, drafter, tokens, a)[row, 0, j - 1]
            odds = drafter.confidence_head(states, drafter.code(tokens[row, a + j - 1]))
            alpha = torch.minimum(p, q).sum()
            value += float(torch.nn.functional.binary_cross_entropy_with_logits(odds, alpha))
            weight = float(torch.exp(torch.tensor(-(j - 1) / 4)))
            sums, weights = sums + weight * value, weights + weight
        total += (end - begin) * sums / weights
    assert_same(found.total, total)


def test_only_the_tokens_before_drafts_are_codes_that_learn(target):
    drafter = made(target).train().requires_grad_(True)
    tokens = sequences(2, 14)
    drafter.loss(batch(target, drafter, tokens)).mean.backward()
    touched = drafter.markov_head.markov_w1.weight.grad.abs().sum(1).nonzero().flatten()
    assert set(touched.tolist()) <= set(tokens[:, 1:-1].flatten().tolist())


@pytest.mark.parametrize("rank", [0, 8])
def test_a_new_markov_head_changes_nothing(target, rank):
    """W2 is zero, or there is no head: DFlash from the anchor, bit for bit."""
    torch.manual_seed(7)
    drafter = DSpark.build(DSparkConfig(num_layers=1, block_size=5, markov_rank=rank), target).eval()
    plain = DFlash.build(DFlashConfig(num_layers=1, block_size=5, from_anchor=True), target).eval()
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if "head" not in k})
    for sampling in (Sampling(0.0), Sampling(1.0, seed=3)):
        found, expected = (
            Decoder(target, one).generate([[1, 2, 3]], 24, sampling, Plan(5), ignore_eos=True)
            for one in (drafter, plain)
        )
        assert (found.tokens, found.rounds) == (expected.tokens, expected.rounds)


def test_the_token_before_a_draft_changes_it_and_later_ones_do_not(target):
    """Of a rnn all tokens before it do."""
    for kind, reaches in (("vanilla", 1), ("gated", 1), ("rnn", 4)):
        drafter, tokens = made(target, markov_head=kind), sequences(1, LENGTH)
        before = block_logits(target, drafter, tokens, 0, 8)
        for j in range(1, 5):
            others = tokens.clone()
            others[0, 8 + j] = (others[0, 8 + j] + 1) % VOCAB
            moved = (block_logits(target, drafter, others, 0, 8) != before).any(-1).tolist()
            assert moved == [j <= d < j + reaches for d in range(5)], kind


@both_precisions
def test_temperatures_divide_the_log_odds_draft_by_draft(target):
    temperatures, found = (1.0, 2.0, 0.5, 3.0, 4.0), []
    for drafter in (made(target), made(target, temperatures=temperatures)):
        session = opened(drafter, target, [[1, 2, 3]])
        session.prefill(torch.tensor([4]))
        odds = [session.confidence().logit()]
        for token in (5, 6, 7, 8):
            session.decode(torch.tensor([[token]]))
            odds.append(session.confidence().logit())
        found.append(torch.cat(odds))
    assert_same(found[0] / found[1], torch.tensor(temperatures))
