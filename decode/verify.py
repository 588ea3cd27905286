"""Verification rules for chains: how many draft tokens stay, and which token follows them.

They are pure functions of their uniforms.

Shapes: B rows, k draft tokens of a chain, V vocabulary. `lengths` `[B]` says how many of the k a row really proposed.
Each rule returns (accepted `[B]`, following `[B]`): the first `accepted` drafts are kept, then `following` is emitted,
the correction at the first refused draft or the bonus after the last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import draw


def match(drafts: Tensor, lengths: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafts while they equal what the target itself chose at that place.

    With `wanted` = the target's argmax this is the greedy rule; with a sample of p it is the rule for deterministic
    candidates (accepted with probability p(x)); with Gumbel-max under shared noise it is the coupled rule.

    Args:
        drafts: `[B, k]`. wanted: the target's own choice at each node, `[B, k + 1]`.
    """
    if not drafts.shape[1]:
        return lengths, wanted[:, 0]
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
    """Keep drafts by speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    A draft x ~ q is kept with probability min(1, p(x)/q(x)); the first refused one is replaced by a draw from
    norm((p − q)+); after the last kept one a token is drawn from p.
    """
    p, q = _scores(drafts, target_probs, draft_probs)
    accepted = _leading(accept_uniforms * q < p, lengths)
    refused = accepted < lengths
    node = accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    p_here = target_probs.gather(1, node)[:, 0]
    q_here = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).gather(1, node)[:, 0]
    residual = (p_here - q_here.masked_fill(~refused[:, None], 0)).clamp(min=0)
    # p <= q everywhere with a refusal can only come from rounding: p = q up to it, so p is the right distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    return accepted, draw(residual, correct_uniforms)


def block(
    drafts: Tensor,  # [B, k]
    lengths: Tensor,  # [B]
    target_probs: Tensor,  # [B, k + 1, V]
    draft_probs: Tensor,  # [B, k, V]
    accept_uniforms: Tensor,  # [B, k]
    correct_uniforms: Tensor,  # [B]
) -> tuple[Tensor, Tensor]:
    """Keep a prefix of drafts by block verification (Sun et al., ICLR 2025, arXiv 2403.10444).

    On average no lossless rule for a sampled chain accepts more.

    A prefix of i drafts is worth P_i = min(1, P_{i-1} p_i/q_i), P_0 = 1, and leaves the residual (P_i p − q)+ of mass
    S_i. The longest prefix that passes its own test, with probability S_i / (S_i + 1 − P_i), is kept; the residual
    there gives the next token.
    """
    chain = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    proposed = chain < lengths[:, None]  # [B, k + 1], does a draft follow this place?
    worth = _worth(drafts, target_probs, draft_probs)
    # After the last draft q counts as 0: the residual is P p there, and the test passes with probability P.
    q = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).masked_fill(~proposed[:, :, None], 0)
    residual = (worth[:, :, None] * target_probs - q).clamp(min=0)
    mass = residual.sum(-1)
    passes = accept_uniforms * (mass + (1 - worth))[:, 1:] < mass[:, 1:]
    # P = 1 always passes, also where p = q up to rounding leaves no mass.
    passes = (passes | (worth[:, 1:] == 1)) & proposed[:, :-1]
    accepted = (torch.nn.functional.pad(passes, (1, 0)) * chain).amax(1)
    here = accepted[:, None, None].expand(-1, 1, q.shape[-1])
    residual, p_here = residual.gather(1, here)[:, 0], target_probs.gather(1, here)[:, 0]
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)  # as in `rejection`
    return accepted, draw(residual, correct_uniforms)


def _worth(drafts: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the P_i of block verification for every prefix, the empty one included, `[B, k + 1]`."""
    p, q = _scores(drafts, target_probs, draft_probs)
    ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)  # finite for q = 0 too, so that 0 times it is 0
    worth = [torch.ones_like(target_probs[:, 0, 0])]
    for i in range(drafts.shape[1]):
        worth.append((worth[-1] * ratio[:, i]).clamp(max=1))
    return torch.stack(worth, 1)


def _scores(drafts: Tensor, target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q of each draft, `[B, k]` each."""
    token = drafts[:, :, None]
    return target_probs[:, :-1].gather(2, token)[:, :, 0], draft_probs.gather(2, token)[:, :, 0]


def _leading(kept: Tensor, lengths: Tensor) -> Tensor:
    """Return how many entries from the left are kept before the first that is not, `[B]`."""
    proposed = torch.arange(kept.shape[1], device=kept.device) < lengths[:, None]
    return (kept & proposed).cumprod(1).sum(1)
