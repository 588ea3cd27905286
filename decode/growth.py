"""How a tree of drafts grows from a session's logits: of a shape that is given, or towards what is most probable.

Shapes: B rows, N draft nodes, W nodes whose logits are known, C children of a node, R nodes read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common import BadInputError
from ..heads import NodeSession, Proposal
from ..targets import Nodes
from .drafting import DraftSampler
from .trees import Tree

# ------------------------------------------------------------ static trees


@dataclass(frozen=True)
class Level:
    """One pass of a static tree's growth.

    Attributes:
        known: nodes whose logits are known, `[1, W]`.
        widest: most children of any of them.
        nodes: their children, `[C]`. Each is child `ranks` `[C]` of the known node at index `which` `[C]`.
        read: those of the children that have children themselves, `[W']`.
        above: the parents of those, by number of reading, `[1, W']`.
    """

    known: Tensor
    widest: int
    nodes: Tensor
    which: Tensor
    ranks: Tensor
    read: Tensor
    above: Tensor


@dataclass(frozen=True)
class StaticTree:
    """A static tree as index tensors on a device.

    Attributes:
        depth: its number of levels.
        parents: `[N]`.
        read: when each node is read, −1 for never, `[N]`.
        places: the nodes whose logits become known, in this order, plus 1, `[1 + R]`.
    """

    depth: int
    parents: Tensor
    read: Tensor
    places: Tensor
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> StaticTree:
        """Lay out `tree` on `device`."""

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        read, places, levels = [-1] * len(tree.parents), [], []
        known: Sequence[int] = (-1,)
        while known:
            families = [tree.children[node] for node in known]
            places += [node + 1 for node in known]
            members = [(node, w, rank) for w, family in enumerate(families) for rank, node in enumerate(family)]
            nodes, which, ranks = zip(*members, strict=True)
            following = [node for node in nodes if tree.children[node]]
            above = [-1 if tree.parents[n] < 0 else read[tree.parents[n]] for n in following]
            for node in following:
                read[node] = max(read) + 1
            widest, kept = max(map(len, families)), (index(nodes), index(which), index(ranks), index(following))
            levels.append(Level(index(known)[None], widest, *kept, index(above)[None]))
            known = following
        return cls(tree.depth, index(tree.parents), index(read), index(places), tuple(levels))


def grow_static(
    session: NodeSession, root: Tensor, layout: StaticTree, chooser: DraftSampler
) -> tuple[Proposal, Tensor | None]:
    """Draft a proposal of the shape `layout` after `root` `[B]`.

    Returns:
        The proposal, and what its tokens were drawn from at each place, `[B, 1 + N, V]`; None if they were not drawn.
    """
    rows, count = len(root), len(layout.parents)
    parents = layout.parents.expand(rows, -1)
    tokens = root.new_zeros(rows, count)
    real = torch.ones(rows, count, dtype=torch.bool, device=root.device)
    before = chooser.context
    sees = None if before is None else Nodes.of_tree(parents, layout.depth).sees[:, :, 1:]
    logits = session.prefill(root)[:, None]
    for depth, level in enumerate(layout.levels, 1):
        _check_width(level.widest, logits.shape[-1])
        here = None
        if before is not None and sees is not None:
            here = before.then(tokens, sees[:, level.known[0] + 1])
        chosen, scores = chooser.children(logits, session.output_ids, level.widest, depth, level.known, here)
        tokens[:, level.nodes] = chosen[:, level.which, level.ranks]
        real[:, level.nodes] = scores[:, level.which, level.ranks] > float("-inf")
        if depth < layout.depth:
            logits = session.decode(tokens[:, level.read], level.above.expand(rows, -1))
    real, read = _under_real(real, parents, layout.depth), layout.read.expand(rows, -1)
    proposal = Proposal.tree(tokens, parents, real, read, layout.depth)
    if not chooser.probs:
        return proposal, None
    drawn = torch.cat(chooser.probs, 1)
    return proposal, drawn.new_zeros(rows, 1 + count, drawn.shape[-1]).index_copy(1, layout.places, drawn)


def _check_width(widest: int, vocab: int) -> None:
    if widest > vocab:
        raise BadInputError(
            f"plan: a node of the tree has {widest} children, the drafter's vocabulary {vocab} tokens; "
            "take a narrower tree."
        )


def _under_real(real: Tensor, parents: Tensor, depth: int) -> Tensor:
    """Return which nodes are there and stand under nodes that are, `[B, N]`."""
    for _ in range(depth - 1):
        real = real & torch.nn.functional.pad(real, (1, 0), value=True).gather(1, parents + 1)
    return real


# ------------------------------------------------------------ dynamic trees


@dataclass
class _Candidates:
    """The nodes of a dynamic tree so far, level by level; all `[B, N]`.

    Attributes:
        tokens: their tokens. scores: log-probabilities of the paths to them.
        parents: indices of their parents among the candidates, −1 for the root.
        read: when the session has read each, −1 if it has not.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    read: Tensor

    @classmethod
    def none(cls, root: Tensor) -> _Candidates:
        nothing = root.new_zeros(len(root), 0)
        return cls(nothing, torch.zeros(len(root), 0, device=root.device), nothing, nothing)

    def add(self, known: Tensor, chosen: Tensor, scores: Tensor) -> None:
        """Add the children `chosen` `[B, W, C]` of the nodes `known` `[B, W]`, with `scores` `[B, W · C]`."""
        unread = self.tokens.new_full(scores.shape, -1)
        self.tokens = torch.cat([self.tokens, chosen.flatten(1)], 1)
        self.scores = torch.cat([self.scores, scores], 1)
        self.parents = torch.cat([self.parents, known.repeat_interleave(chosen.shape[2], 1)], 1)
        self.read = torch.cat([self.read, unread], 1)

    def note_read(self, nodes: Tensor, first: int) -> None:
        """Note that `nodes` `[B, W]` are read next, as number `first` and those after it."""
        numbers = first + torch.arange(nodes.shape[1], device=nodes.device)
        self.read = self.read.scatter(1, nodes, numbers.expand(len(nodes), -1))

    def parents_read(self, nodes: Tensor) -> Tensor:
        """Return when the parents of `nodes` `[B, W]` were read, −1 for the root."""
        above = self.parents.gather(1, nodes)
        return torch.where(above < 0, -1, self.read.gather(1, above.clamp(min=0)))

    def above(self, nodes: Tensor, depth: int) -> Tensor:
        """Return which candidates stand on the way to `nodes` `[B, W]`, themselves included, `[B, W, N]`."""
        sees = Nodes.of_tree(self.parents, depth).sees[:, :, 1:]
        return sees.gather(1, (nodes + 1)[:, :, None].expand(-1, -1, sees.shape[2]))

    def best(self, count: int, depth: int) -> Proposal:
        """Keep the `count` candidates with the highest scores.

        A node's score is at most its parent's, and equal ones stay in order: so what is kept includes its parents.
        """
        kept = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        numbers = torch.arange(kept.shape[1], device=kept.device).expand(len(kept), -1)
        place = torch.full_like(self.parents, -1).scatter(1, kept, numbers)
        above = self.parents.gather(1, kept)
        above = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
        real = self.scores.gather(1, kept) > float("-inf")
        return Proposal.tree(self.tokens.gather(1, kept), above, real, self.read.gather(1, kept), depth)


def grow_dynamic(
    session: NodeSession, root: Tensor, width: int, nodes: int, depth: int, chooser: DraftSampler
) -> Proposal:
    """Draft EAGLE-2's tree after `root` `[B]`: expand the most probable nodes, keep the best of all.

    What is compared is the product of the drafter's probabilities along the path (arXiv 2406.16858, §4).

    Args:
        width: nodes that are expanded in each level, and children that each of them gets.
        nodes: how many are kept.
        depth: the number of levels.
    """
    before = chooser.context
    logits = session.prefill(root)[:, None]
    width = min(width, logits.shape[-1])
    found = _Candidates.none(root)
    known, known_scores = root.new_full((len(root), 1), -1), torch.zeros(len(root), 1, device=root.device)
    for level in range(1, depth + 1):
        here = None if before is None else before.then(found.tokens, found.above(known, level))
        chosen, scores = chooser.children(logits, session.output_ids, width, level, known, here)
        total = (known_scores[:, :, None] + scores).flatten(1)
        first = found.tokens.shape[1]
        found.add(known, chosen, total)
        if level == depth:
            break
        best = total.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(1).values
        known, known_scores = best + first, total.gather(1, best)
        order = found.parents_read(known)
        found.note_read(known, (level - 1) * width)
        logits = session.decode(found.tokens.gather(1, known), order)
    return found.best(nodes, depth)
