"""How drafts are made of a drafter's logits: chains, trees of a given shape, and trees of the most probable paths.

`DraftSampler` picks tokens; `ChainDraft` and the two functions that grow trees make a `Draft` of them: a proposal, and
the distributions that its tokens were drawn from.

Shapes: B rows, N draft tokens, W nodes whose logits are known, C children of a node, R nodes read, V vocabulary,
V' the drafter's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..heads import NodeSession, Proposal, Session
from ..heads.session import handed
from ..targets import Nodes
from .plan import Tree
from .rng import uniforms
from .rule_table import DraftPolicy, Rule
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
    """How tokens are drawn from logits, by drafter and target alike."""

    sampling: Sampling
    processors: Processors | None  # for penalties and bans; None if there are none
    vocab: int
    undrafted: Tensor | None = None  # tokens that the target may write and a drafter never drafts, [U]; None for none

    def draftable(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """Return a drafter's logits `[..., V']`, of the tokens `token_ids` `[V']`, in which no other can be drawn."""
        if self.undrafted is None:
            return logits
        ids = torch.arange(logits.shape[-1], device=logits.device) if token_ids is None else token_ids
        return logits.masked_fill(torch.isin(ids, self.undrafted), float("-inf"))


@dataclass(frozen=True)
class Draft:
    """A proposal on its way to the target."""

    proposal: Proposal
    # The distributions its tokens were drawn from: for a chain [B, N, V], for a tree at each place [B, 1 + N, V]; None
    # if they were not drawn.
    probs: Tensor | None = None
    # For each of the drafter's distributions a number that is finite only if its logits are, [B, …]; see `nonfinite`.
    peaks: Sequence[Tensor] = ()


class NextToken(NamedTuple):
    """The next token of each row's chain."""

    token: Tensor  # [B]
    probs: Tensor | None  # the distribution it was drawn from, [B, V]; None if it was not drawn
    peak: Tensor | None  # where `probs` is None, a number that is finite only if the logits are, [B, 1]
    logits: Tensor  # what it was picked from, processed, [B, V or V']
    place: Tensor  # its index among them, [B]

    def probability(self) -> Tensor:
        """Return the probability that the drafter gives the token, `[B]`."""
        probs = self.logits.float().softmax(-1) if self.probs is None else self.probs
        return probs.gather(-1, self.place[:, None])[:, 0]


class Children(NamedTuple):
    """Different tokens after each of W nodes, best first."""

    tokens: Tensor  # [B, W, C]
    scores: Tensor  # the drafter's log-probabilities, [B, W, C]; −inf for a token that is not really there
    probs: Tensor | None  # the distributions they were drawn from, [B, W, V]; None if they were not drawn
    peaks: Tensor | None  # where `probs` is None, numbers that are finite only if the logits are, [B, W]


@dataclass(frozen=True)
class DraftSampler:
    """Picks draft tokens under the target's own processors and filters."""

    rule: Rule  # how the proposal will be verified; decides how tokens are picked
    config: SamplerConfig
    keys: Keys  # of every draw; `keys.first` is the first token drafted
    context: Context | None = None  # of that token, if there are processors

    def next_token(
        self, logits: Tensor, token_ids: Tensor | None, depth: int = 0, context: Context | None = None
    ) -> NextToken:
        """Pick the token of a chain that stands after `depth` drafts, from logits `[B, V']`.

        `context`: of that token, if there are processors.
        """
        logits = self._draftable(logits, token_ids)
        if self._is_certain and context is None:
            best = _highest(logits, logits)
            return best if token_ids is None else best._replace(token=token_ids.index_select(0, best.place))
        return self._pick(self._processed(logits[:, None], token_ids, context)[:, 0], depth)

    def _pick(self, logits: Tensor, depth: int) -> NextToken:
        if self._is_certain:
            return _highest(logits, logits)
        keys, probs = self.keys, probabilities(logits, self.config.sampling)
        positions = keys.first + depth
        if self.rule.pick is DraftPolicy.SHARED_NOISE:
            return _highest(probs.double().log() + self._shared_noise(keys.sequences, positions), logits)
        token = draw(probs, uniforms(keys.seed, DRAFT, keys.sequences, keys.first, positions))
        return NextToken(token, probs, None, logits, token)

    def children(
        self, logits: Tensor, token_ids: Tensor | None, count: int, depth: int, nodes: Tensor, context: Context | None
    ) -> Children:
        """Pick `count` different tokens after each of W nodes.

        Args:
            logits: `[B, W, V']`.
            depth: the children's.
            nodes: numbers of the nodes, by which draws differ, `[B or 1, W]`.
            context: the children's, `[B, W]` places, if there are processors.
        """
        logits = self._draftable(logits, token_ids, nodes.shape[-1])
        if not self._is_certain or context is not None:
            logits, token_ids = self._processed(logits, token_ids, context), None
        if self._is_certain:
            tokens, scores = _top(logits, count)
            return Children(tokens if token_ids is None else token_ids[tokens], scores, None, scores[:, :, 0])
        keys, probs = self.keys, probabilities(logits, self.config.sampling)
        log_probs, rows, first = probs.double().log(), keys.sequences[:, None], keys.first[:, None]
        if self.rule.pick is DraftPolicy.SHARED_NOISE:
            drawn, peaks = None, probs[:, :, 0].clone()  # a view would keep the whole distribution
            noise = self._shared_noise(rows, first + depth - 1)
        else:
            # The largest of log q + Gumbel noise are draws without replacement, in order (arXiv 1903.06059).
            drawn, peaks = probs, None
            noise = gumbel(keys.seed, DRAFT, self.config.vocab, rows, first, nodes)
        tokens = (log_probs + noise).topk(count, -1).indices
        return Children(tokens, log_probs.gather(-1, tokens), drawn, peaks)

    def _draftable(self, logits: Tensor, token_ids: Tensor | None, *nodes: int) -> Tensor:
        """Return a session's logits `[B, V']`, or `[B, W, V']` at W `nodes`, without what must not be drafted."""
        expected = (len(self.keys.sequences), *nodes, self.config.vocab if token_ids is None else len(token_ids))
        if tuple(logits.shape) != expected:
            raise IncompatibleError(
                f"the drafter's session returned logits of the shape {tuple(logits.shape)}, expected {expected}: rows, "
                "nodes of a tree, and the target's vocabulary, or as many as it has output_ids. Mend the session."
            )
        return self.config.draftable(logits, token_ids)

    @property
    def _is_certain(self) -> bool:
        return self.rule.pick is DraftPolicy.MOST_PROBABLE

    def _shared_noise(self, sequences: Tensor, positions: Tensor) -> Tensor:
        return shared_gumbel(self.keys.seed, sequences, positions, self.config.vocab)

    def _processed(self, logits: Tensor, token_ids: Tensor | None, context: Context | None) -> Tensor:
        """Return logits `[B, W, V']` over the whole vocabulary, `[B, W, V]`, after the processors."""
        logits, processors = logits.float(), self.config.processors
        if token_ids is not None:
            whole = logits.new_full((*logits.shape[:-1], self.config.vocab), float("-inf"))
            logits = whole.scatter(-1, token_ids.expand_as(logits), logits)
        if processors is None or context is None:
            return logits
        processed = processors(logits, context)
        # A pruned vocabulary may hold no token that is allowed here. What is drafted then is refused, but must be drawn
        # from what it is scored with.
        return torch.where(nothing_left(processed)[..., None], logits, processed)


def _highest(scores: Tensor, logits: Tensor) -> NextToken:
    """Return the token with the highest of the `scores` that were made of `logits`, `[B, V]` each."""
    best = highest(scores)
    return NextToken(best.token, None, best.logit[:, None], logits, best.token)


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most probable tokens and their log-probabilities, `[..., C]` each.

    The first is the one that argmax takes, as the target does: topk orders ties at will.
    """
    top, best = logits.float().log_softmax(-1).topk(count, -1), highest(logits).token[..., None]
    others = torch.where(top.indices == best, top.indices[..., :1], top.indices)[..., 1:]
    return torch.cat([best, others], -1), top.values


class ChainDraft:
    """A chain that a session is drafting, and the distributions of its tokens so far.

    Sessions get `next_token` as their `Choose` and `ended` as their `Ended`.

    Attributes:
        confidence: see `Plan.confidence`.
        context: of the next token, if there are processors.
        depth: tokens so far. probs: the distributions they were drawn from, `[B, V]` each. peaks: see `Draft`.
        reach: how probable each token is to be reached and accepted, by the drafter's confidences (`expect`), `[B]`.
        certain: which rows have not ended yet. lengths: tokens of each row so far. Both `[B]`, None without
            `confidence`.
    """

    def __init__(self, sampler: DraftSampler, confidence: float = 0.0):
        self.sampler, self.confidence, self.context, self.depth = sampler, confidence, sampler.context, 0
        self.probs, self.peaks, self.reach = list[Tensor](), list[Tensor](), list[Tensor]()
        self.tokens: list[Tensor] | None = None  # copies of those that were chosen, where they are compared
        self.certain: Tensor | None = None
        self.lengths: Tensor | None = None

    def next_token(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """Append the token that the sampler picks from logits `[B, V']`; return it, `[B]`."""
        picked = self.sampler.next_token(logits, token_ids, self.depth, self.context)
        token = picked.token
        if picked.probs is not None:
            self.probs.append(picked.probs)
        if picked.peak is not None:
            self.peaks.append(picked.peak)
        if self.confidence:
            self._count(picked)
        if self.tokens is not None:
            self.tokens.append(token.clone())
        self.depth += 1
        if self.context is not None:
            self.context = self.context.then(token[:, None], torch.ones(1, 1, 1, dtype=torch.bool, device=token.device))
        return token

    def expect(self, confidence: Tensor) -> None:
        """Record how probable the next token is to be accepted if the ones before it are, `[B]`.

        That depends on the tokens before it alone, so a chain may end before it without a bias.
        """
        self.reach.append(self.reach[-1] * confidence if self.reach else confidence)
        if self.confidence:
            certain = self.reach[-1] >= self.confidence
            self.certain = certain if self.certain is None else self.certain & certain

    def ended(self) -> bool:
        """Return whether every row has had an uncertain token (read back from the device)."""
        return self.certain is not None and not bool(self.certain.any())

    def _count(self, picked: NextToken) -> None:
        """Count a token in the rows that have not ended.

        The uncertain token itself is still proposed: leaving it out would bias the text.
        """
        if self.certain is None:
            self.certain = torch.ones_like(picked.token, dtype=torch.bool)
        self.lengths = self.certain + (torch.zeros_like(picked.token) if self.lengths is None else self.lengths)
        if not self.reach:  # else the drafter's own confidence has decided
            self.certain = self.certain & (picked.probability() >= self.confidence)

    def draft(self, proposal: Proposal) -> Draft:
        """Return the session's proposal with the distributions of its tokens."""
        if not self.probs:
            return Draft(proposal, None, self.peaks)
        probs = torch.stack(self.probs, 1)
        return Draft(proposal, probs, [*self.peaks, probs[:, :, 0]])


def propose_confidently(session: NodeSession, root: Tensor, depth: int, chain: ChainDraft, may_sync: bool) -> Proposal:
    """Draft a chain after `root` `[B]` with a session that gives, before each token, its confidence in it.

    `may_sync`: whether the host may wait for the device to learn that all rows have ended.
    """
    session.round_depth = depth = min(depth, session.max_depth or depth)
    logits, drafted = session.prefill(root), list[Tensor]()
    while True:
        chain.expect(session.confidence())
        if drafted and may_sync and chain.ended():
            break
        drafted.append(chain.next_token(logits, session.output_ids))
        if len(drafted) == depth:
            break
        logits = session.decode(handed(session, drafted[-1][:, None]))[:, 0]
    return Proposal.chain(torch.stack(drafted, 1))


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


@dataclass
class ProposalCheck:
    """A check of what a drafter's session proposes: of shapes in each round, of contents in the first of a request.

    A session may be somebody else's, and what is wrong would end inside the target, or change the text. To read
    contents the host waits for the device, so rounds of fixed shapes do without, unless the host itself proposes.
    """

    vocab: int
    max_nodes: Callable[[int], int]  # the drafter's, of a depth
    is_done: bool = False  # whether contents were read

    def __call__(self, session: Session, proposal: Proposal, rows: int, depth: int, chain: ChainDraft | None) -> None:
        """Raise IncompatibleError for a wrong proposal of up to `depth` tokens.

        `chain`: has the distributions that the rule needs its tokens to be drawn from; None if it needs none.
        """
        problem = self._problem_of_shapes(proposal, rows, depth)
        count = 0 if problem else proposal.tokens.shape[1]
        if count and chain is not None and len(chain.probs) != count:
            problem = f"{count} tokens, of which choose picked {len(chain.probs)}; expected all, or deterministic=True"
        if problem is None and count and not self.is_done:
            self.is_done = True
            problem = self.problem_of_contents(proposal, None if chain is None else chain.tokens)
        if problem is not None:
            raise self.refusal(session, problem)

    def refusal(self, session: Session, problem: str) -> IncompatibleError:
        advice = "Mend its propose (docs/developers/adding-a-drafter.md), or take another drafter."
        return IncompatibleError(f"the drafter's {type(session).__name__} proposed {problem}. {advice}")

    def _problem_of_shapes(self, proposal: Proposal, rows: int, depth: int) -> str | None:
        most = depth if proposal.parents is None else self.max_nodes(depth)
        size, names = tuple(proposal.tokens.shape), ["tokens", "real", "parents", "read"]
        for name in names[:2] if proposal.parents is None else names:
            part, dtype = getattr(proposal, name), torch.bool if name == "real" else torch.long
            if part is None or part.dtype != dtype or part.shape != size or len(size) != 2 or size[0] != rows:
                found = "none" if part is None else f"{part.dtype} {list(part.shape)}"
                return f"{name} of {found}; expected {dtype} [{rows}, N]"
        if size[1] > most or (proposal.parents is None and proposal.depth != size[1]):
            return f"{size[1]} tokens that are {proposal.depth} deep; expected at most {most}, a chain as deep as long"
        return None

    def problem_of_contents(self, proposal: Proposal, chosen: list[Tensor] | None) -> str | None:
        """Return what is wrong with a proposal of right shapes, in words; None for nothing."""
        tokens, real, parents = proposal.tokens, proposal.real, proposal.parents
        outside = tokens[(tokens < 0) | (tokens >= self.vocab)]
        if len(outside):
            return f"token {int(outside[0])}; expected ids from 0 to {self.vocab - 1}, the target's vocabulary"
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        above = (numbers - 1).expand_as(tokens) if parents is None else parents
        if ((above < -1) | (above >= numbers)).any():
            return f"parents {above[0].tolist()} in its first row; expected −1 or the number of an earlier token"
        if (real & ~torch.nn.functional.pad(real, (1, 0), value=True).gather(1, above + 1)).any():
            return "tokens after padding; expected none, as real says which are padding"
        ancestors = above
        for _ in range(proposal.depth - 1):
            ancestors = torch.where(ancestors < 0, -1, above.gather(1, ancestors.clamp(min=0)))
        if (ancestors >= 0).any():
            return f"a tree deeper than its depth of {proposal.depth}"
        if chosen and (real & (torch.stack(chosen, 1) != tokens)).any():
            return "other tokens than choose picked, by whose probabilities they would be judged; expected those"
        return None
