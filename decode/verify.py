"""Verification rules: how many draft tokens stay, and which token follows them. Pure functions of their uniforms.

Shapes: B rows, k draft tokens of a chain, V vocabulary. `lengths` `[B]` says how many of the k a row really proposed.
Each rule returns (accepted `[B]`, following `[B]`): the first `accepted` drafts are kept, then `following` is emitted,
the correction at the first refused draft or the bonus behind the last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import draw

RULES = ("greedy", "rejection", "candidates", "coupled")


def match(drafts: Tensor, lengths: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafts while they equal what the target itself chose at that place.

    With `wanted` = the target's argmax this is the greedy rule; with a sample of p it is the rule for deterministic
    candidates (accepted with probability p(x)); with Gumbel-max under shared noise it is the coupled rule.

    Args:
        drafts: `[B, k]`. wanted: the target's own choice at each node, `[B, k + 1]`.
    """
    accepted = _leading(drafts == wanted[:, :-1], lengths)
    return accepted, wanted.gather(1, accepted[:, None])[:, 0]


def rejection(
    drafts: Tensor,  # [B, k]
    lengths: Tensor,  # [B]
    target_probs: Tensor,  # [B, k + 1, V]
    draft_probs: Tensor,  # [B, k, V]
    accept_uniforms: Tensor,  # [B, k]
    correct_uniforms: Tensor,  # [B]
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    A draft x ~ q is kept with probability min(1, p(x)/q(x)); the first refused one is replaced by a draw from
    norm((p − q)+); behind the last kept one a token is drawn from p.
    """
    p = target_probs[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]
    q = draft_probs.gather(2, drafts[:, :, None])[:, :, 0]
    accepted = _leading(accept_uniforms * q < p, lengths)
    refused = accepted < lengths
    node = accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    p_here = target_probs.gather(1, node)[:, 0]
    q_here = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).gather(1, node)[:, 0]
    residual = (p_here - q_here.masked_fill(~refused[:, None], 0)).clamp(min=0)
    # p <= q everywhere with a refusal can only come from rounding: p = q up to it, so p is the right distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    return accepted, draw(residual, correct_uniforms)


def _leading(kept: Tensor, lengths: Tensor) -> Tensor:
    """How many entries from the left are kept before the first that is not, `[B]`."""
    proposed = torch.arange(kept.shape[1], device=kept.device) < lengths[:, None]
    return (kept & proposed).long().cumprod(1).sum(1)
