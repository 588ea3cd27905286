"""The verification rules by name: the proposals that each can judge, how drafts are picked for it, and its memory.

Plans are checked against this table, which needs no torch; the judges are in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DraftShape(Enum):
    """The shapes that a plan can ask for; the value is its name in sentences."""

    CHAIN = "a chain"
    STATIC = "a static tree"
    DYNAMIC = "a dynamic tree"


class DraftPolicy(Enum):
    """How draft tokens are picked from a drafter's distribution; the value is a phrase for sentences."""

    MOST_PROBABLE = "the most probable ones"
    DRAWN = "drawn from it, siblings without replacement"
    SHARED_NOISE = "the largest of log q plus the noise that the target's choice has at the same place"


@dataclass(frozen=True)
class Rule:
    """One way to decide which drafts stay and which token follows them."""

    name: str
    shapes: frozenset[DraftShape]  # of the proposals that it can judge
    pick: DraftPolicy  # how drafts are picked for it
    logit_bytes: tuple[int, int]  # memory it makes of each of the target's logits, and of those of one place per row
    lossy: bool = False  # it changes the target's law: never chosen automatically, and labelled in every figure

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
        Rule("greedy", _ANY, DraftPolicy.MOST_PROBABLE, (0, 0)),
        Rule("candidates", _ANY, DraftPolicy.MOST_PROBABLE, (20, 0)),
        Rule("coupled", _ANY, DraftPolicy.SHARED_NOISE, (28, 2)),
        Rule("rejection", _CHAIN, DraftPolicy.DRAWN, (7, 16)),
        Rule("block", _CHAIN, DraftPolicy.DRAWN, (16, 0)),
        Rule("without_replacement", _STATIC, DraftPolicy.DRAWN, (16, 0)),
        Rule("traversal", _STATIC, DraftPolicy.DRAWN, (16, 0)),
        Rule("typical", _ANY, DraftPolicy.MOST_PROBABLE, (8, 0), lossy=True),
    )
}
LOSSLESS = tuple(name for name, rule in RULES.items() if not rule.lossy)
LOSSY = tuple(name for name, rule in RULES.items() if rule.lossy)
AT_ZERO, NOT_DRAWN = "greedy", "candidates"
BY_SHAPE = {DraftShape.CHAIN: "rejection", DraftShape.STATIC: "without_replacement", DraftShape.DYNAMIC: NOT_DRAWN}


def choose_rule(name: str, shape: DraftShape, temperature: float, deterministic: bool) -> str:
    """Return the name of the rule that judges a proposal, for a plan whose `verify` is `name` ("auto" or a rule's).

    Auto is greedy at temperature 0; above it candidates for proposals that are no samples (n-grams, dynamic trees),
    else rejection for chains and without_replacement for trees.

    `deterministic`: whether the proposal's tokens are no samples.
    """
    if name in LOSSY:
        return name
    if temperature == 0:
        return AT_ZERO
    name = BY_SHAPE[shape] if name == "auto" else name
    return NOT_DRAWN if RULES[name].samples and (deterministic or shape is DraftShape.DYNAMIC) else name
