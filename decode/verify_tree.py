"""Verification rules for trees: which path of draft tokens stays, and which token follows it.

They are pure functions of their uniforms.

Shapes: B rows, N draft nodes, D levels, V vocabulary. `parents` `[B, N]` is the index of each node's parent, -1 for the
root (the last committed token). A parent stands before its children, and siblings are tried in the order in which they
stand. `real` `[B, N]` says which nodes a row really proposed, none of them under one that is not; the others mean
nothing, though their tokens and parents are valid indices. Probabilities are given at N + 1 places: place 0 is the
root, place i + 1 is node i.

Each rule returns (accepted `[B]`, path `[B, D]`, following `[B]`): the first `accepted` entries of `path` are the nodes
that are kept, from the root on, and -1 stands after them; then `following` is emitted. D is at least the depth of
every row's tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import draw

Walk = tuple[Tensor, Tensor, Tensor]  # accepted, path, following (or the place at the path's end)


def match_tree(
    tokens: Tensor,  # [B, N]
    parents: Tensor,  # [B, N]
    real: Tensor,  # [B, N]
    wanted: Tensor,  # [B, N + 1]
    depth: int,
) -> Walk:
    """Follow the children that equal what the target itself chose at their parent: `verify.match` for trees.

    With `wanted` = the target's argmax this is the greedy rule, with a sample of p the rule for deterministic
    candidates (one of them is accepted with their summed probability), with Gumbel-max under shared noise the coupled
    rule.
    """
    kept = real & (tokens == wanted.gather(1, parents + 1))
    accepted, path, place = _descend(kept, parents, depth)
    return accepted, path, wanted.gather(1, place[:, None])[:, 0]


def without_replacement(
    tokens: Tensor,  # [B, N]
    parents: Tensor,  # [B, N]
    real: Tensor,  # [B, N]
    target_probs: Tensor,  # [B, N + 1, V]
    draft_probs: Tensor,  # [B, N + 1, V]
    accept_uniforms: Tensor,  # [B, N]
    correct_uniforms: Tensor,  # [B]
    depth: int,
) -> Walk:
    """Reject drafts down a tree whose siblings were drawn without replacement (Sequoia, arXiv 2402.12374).

    `draft_probs` is q at each place that has children: the first child was drawn from it, each further one from q
    without the tokens before it, renormalised. A child x stays with min(1, p(x)/q(x)); after a refusal p becomes
    norm((p − q)+) and q loses x. When all children are refused, that p gives the next token.
    """
    odds, _, residual = _weigh(tokens, parents, real, target_probs, draft_probs, carry=False)
    accepted, path, place = _descend(real & (accept_uniforms < odds), parents, depth)
    return accepted, path, draw(_at(residual, place), correct_uniforms)


def traversal(
    tokens: Tensor,  # [B, N]
    parents: Tensor,  # [B, N]
    real: Tensor,  # [B, N]
    target_probs: Tensor,  # [B, N + 1, V]
    draft_probs: Tensor,  # [B, N + 1, V]
    accept_uniforms: Tensor,  # [B, N]
    correct_uniforms: Tensor,  # [B]
    depth: int,
) -> Walk:
    """Keep a path by traversal verification, from the leaves to the root (arXiv 2505.12398).

    It judges whole paths at a time; on a chain it is `verify.block`. Children come before their parent and in their
    order; the first node that passes its test is kept, with its path. Siblings were drawn as for `without_replacement`.
    Where only the root has several children, it accepts no less than that rule on average. With siblings further down
    it usually accepts more, but there are p and q for which it accepts a little less.
    """
    _, stays, residual = _weigh(tokens, parents, real, target_probs, draft_probs, carry=True)
    passed = _with_ancestors(real & (accept_uniforms < stays), parents, depth)
    # The first child with a pass below it or in it: that is the order above.
    accepted, path, place = _descend(passed, parents, depth)
    return accepted, path, draw(_at(residual, place), correct_uniforms)


def typical(
    tokens: Tensor,  # [B, N]
    parents: Tensor,  # [B, N]
    real: Tensor,  # [B, N]
    target_probs: Tensor,  # [B, N + 1, V]
    depth: int,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Walk:
    """Keep what is typical of the target (Medusa, arXiv 2401.10774). Lossy: the text does not follow the target's law.

    A node x stays with p(x) > min(epsilon, delta·exp(−H(p))), where H is the entropy; of the longest paths the most
    probable wins. The token that follows is the target's most probable one: Medusa's greedy first token, which its next
    round keeps untested.
    """
    above = parents + 1
    rows = torch.arange(len(tokens), device=tokens.device)
    chance = target_probs[rows[:, None], above, tokens]
    floor = (delta * (-torch.special.entr(target_probs).sum(-1)).exp()).clamp(max=epsilon)
    kept = real & (chance > floor.gather(1, above))
    level = torch.zeros_like(target_probs[:, :, 0])  # [B, N + 1]
    likelihood = torch.zeros_like(level)
    for _ in range(depth):  # after d steps the first d levels are right
        level[:, 1:] = torch.where(kept, level.gather(1, above) + 1, float("-inf"))
        likelihood[:, 1:] = chance.log() + likelihood.gather(1, above)
    longest = level == level.amax(1, keepdim=True)
    best = likelihood.masked_fill(~longest, float("-inf")).argmax(1)
    chosen = torch.arange(1, level.shape[1], device=tokens.device) == best[:, None]
    accepted, path, place = _descend(_with_ancestors(chosen, parents, depth), parents, depth)
    return accepted, path, _at(target_probs, place).argmax(-1)


def _weigh(
    tokens: Tensor, parents: Tensor, real: Tensor, target_probs: Tensor, draft_probs: Tensor, carry: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh each node for when all that is tried before it has been refused; no uniform has a part in that.

    Each place has a claim w: the law p there, times the probability P with which the path to it may stay. A child x ~ q
    covers min(w, q) of it, so x stays with min(1, w(x)/q(x)). What is left, (w − q)+, is wanted from the remaining 1 −
    Σ min(w, q) of all cases: after the refusal w = (w − q)+ / (Σ (w − q)+ + 1 − P), and the new P is its sum. With
    `carry` a child's own claim starts with the P it stays with, and is decided after its children; without, a child is
    decided on arrival, and P = 1 below it.

    Returns:
        w(x)/q(x) when a node's turn comes `[B, N]`; P after its children `[B, N]`; w after the children of each place
        `[B, N + 1, V]`.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    claim, left = target_probs.clone(), draft_probs.clone()
    short = torch.zeros_like(claim[:, :, 0])  # 1 − P; kept instead of P, so that P = 1 stays exact
    odds = torch.zeros_like(short[:, 1:])
    for i in range(tokens.shape[1]):
        place, token, counts = parents[:, i] + 1, tokens[:, i, None], real[:, i]
        w, before, lost = claim[rows, place], left[rows, place], short[rows, place]
        # What q cannot have drawn, as when nothing of it was left, is a candidate: its drafter was certain of it.
        q = torch.where(before.gather(1, token) > 0, before, torch.zeros_like(before).scatter(1, token, 1))
        odds[:, i] = (w.gather(1, token) / q.gather(1, token))[:, 0]
        if carry:
            stays = odds[:, i].clamp(max=1)
            claim[:, i + 1] *= stays[:, None]
            short[:, i + 1] = 1 - stays
        rest = (w - q).clamp(min=0)
        share = rest.sum(-1) + lost
        refusable = counts & (share > 0)  # otherwise p = q, and the node stays
        claim[rows, place] = torch.where(refusable[:, None], rest / share[:, None], w)
        short[rows, place] = torch.where(refusable, lost / share, lost)
        others = before.scatter(1, token, 0)
        others = others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)
        left[rows, place] = torch.where(counts[:, None], others, before)
    return odds, 1 - short[:, 1:], claim


def _descend(kept: Tensor, parents: Tensor, depth: int) -> Walk:
    """Follow the first child that is kept from the root on, as far as it goes.

    Returns:
        accepted `[B]`, path `[B, D]`, and the place at its end `[B]`.
    """
    path = parents.new_full((len(parents), depth), -1)
    node = parents.new_full((len(parents),), -1)
    place = torch.zeros_like(node)
    for level in range(depth):
        children = kept & (parents == node[:, None])
        found, first = children.any(1), children.to(torch.uint8).argmax(1)
        path[:, level] = torch.where(found, first, -1)
        place = torch.where(found, first + 1, place)
        node = torch.where(found, first, -2)  # nobody's parent
    return (path >= 0).sum(1), path, place


def _with_ancestors(marked: Tensor, parents: Tensor, depth: int) -> Tensor:
    """Return the marked nodes `[B, N]` and all that stand above one."""
    for _ in range(depth - 1):
        below = parents.new_zeros(len(parents), parents.shape[1] + 1).scatter_add(1, parents + 1, marked.long())
        marked = marked | (below[:, 1:] > 0)
    return marked


def _at(probs: Tensor, place: Tensor) -> Tensor:
    """Return the law at one place of each row, `[B, V]`, from probs `[B, N + 1, V]`."""
    return probs[torch.arange(len(place), device=place.device), place]
