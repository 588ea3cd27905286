"""How trees of drafts are grown of a drafter's logits: of a given shape, and of the most probable paths.

Shapes: B rows, N draft tokens, W nodes whose logits are known, C children of a node, R nodes read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common import BadInputError
from ..heads import NodeSession, Proposal
from ..heads.session import handed
from ..targets import Nodes
from .plan import Tree
from .sampling import Draft, DraftSampler


@dataclass(frozen=True)
class Level:
    """One pass of a static tree's growth."""

    known: Tensor  # nodes whose logits are known, [1, W]
    widest: int  # most children of any of them
    nodes: Tensor  # their children, [C]: each is child `ranks` [C] of the known node at index `which` [C]
    which: Tensor
    ranks: Tensor
    read: Tensor  # those of the children that have children themselves, [W']
    above: Tensor  # the parents of those, by number of reading, [1, W']


@dataclass(frozen=True)
class StaticTree:
    """A static tree as index tensors on a device."""

    depth: int
    parents: Tensor  # [N]
    read: Tensor  # when each node is read, −1 for never, [N]
    places: Tensor  # the nodes whose logits become known, in this order, plus 1, [1 + R]
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> StaticTree:
        """Lay out `tree` on `device`."""

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        read = [-1] * len(tree.parents)
        places = []
        levels = []
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


def grow_static(session: NodeSession, root: Tensor, layout: StaticTree, sampler: DraftSampler) -> Draft:
    """Draft a tree of the shape `layout` after `root` `[B]`."""
    rows, count = len(root), len(layout.parents)
    parents = layout.parents.expand(rows, -1)
    tokens = root.new_zeros(rows, count)
    real = torch.ones(rows, count, dtype=torch.bool, device=root.device)
    before = sampler.context
    sees = None if before is None else Nodes.of_tree(parents, layout.depth).sees[:, :, 1:]
    drawn, peaks = list[Tensor](), list[Tensor]()
    session.round_depth = layout.depth
    logits = session.prefill(root)[:, None]
    for depth, level in enumerate(layout.levels, 1):
        if level.widest > logits.shape[-1]:
            raise BadInputError(
                f"plan: a node of the tree has {level.widest} children, the drafter's vocabulary {logits.shape[-1]} "
                "tokens; take a narrower tree."
            )
        here = None if before is None or sees is None else before.then(tokens, sees[:, level.known[0] + 1])
        children = sampler.children(logits, session.output_ids, level.widest, depth, level.known, here)
        if children.probs is not None:
            drawn.append(children.probs)
        if children.peaks is not None:
            peaks.append(children.peaks)
        tokens[:, level.nodes] = children.tokens[:, level.which, level.ranks]
        real[:, level.nodes] = children.scores[:, level.which, level.ranks] > float("-inf")
        if depth < layout.depth:
            logits = session.decode(tokens[:, level.read], handed(session, level.above.expand(rows, -1)))
    for _ in range(layout.depth - 1):  # under nodes that are there, too
        real = real & torch.nn.functional.pad(real, (1, 0), value=True).gather(1, parents + 1)
    proposal = Proposal(tokens, real, layout.depth, parents, layout.read.expand(rows, -1))
    if not drawn:
        return Draft(proposal, None, peaks)
    known = torch.cat(drawn, 1)
    probs = known.new_zeros(rows, 1 + count, known.shape[-1]).index_copy(1, layout.places, known)
    return Draft(proposal, probs, [*peaks, probs[:, :, 0]])


@dataclass
class _Candidates:
    """The nodes of a dynamic tree so far, level by level; all `[B, N]`."""

    tokens: Tensor
    scores: Tensor  # log-probabilities of the paths to them
    parents: Tensor  # indices among the candidates, −1 for the root
    read: Tensor  # when the session has read each, −1 if it has not

    @classmethod
    def none(cls, root: Tensor) -> _Candidates:
        nothing = root.new_zeros(len(root), 0)
        return cls(nothing, torch.zeros(len(root), 0, device=root.device), nothing, nothing)

    def add(self, known: Tensor, chosen: Tensor, scores: Tensor) -> None:
        """Add the children `chosen` `[B, W, C]` of the nodes `known` `[B, W]`, with `scores` `[B, W · C]`."""
        self.tokens = torch.cat([self.tokens, chosen.flatten(1)], 1)
        self.scores = torch.cat([self.scores, scores], 1)
        self.parents = torch.cat([self.parents, known.repeat_interleave(chosen.shape[2], 1)], 1)
        self.read = torch.cat([self.read, self.tokens.new_full(scores.shape, -1)], 1)

    def mark_read(self, nodes: Tensor, first: int) -> Tensor:
        """Mark `nodes` `[B, W]` as read, from number `first` on; return when their parents were, −1 for the root."""
        above = self.parents.gather(1, nodes)
        order = torch.where(above < 0, -1, self.read.gather(1, above.clamp(min=0)))
        numbers = first + torch.arange(nodes.shape[1], device=nodes.device)
        self.read = self.read.scatter(1, nodes, numbers.expand(len(nodes), -1))
        return order

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
        return Proposal(self.tokens.gather(1, kept), real, depth, above, self.read.gather(1, kept))


def grow_dynamic(
    session: NodeSession, root: Tensor, width: int, nodes: int, depth: int, sampler: DraftSampler
) -> Draft:
    """Draft EAGLE-2's tree after `root` `[B]`: expand the most probable nodes, keep the best of all.

    What is compared is the product of the drafter's probabilities along the path (arXiv 2406.16858, §4). Nodes that
    are chosen so are no draws, and no distributions are kept for them.

    Args:
        width: nodes that are expanded in each level, and children that each of them gets.
        nodes: how many are kept.
        depth: the number of levels.
    """
    before, session.round_depth = sampler.context, depth
    logits = session.prefill(root)[:, None]
    width = min(width, logits.shape[-1])
    tree, peaks = _Candidates.none(root), list[Tensor]()
    known, known_scores = root.new_full((len(root), 1), -1), torch.zeros(len(root), 1, device=root.device)
    for level in range(1, depth + 1):
        here = None if before is None else before.then(tree.tokens, tree.above(known, level))
        children = sampler.children(logits, session.output_ids, width, level, known, here)
        if children.peaks is not None:
            peaks.append(children.peaks)
        total = (known_scores[:, :, None] + children.scores).flatten(1)
        first = tree.tokens.shape[1]
        tree.add(known, children.tokens, total)
        if level == depth:
            break
        best = total.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(1).values
        known, known_scores = best + first, total.gather(1, best)
        order = tree.mark_read(known, (level - 1) * width)
        logits = session.decode(tree.tokens.gather(1, known), order)
    return Draft(tree.best(nodes, depth), None, peaks)
