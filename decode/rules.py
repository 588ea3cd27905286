"""The judges of the verification rules, and their arithmetic.

A new rule is one entry of `rule_table.RULES`, one of `JUDGES`, and its proof (tests/decode/test_rules.py). A judge
decides `VerifyInputs`; the arithmetic comes after the table, for chains and for trees, as pure functions of their
uniforms.

Shapes: B rows, N draft tokens, D of them on the longest path, V vocabulary.

A chain has k draft tokens; `lengths` `[B]` says how many of them a row really proposed. A rule for chains returns
(accepted `[B]`, following `[B]`): the first `accepted` drafts are kept, then `following` is emitted, the correction at
the first refused draft or the bonus after the last one.

In a tree `parents` `[B, N]` is the index of each node's parent, −1 for the root (the last committed token). A parent
stands before its children, and siblings are tried in the order in which they stand. `real` `[B, N]` says which nodes a
row really proposed, none of them under one that is not; the others mean nothing, though their tokens and parents are
valid indices. Probabilities are given at N + 1 places: place 0 is the root, place i + 1 is node i. A rule for trees
returns (accepted `[B]`, path `[B, D]`, following `[B]`): the first `accepted` entries of `path` are the nodes that are
kept, from the root on, and −1 stands after them. D is at least the depth of every row's tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads import Proposal
from .rng import uniforms
from .sampling import ACCEPT, CORRECT, Highest, Keys, Sampling, draw, highest, probabilities, shared_gumbel


class Verdict(NamedTuple):
    """A rule's decision about a proposal."""

    accepted: Tensor  # how many drafts stay, [B]
    path: Tensor | None  # in a tree the nodes that stay, from the root on, −1 after them, [B, D]; None for a chain
    following: Tensor  # the token that follows them, [B]


@dataclass(frozen=True)
class VerifyInputs:
    """A proposal, and everything that a rule may use to judge it."""

    proposal: Proposal
    logits: Tensor  # the target's after root and drafts, processed, [B, 1 + N, V]
    # The distributions the tokens were drawn from: for a chain [B, N, V], for a tree at each place [B, 1 + N, V]; None
    # if they were not drawn.
    draft_probs: Tensor | None
    sampling: Sampling
    keys: Keys  # of every draw; the first logits predict the token `keys.first`

    @cached_property
    def highest(self) -> Highest:
        """The target's most probable token at each place, and its logit, `[B, 1 + N]` each."""
        return highest(self.logits)

    @property
    def best(self) -> Tensor:
        """The target's most probable token at each place, `[B, 1 + N]`."""
        return self.highest.token

    @cached_property
    def probs(self) -> Tensor:
        """The target's distribution at each place, `[B, 1 + N, V]`."""
        return probabilities(self.logits, self.sampling)

    @property
    def peaks(self) -> Tensor:
        """For each place a number that is finite only if all its logits are numbers, `[B, 1 + N]`."""
        if self.sampling.greedy:
            return self.highest.logit
        return self.probs[:, :, 0]

    @property
    def positions(self) -> Tensor:
        """The index in its text of the token that each place predicts, `[B, 1 + N]`."""
        return self.keys.first[:, None] + self.proposal.nodes.depths

    def accepts(self) -> Tensor:
        """Return one uniform for each draft, keyed by the round and the draft's number, `[B, N]`."""
        first = self.keys.first[:, None]
        numbers = torch.arange(self.proposal.tokens.shape[1], device=first.device)
        return uniforms(self.keys.seed, ACCEPT, self.keys.sequences[:, None], first, first + numbers)

    def corrects(self) -> Tensor:
        """Return one uniform for each row, keyed by the round, `[B]`."""
        return uniforms(self.keys.seed, CORRECT, self.keys.sequences, self.keys.first)


def _greedy(case: VerifyInputs) -> Verdict:
    """Keep the drafts that the target itself would have written."""
    return _matched(case.proposal, case.best)


def _candidates(case: VerifyInputs) -> Verdict:
    """Draw the target's own token at each place, keyed by the place: a draft x stays with probability p(x)."""
    own = draw(case.probs, uniforms(case.keys.seed, CORRECT, case.keys.sequences[:, None], case.positions))
    return _matched(case.proposal, own)


def _coupled(case: VerifyInputs) -> Verdict:
    """Choose the target's token by Gumbel-max under the noise that the drafter had at the same place."""
    noise = shared_gumbel(case.keys.seed, case.keys.sequences[:, None], case.positions, case.probs.shape[-1])
    return _matched(case.proposal, (case.probs.double().log() + noise).argmax(-1))


def _matched(proposal: Proposal, wanted: Tensor) -> Verdict:
    if proposal.parents is None:
        accepted, following = match(proposal.tokens, proposal.lengths, wanted)
        return Verdict(accepted, None, following)
    tokens = proposal.tokens
    parents = proposal.parents
    real = proposal.real
    return Verdict(*match_tree(tokens, parents, real, wanted, proposal.depth))


def _token_by_token(case: VerifyInputs) -> Verdict:
    """Reject drafts one by one; down a tree, siblings in turn."""
    return _sampled(case, rejection, without_replacement)


def _path_by_path(case: VerifyInputs) -> Verdict:
    """Judge whole prefixes; in a tree, whole paths from the leaves up."""
    return _sampled(case, block, traversal)


def _sampled(
    case: VerifyInputs, on_chain: Callable[..., tuple[Tensor, Tensor]], on_tree: Callable[..., tuple]
) -> Verdict:
    proposal, draft_probs = case.proposal, case.draft_probs
    if draft_probs is None:  # nothing was drafted
        return _candidates(case)
    tokens, draws = proposal.tokens, (case.probs, draft_probs, case.accepts(), case.corrects())
    if proposal.parents is None:
        accepted, following = on_chain(tokens, proposal.lengths, *draws)
        return Verdict(accepted, None, following)
    return Verdict(*on_tree(tokens, proposal.parents, proposal.real, *draws, proposal.depth))


def _typical(case: VerifyInputs) -> Verdict:
    """Keep drafts that are typical of the target: lossy."""
    proposal = case.proposal
    probs = case.logits.float().softmax(-1) if case.sampling.greedy else case.probs
    chain = torch.arange(-1, proposal.depth - 1, device=probs.device).expand(len(probs), -1)
    parents = chain if proposal.parents is None else proposal.parents
    accepted, path, following = typical(proposal.tokens, parents, proposal.real, probs, proposal.depth)
    return Verdict(accepted, None if proposal.parents is None else path, following)


JUDGES: dict[str, Callable[[VerifyInputs], Verdict]] = {
    "greedy": _greedy,
    "candidates": _candidates,
    "coupled": _coupled,
    "rejection": _token_by_token,
    "block": _path_by_path,
    "without_replacement": _token_by_token,
    "traversal": _path_by_path,
    "typical": _typical,
}


def match(drafts: Tensor, lengths: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafts `[B, k]` while they equal `wanted` `[B, k + 1]`, the target's own choice at each place.

    With the target's argmax this is the greedy rule; with a sample of p it is the rule for deterministic candidates
    (accepted with probability p(x)); with Gumbel-max under shared noise it is the coupled rule.
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

    On average no lossless rule for a sampled chain accepts more. A prefix of i drafts is worth P_i = min(1,
    P_{i-1} p_i/q_i), P_0 = 1, and leaves the residual (P_i p − q)+ of mass S_i. The longest prefix that passes its own
    test, with probability S_i / (S_i + 1 − P_i), is kept; the residual there gives the next token.
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


Walk = tuple[Tensor, Tensor, Tensor]  # accepted, path, following (or the place at the path's end)


def match_tree(
    tokens: Tensor,  # [B, N]
    parents: Tensor,  # [B, N]
    real: Tensor,  # [B, N]
    wanted: Tensor,  # [B, N + 1]
    depth: int,
) -> Walk:
    """Follow the children that equal `wanted`, the target's own choice at their parent: `match` for trees.

    Under samples of p one of several candidates is accepted with their summed probability.
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

    It judges whole paths at a time; on a chain it is `block`. Children come before their parent and in their
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
        place = parents[:, i] + 1
        token = tokens[:, i, None]
        counts = real[:, i]
        w = claim[rows, place]
        before = left[rows, place]
        lost = short[rows, place]
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
    """Follow the first child that is kept from the root on; return accepted, path, and the place at its end `[B]`."""
    path = parents.new_full((len(parents), depth), -1)
    node = parents.new_full((len(parents),), -1)
    place = torch.zeros_like(node)
    for level in range(depth):
        children = kept & (parents == node[:, None])
        goes_on, first = children.any(1), children.to(torch.uint8).argmax(1)
        path[:, level] = torch.where(goes_on, first, -1)
        place = torch.where(goes_on, first + 1, place)
        node = torch.where(goes_on, first, -2)  # no node's parent
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
