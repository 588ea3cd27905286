"""Divergences between the target's distribution p and the drafter's q, one value per position.

Shapes: P positions, V symbols. Both arguments are logits; softmax is taken in fp32. Nothing here reduces over
positions: sums and counts are made in one place (`chunked_divergence`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..target import BadInputError

Divergence = Callable[[Tensor, Tensor], Tensor]


def _log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def forward_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(p || q) per position, `[P]`. Its gradient is soft cross-entropy's; this one is zero at q = p."""
    log_p, log_q = _log_probs(target_logits), _log_probs(draft_logits)
    return (log_p.exp() * (log_p - log_q).nan_to_num(0.0)).sum(-1)


def soft_cross_entropy(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """−Σ p log q per position, `[P]` (EAGLE-3's loss, arXiv 2503.01840)."""
    return -(_log_probs(target_logits).exp() * _log_probs(draft_logits)).sum(-1)


def reverse_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(q || p) per position, `[P]`."""
    return forward_kl(draft_logits, target_logits)


def jensen_shannon(target_logits: Tensor, draft_logits: Tensor, beta: float = 0.5) -> Tensor:
    """β KL(p || m) + (1−β) KL(q || m) with m = βp + (1−β)q, per position, `[P]` (DistillSpec, arXiv 2310.08461)."""
    log_p, log_q = _log_probs(target_logits), _log_probs(draft_logits)
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).clamp(min=1e-30).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def total_variation(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """½ Σ |p − q| = 1 − Σ min(p, q) per position, `[P]`: one minus the acceptance rate of rejection sampling."""
    return 0.5 * (_log_probs(target_logits).exp() - _log_probs(draft_logits).exp()).abs().sum(-1)


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
class Positions:
    """Per-position results, `[P]` each; with S steps `[S, P]`."""

    loss: Tensor  # differentiable
    alpha: Tensor  # Σ min(p, q): the analytic acceptance probability
    top1: Tensor  # 1.0 where the two agree on the most probable token


def compare(target_logits: Tensor, draft_logits: Tensor, rule: Divergence, kept: Tensor | None = None) -> Positions:
    """Loss and agreement of two logits, `[P, V]` and `[P, V']`.

    Args:
        kept: token ids `[V']` of a pruned draft vocabulary. The loss then renormalises p on these tokens
            (EAGLE-3); alpha counts the mass that q cannot reach as rejected, and top-1 as disagreement.
    """
    with torch.no_grad():
        p, best = _log_probs(target_logits).exp(), draft_logits.argmax(-1)
        if kept is not None:
            p, best = p[:, kept], kept[best]
        alpha = torch.minimum(p, _log_probs(draft_logits).exp()).sum(-1)
        top1 = (target_logits.argmax(-1) == best).float()
    return Positions(rule(target_logits if kept is None else target_logits[:, kept], draft_logits), alpha, top1)


def chunked_compare(
    target_hidden: Tensor,  # [P, H]
    draft_hidden: Tensor,  # [P, H'] or [S, P, H']
    target_head: Callable[[Tensor], Tensor],
    draft_head: Callable[[Tensor], Tensor],
    rule: Divergence,
    kept: Tensor | None = None,
    chunk: int = 2048,
) -> Positions:
    """`compare` on the logits of hidden states, of at most `chunk` rows at a time, so that `[P, V]` never exists.

    With S steps, all are compared with the same target positions, whose logits are made once.
    """
    steps = draft_hidden if draft_hidden.ndim == 3 else draft_hidden[None]

    def part(target_part: Tensor, draft_parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Mixed precision is for the drafter: the target keeps its own dtype, or its distribution would be rounded.
        with torch.no_grad(), torch.autocast(target_part.device.type, enabled=False):
            target_logits = target_head(target_part)
        found = [compare(target_logits, draft_head(d), rule, kept) for d in draft_parts]
        return torch.stack([f.loss for f in found]), torch.stack([f.alpha for f in found]), torch.stack([f.top1 for f in found])

    rows = max(1, chunk // len(steps))
    again = torch.is_grad_enabled() and len(target_hidden) > rows
    split = zip(target_hidden.split(rows), steps.split(rows, 1), strict=True)
    parts = [checkpoint(part, t, d, use_reentrant=False) if again else part(t, d) for t, d in split]
    columns = [torch.cat(column, 1) for column in zip(*parts, strict=True)]
    return Positions(*(columns if draft_hidden.ndim == 3 else (c[0] for c in columns)))


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
