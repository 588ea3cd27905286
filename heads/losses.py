"""Divergences between the target's distribution p and the drafter's q, one value per position.

Shapes: P positions, V symbols, S unrolled steps. Divergences take log-probabilities: both sides need theirs for other
things too, and a softmax over a vocabulary is what this costs. Nothing but `chunked_compare` reduces over positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..target import BadInputError

Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) per position, `[P]`. Its gradient is soft cross-entropy's; this one is zero at q = p."""
    return (log_p.exp() * (log_p - log_q).nan_to_num(0.0)).sum(-1)


def soft_cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """−Σ p log q per position, `[P]` (EAGLE-3's loss, arXiv 2503.01840)."""
    return -(log_p.exp() * log_q).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) per position, `[P]`."""
    return forward_kl(log_q, log_p)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """β KL(p || m) + (1−β) KL(q || m) with m = βp + (1−β)q, per position, `[P]` (DistillSpec, arXiv 2310.08461)."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).clamp(min=1e-30).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """½ Σ |p − q| = 1 − Σ min(p, q) per position, `[P]`: one minus the acceptance rate of rejection sampling."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "soft_ce": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
}


def divergence(name: str) -> Divergence:
    if name not in DIVERGENCES:
        raise BadInputError(f"unknown loss {name!r}; known: {', '.join(DIVERGENCES)}.")
    return DIVERGENCES[name]


@dataclass
class Reference:
    """The target's side of a comparison, made once for all steps that are compared with it.

    Attributes:
        probs: p on the drafter's vocabulary, `[P, V']`; sums to less than 1 where that one is pruned.
        log_probs: log p renormalised on the drafter's vocabulary (EAGLE-3's target), `[P, V']`.
        best: index of the target's most probable token in the drafter's vocabulary, -1 where it is not there, `[P]`.
    """

    probs: Tensor
    log_probs: Tensor
    best: Tensor

    @classmethod
    def of(cls, logits: Tensor, kept: Tensor | None = None) -> Reference:
        """From the target's logits `[P, V]`; `kept` `[V']` are the token ids of a pruned draft vocabulary."""
        logits = logits.float()
        best = logits.argmax(-1)
        if kept is None:
            log_probs = logits.log_softmax(-1)
            return cls(log_probs.exp(), log_probs, best)
        place = torch.full((logits.shape[-1],), -1, device=kept.device).scatter(0, kept, torch.arange(len(kept), device=kept.device))
        total = logits.logsumexp(-1, keepdim=True)
        logits = logits[:, kept]
        return cls((logits - total).exp(), logits.log_softmax(-1), place[best])


@dataclass
class Comparison:
    """What a drafter made of P positions, `[P]` each, with S steps `[S, P]`.

    Attributes:
        total: Σ weight · loss, the one differentiable value.
        loss: the divergence; where the draft vocabulary is pruned, from p renormalised on it.
        alpha: Σ min(p, q), the analytic acceptance probability; mass that q cannot reach counts as rejected.
        top1: 1.0 where both agree on the most probable token.
    """

    total: Tensor
    loss: Tensor
    alpha: Tensor
    top1: Tensor


def compare(reference: Reference, draft_logits: Tensor, rule: Divergence) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, alpha, top1) of draft logits `[P, V']`; the loss is differentiable."""
    log_q = draft_logits.float().log_softmax(-1)
    with torch.no_grad():
        alpha = torch.minimum(reference.probs, log_q.exp()).sum(-1)
        top1 = (log_q.argmax(-1) == reference.best).float()
    return rule(reference.log_probs, log_q), alpha, top1


def chunked_compare(
    target_hidden: Tensor,  # [P, H]
    draft_hidden: Tensor,  # [P, H'] or [S, P, H']
    target_head: Callable[[Tensor], Tensor],
    draft_head: Callable[[Tensor], Tensor],
    rule: Divergence,
    kept: Tensor | None = None,
    weights: Tensor | None = None,  # [P] or [S, P]
    parameters: Sequence[Tensor] = (),
    chunk: int = 512,
) -> Comparison:
    """`compare` on the logits of hidden states, `chunk` positions at a time, so that `[P, V]` never exists.

    The gradient of each chunk is taken as soon as its loss is known (as in Liger's fused linear losses, arXiv 2410.10989):
    no logits are kept for the backward pass, and none are computed twice.

    Args:
        kept: token ids `[V']` of a pruned draft vocabulary.
        weights: of each loss in the total; 1 if None.
        parameters: what `draft_head` trains. Others get no gradient from here.
    """
    steps = draft_hidden if draft_hidden.ndim == 3 else draft_hidden[None]
    weights = steps.new_ones(steps.shape[:2], dtype=torch.float32) if weights is None else weights.reshape(steps.shape[:2]).float()
    learning = torch.is_grad_enabled()
    trained = [p for p in parameters if p.requires_grad] if learning else []
    slopes = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
    results, columns = steps.new_zeros(3, *steps.shape[:2], dtype=torch.float32), torch.zeros_like(steps)
    for begin in range(0, len(target_hidden), chunk):
        part = slice(begin, begin + chunk)
        # Mixed precision is for the drafter: the target's output embedding keeps its own dtype.
        with torch.no_grad(), torch.autocast(target_hidden.device.type, enabled=False):
            reference = Reference.of(target_head(target_hidden[part]), kept)
        for i in range(len(steps)):
            hidden = steps[i, part].detach().requires_grad_(learning)
            found = compare(reference, draft_head(hidden), rule)
            results[:, i, part] = torch.stack([f.detach() for f in found])
            if learning:
                first, *others = torch.autograd.grad((found[0] * weights[i, part]).sum(), [hidden, *trained])
                columns[i, part] = first
                for slope, other in zip(slopes, others, strict=True):
                    slope += other
    loss, alpha, top1 = results if draft_hidden.ndim == 3 else results[:, 0]
    total = (results[0] * weights).sum()
    if learning:  # a value with these slopes: what the backward pass multiplies and hands on
        pairs = [(steps, columns), *zip(trained, slopes, strict=True)]
        linear = torch.stack([(x.float() * slope).sum() for x, slope in pairs]).sum()
        total = total + (linear - linear.detach())
    return Comparison(total, loss, alpha, top1)


def ahead(values: Tensor, by: int) -> Tensor:
    """`values[:, t + by]` at t `[B, T]`; zero behind the end."""
    return torch.nn.functional.pad(values, (0, by))[:, by:]


def acceptance_metrics(alphas: list[Tensor], wanted: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Expected acceptance of a chain from the analytic alphas along it, as (sum, count) pairs.

    Args:
        alphas: per depth, `[B, T]`: the acceptance probability at that depth of the chain that starts at t.
        wanted: per depth, `[B, T]` bool: where it was measured.

    Returns:
        `alpha_d1`, …: acceptance at depth d, weighted by the probability that the chain gets there (so: given that
        depth d−1 was accepted). `tau`: 1 + Σ_d Π_{i<=d} alpha_i per starting position, never the product of averages.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    reach = torch.ones_like(alphas[0])
    tau = torch.ones_like(alphas[0])
    whole = torch.ones_like(wanted[0])
    for depth, (alpha, measured) in enumerate(zip(alphas, wanted, strict=True), 1):
        whole = whole & measured
        found[f"alpha_d{depth}"] = ((reach * alpha)[whole].sum(), reach[whole].sum())
        reach = reach * alpha
        tau = tau + reach
    found["tau"] = (tau[whole].sum(), whole.sum())
    return found
