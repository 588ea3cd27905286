"""How draft tokens are picked from a drafter's logits.

Shapes: B rows, W nodes whose logits are known, C children of a node, V vocabulary, V' the drafter's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..common import BadInputError
from ..heads import NodeSession, Proposal
from ..targets import Nodes
from .hashing import uniforms
from .plan import Tree
from .rules import DraftPolicy, Rule
from .sampling import (
    DRAFT,
    Context,
    Keys,
    Processors,
    Sampling,
    draw,
    gumbel,
    highest,
    nothing_left,
    probabilities,
    shared_gumbel,
)


@dataclass(frozen=True)
class SamplerConfig:
    """How tokens are drawn from logits, by drafter and target alike.

    Attributes:
        sampling: temperature, filters and penalties.
        processors: what the penalties and bans need; None if there are none.
        vocab: V.
    """

    sampling: Sampling
    processors: Processors | None
    vocab: int


@dataclass
class DraftSampler:
    """Picks draft tokens under the target's own processors and filters, and remembers what they were drawn from.

    Attributes:
        rule: how the proposal will be verified; decides how tokens are picked.
        keys: of every draw; `keys.first` is the first token drafted.
        context: of that token, if there are processors.
        confidence: a chain ends after the first token to which the drafter gives less than this; 0 for never. Where a
            drafter tells its confidence (`expect`), before the first token that is reached with less than this.
        depth: tokens of the chain so far.
        reach: how probable each token of the chain is to be reached and accepted, as the drafter told it (`expect`),
            `[B]` each.
        probs: what tokens were drawn from: for a chain `[B, V]` per depth, for a tree `[B, W, V]` per pass.
        peaks: of each distribution that is not among `probs` a number, finite only if its logits are (see `finite`),
            `[B, 1 or W]` per pass.
        certain: which rows have not ended yet, `[B]`. lengths: tokens of each row so far, `[B]`. Both None without
            `confidence`.
    """

    rule: Rule
    drawing: SamplerConfig
    keys: Keys
    context: Context | None = None
    confidence: float = 0.0
    depth: int = field(default=0, init=False)
    probs: list[Tensor] = field(default_factory=list, init=False)
    peaks: list[Tensor] = field(default_factory=list, init=False)
    reach: list[Tensor] = field(default_factory=list, init=False)
    certain: Tensor | None = field(default=None, init=False)
    lengths: Tensor | None = field(default=None, init=False)

    # ------------------------------------------------------------ chains

    def __call__(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """Pick the next token of a chain, `[B]`, from logits `[B, V']`."""
        if self._is_certain and self.context is None:
            best = self._highest(logits)
            if self.confidence:
                self._note(logits.float().softmax(-1), best)
            return best if token_ids is None else token_ids.index_select(0, best)
        logits = self._processed(_spread(logits, token_ids, self.drawing.vocab)[:, None], self.context)[:, 0]
        chosen = self._pick(logits)
        if self.confidence:
            self._note(self.probs[-1] if self.probs else logits.softmax(-1), chosen)
        self.depth += 1
        if self.context is not None:
            self.context = self.context.then(
                chosen[:, None], torch.ones(1, 1, 1, dtype=torch.bool, device=chosen.device)
            )
        return chosen

    def expect(self, confidence: Tensor) -> None:
        """Take note of how probable the token that is picked next is to be accepted if it is looked at, `[B]`.

        It is a function of the tokens before that one, so a chain may end before it: the token itself decides nothing.
        """
        self.reach.append(self.reach[-1] * confidence if self.reach else confidence)
        if self.confidence:
            certain = self.reach[-1] >= self.confidence
            self.certain = certain if self.certain is None else self.certain & certain

    def ended(self) -> bool:
        """Tell whether every row has had an uncertain token (read back from the device)."""
        return self.certain is not None and not bool(self.certain.any())

    def _note(self, probs: Tensor, chosen: Tensor) -> None:
        """Count `chosen` `[B]` in the rows that have not ended.

        The uncertain token itself is still proposed: leaving it out would bias the text.
        """
        if self.certain is None:
            self.certain = torch.ones_like(chosen, dtype=torch.bool)
        self.lengths = self.certain + (torch.zeros_like(chosen) if self.lengths is None else self.lengths)
        if self.reach:  # the drafter has told what decides
            return
        self.certain = self.certain & (probs.gather(-1, chosen[:, None])[:, 0] >= self.confidence)

    def _pick(self, logits: Tensor) -> Tensor:
        if self._is_certain:
            return self._highest(logits)
        keys, probs = self.keys, probabilities(logits, self.drawing.sampling)
        positions = keys.first + self.depth
        if self.rule.pick is DraftPolicy.SHARED_NOISE:
            noise = shared_gumbel(keys.seed, keys.sequences, positions, self.drawing.vocab)
            return self._highest(probs.double().log() + noise)
        self.probs.append(probs)
        return draw(probs, uniforms(keys.seed, DRAFT, keys.sequences, keys.first, positions))

    def _highest(self, logits: Tensor) -> Tensor:
        """Return the token with the highest logit, `[B]`, and take note of that logit."""
        found = highest(logits)
        self.peaks.append(found.logit[:, None])
        return found.token

    # ------------------------------------------------------------ trees

    def children(
        self, logits: Tensor, token_ids: Tensor | None, count: int, depth: int, nodes: Tensor, context: Context | None
    ) -> tuple[Tensor, Tensor]:
        """Pick `count` different tokens after each of W nodes, best first, `[B, W, C]`.

        Args:
            logits: `[B, W, V']`.
            depth: the children's.
            nodes: numbers of the nodes, by which draws differ, `[B or 1, W]`.
            context: the children's, `[B, W]` places, if there are processors.

        Returns:
            Tokens, and the drafter's log-probabilities of them; −inf for a token that is not really there.
        """
        if self._is_certain and context is None:
            tokens, scores = self._top(logits, count)
            return (tokens if token_ids is None else token_ids[tokens]), scores
        logits = self._processed(_spread(logits, token_ids, self.drawing.vocab), context)
        if self._is_certain:
            return self._top(logits, count)
        keys, vocab, probs = self.keys, self.drawing.vocab, probabilities(logits, self.drawing.sampling)
        log_probs, rows, first = probs.double().log(), keys.sequences[:, None], keys.first[:, None]
        if self.rule.pick is DraftPolicy.SHARED_NOISE:
            self.peaks.append(probs[:, :, 0].clone())  # a view would keep the whole distribution
            noise = shared_gumbel(keys.seed, rows, first + depth - 1, vocab)
        else:
            # The largest of log q + Gumbel noise are draws without replacement, in order (Kool et al.,
            # arXiv 1903.06059).
            noise = gumbel(keys.seed, DRAFT, vocab, rows, first, nodes)
            self.probs.append(probs)
        tokens = (log_probs + noise).topk(count, -1).indices
        return tokens, log_probs.gather(-1, tokens)

    def _top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        tokens, scores = _top(logits, count)
        self.peaks.append(scores[:, :, 0])
        return tokens, scores

    # ------------------------------------------------------------

    @property
    def _is_certain(self) -> bool:
        return self.rule.pick is DraftPolicy.MOST_PROBABLE

    def _processed(self, logits: Tensor, context: Context | None) -> Tensor:
        """Return the logits `[B, W, V]` after the processors."""
        processors = self.drawing.processors
        if processors is None or context is None:
            return logits
        processed = processors(logits, context)
        # A pruned vocabulary may hold no token that is allowed here. What is drafted then is refused, but must be a
        # draw from what it is scored with.
        return torch.where(nothing_left(processed)[..., None], logits, processed)


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most probable tokens and their log-probabilities, `[..., C]` each.

    The first is the one that argmax takes, as the target does: topk orders ties at will.
    """
    top, best = logits.float().log_softmax(-1).topk(count, -1), highest(logits).token[..., None]
    others = torch.where(top.indices == best, top.indices[..., :1], top.indices)[..., 1:]
    return torch.cat([best, others], -1), top.values


def _spread(logits: Tensor, token_ids: Tensor | None, vocab: int) -> Tensor:
    """Turn logits over a pruned vocabulary `[..., V']` into logits over the whole one `[..., V]`, fp32."""
    logits = logits.float()
    if token_ids is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab), float("-inf"))
    return whole.scatter(-1, token_ids.expand_as(logits), logits)


def propose_confidently(session: NodeSession, root: Tensor, depth: int, chooser: DraftSampler, asks: bool) -> Proposal:
    """Draft a chain after `root` `[B]` with a session that says, before each token, how sure it is of it.

    Args:
        asks: whether the host may be asked if all rows have ended.
    """
    depth = min(depth, session.max_depth or depth)
    logits, drafted = session.prefill(root), list[Tensor]()
    while True:
        chooser.expect(session.confidence())
        if drafted and asks and chooser.ended():
            break
        drafted.append(chooser(logits, session.output_ids))
        if len(drafted) == depth:
            break
        logits = session.decode(drafted[-1][:, None])[:, 0]
    return Proposal.chain(torch.stack(drafted, 1))


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
