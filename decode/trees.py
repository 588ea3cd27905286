"""Static trees of drafts: one shape for every round, given, or the best one for measured acceptance rates.

Nodes are numbered so that parents come first; −1 is the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from ..common import BadInputError
from ..common.values import tree_depths


@dataclass(frozen=True)
class Tree:
    """A static shape: the parent of each node, in level order; a chain of three is (-1, 0, 1).

    Raises:
        BadInputError: a parent that does not come first, or nodes that are not in level order.
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
        return {
            node: tuple(i for i, p in enumerate(self.parents) if p == node) for node in range(-1, len(self.parents))
        }

    @property
    def depth(self) -> int:
        return self.depths[-1]

    def up_to(self, depth: int) -> Tree:
        """Return the tree of its first `depth` levels."""
        return Tree(self.parents[: sum(d <= depth for d in self.depths)])

    def value(self, rates: Sequence[Sequence[float]]) -> float:
        """Return the expected tokens of a round.

        They are 1 + Σ over nodes of the product of `rates[depth − 1][rank]` along the path.
        """
        found: list[float] = []
        for parent, depth, rank in zip(self.parents, self.depths, self.ranks, strict=True):
            found.append((1.0 if parent < 0 else found[parent]) * rates[depth - 1][rank])
        return 1 + sum(found)


def best_tree(rates: Sequence[Sequence[float]], nodes: int) -> Tree:
    """Return the tree of `nodes` drafts with the highest expected number of tokens.

    It is found by Sequoia's dynamic programme (arXiv 2402.12374, §4.1).

    Args:
        rates: `rates[d][r]`, the probability that the r-th child of a node at depth d is accepted, given that the node
            was (and that the children before it were refused: counted as part of the rate). Depth and width are limited
            by it.

    Raises:
        BadInputError: more nodes than these rates have room for.
    """

    if not rates or nodes < 1:
        raise BadInputError(
            f"the best tree needs acceptance rates and at least one node; got {len(rates)} levels and {nodes} nodes."
        )

    @cache
    def below(count: int, depth: int, rank: int) -> tuple[float, tuple[int, ...]]:
        """Return the best value of `count` nodes below a node at `depth`, in its children from `rank` on.

        It comes with the sizes of those children's subtrees.
        """
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
