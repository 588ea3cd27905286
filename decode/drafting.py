"""How a proposal is drafted: which tokens are picked from a drafter's logits, and how a tree grows from them.

Shapes: B rows, N draft nodes, W nodes whose logits are known, C children of a node, V vocabulary, V' the drafter's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..ground import BadInputError
from ..heads import NodeSession, Proposal
from ..targets import Nodes
from .plan import SAMPLED, Plan
from .sampling import (
    DRAFT,
    Context,
    Processors,
    Sampling,
    Seed,
    draw,
    gumbel,
    most_probable,
    nothing_left,
    probabilities,
    shared_gumbel,
    uniforms,
)
from .trees import Tree


@dataclass
class Chooser:
    """Picks draft tokens under the same processors as the target's, drawn ones under the same filters too, and remembers the distributions.

    Attributes:
        rule: how the proposal will be verified; decides whether tokens are drawn or the most probable ones.
        seed: of every draw.
        sequences: keys of each row's randomness, `[B]`.
        first: index in its sequence of the first token drafted, `[B]`. Randomness is keyed by it, so that a token that is
            drafted again in a later round is a new draw.
        context: of that token, if there are processors.
        probs: the distributions that tokens were drawn from: of a chain `[B, V]` per depth, of a tree `[B, W, V]` per pass.
        confidence: a chain ends behind the first token to which the drafter gives less than this; 0 for never.
        certain: which rows have not ended yet, `[B]`. lengths: tokens of each row so far, `[B]`. Both None without `confidence`.
    """

    rule: str
    sampling: Sampling
    seed: Seed
    vocab: int
    sequences: Tensor
    first: Tensor
    processors: Processors | None = None
    context: Context | None = None
    depth: int = 0
    probs: list[Tensor] = field(default_factory=list)
    confidence: float = 0.0
    certain: Tensor | None = None
    lengths: Tensor | None = None

    # ------------------------------------------------------------ chains

    def __call__(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """The next token of a chain, `[B]`, from logits `[B, V']`."""
        if self._most_probable and self.context is None:
            best = most_probable(logits)
            if self.confidence:
                self._note(logits.float().softmax(-1), best)
            return best if token_ids is None else token_ids.index_select(0, best)
        logits = self._processed(_spread(logits, token_ids, self.vocab)[:, None], self.context)[:, 0]
        chosen = self._pick(logits)
        if self.confidence:
            self._note(self.probs[-1] if self.probs else logits.softmax(-1), chosen)
        self.depth += 1
        if self.context is not None:
            self.context = self.context.then(
                chosen[:, None], torch.ones(1, 1, 1, dtype=torch.bool, device=chosen.device)
            )
        return chosen

    def ended(self) -> bool:
        """Whether every row has an uncertain token behind it (read back from the device)."""
        return self.certain is not None and not bool(self.certain.any())

    def _note(self, probs: Tensor, chosen: Tensor) -> None:
        """Count `chosen` `[B]` in the rows that have not ended; the uncertain token itself is still proposed: leaving it out would bias the text."""
        if self.certain is None or self.lengths is None:
            self.certain, self.lengths = torch.ones_like(chosen, dtype=torch.bool), torch.zeros_like(chosen)
        self.lengths = self.lengths + self.certain
        self.certain = self.certain & (probs.gather(-1, chosen[:, None])[:, 0] >= self.confidence)

    def _pick(self, logits: Tensor) -> Tensor:
        if self._most_probable:
            return most_probable(logits)
        probs, positions = probabilities(logits, self.sampling), self.first + self.depth
        if self.rule == "coupled":
            return (probs.double().log() + shared_gumbel(self.seed, self.sequences, positions, self.vocab)).argmax(-1)
        self.probs.append(probs)
        return draw(probs, uniforms(self.seed, DRAFT, self.sequences, self.first, positions))

    # ------------------------------------------------------------ trees

    def children(
        self, logits: Tensor, token_ids: Tensor | None, count: int, depth: int, nodes: Tensor, context: Context | None
    ) -> tuple[Tensor, Tensor]:
        """`count` different tokens behind each of W nodes, and their scores, best first: `[B, W, C]` each.

        Args:
            logits: `[B, W, V']`. depth: of the children. nodes: `[B or 1, W]`, numbers of the nodes, by which draws differ.
            context: of the children, `[B, W]` places, if there are processors.

        Returns:
            Tokens, and the drafter's log-probabilities of them; −inf for a token that is not really there.
        """
        if self._most_probable and context is None:
            tokens, scores = _top(logits, count)
            return (tokens if token_ids is None else token_ids[tokens]), scores
        logits = self._processed(_spread(logits, token_ids, self.vocab), context)
        if self._most_probable:
            return _top(logits, count)
        probs = probabilities(logits, self.sampling)
        log_probs, rows, seed = probs.double().log(), self.sequences[:, None], self.seed
        if self.rule == "coupled":
            noise = shared_gumbel(seed, rows, self.first[:, None] + depth - 1, self.vocab)
        else:
            # The largest of log q + Gumbel noise are draws without replacement, in order (Kool et al., arXiv 1903.06059).
            noise = gumbel(seed, DRAFT, self.vocab, rows, self.first[:, None], nodes)
            self.probs.append(probs)
        tokens = (log_probs + noise).topk(count, -1).indices
        return tokens, log_probs.gather(-1, tokens)

    # ------------------------------------------------------------

    @property
    def _most_probable(self) -> bool:
        return self.rule not in SAMPLED and self.rule != "coupled"

    def _processed(self, logits: Tensor, context: Context | None) -> Tensor:
        """`[B, W, V]` after the processors."""
        if self.processors is None or context is None:
            return logits
        processed = self.processors(logits, context)
        # A pruned vocabulary may hold no token that is allowed here. What is drafted then is refused, but must be a draw from what it is scored with.
        return torch.where(nothing_left(processed)[..., None], logits, processed)


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens and their log-probabilities, `[..., C]` each. The first is the one that argmax takes, as the target does: topk orders ties at will."""
    top, best = logits.float().log_softmax(-1).topk(count, -1), most_probable(logits, keepdim=True)
    others = torch.where(top.indices == best, top.indices[..., :1], top.indices)[..., 1:]
    return torch.cat([best, others], -1), top.values


def _spread(logits: Tensor, token_ids: Tensor | None, vocab: int) -> Tensor:
    """Logits over a pruned vocabulary `[..., V']` as logits over the whole one `[..., V]`, fp32."""
    logits = logits.float()
    if token_ids is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab), float("-inf"))
    return whole.scatter(-1, token_ids.expand_as(logits), logits)


# ------------------------------------------------------------ static trees


@dataclass(frozen=True)
class _Level:
    """One pass of a static tree's growth.

    Attributes:
        known: nodes whose logits are known, `[1, W]`. widest: most children of any of them.
        nodes: their children; each is child `ranks` of the known node at index `which`, `[C]` each.
        read: those of the children that have children themselves, `[W']`. above: by number of reading, their parents, `[1, W']`.
    """

    known: Tensor
    widest: int
    nodes: Tensor
    which: Tensor
    ranks: Tensor
    read: Tensor
    above: Tensor


@dataclass(frozen=True)
class _Layout:
    """A static tree as index tensors on a device, made once.

    Attributes:
        parents: `[N]`. read: when each node is read, −1 for never, `[N]`. places: the nodes whose logits become known, in this order, plus 1, `[1 + R]`.
    """

    parents: Tensor
    read: Tensor
    places: Tensor
    levels: tuple[_Level, ...]


@lru_cache(maxsize=64)
def layout_of(tree: Tree, device: torch.device) -> _Layout:
    def index(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    read, places, levels = [-1] * len(tree.parents), [], []
    known: Sequence[int] = (-1,)
    while known:
        families = [tree.children[node] for node in known]
        places += [node + 1 for node in known]
        nodes, which, ranks = zip(
            *((node, w, rank) for w, family in enumerate(families) for rank, node in enumerate(family)), strict=True
        )
        following = [node for node in nodes if tree.children[node]]
        above = [-1 if tree.parents[n] < 0 else read[tree.parents[n]] for n in following]
        for node in following:
            read[node] = max(read) + 1
        levels.append(
            _Level(
                index(known)[None],
                max(map(len, families)),
                index(nodes),
                index(which),
                index(ranks),
                index(following),
                index(above)[None],
            )
        )
        known = following
    return _Layout(index(tree.parents), index(read), index(places), tuple(levels))


def grow_static(session: NodeSession, root: Tensor, tree: Tree, chooser: Chooser) -> tuple[Proposal, Tensor | None]:
    """A proposal of the shape `tree`, and the distributions its tokens were drawn from at each place, `[B, 1 + N, V]`; None for no draws."""
    rows, layout = len(root), layout_of(tree, root.device)
    parents = layout.parents.expand(rows, -1)
    tokens, real = (
        root.new_zeros(rows, len(tree.parents)),
        torch.ones(rows, len(tree.parents), dtype=torch.bool, device=root.device),
    )
    sees = Nodes.of_tree(parents, tree.depth).sees[:, :, 1:] if chooser.context is not None else None
    logits = session.begin(root)[:, None]
    for depth, level in enumerate(layout.levels, 1):
        context = (
            None
            if sees is None or chooser.context is None
            else chooser.context.then(tokens, sees[:, level.known[0] + 1])
        )
        if level.widest > logits.shape[-1]:
            raise BadInputError(
                f"plan: a node of the tree has {level.widest} children, the drafter's vocabulary {logits.shape[-1]} tokens; take a narrower tree."
            )
        chosen, scores = chooser.children(logits, session.output_ids, level.widest, depth, level.known, context)
        tokens[:, level.nodes] = chosen[:, level.which, level.ranks]
        real[:, level.nodes] = scores[:, level.which, level.ranks] > float("-inf")
        if depth < tree.depth:
            logits = session.extend(tokens[:, level.read], level.above.expand(rows, -1))
    proposal = Proposal.tree(
        tokens, parents, _under_real(real, parents, tree.depth), layout.read.expand(rows, -1), tree.depth
    )
    if not chooser.probs:
        return proposal, None
    drawn = torch.cat(chooser.probs, 1)
    return proposal, drawn.new_zeros(rows, 1 + len(tree.parents), drawn.shape[-1]).index_copy(1, layout.places, drawn)


def _under_real(real: Tensor, parents: Tensor, depth: int) -> Tensor:
    """Nodes that are there and stand under nodes that are."""
    for _ in range(depth - 1):
        real = real & torch.nn.functional.pad(real, (1, 0), value=True).gather(1, parents + 1)
    return real


# ------------------------------------------------------------ dynamic trees


def grow_dynamic(session: NodeSession, root: Tensor, plan: Plan, depth: int, chooser: Chooser) -> Proposal:
    """EAGLE-2's tree (arXiv 2406.16858, §4): expand the most probable nodes level by level, then keep the most probable of all.

    What is compared is the product of the drafter's probabilities along the path.
    """
    rows, device = len(root), root.device
    logits = session.begin(root)[:, None]
    width = min(plan.width, logits.shape[-1])
    # All candidates, level by level: token, score, parent (a candidate), and when the drafter read it (-1: it has not).
    tokens, parents, scores = root.new_zeros(rows, 0), root.new_zeros(rows, 0), torch.zeros(rows, 0, device=device)
    read = root.new_zeros(rows, 0)
    known, known_scores = root.new_full((rows, 1), -1), torch.zeros(rows, 1, device=device)
    for level in range(1, depth + 1):
        context = None if chooser.context is None else chooser.context.then(tokens, _above(parents, known, level))
        chosen, found = chooser.children(logits, session.output_ids, width, level, known, context)
        before, count = tokens.shape[1], chosen[0].numel()
        total = (known_scores[:, :, None] + found).flatten(1)
        tokens, scores = torch.cat([tokens, chosen.flatten(1)], 1), torch.cat([scores, total], 1)
        parents = torch.cat([parents, known.repeat_interleave(width, 1)], 1)
        read = torch.cat([read, root.new_full((rows, count), -1)], 1)
        if level == depth:
            break
        best = total.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(1).values
        known, known_scores = best + before, total.gather(1, best)
        above = parents.gather(1, known)
        order = torch.where(above < 0, -1, read.gather(1, above.clamp(min=0)))
        read = read.scatter(1, known, (level - 1) * width + torch.arange(width, device=device).expand(rows, -1))
        logits = session.extend(tokens.gather(1, known), order)
    return _best(plan.max_nodes, tokens, parents, scores, read, depth)


def _above(parents: Tensor, nodes: Tensor, depth: int) -> Tensor:
    """Which candidates stand on the way to `nodes` `[B, W]`, themselves included, `[B, W, N]`."""
    sees = Nodes.of_tree(parents, depth).sees[:, :, 1:]
    return sees.gather(1, (nodes + 1)[:, :, None].expand(-1, -1, sees.shape[2]))


def _best(count: int, tokens: Tensor, parents: Tensor, scores: Tensor, read: Tensor, depth: int) -> Proposal:
    """The `count` candidates with the highest scores. A node's score is at most its parent's, and equal ones stay in order: so parents stay too."""
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
    place = torch.full_like(parents, -1).scatter(
        1, kept, torch.arange(kept.shape[1], device=kept.device).expand(len(kept), -1)
    )
    above = parents.gather(1, kept)
    above = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
    return Proposal.tree(
        tokens.gather(1, kept), above, scores.gather(1, kept) > float("-inf"), read.gather(1, kept), depth
    )
