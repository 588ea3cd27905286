"""Divergences of a drafter's distribution q from the target's p, or from the token that followed.

Each is one value per position, from log-probabilities; `losses.divergence` finds them by the names in recipes. A new
one is a function, an entry in `DIVERGENCES`, one in `PARAMETERS` if it has a parameter, and a row in
`tests/heads/test_losses.py`.

Shapes: P positions, V' symbols of the drafter, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]
LossName = str | dict[str, float]  # as in a recipe: see `losses.divergence`


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


def negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """−log Σ min(p, q) per position, `[P]` (LK losses, arXiv 2602.23881).

    Its gradient is TV's divided by the acceptance rate, so none vanishes far from p.
    """
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def renyi_half(log_p: Tensor, log_q: Tensor) -> Tensor:
    """−2 log Σ √(p q) per position, `[P]`: Rényi's divergence of order ½, symmetric (D-PARD, SpecForge)."""
    return -2 * (0.5 * (log_p + log_q)).logsumexp(-1)


def hybrid_acceptance(log_p: Tensor, log_q: Tensor, eta: float = 3.0) -> Tensor:
    """λ KL(p || q) + (1−λ) TV(p, q) per position, `[P]` (LK losses, arXiv 2602.23881): KL far from p, TV near it.

    λ = exp(−η α) with that position's acceptance rate α, and is not differentiated. The paper takes η = 3, and 10 for
    Medusa's heads.
    """
    variation = total_variation(log_p, log_q)
    share = torch.exp(-eta * (1 - variation.detach()))
    return share * forward_kl(log_p, log_q) + (1 - share) * variation


def hard_cross_entropy(following: Tensor, log_q: Tensor) -> Tensor:
    """−log q at the token that followed per position, `[P]` (Medusa's loss, arXiv 2401.10774).

    It is 0 where `following` `[P]` is −1: a token that q has no probability for.
    """
    return -log_q.gather(-1, following.clamp(min=0)[:, None])[:, 0] * (following >= 0)


def smooth_l1(features: Tensor, drafted: Tensor) -> Tensor:
    """Mean over H of ½ d² where |d| < 1 and of |d| − ½ elsewhere, `[...]` (EAGLE, arXiv 2401.15077).

    d is the drafted minus the true feature, `[..., H]`. Its gradient stays bounded where a few dimensions of a hidden
    state are far larger than the others.
    """
    precision = torch.promote_types(drafted.dtype, torch.float32)
    features = features.to(precision).expand_as(drafted)
    return torch.nn.functional.smooth_l1_loss(drafted.to(precision), features, reduction="none").mean(-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "soft_ce": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "lk_nla": negative_log_acceptance,
    "renyi_half": renyi_half,
    "lk_hybrid": hybrid_acceptance,
}
HARD = "hard_ce"

# Of the divergences with a parameter: its name, and what it may be.
PARAMETERS: dict[str, tuple[str, str, Callable[[float], bool]]] = {
    "jsd": ("beta", "between 0 and 1", lambda beta: 0 < beta < 1),
    "lk_hybrid": ("eta", "0 or more", lambda eta: 0 <= eta < math.inf),
}
