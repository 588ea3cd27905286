"""A plan: the shape of a proposal and how it is verified; and static trees, given or the best for measured rates.

Nodes of a tree are numbered so that parents come first; −1 is the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from ..common import BadInputError
from ..common.values import tree_depths
from .control import Control
from .rule_table import AT_ZERO, LOSSLESS, LOSSY, RULES, DraftShape, choose_rule


@dataclass(frozen=True)
class Plan:
    """The shape of a proposal and how it is verified.

    Attributes:
        depth: draft tokens on a path; 0 is plain decoding.
        width: 1 drafts a chain. More grow a dynamic tree (EAGLE-2, arXiv 2406.16858): of each level the `width` most
            probable nodes are read, `width` children of each are considered, and the `nodes` most probable of all are
            verified.
        nodes: how many nodes of a dynamic tree are verified; None for `width * depth`.
        tree: a static tree instead; it decides the depth.
        verify: "auto", or the name of a rule (`decode.rule_table.RULES`); see `choose_rule`.
        confidence: a chain ends after the first draft that the drafter gives less probability than this; 0 for never.
            With a drafter that has a confidence before it draws (`Abilities.confident`) it ends before the first draft
            that is expected to be reached and accepted with less than this.
        control: decides the depth of every round, up to `depth`, or that it drafts nothing (a tree is drafted
            whole or not at all).
    """

    depth: int = 4
    width: int = 1
    nodes: int | None = None
    tree: Tree | None = None
    verify: str = "auto"
    confidence: float = 0.0
    control: Control | None = None

    def __post_init__(self) -> None:
        if self.tree is not None:
            object.__setattr__(self, "depth", self.tree.depth)
        if self.depth < 0:
            raise BadInputError(f"plan: depth must be >= 0, got {self.depth}.")
        if self.width < 1:
            raise BadInputError(f"plan: width must be >= 1, got {self.width}.")
        if self.tree is not None and (self.width > 1 or self.nodes is not None):
            raise BadInputError("plan: a static tree has its own width and number of nodes; leave out width and nodes.")
        if self.nodes is not None and (self.width == 1 or self.nodes < 1):
            raise BadInputError(
                "plan: nodes says how many nodes of a dynamic tree are verified; it needs width > 1 and must be >= 1, "
                f"got {self.nodes}."
            )
        if not 0 <= self.confidence <= 1:
            raise BadInputError(f"plan: confidence is a probability, got {self.confidence}.")
        if self.confidence and self.is_tree:
            raise BadInputError(
                "plan: confidence ends chains; a dynamic tree already follows the drafter's confidence, "
                "a static one has a fixed shape."
            )
        known = ("auto", *LOSSLESS, *LOSSY)
        if self.verify not in known:
            raise BadInputError(f"plan: unknown verification rule {self.verify!r}; known: {', '.join(known)}.")
        fitting = ("auto", *(name for name, rule in RULES.items() if self.shape in rule.shapes))
        if self.verify not in fitting:
            raise BadInputError(
                f"plan: the rule {self.verify!r} cannot verify {self.shape.value}; these can: {', '.join(fitting)}."
            )

    def __str__(self) -> str:
        most = "up to " if self.control is not None or self.confidence else ""
        if not self.is_tree:
            return f"depth {most}{self.depth}"
        return f"{self.shape.value.removeprefix('a ')} of {most}{self.max_nodes} nodes, depth {self.depth}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Build a plan from what `to_dict` returned."""
        tree, control = values.get("tree"), values.get("control")
        return cls(**values | {"tree": tree and Tree(tuple(tree)), "control": control and Control.from_dict(control)})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values that JSON can hold; a static tree is its parents."""
        tree, control = self.tree and list(self.tree.parents), self.control and self.control.to_dict()
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"tree": tree, "control": control}

    @property
    def shape(self) -> DraftShape:
        """Whether it asks for a chain, a static or a dynamic tree."""
        if self.tree is not None:
            return DraftShape.STATIC
        return DraftShape.DYNAMIC if self.width > 1 and self.depth > 0 else DraftShape.CHAIN

    @property
    def is_tree(self) -> bool:
        return self.shape is not DraftShape.CHAIN

    @property
    def chain(self) -> Plan:
        """A plan as deep as this one for a drafter that grows no trees."""
        if not self.is_tree:
            return self
        fits = self.verify != "auto" and DraftShape.CHAIN in RULES[self.verify].shapes
        return Plan(self.depth, verify=self.verify if fits else "auto", control=self.control)

    def up_to(self, depth: int | None) -> Plan:
        """Return this plan cut to `depth` (None: as it is), for a drafter that drafts no deeper."""
        if depth is None or self.depth <= depth:
            return self
        return replace(self, depth=depth, tree=self.tree and self.tree.up_to(depth))

    def within(self, max_new_tokens: int) -> Plan:
        """Return this plan cut to the drafts that a round can emit: the first of the new tokens belongs to none."""
        return self.up_to(max(1, max_new_tokens - 1))

    @property
    def max_nodes(self) -> int:
        """Most draft tokens of one verification pass."""
        if self.tree is not None:
            return len(self.tree.parents)
        return self.depth if self.width == 1 else self.nodes or self.width * self.depth

    @property
    def max_read(self) -> int:
        """Most drafts that a drafter reads in one round."""
        if self.tree is not None:
            return len(self.tree.parents)
        return max(0, self.depth - 1) * self.width

    def rule(self, temperature: float, deterministic: bool) -> str:
        """Return the name of the rule for a proposal that is, or is not, deterministic.

        Raises BadInputError for the greedy rule above temperature 0.
        """
        if self.verify == AT_ZERO and temperature > 0:
            raise BadInputError(f"the greedy rule needs temperature 0, got {temperature}.")
        return choose_rule(self.verify, self.shape, temperature, deterministic)


@dataclass(frozen=True)
class Tree:
    """A static shape: the parent of each node, in level order; a chain of three is (-1, 0, 1).

    Raises BadInputError for a parent that does not come first, or nodes that are not in level order.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(self.parents))
        tree_depths(self.parents)  # refuses what is no tree

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; a child of the root has depth 1."""
        return tree_depths(self.parents)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The number of each node among its siblings, from 0."""
        return tuple(sum(p == parent for p in self.parents[:node]) for node, parent in enumerate(self.parents))

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The children of each node, and of the root."""
        nodes = range(-1, len(self.parents))
        return {node: tuple(i for i, p in enumerate(self.parents) if p == node) for node in nodes}

    @property
    def depth(self) -> int:
        return self.depths[-1]

    def up_to(self, depth: int) -> Tree:
        """Return the tree of its first `depth` levels."""
        return Tree(self.parents[: sum(d <= depth for d in self.depths)])

    def value(self, rates: Sequence[Sequence[float]]) -> float:
        """Return a round's expected tokens: 1 + Σ over nodes of the product of `rates[depth − 1][rank]` on the path."""
        reached: list[float] = []
        for parent, depth, rank in zip(self.parents, self.depths, self.ranks, strict=True):
            reached.append((1.0 if parent < 0 else reached[parent]) * rates[depth - 1][rank])
        return 1 + sum(reached)


def best_tree(rates: Sequence[Sequence[float]], nodes: int) -> Tree:
    """Return the tree of `nodes` drafts with the highest expected number of tokens.

    Sequoia's dynamic programme (arXiv 2402.12374, §4.1).

    `rates`: `rates[d][r]`, the probability that the r-th child of a node at depth d is accepted, given that the node
    was; that the children before it were refused is part of the rate. They limit depth and width.

    Raises BadInputError for more nodes than these rates have room for.
    """
    if not rates or nodes < 1:
        raise BadInputError(
            f"the best tree needs acceptance rates and at least one node; got {len(rates)} levels and {nodes} nodes."
        )

    @cache
    def below(count: int, depth: int, rank: int) -> tuple[float, tuple[int, ...]]:
        """Return the best value of `count` nodes in the children from `rank` on, and the sizes of their subtrees."""
        if count == 0:
            return 0.0, ()
        if depth == len(rates) or rank == len(rates[depth]):
            return -1.0, ()
        best: tuple[float, tuple[int, ...]] = (-1.0, ())
        for size in range(1, count + 1):
            inside, rest = below(size - 1, depth + 1, 0), below(count - size, depth, rank + 1)
            if inside[0] < 0 or rest[0] < 0:
                continue
            value = rates[depth][rank] * (1 + inside[0]) + rest[0]
            if value > best[0]:
                best = (value, (size, *rest[1]))
        return best

    if below(nodes, 0, 0)[0] < 0:
        raise BadInputError(
            f"no tree of {nodes} nodes fits into {len(rates)} levels with at most {max(map(len, rates))} children."
        )
    parents: list[int] = []
    level = [(-1, nodes)]  # nodes of one depth with the number of nodes below each
    for depth in range(len(rates)):
        following = []
        for node, count in level:
            for size in below(count, depth, 0)[1]:
                following.append((len(parents), size - 1))
                parents.append(node)
        level = following
    return Tree(tuple(parents))
