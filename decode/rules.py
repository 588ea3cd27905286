"""The verification rules: what each can judge, how drafts are picked for it, and what it costs.

Each rule stands here once; a new one is one entry of `RULES` and its proof (tests/decode). The arithmetic is in
`verify` (chains) and `verify_tree`, as pure functions of their uniforms.

Shapes: B rows, N draft tokens, D of them on the longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads import Proposal
from . import verify, verify_tree
from .hashing import uniforms
from .sampling import ACCEPT, CORRECT, Highest, Keys, Sampling, draw, highest, probabilities, shared_gumbel


class DraftShape(Enum):
    """The shapes that a plan can ask for; the value is its name in sentences."""

    CHAIN = "a chain"
    STATIC = "a static tree"
    DYNAMIC = "a dynamic tree"


class DraftPolicy(Enum):
    """How draft tokens are picked from a drafter's distribution."""

    MOST_PROBABLE = "the most probable ones"
    DRAWN = "drawn from it, siblings without replacement"
    SHARED_NOISE = "the largest of log q plus the noise that the target's choice has at the same place"


class Verdict(NamedTuple):
    """What a rule says of a proposal.

    Attributes:
        accepted: how many drafts stay, `[B]`.
        path: in a tree the nodes that stay, from the root on, −1 after them, `[B, D]`; None for a chain.
        following: the token that follows them, `[B]`.
    """

    accepted: Tensor
    path: Tensor | None
    following: Tensor


@dataclass(frozen=True)
class VerifyInputs:
    """A proposal, and everything that a rule may look at to judge it.

    Attributes:
        logits: the target's after root and drafts, processed, `[B, 1 + N, V]`.
        draft_probs: what the tokens were drawn from: for a chain `[B, N, V]`, for a tree at each place `[B, 1 + N, V]`;
            None if they were not drawn.
        keys: of every draw; the first logits predict the token `keys.first`.
    """

    proposal: Proposal
    logits: Tensor
    draft_probs: Tensor | None
    sampling: Sampling
    keys: Keys

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
        """A number of each place that is finite only if all its logits are numbers, `[B, 1 + N]`."""
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


# ------------------------------------------------------------ judges


def _greedy(case: VerifyInputs) -> Verdict:
    """Keep what the target itself would have said."""
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
        accepted, following = verify.match(proposal.tokens, proposal.lengths, wanted)
        return Verdict(accepted, None, following)
    tokens, parents, real = proposal.tokens, proposal.parents, proposal.real
    return Verdict(*verify_tree.match_tree(tokens, parents, real, wanted, proposal.depth))


def _token_by_token(case: VerifyInputs) -> Verdict:
    """Reject drafts one by one; down a tree, siblings in turn."""
    return _sampled(case, verify.rejection, verify_tree.without_replacement)


def _path_by_path(case: VerifyInputs) -> Verdict:
    """Judge whole prefixes; in a tree, whole paths from the leaves up."""
    return _sampled(case, verify.block, verify_tree.traversal)


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
    """Keep what is typical of the target, whatever its own law says."""
    proposal = case.proposal
    probs = case.logits.float().softmax(-1) if case.sampling.greedy else case.probs
    chain = torch.arange(-1, proposal.depth - 1, device=probs.device).expand(len(probs), -1)
    parents = chain if proposal.parents is None else proposal.parents
    accepted, path, following = verify_tree.typical(proposal.tokens, parents, proposal.real, probs, proposal.depth)
    return Verdict(accepted, None if proposal.parents is None else path, following)


# ------------------------------------------------------------ the table


@dataclass(frozen=True)
class Rule:
    """One way to decide which drafts stay and which token follows them.

    Attributes:
        shapes: what a plan that names it may ask for.
        pick: how drafts are picked for it.
        judge: decides a `VerifyInputs`.
        logit_bytes: memory it makes of each of the target's logits, and of those of one place per row.
        lossy: it changes what the target says: never chosen for anyone, and labelled in every figure.
    """

    name: str
    shapes: frozenset[DraftShape]
    pick: DraftPolicy
    judge: Callable[[VerifyInputs], Verdict]
    logit_bytes: tuple[int, int]
    lossy: bool = False

    @property
    def samples(self) -> bool:
        """Whether it needs drafts that were drawn from the drafter's distribution, and that distribution."""
        return self.pick is DraftPolicy.DRAWN


_ANY = frozenset(DraftShape)
_CHAIN = frozenset({DraftShape.CHAIN})
# In a dynamic tree the drafter's certainty decides which draws are kept, so they are no draws any more.
_STATIC = frozenset({DraftShape.STATIC})

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("greedy", _ANY, DraftPolicy.MOST_PROBABLE, _greedy, (0, 0)),
        Rule("candidates", _ANY, DraftPolicy.MOST_PROBABLE, _candidates, (20, 0)),
        Rule("coupled", _ANY, DraftPolicy.SHARED_NOISE, _coupled, (28, 2)),
        Rule("rejection", _CHAIN, DraftPolicy.DRAWN, _token_by_token, (7, 16)),
        Rule("block", _CHAIN, DraftPolicy.DRAWN, _path_by_path, (16, 0)),
        Rule("without_replacement", _STATIC, DraftPolicy.DRAWN, _token_by_token, (16, 0)),
        Rule("traversal", _STATIC, DraftPolicy.DRAWN, _path_by_path, (16, 0)),
        Rule("typical", _ANY, DraftPolicy.MOST_PROBABLE, _typical, (8, 0), lossy=True),
    )
}
LOSSLESS = tuple(name for name, rule in RULES.items() if not rule.lossy)
LOSSY = tuple(name for name, rule in RULES.items() if rule.lossy)
AT_ZERO, NOT_DRAWN = "greedy", "candidates"
BY_SHAPE = {DraftShape.CHAIN: "rejection", DraftShape.STATIC: "without_replacement", DraftShape.DYNAMIC: NOT_DRAWN}


def fitting_rules(shape: DraftShape) -> tuple[str, ...]:
    """Return the names of the rules that can judge proposals of `shape`."""
    return tuple(name for name, rule in RULES.items() if shape in rule.shapes)


def choose_rule(wanted: str, shape: DraftShape, temperature: float, deterministic: bool) -> str:
    """Return the name of the rule that judges a proposal, for a plan that wants `wanted` ("auto" or a rule's name).

    Auto is greedy at temperature 0; above it candidates for proposals that are no samples (n-grams, dynamic trees),
    else rejection for chains and without_replacement for trees.

    Args:
        deterministic: whether the proposal's tokens are no samples: it has no distribution to reject against.
    """
    if wanted in LOSSY:
        return wanted
    if temperature == 0:
        return AT_ZERO
    found = BY_SHAPE[shape] if wanted == "auto" else wanted
    return NOT_DRAWN if RULES[found].samples and (deterministic or shape is DraftShape.DYNAMIC) else found
