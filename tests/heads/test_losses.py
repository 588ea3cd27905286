"""Divergences are scipy's, their gradients autograd's, and nothing depends on how positions are chunked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import jensenshannon
from scipy.special import huber
from torch import Tensor

from outrider.common import BadInputError
from outrider.heads import losses
from outrider.heads.divergences import (
    DIVERGENCES,
    HARD,
    hard_cross_entropy,
    smooth_l1,
)
from outrider.heads.losses import (
    Float32Logits,
    LossSettings,
    PositionLosses,
    TargetDistribution,
    acceptance_metrics,
    ahead,
    chunked_compare,
    compare,
    divergence,
    metrics_by_depth,
    own_precision,
)
from outrider.targets import PeakBytes

from ..closeness import assert_same, both_precisions

P = np.array([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5]])
Q = np.array([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])


def log(probs: np.ndarray) -> Tensor:
    return torch.tensor(np.log(probs), dtype=torch.float32)


def logits(probs: np.ndarray) -> Tensor:
    """Any logits of these probabilities: a constant per position does not matter."""
    return log(probs) + torch.arange(len(probs), dtype=torch.float32)[:, None]


# Sums over three symbols, in which each term is a few products and a logarithm; and those over twelve symbols, of
# logits from five dimensions, with gradients of a weight at 23 places of three steps.
SMALL, LARGE = 3 * 10, 12 * 10 + 5 + 23 * 3


SCIPY = {
    "forward_kl": lambda p, q: stats.entropy(p, q, axis=-1),
    "reverse_kl": lambda p, q: stats.entropy(q, p, axis=-1),
    "soft_ce": lambda p, q: stats.entropy(p, axis=-1) + stats.entropy(p, q, axis=-1),
    "jsd": lambda p, q: jensenshannon(p, q, axis=-1) ** 2,
    "tv": lambda p, q: np.abs(p - q).sum(-1) / 2,
    "lk_nla": lambda p, q: -np.log(1 - np.abs(p - q).sum(-1) / 2),
    "lk_hybrid": lambda p, q: hybrid(p, q, 3),
    "renyi_half": lambda p, q: -2 * np.log(np.sqrt(p * q).sum(-1)),
}


def hybrid(p: np.ndarray, q: np.ndarray, eta: float) -> np.ndarray:
    """λ KL + (1−λ) TV with λ = exp(−η Σ min(p, q))."""
    share = np.exp(-eta * np.minimum(p, q).sum(-1))
    return share * stats.entropy(p, q, axis=-1) + (1 - share) * np.abs(p - q).sum(-1) / 2


@both_precisions
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_equal_scipys(name):
    assert_same(DIVERGENCES[name](log(P), log(Q)).numpy(), SCIPY[name](P, Q), SMALL)


@both_precisions
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "soft_ce"])
def test_a_divergence_is_zero_only_where_the_two_agree(name):
    values = DIVERGENCES[name](log(P), log(Q))
    assert_same(values[3], 0.0, SMALL, scale=1.0)
    assert (values[:3] > 0.01).all()


def value(name: str | dict[str, float], following: list[int] | None = None) -> np.ndarray:
    """The loss of that name of Q against P."""
    tokens = None if following is None else torch.tensor(following)
    return divergence(name)(TargetDistribution.of(logits(P), following=tokens), log(Q)).numpy()


@both_precisions
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_the_jensen_shannon_weights_are_those_of_distillspec(beta):
    """β KL(p || m) + (1−β) KL(q || m), m = βp + (1−β)q."""
    m = beta * P + (1 - beta) * Q
    expected = beta * stats.entropy(P, m, axis=-1) + (1 - beta) * stats.entropy(Q, m, axis=-1)
    assert_same(value(f"jsd({beta})"), expected, SMALL)


@both_precisions
@pytest.mark.parametrize("eta", [0, 3, 10, 2.5])
def test_the_lk_hybrid_goes_from_kl_to_tv_as_acceptance_grows(eta):
    assert_same(value(f"lk_hybrid({eta})"), hybrid(P, Q, eta), SMALL)


@both_precisions
def test_hard_cross_entropy_is_that_of_the_token_that_followed():
    assert_same(value(HARD, [0, 2, 1, 2]), -np.log([0.2, 0.1, 0.3, 0.5]), SMALL)


@both_precisions
def test_smooth_l1_of_features_is_scipys_huber_loss_averaged_over_dimensions():
    """One value per position; true features stand for all unrolled steps."""
    true = np.array([[0.0, 1.0, -2.0], [3.0, 3.0, 3.0]])
    drafted = np.array([[[0.5, 3.0, -2.0], [3.0, 2.0, -7.0]], [[0.0, 1.0, -2.0], [9.0, 3.0, 3.1]]])
    found = smooth_l1(torch.tensor(true, dtype=torch.float32), torch.tensor(drafted, dtype=torch.float32))
    assert_same(found.numpy(), huber(1, drafted - true).mean(-1), SMALL)
    assert_same(found[0, 0], (0.125 + 1.5) / 3, SMALL, msg="by hand: ½ · 0.5², and 2 − ½")


@both_precisions
def test_a_mix_is_the_weighted_sum_of_its_parts():
    mixed = value({"soft_ce": 1.0, "tv": 0.1, "jsd(0.2)": 2, HARD: 0.5}, [0, 1, 2, 0])
    parts = value("soft_ce"), 0.1 * value("tv"), 2 * value("jsd(0.2)"), 0.5 * value(HARD, [0, 1, 2, 0])
    assert_same(mixed, sum(parts), SMALL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kl", r"unknown loss 'kl'; known: forward_kl, .*hard_ce; jsd\(beta\) and lk_hybrid\(eta\) take a parameter"),
        ({"tv": 1.0, "kl": 1.0}, "unknown loss 'kl'"),
        ({3: 1.0}, "unknown loss 3"),
        ("tv(0.5)", r"unknown loss 'tv\(0.5\)'; known"),
        ("tv(", r"unknown loss 'tv\('; known"),
        ("jsd(0)", "beta must be a number, between 0 and 1; found '0'"),
        ("jsd(1)", "beta must be a number, between 0 and 1; found '1'"),
        ("jsd(half)", "beta must be a number, between 0 and 1; found 'half'"),
        ("jsd()", "beta must be a number"),
        ("lk_hybrid(-1)", "eta must be a number, 0 or more; found '-1'"),
        ("lk_hybrid(inf)", "eta must be a number"),
        ({}, "expected a name or a mapping from names to weights"),
        (None, "expected a name or a mapping .* found None"),
        (["tv"], "expected a name or a mapping"),
        ({"tv": 0}, "weight of 'tv' must be a number above 0, found 0"),
        ({"tv": True}, "weight of 'tv' must be a number above 0, found True"),
        ({"tv": float("inf")}, "weight of 'tv' must be a number above 0, found inf"),
        ({"tv": "much"}, "weight of 'tv' must be a number above 0, found 'much'"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused(name, message):
    with pytest.raises(BadInputError, match=message):
        divergence(name)


NAIVE = {
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "soft_ce": lambda p, q: -(p * q.log()).sum(-1),
    "jsd": lambda p, q: 0.5 * (p * (2 * p / (p + q)).log()).sum(-1) + 0.5 * (q * (2 * q / (p + q)).log()).sum(-1),
    "tv": lambda p, q: 1 - torch.minimum(p, q).sum(-1),
    "lk_nla": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
    "lk_hybrid": lambda p, q: naive_hybrid(p, q, torch.minimum(p, q).sum(-1).detach()),
    "renyi_half": lambda p, q: -2 * (p * q).sqrt().sum(-1).log(),
}


def naive_hybrid(p: Tensor, q: Tensor, alpha: Tensor) -> Tensor:
    share = (-3 * alpha).exp()
    return share * (p * (p / q).log()).sum(-1) + (1 - share) * (1 - torch.minimum(p, q).sum(-1))


@both_precisions
@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_equal_those_of_the_naive_form(name):
    generator = torch.Generator().manual_seed(0)
    target, ours = torch.randn(20, 3, generator=generator), torch.randn(20, 3, generator=generator, requires_grad=True)
    naive = ours.detach().double().requires_grad_()
    DIVERGENCES[name](target.log_softmax(-1), ours.log_softmax(-1)).sum().backward()
    NAIVE[name](target.double().softmax(-1), naive.softmax(-1)).sum().backward()
    assert_same(ours.grad, naive.grad, SMALL)


@both_precisions
def test_the_share_of_the_lk_hybrid_carries_no_gradient():
    """As if λ were a constant, and not as if it were differentiated."""
    p, start = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[-4.0, 0.0, 3.0]], requires_grad=True)
    q = start.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    constant, differentiated = (
        torch.autograd.grad(naive_hybrid(p, q, share).sum(), start, retain_graph=True)[0]
        for share in (alpha.detach(), alpha)
    )
    (ours,) = torch.autograd.grad(DIVERGENCES["lk_hybrid"](p.log(), start.log_softmax(-1)).sum(), start)
    assert_same(ours, constant, SMALL)
    assert (ours - differentiated).abs().max() > 0.05


@both_precisions
def test_the_gradient_of_lk_nla_is_that_of_tv_divided_by_the_acceptance_rate():
    """∇ −log α = ∇ TV / α: what pure TV lacks where q is far from p."""
    target, start = log(P[:1]), torch.tensor([[-4.0, 0.0, 3.0]], requires_grad=True)
    both = (DIVERGENCES[name](target, start.log_softmax(-1)).sum() for name in ("lk_nla", "tv"))
    slopes = [torch.autograd.grad(loss, start)[0] for loss in both]
    alpha = torch.minimum(target.exp(), start.softmax(-1)).sum().item()
    assert_same(slopes[0], slopes[1] / alpha, SMALL)


@both_precisions
def test_golden_renyi_half():
    """p = (1/2, 1/2) and q = (1/5, 4/5): (Σ √(p q))² = (√(1/10) + √(2/5))² = 9/10."""
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.2, 0.8]])
    for one, other in ((p, q), (q, p)):
        assert_same(DIVERGENCES["renyi_half"](one.log(), other.log()).exp(), [10 / 9], SMALL)


@both_precisions
def test_the_gradient_of_hard_cross_entropy_is_pytorchs_and_zero_for_tokens_that_cannot_be_said():
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (ours,) = torch.autograd.grad(hard_cross_entropy(torch.tensor([2, -1, 0, 1]), start.log_softmax(-1)).sum(), start)
    expected = torch.nn.functional.cross_entropy(start, torch.tensor([2, -100, 0, 1]), reduction="sum")
    (theirs,) = torch.autograd.grad(expected, start)
    assert_same(ours, theirs, SMALL)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_very_certain_target_gives_finite_losses_and_gradients(name):
    draft = torch.tensor([[0.0, 50.0, -50.0]], requires_grad=True)
    loss = DIVERGENCES[name](torch.tensor([[200.0, 0.0, -200.0]]).log_softmax(-1), draft.log_softmax(-1))
    loss.sum().backward()
    assert bool(loss.isfinite().all() and draft.grad.isfinite().all())


def heads(kept: Tensor | None, vocab: int = 12) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(0)
    return torch.nn.Linear(5, vocab), torch.nn.Linear(4, vocab if kept is None else len(kept))


Heads = tuple[Any, Any]


def compared(
    hidden: tuple[Tensor, Tensor], heads: Heads, name: Any, *, kept: Tensor | None = None, chunk: int = 0, **more: Any
) -> PositionLosses:
    """`chunked_compare` of (target's, drafter's) hidden states by (target's, drafter's) heads, of which one is trained.

    A list of heads has one for each step.
    """
    own = heads[1] if isinstance(heads[1], list) else [heads[1]]
    parameters = [p for head in own if isinstance(head, torch.nn.Module) for p in head.parameters()]
    settings = LossSettings(*heads, divergence(name), kept, parameters, chunk)
    return chunked_compare(*hidden, settings, **more)


LOSSES = [*DIVERGENCES, HARD, {"soft_ce": 0.1}, {"soft_ce": 1.0, HARD: 0.5}, {"soft_ce": 1.0, "tv": 0.1, HARD: 0.5}]


@both_precisions
@pytest.mark.parametrize("kept", [None, torch.tensor([1, 2, 5, 9])], ids=["whole", "pruned"])
@pytest.mark.parametrize("name", LOSSES, ids=str)
def test_values_and_gradients_are_those_of_the_whole_logits_at_once(name, kept):
    """Against plain autograd on `[S, P, V]`, for any chunk; with weights, and a gradient that comes from above."""
    target_head, draft_head = heads(kept)
    target_hidden = torch.randn(23, 5)
    start = torch.randn(3, 23, 4)
    weights = torch.rand(3, 23)
    following = torch.arange(23) % 12
    wanted = start.clone().requires_grad_()
    log_q = draft_head(wanted).log_softmax(-1)
    reference = TargetDistribution.of(target_head(target_hidden), kept, following)
    p = target_head(target_hidden).softmax(-1)
    p_kept = p if kept is None else p[:, kept]
    assert_same(reference.log_probs, (p_kept / p_kept.sum(-1, keepdim=True)).log(), LARGE)
    values = torch.stack([divergence(name)(reference, q) for q in log_q])
    alpha = torch.minimum(p_kept, log_q.exp()).sum(-1)
    best = log_q.argmax(-1) if kept is None else kept[log_q.argmax(-1)]
    trained = list(draft_head.parameters())
    expected = [3 * g for g in torch.autograd.grad((values * weights).sum(), [wanted, *trained])]
    for chunk in (100, 23, 7, 1):
        hidden, both = start.clone().requires_grad_(), (target_head, draft_head)
        more = {"kept": kept, "chunk": chunk, "weights": weights, "following": following}
        result = compared((target_hidden, hidden), both, name, **more)
        assert_same((result.loss, result.alpha), (values.detach(), alpha.detach()), LARGE)
        assert torch.equal(result.top1, (best == p.argmax(-1)).float())
        assert_same(result.total.detach(), (values * weights).sum().detach(), LARGE)
        found = torch.autograd.grad(3 * result.total, [hidden, *trained])
        assert_same(list(found), expected, LARGE)
    assert target_head.weight.grad is None, "the target is never trained"


def test_a_token_outside_of_a_pruned_vocabulary_has_no_hard_loss():
    kept, draft = torch.tensor([1, 2, 5, 9]), torch.randn(3, 4)
    reference = TargetDistribution.of(torch.randn(3, 12), kept, torch.tensor([5, 0, 9]))
    expected = -draft.log_softmax(-1)[[0, 2], [2, 3]]
    assert divergence(HARD)(reference, draft.log_softmax(-1)).tolist() == [expected[0].item(), 0, expected[1].item()]


def test_what_a_pruned_vocabulary_lacks_is_minus_one():
    kept, target = torch.tensor([1, 2, 5, 9]), torch.nn.functional.one_hot(torch.tensor([9, 0, 2]), 12).float()
    reference = TargetDistribution.of(target, kept, torch.tensor([5, 0, 3]))
    assert reference.best.tolist() == [3, -1, 1]
    assert reference.following.tolist() == [2, -1, -1]
    assert TargetDistribution.of(target, kept).following is None
    assert TargetDistribution.of(target).following is None


@pytest.mark.parametrize("kept", [None, [1, 2, 5, 9]])
def test_a_reference_is_made_where_the_logits_are(kept):
    """On the meta device, whose tensors mix with no others."""
    kept = kept and torch.tensor(kept, device="meta")
    tokens = torch.zeros(3, dtype=torch.long, device="meta")
    found = TargetDistribution.of(torch.zeros(3, 12, device="meta"), kept, tokens)
    assert all(x.is_meta for x in (found.probs, found.log_probs, found.best, found.following, found.renormalised))


@both_precisions
def test_steps_may_have_heads_of_their_own():
    """The same as each step compared alone; every head gets its own step's gradient."""
    target_head, _ = heads(None)
    own = [torch.nn.Linear(4, 12) for _ in range(3)]
    target_hidden = torch.randn(9, 5)
    start = torch.randn(3, 9, 4)
    weights = torch.rand(3, 9)
    parameters = [p for head in own for p in head.parameters()]
    hidden = start.clone().requires_grad_()
    together = compared((target_hidden, hidden), (target_head, own), "tv", chunk=4, weights=weights)
    found = torch.autograd.grad(together.total, [hidden, *parameters])
    for i, head in enumerate(own):
        single = start[i].clone().requires_grad_()
        alone = compared((target_hidden, single), (target_head, head), "tv", weights=weights[i])
        assert_same(together.loss[i], alone.loss, LARGE)
        expected = torch.autograd.grad(alone.total, [single, *head.parameters()])
        assert_same([found[0][i], *found[1 + 2 * i : 3 + 2 * i]], list(expected), LARGE)


@both_precisions
def test_without_gradients_nothing_is_differentiated():
    with torch.no_grad():
        result = compared((torch.randn(3, 5), torch.randn(3, 4)), heads(None), "tv")
    assert not result.total.requires_grad
    assert_same(result.total, result.loss.sum(), LARGE)


def test_no_logits_are_kept_for_the_backward_pass():
    """What autograd holds on to grows with the hidden states, not with the vocabulary."""
    saved, hidden = [], torch.randn(50, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        result = compared((torch.randn(50, 5), hidden), heads(None, vocab=1000), "tv", chunk=10)
        inside = len(saved)
        result.total.backward()
    assert inside > 0
    assert max(saved) <= 10 * 1000, "a chunk at a time"


@pytest.mark.parametrize("name", ["soft_ce", "jsd", {"lk_hybrid": 1.0, HARD: 0.5}], ids=str)
def test_peak_memory_grows_with_the_chunk_and_not_with_positions_or_steps(name):
    """Forward and backward; `[S, P, V]` alone would be 10 times the largest of these."""
    vocab = 2000
    target_head, draft_head = torch.nn.Linear(5, vocab, bias=False), torch.nn.Linear(4, vocab, bias=False)

    def peak(chunk: int, positions: int, steps: int) -> float:
        """In chunks of logits of one position, what grows with hidden states taken off."""
        hidden = torch.randn(steps, positions, 4, requires_grad=True)
        target_hidden, following = torch.randn(positions, 5), torch.zeros(positions, dtype=torch.long)
        both, more = (target_head, draft_head), {"chunk": chunk, "following": following}
        with PeakBytes() as count:
            compared((target_hidden, hidden), both, name, **more).total.backward()
        draft_head.zero_grad(set_to_none=True)
        return count.peak / (4 * vocab)

    fixed = 4 * 4  # gradients of the output embedding, in rows of V
    small, large = peak(20, 400, 4), peak(40, 400, 4)
    assert large - fixed == pytest.approx(2 * (small - fixed), rel=0.15)
    assert peak(20, 800, 4) == pytest.approx(small, rel=0.1)
    assert peak(20, 400, 8) == pytest.approx(small, rel=0.1)
    assert large < 400 * 4 / 3


def test_values_and_slopes_of_half_precision_are_summed_in_single():
    """600 times the same position, one by one: in 16 bits a sum stands still once it is 256 times what is added."""
    target_head, draft_head = (head.bfloat16() for head in heads(None))
    one = torch.randn(1, 4).bfloat16()
    found = {}
    for count in (1, 600):
        hidden = one.expand(count, -1).clone().requires_grad_()
        result = compared((torch.ones(count, 5).bfloat16(), hidden), (target_head, draft_head), "tv", chunk=1)
        assert result.loss.dtype == result.alpha.dtype == result.top1.dtype == result.total.dtype == torch.float32
        found[count] = torch.autograd.grad(result.total, [hidden, draft_head.weight])[1]
    assert_same(found[600], 600 * found[1].float(), sums=600)


def test_512_positions_are_compared_at_a_time_if_nothing_else_is_asked_for():
    seen: list[int] = []
    target_head, draft_head = heads(None, vocab=3)

    def head(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return target_head(hidden)

    compared((torch.randn(1025, 5), torch.randn(1025, 4)), (head, draft_head), "tv")
    assert seen == [512, 512, 1]


@pytest.mark.parametrize("kept", [None, torch.tensor([1, 2])])
def test_no_positions_give_no_values_and_a_graph_that_can_be_walked(kept):
    draft_hidden = torch.randn(0, 4, requires_grad=True)
    result = compared((torch.randn(0, 5), draft_hidden), heads(kept), "tv", kept=kept)
    assert result.loss.shape == result.alpha.shape == result.top1.shape == (0,)
    result.total.backward()
    assert draft_hidden.grad.shape == (0, 4)


@both_precisions
def test_alpha_is_one_minus_total_variation():
    _, alpha, top1 = compare(TargetDistribution.of(logits(P)), logits(Q), divergence("forward_kl"))
    assert_same(alpha.numpy(), 1 - SCIPY["tv"](P, Q), SMALL)
    assert_same(alpha.numpy(), np.minimum(P, Q).sum(-1), SMALL)
    assert top1.tolist() == [0, 0, 1, 1]


@both_precisions
def test_mass_that_a_pruned_vocabulary_cannot_reach_counts_as_rejected():
    """p = (.5, .3, .2), q on the last two symbols = (.6, .4): alpha = .3 + .2; the loss renormalises p to (.6, .4)."""
    p = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = torch.tensor([1, 2])
    plain = (lambda x: x, lambda x: x)
    result = compared((p, torch.tensor([[0.6, 0.4]]).log()), plain, "forward_kl", kept=kept)
    assert_same(result.alpha, [0.5], SMALL)
    assert_same(result.loss, [0.0], SMALL, scale=1.0)
    assert result.top1.item() == 0
    result = compared((p, torch.tensor([[0.1, 0.9]]).log()), plain, "tv", kept=kept)
    assert_same(result.alpha, [0.1 + 0.2], SMALL)
    assert_same(result.loss, [0.5], SMALL)


@pytest.mark.parametrize("have_it", [True, False])
def test_a_loss_that_kernels_have_is_theirs(monkeypatch, have_it):
    """They are asked on devices that have them alone."""
    asked: list[tuple] = []
    reference = TargetDistribution.of(logits(P))
    draft_logits = logits(Q)
    loss = divergence("tv")
    usual = compare(reference, draft_logits, loss)
    monkeypatch.setattr(losses, "plugin", lambda *_: lambda *given: asked.append(given) or (given if have_it else None))
    assert_same(compare(reference, draft_logits, loss), usual)
    assert not asked
    monkeypatch.setattr(losses, "KERNEL_DEVICES", {"cpu"})
    found = compare(reference, draft_logits, loss)
    assert asked == [(reference, draft_logits, loss)]
    if have_it:
        assert found == asked[0]
    else:
        assert_same(found, usual)


def test_mixed_precision_is_for_the_drafter_alone():
    """Under autocast, which would round products to 16 bits; tensors without contents know none, and are left alone."""
    target_head, draft_head = heads(None)
    target_hidden, hidden = torch.randn(9, 5), torch.randn(9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with own_precision(torch.device("cpu")):
            exact = target_head(target_hidden)
        with own_precision(torch.device("meta")):
            assert target_head(target_hidden).dtype == torch.bfloat16
        found = compared((target_hidden, hidden), (target_head, draft_head), "tv")
        with Float32Logits():
            drafted = draft_head(hidden)
    assert torch.equal(exact, target_head(target_hidden))
    expected = divergence("tv")(TargetDistribution.of(target_head(target_hidden)), drafted.log_softmax(-1))
    assert_same(found.loss, expected.detach(), LARGE)


@pytest.mark.parametrize(
    ("by", "expected"),
    [(0, [[1, 2, 3], [4, 5, 6]]), (1, [[2, 3, 0], [5, 6, 0]]), (2, [[3, 0, 0], [6, 0, 0]]), (3, [[0] * 3] * 2)],
)
def test_what_stands_ahead_and_nothing_after_the_end(by, expected):
    assert ahead(torch.tensor([[1, 2, 3], [4, 5, 6]]), by).tolist() == expected


def test_a_chain_of_one_draft():
    found = acceptance_metrics([torch.tensor([[0.5, 1.0]])], [torch.ones(1, 2, dtype=torch.bool)])
    assert {name: [t.item() for t in pair] for name, pair in found.items()} == {"alpha_d1": [1.5, 2], "tau": [3.5, 2]}


def test_every_depth_says_where_it_was_measured():
    with pytest.raises(ValueError, match="zip"):
        acceptance_metrics([torch.ones(1, 2)] * 2, [torch.ones(1, 2, dtype=torch.bool)])


@both_precisions
def test_metrics_by_depth_follow_each_chain_from_its_start():
    """Step k predicts from k places further back: a chain that starts at t has its depth k at the token t + k."""
    wanted = torch.tensor([[True, True, False, True], [False, True, True, True]])
    here = torch.tensor([[True] * 6, [False, True, True, True, False, True]])
    numbers = torch.arange(1.0, 13.0).view(2, 6) / 12
    alpha = numbers
    loss = 10 + numbers
    top1 = 1 - numbers
    found = metrics_by_depth(PositionLosses(loss.sum(), loss, alpha, top1), wanted, here)
    values = {name: [part.item() for part in pair] for name, pair in found.items()}
    # The tokens stand at (0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (1, 3). Chains of two start at (0, 0) and at (1, 2).
    first, second = {(0, 0): 1, (1, 2): 5}, {(0, 0): 8, (1, 2): 12}
    reached = sum(first.values()) / 12
    both = sum(first[start] * second[start] for start in first) / 144
    expected = {
        "loss_d1": [60 + 21 / 12, 6],
        "top1_d1": [6 - 21 / 12, 6],
        "loss_d2": [40 + (8 + 9 + 10 + 12) / 12, 4],
        "top1_d2": [4 - (8 + 9 + 10 + 12) / 12, 4],
        "alpha_d1": [21 / 12, 6],
        "alpha_d2": [both, reached],
        "tau": [2 + reached + both, 2],
    }
    assert_same(values, expected, SMALL)


@both_precisions
def test_acceptance_along_a_chain_by_hand():
    """Two starts with alphas (.5, .4), (1, .8): tau is the mean of 1 + .5 + .2 and 1 + 1 + .8, no product of means."""
    alphas = [torch.tensor([[0.5, 1.0]]), torch.tensor([[0.4, 0.8]])]
    found = acceptance_metrics(alphas, [torch.ones(1, 2, dtype=torch.bool)] * 2)
    values = {name: (total / count).item() for name, (total, count) in found.items()}
    of_chains_that_get_there = (0.5 * 0.4 + 1 * 0.8) / 1.5
    assert_same(values, {"alpha_d1": 0.75, "alpha_d2": of_chains_that_get_there, "tau": (1.7 + 2.8) / 2}, SMALL)
    assert found["tau"][1].item() == 2


@both_precisions
def test_a_start_counts_as_far_as_it_was_measured():
    """The second start ends before depth 2: it counts for alpha at depth 1 and not for tau."""
    wanted = [torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]])]
    found = acceptance_metrics([torch.tensor([[0.5, 1.0, 9.0]]), torch.tensor([[0.4, 9.0, 9.0]])], wanted)
    assert [t.item() for t in found["alpha_d1"]] == [1.5, 2]
    assert_same([t.item() for t in found["alpha_d2"]], [0.2, 0.5], SMALL)
    assert_same([t.item() for t in found["tau"]], [1.7, 1], SMALL)
