"""Divergences are scipy's, their gradients autograd's, and nothing depends on how positions are chunked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from outrider.heads.losses import DIVERGENCES, Reference, acceptance_metrics, chunked_compare, compare, divergence
from outrider.target import BadInputError

P = np.array([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5]])
Q = np.array([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])


def log(probs: np.ndarray) -> Tensor:
    return torch.tensor(np.log(probs), dtype=torch.float32)


def logits(probs: np.ndarray) -> Tensor:
    """Any logits of these probabilities: a constant per position does not matter."""
    return log(probs) + torch.arange(len(probs), dtype=torch.float32)[:, None]


# ------------------------------------------------------------ values

SCIPY = {
    "forward_kl": lambda p, q: stats.entropy(p, q, axis=-1),
    "reverse_kl": lambda p, q: stats.entropy(q, p, axis=-1),
    "soft_ce": lambda p, q: stats.entropy(p, axis=-1) + stats.entropy(p, q, axis=-1),
    "jsd": lambda p, q: jensenshannon(p, q, axis=-1) ** 2,
    "tv": lambda p, q: np.abs(p - q).sum(-1) / 2,
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_equal_scipys(name):
    np.testing.assert_allclose(DIVERGENCES[name](log(P), log(Q)).numpy(), SCIPY[name](P, Q), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tv"])
def test_a_divergence_is_zero_only_where_the_two_agree(name):
    values = DIVERGENCES[name](log(P), log(Q))
    assert values[3] == pytest.approx(0, abs=1e-6)
    assert (values[:3] > 0.01).all()


def test_the_jensen_shannon_weights_are_those_of_distillspec():
    """β KL(p || m) + (1−β) KL(q || m), m = βp + (1−β)q."""
    from outrider.heads.losses import jensen_shannon

    beta = 0.1
    m = beta * P + (1 - beta) * Q
    expected = beta * stats.entropy(P, m, axis=-1) + (1 - beta) * stats.entropy(Q, m, axis=-1)
    np.testing.assert_allclose(jensen_shannon(log(P), log(Q), beta).numpy(), expected, rtol=1e-4, atol=1e-7)


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(BadInputError, match="unknown loss 'kl'; known: forward_kl"):
        divergence("kl")


# ------------------------------------------------------------ gradients

NAIVE = {
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "soft_ce": lambda p, q: -(p * q.log()).sum(-1),
    "jsd": lambda p, q: 0.5 * (p * (2 * p / (p + q)).log()).sum(-1) + 0.5 * (q * (2 * q / (p + q)).log()).sum(-1),
    "tv": lambda p, q: 1 - torch.minimum(p, q).sum(-1),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_equal_those_of_the_naive_form(name):
    generator = torch.Generator().manual_seed(0)
    target, ours = torch.randn(20, 3, generator=generator), torch.randn(20, 3, generator=generator, requires_grad=True)
    naive = ours.detach().double().requires_grad_()
    DIVERGENCES[name](target.log_softmax(-1), ours.log_softmax(-1)).sum().backward()
    NAIVE[name](target.double().softmax(-1), naive.softmax(-1)).sum().backward()
    torch.testing.assert_close(ours.grad.double(), naive.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_very_certain_target_gives_finite_losses_and_gradients(name):
    draft = torch.tensor([[0.0, 50.0, -50.0]], requires_grad=True)
    loss = DIVERGENCES[name](torch.tensor([[200.0, 0.0, -200.0]]).log_softmax(-1), draft.log_softmax(-1))
    loss.sum().backward()
    assert bool(loss.isfinite().all() and draft.grad.isfinite().all())


# ------------------------------------------------------------ chunks and pruned vocabularies


def heads(kept: Tensor | None, vocab: int = 12) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(0)
    return torch.nn.Linear(5, vocab), torch.nn.Linear(4, vocab if kept is None else len(kept))


@pytest.mark.parametrize("kept", [None, torch.tensor([1, 2, 5, 9])], ids=["whole", "pruned"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_are_those_of_the_whole_logits_at_once(name, kept):
    """Against plain autograd on `[S, P, V]`, for any chunk; with weights, and a gradient that comes from above."""
    target_head, draft_head = heads(kept)
    target_hidden, start, weights = torch.randn(23, 5), torch.randn(3, 23, 4), torch.rand(3, 23)
    wanted = start.clone().requires_grad_()
    p, log_q = target_head(target_hidden).softmax(-1), draft_head(wanted).log_softmax(-1)
    p_kept = p if kept is None else p[:, kept]
    losses = torch.stack([DIVERGENCES[name]((p_kept / p_kept.sum(-1, keepdim=True)).log(), q) for q in log_q])
    alpha = torch.minimum(p_kept, log_q.exp()).sum(-1)
    best = log_q.argmax(-1) if kept is None else kept[log_q.argmax(-1)]
    expected = [3 * g for g in torch.autograd.grad((losses * weights).sum(), [wanted, draft_head.weight, draft_head.bias])]
    for chunk in (100, 23, 7, 1):
        hidden = start.clone().requires_grad_()
        result = chunked_compare(target_hidden, hidden, target_head, draft_head, DIVERGENCES[name], kept, weights, list(draft_head.parameters()), chunk)
        torch.testing.assert_close((result.loss, result.alpha), (losses.detach(), alpha.detach()))
        assert torch.equal(result.top1, (best == p.argmax(-1)).float())
        torch.testing.assert_close(result.total.detach(), (losses * weights).sum().detach())
        found = torch.autograd.grad(3 * result.total, [hidden, draft_head.weight, draft_head.bias])
        torch.testing.assert_close(list(found), expected, rtol=1e-4, atol=1e-5)
    assert target_head.weight.grad is None, "the target is never trained"


def test_without_gradients_nothing_is_differentiated():
    target_head, draft_head = heads(None)
    with torch.no_grad():
        result = chunked_compare(torch.randn(3, 5), torch.randn(3, 4), target_head, draft_head, divergence("tv"), parameters=list(draft_head.parameters()))
    assert not result.total.requires_grad
    assert result.total.item() == pytest.approx(result.loss.sum().item())


def test_no_logits_are_kept_for_the_backward_pass():
    """What autograd holds on to grows with the hidden states, not with the vocabulary."""
    saved = []
    target_head, draft_head = heads(None, vocab=1000)
    hidden = torch.randn(50, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        result = chunked_compare(torch.randn(50, 5), hidden, target_head, draft_head, divergence("tv"), parameters=list(draft_head.parameters()), chunk=10)
        inside = len(saved)
        result.total.backward()
    assert inside > 0
    assert max(saved) <= 10 * 1000, "a chunk at a time"


@pytest.mark.parametrize("kept", [None, torch.tensor([1, 2])])
def test_no_positions_give_no_values_and_a_graph_that_can_be_walked(kept):
    target_head, draft_head = heads(kept)
    draft_hidden = torch.randn(0, 4, requires_grad=True)
    result = chunked_compare(torch.randn(0, 5), draft_hidden, target_head, draft_head, divergence("tv"), kept)
    assert result.loss.shape == result.alpha.shape == result.top1.shape == (0,)
    result.total.backward()
    assert draft_hidden.grad.shape == (0, 4)


def test_alpha_is_one_minus_total_variation():
    _, alpha, top1 = compare(Reference.of(logits(P)), logits(Q), divergence("forward_kl"))
    np.testing.assert_allclose(alpha.numpy(), 1 - SCIPY["tv"](P, Q), rtol=1e-6)
    np.testing.assert_allclose(alpha.numpy(), np.minimum(P, Q).sum(-1), rtol=1e-6)
    assert top1.tolist() == [0, 0, 1, 1]


def test_mass_that_a_pruned_vocabulary_cannot_reach_counts_as_rejected():
    """p = (.5, .3, .2) with q on the last two symbols = (.6, .4): alpha = .3 + .2; the loss renormalises p to (.6, .4)."""
    p, kept = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([1, 2])
    result = chunked_compare(p, torch.tensor([[0.6, 0.4]]).log(), lambda x: x, lambda x: x, divergence("forward_kl"), kept)
    assert result.alpha.item() == pytest.approx(0.5)
    assert result.loss.item() == pytest.approx(0, abs=1e-6)
    assert result.top1.item() == 0
    result = chunked_compare(p, torch.tensor([[0.1, 0.9]]).log(), lambda x: x, lambda x: x, divergence("tv"), kept)
    assert result.alpha.item() == pytest.approx(0.1 + 0.2)
    assert result.loss.item() == pytest.approx(0.5)


# ------------------------------------------------------------ metrics


def test_acceptance_along_a_chain_by_hand():
    """Two starts with alphas (.5, .4) and (1, .8): tau is the mean of 1 + .5 + .2 and 1 + 1 + .8, not the product of means."""
    found = acceptance_metrics([torch.tensor([[0.5, 1.0]]), torch.tensor([[0.4, 0.8]])], [torch.ones(1, 2, dtype=torch.bool)] * 2)
    values = {name: (total / count).item() for name, (total, count) in found.items()}
    assert values["alpha_d1"] == pytest.approx(0.75)
    assert values["alpha_d2"] == pytest.approx((0.5 * 0.4 + 1 * 0.8) / 1.5)  # of the chains that get there
    assert values["tau"] == pytest.approx((1.7 + 2.8) / 2)
    assert found["tau"][1].item() == 2


def test_a_start_counts_as_far_as_it_was_measured():
    """The second start ends before depth 2: it counts for alpha at depth 1 and not for tau."""
    wanted = [torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]])]
    found = acceptance_metrics([torch.tensor([[0.5, 1.0, 9.0]]), torch.tensor([[0.4, 9.0, 9.0]])], wanted)
    assert [t.item() for t in found["alpha_d1"]] == [1.5, 2]
    assert [t.item() for t in found["alpha_d2"]] == pytest.approx([0.2, 0.5])
    assert [t.item() for t in found["tau"]] == pytest.approx([1.7, 1])
