"""One round: draft, verify, commit. Everything in it stays on the device, and nothing in it depends on a length.

A sequence is committed tokens plus a `root`: its last token, which the target has not processed yet. A round drafts
after the root, verifies root and drafts in one pass of the target, and ends with a new root. `step` takes a
`RoundState` and returns the next one with a `RoundResult`, of which the host reads one small tensor: a `RoundRow` per
sequence. Where a session has a text part, the host asks it first (`propose`): its tokens are the whole proposal, or
its beginning.

Shapes: B active rows, N draft tokens, D of them on the longest path (in a chain all), V vocabulary, K taps,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common import IncompatibleError
from ..heads import Abilities, NodeSession, Proposal, Session
from ..heads.session import handed
from ..targets import RaggedCache, RowLengths, Target
from .control import Schedule
from .plan import Plan
from .proposal_check import ProposalCheck
from .rng import Seed
from .rule_table import LOSSY, RULES, DraftShape
from .rules import JUDGES, Verdict, VerifyInputs
from .sampling import Context, Draft, DraftSampler, Keys, NextToken, SamplerConfig, are_finite, nothing_left
from .trees import StaticTree, grow_dynamic, grow_static

_NOTHING_LEFT, _NOT_FINITE = -1, -2  # in place of a token that follows; see `RoundRow`


@dataclass(frozen=True)
class RoundSetup:
    """What does not change from round to round of one request."""

    target: Target
    plan: Plan  # no deeper than the drafter drafts
    sampler_config: SamplerConfig
    abilities: Abilities = field(default_factory=Abilities)  # the drafter's; all off where there is none
    taps: tuple[int, ...] = ()  # hidden states that the drafter reads
    # Whether the host may wait for the device, to learn whether a chain has ended: not in a round of fixed shape.
    may_sync: bool = True
    proposals: ProposalCheck | None = None  # of what the text part of the drafter's session proposes
    # Called with every verdict and what it was made of; for measurements.
    on_verdict: Callable[[Verdict, VerifyInputs], None] | None = None

    @property
    def lossy(self) -> bool:
        """Whether the text may be other than the target's own: the plan asked for such a rule."""
        return self.plan.verify in LOSSY

    @cached_property
    def rule(self) -> str:
        """The name of the rule that judges every round."""
        return self.plan.rule(self.sampler_config.sampling.temperature, self.abilities.deterministic)

    @cached_property
    def shape(self) -> DraftShape:
        """The plan's shape; a chain for a drafter that grows no trees."""
        return self.plan.shape if self.abilities.reads_nodes else DraftShape.CHAIN

    @cached_property
    def schedule(self) -> Schedule | None:
        """The plan's rule for how many of a batch's drafts are verified, if it has one."""
        return self.plan.control if isinstance(self.plan.control, Schedule) else None

    @cached_property
    def asks_confidence(self) -> bool:
        """Whether the drafter's own confidence decides how long chains are."""
        return self.abilities.confident and bool(self.plan.confidence or self.schedule)

    @cached_property
    def static_tree(self) -> StaticTree | None:
        """The plan's static tree on the target's device; None if it has none."""
        return None if self.plan.tree is None else StaticTree.of(self.plan.tree, self.target.device)


@dataclass(frozen=True)
class RoundState:
    """What a round leaves for the round after it.

    The value is frozen, its cache and session are not: `select` and `rebound` change both in place. A new tensor
    belongs in `select`, if it has rows, and in `_moved`, the one list that captured rounds are copied by.
    """

    root: Tensor  # each row's last token, not processed yet, [B]
    sequences: Tensor  # which sequence each row is, [B]; keys its randomness, with `seed`
    seed: Seed
    speculate: Tensor | None  # rows that are drafted for, [B] bool; None for all
    context: Context | None  # the processors' view of the text, the root included; None without processors
    cache: RaggedCache  # the target's, of the committed tokens but the root
    session: Session  # the drafter's; an empty one where nothing is drafted
    proposal: Proposal | None = None  # what the text part proposes for this round; None between rounds

    @property
    def keys(self) -> Keys:
        """The keys of this round's draws: its first token follows the root."""
        return Keys(self.seed, self.sequences, self.cache.lengths + 1)

    def select(self, rows: list[int]) -> RoundState:
        """Keep only these rows, in this order; between rounds."""
        assert self.proposal is None, "a proposal is of the rows that it was made for"
        self.cache.select(rows)
        self.session.select(list(rows))  # what sessions are handed is their own: a copy, if it is used again
        return replace(
            self,
            root=self.root[rows],
            sequences=self.sequences[rows],
            speculate=None if self.speculate is None else self.speculate[rows],
            context=None if self.context is None else self.context.select(rows),
        )

    # What a captured round reads and writes (see `static_batch`); entries of caches are written where they are.

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a round reads and the round before, or the host, wrote; cache entries apart."""
        assert isinstance(self.seed, Tensor), "rounds of fixed shapes take their seed from the device"
        own = list[Tensor]()

        def note(tensor: Tensor) -> Tensor:
            own.append(tensor)
            return tensor

        self._moved(note)
        lengths = [cache.lengths for cache in (self.cache, *self.session.caches())]
        return own + lengths + self.session.carried()

    def rebound(self, tensors: Iterable[Tensor]) -> RoundState:
        """Return this state in other places in memory, given in the order of `tensors`, with its cache and session."""
        rest = iter(tensors)
        moved = self._moved(lambda _: next(rest))
        for cache in (self.cache, *self.session.caches()):
            cache.lengths = next(rest)
        self.session.carry(list(rest))
        return moved

    def _moved(self, change: Callable[[Tensor], Tensor]) -> RoundState:
        """Return this state with every tensor of its own replaced by what `change` makes of it."""
        return replace(
            self,
            root=change(self.root),
            sequences=change(self.sequences),
            seed=change(self.seed) if isinstance(self.seed, Tensor) else self.seed,
            speculate=None if self.speculate is None else change(self.speculate),
            context=None if self.context is None else self.context.rebound(change),
            proposal=None if self.proposal is None else self.proposal.rebound(change),
        )


@dataclass(frozen=True)
class RoundRow:
    """What the host reads of one sequence's round; `accepted`, `drafted` and `tried` are those of `stats.Round`."""

    drafts: list[int]  # those of the kept path, [D]; the first `accepted` of them stay
    following: int  # the token after them, unless `nothing_left` or `not_finite` is true
    accepted: int
    drafted: int
    tried: int

    @staticmethod
    def pack(drafts: Tensor, following: Tensor, accepted: Tensor, drafted: Tensor, tried: Tensor) -> Tensor:
        """Return drafts `[B, D]` and four numbers of each row `[B]` as one tensor, `[B, D + 4]`."""
        return torch.cat([drafts, torch.stack([following, accepted, drafted, tried], 1)], 1)

    @classmethod
    def unpack(cls, packed: list[list[int]]) -> list[RoundRow]:
        return [cls(row[:-4], *row[-4:]) for row in packed]

    @property
    def tokens(self) -> list[int]:
        """The tokens that the round adds: accepted drafts, then the target's own token."""
        return [*self.drafts[: self.accepted], self.following]

    @property
    def nothing_left(self) -> bool:
        """Whether the processors left no token to go on with."""
        return self.following == _NOTHING_LEFT

    @property
    def not_finite(self) -> bool:
        """Whether some logits of the round are not finite."""
        return self.following == _NOT_FINITE


@dataclass(frozen=True)
class RoundResult:
    """What a round did, on the device."""

    packed: Tensor  # a `RoundRow` of each sequence, [B, D + 4]: all that the host needs
    tokens: Tensor  # root and drafts of the path, [B, 1 + D]
    hidden: Tensor | None  # their tapped states, [B, 1 + D, K, H]; None without taps
    counts: RowLengths  # how many of them stay, [B]
    read: Tensor | None  # when the session read each draft of a tree's path, [B, D]; see `Session.update`
    best: Tensor | None  # the target's most probable token at each place, [B, 1 + N]; None where no session observes it

    def select(self, rows: list[int]) -> RoundResult:
        """Return the result of these rows."""
        if len(rows) == len(self.packed):
            return self
        hidden, read, best = (None if t is None else t[rows] for t in (self.hidden, self.read, self.best))
        return RoundResult(self.packed[rows], self.tokens[rows], hidden, self.counts.select(rows), read, best)

    def cloned(self) -> RoundResult:
        """Return a copy that a replay of the round does not overwrite."""
        hidden, read, best = (None if t is None else t.clone() for t in (self.hidden, self.read, self.best))
        counts = RowLengths(self.counts.tensor.clone())
        return replace(self, tokens=self.tokens.clone(), hidden=hidden, counts=counts, read=read, best=best)


@dataclass(frozen=True)
class PendingRound:
    """A round that was launched and that the host has not read."""

    state: RoundState  # what it leaves for the next round, which may be launched at once
    packed: Callable[[], list[list[int]]]  # waits for it and returns `RoundResult.packed`
    idle: tuple[int, ...] = ()  # rows that had finished before it

    def read(self) -> list[RoundRow]:
        """Wait for the round and return its rows."""
        return RoundRow.unpack(self.packed())


def propose(setup: RoundSetup, session: Session, root: Tensor, depth: int) -> Proposal | None:
    """Return what the text part of a session proposes after `root` `[B]`, checked; None without such a part."""
    if session.text is None or not depth:
        return None
    proposal = session.text.propose(handed(session, root), depth)
    if setup.proposals is not None:
        setup.proposals(session.text, proposal, len(root), depth)
    return proposal


def step(
    setup: RoundSetup,
    state: RoundState,
    depth: int,
    with_model: bool = True,
    on_drafted: Callable[[], None] | None = None,
) -> tuple[RoundState, RoundResult]:
    """Run a whole round of `depth` drafts: draft, verify, commit, and update the drafter's session.

    Args:
        with_model: whether a session that gives logits drafts, or `state.proposal` is all there is; see `model_drafts`.
        on_drafted: called between drafting and verification, to time them.
    """
    drafted = draft(setup, state, depth, with_model)
    if on_drafted is not None:
        on_drafted()
    try:
        after, result = verify_and_commit(setup, state, drafted)
    except IndexError:
        if setup.proposals is not None and state.proposal is not None:
            setup.proposals.check_contents(state.session, state.proposal)
        raise
    update_session(state.session, result)
    return after, result


def first_tokens(setup: RoundSetup, state: RoundState, logits: Tensor | None, keys: Keys) -> tuple[RoundState, Tensor]:
    """Draw the tokens that follow the prompts from the target's logits after them, `[B, 1, V]`.

    Returns the state whose roots they are, and a packed `RoundRow` of each.
    """
    verdict, _ = judge(setup, state, no_draft(state.root), logits, keys)
    nothing = verdict.accepted
    return commit(state, state.root[:, None][:, :0], verdict, nothing, nothing)


def no_draft(root: Tensor) -> Draft:
    """Return a draft of nothing: plain decoding."""
    return Draft(Proposal.chain(root[:, None][:, :0]))


def draft(setup: RoundSetup, state: RoundState, depth: int, with_model: bool = True) -> Draft:
    """Return a draft of up to `depth` tokens after the root, in the plan's shape if the session can.

    A static tree that the context's end cuts becomes a chain: all rules for static trees judge chains, too.
    """
    if not depth:
        return no_draft(state.root)
    session = state.session
    root = handed(session, state.root)
    sampler = DraftSampler(RULES[setup.rule], setup.sampler_config, state.keys, state.context)
    if not isinstance(session, NodeSession) or not with_model:
        if state.proposal is None:
            raise IncompatibleError(
                f"a {type(session).__name__} has neither a text part nor a model part: nothing drafts. Mend the "
                "session (docs/developers/adding-a-drafter.md)."
            )
        if isinstance(session, NodeSession):
            session.pass_over(root)
        return _masked(setup, state, Draft(state.proposal), None)
    if setup.shape is DraftShape.STATIC and depth == setup.plan.depth:
        assert setup.static_tree is not None
        return _masked(setup, state, grow_static(session, root, setup.static_tree, sampler), None)
    if setup.shape is DraftShape.DYNAMIC:
        plan = setup.plan
        return _masked(setup, state, grow_dynamic(session, root, plan.width, plan.max_nodes, depth, sampler), None)
    return _draft_chain(setup, state, session, root, depth, sampler)


def _draft_chain(
    setup: RoundSetup, state: RoundState, session: NodeSession, root: Tensor, depth: int, sampler: DraftSampler
) -> Draft:
    """Return a chain of up to `depth` tokens after `root` `[B]`: the text part's first, then those of the session."""
    chain = _Chain(sampler, setup.plan.confidence, state.proposal)
    session.round_depth = depth
    logits = session.prefill(root)
    while True:
        if setup.asks_confidence:
            chain.expect(session.confidence())
            if chain.tokens and setup.may_sync and chain.has_ended():
                break
        chain.append(logits, session.output_ids)
        if len(chain.tokens) == depth:
            break
        if not setup.asks_confidence and setup.may_sync and chain.has_ended():
            break
        logits = session.decode(handed(session, chain.tokens[-1][:, None]))[:, 0]
    lengths = chain.lengths
    if setup.schedule is not None and chain.reach:
        lengths = setup.schedule.lengths(torch.stack(chain.reach[: len(chain.tokens)], 1))
    if session.lengths is not None:
        lengths = session.lengths if lengths is None else torch.minimum(lengths, session.lengths)
    drafted = _masked(setup, state, chain.draft(), lengths)
    return drafted if lengths is None or not setup.may_sync else _shortened(drafted)


class _Chain:
    """A chain that is being drafted.

    Attributes:
        confidence: see `Plan.confidence`.
        context: of the next token, if there are processors.
        tokens: so far, `[B]` each. probs: the distributions they were drawn from, `[B, V]` each. peaks: see `Draft`.
        reach: how probable each token is to be reached and accepted, by the drafter's confidences (`expect`), `[B]`.
        certain: which rows have not ended yet. lengths: tokens of each row so far. Both `[B]`, None without
            `confidence`.
    """

    def __init__(self, sampler: DraftSampler, confidence: float, prefix: Proposal | None):
        self.sampler = sampler
        self.confidence = confidence
        self.prefix = prefix
        self.context = sampler.context
        self.tokens = list[Tensor]()
        self.probs = list[Tensor]()
        self.peaks = list[Tensor]()
        self.reach = list[Tensor]()
        self.certain: Tensor | None = None
        self.lengths: Tensor | None = None

    def append(self, logits: Tensor, token_ids: Tensor | None) -> None:
        """Append the prefix's next token, in rows that have one, or the token that the sampler picks from logits."""
        picked = self.sampler.next_token(logits, token_ids, len(self.tokens), self.context)
        copied = self._copied()
        token = picked.token
        if copied is not None and self.prefix is not None:
            token = torch.where(copied, self.prefix.tokens[:, len(self.tokens)], token)
        if picked.probs is not None:
            if self.prefix is not None:
                raise IncompatibleError(
                    "a drafter whose text part proposes before its model must declare that its drafts are "
                    "deterministic: no distribution scores the prefix (docs/developers/adding-a-drafter.md)."
                )
            self.probs.append(picked.probs)
        if picked.peak is not None:
            self.peaks.append(picked.peak if copied is None else picked.peak.masked_fill(copied[:, None], 0))
        if self.confidence:
            self._count(picked, copied)
        self.tokens.append(token)
        if self.context is not None:
            after_it = torch.ones(1, 1, 1, dtype=torch.bool, device=token.device)
            self.context = self.context.then(token[:, None], after_it)

    def _copied(self) -> Tensor | None:
        """Return the rows whose next token is the prefix's, `[B]`; None after the prefix's end."""
        if self.prefix is None or len(self.tokens) >= self.prefix.tokens.shape[1]:
            return None
        return self.prefix.lengths > len(self.tokens)

    def expect(self, confidence: Tensor) -> None:
        """Record how probable the next token is to be accepted if the ones before it are, `[B]`.

        That depends on the tokens before it alone, so a chain may end before it without a bias.
        """
        self.reach.append(self.reach[-1] * confidence if self.reach else confidence)
        if self.confidence:
            certain = self.reach[-1] >= self.confidence
            self.certain = certain if self.certain is None else self.certain & certain

    def has_ended(self) -> bool:
        """Return whether every row has had an uncertain token (read back from the device)."""
        return self.certain is not None and not bool(self.certain.any())

    def _count(self, picked: NextToken, copied: Tensor | None) -> None:
        """Count a token in the rows that have not ended.

        The uncertain token itself is still proposed: leaving it out would bias the text.
        """
        if self.certain is None:
            self.certain = torch.ones_like(picked.token, dtype=torch.bool)
        self.lengths = self.certain + (torch.zeros_like(picked.token) if self.lengths is None else self.lengths)
        if not self.reach:  # else the drafter's own confidence has decided
            certain = picked.probability() >= self.confidence
            self.certain = self.certain & (certain if copied is None else certain | copied)

    def draft(self) -> Draft:
        """Return the chain with the distributions of its tokens."""
        proposal = Proposal.chain(torch.stack(self.tokens, 1))
        if not self.probs:
            return Draft(proposal, None, self.peaks)
        probs = torch.stack(self.probs, 1)
        return Draft(proposal, probs, [*self.peaks, probs[:, :, 0]])


def _masked(setup: RoundSetup, state: RoundState, draft: Draft, lengths: Tensor | None) -> Draft:
    """Return the draft with only each row's first `lengths` `[B]` tokens (None: all) real, none in a plain row.

    From the first token on that must not be drafted (it was copied from the text), none is real either.
    """
    real = draft.proposal.real
    if lengths is not None:
        real = real & (torch.arange(real.shape[1], device=real.device) < lengths[:, None])
    if state.speculate is not None:
        real = real & state.speculate[:, None]
    if (undrafted := setup.sampler_config.undrafted) is not None:
        real = real & (torch.isin(draft.proposal.tokens, undrafted).cumsum(1) == 0)
    return draft if real is draft.proposal.real else replace(draft, proposal=replace(draft.proposal, real=real))


def _shortened(draft: Draft) -> Draft:
    """Return a chain cut to the longest that a row proposes: the target would read the rest in vain."""
    proposal, probs = draft.proposal, draft.probs
    longest = int(proposal.lengths.max())
    if longest == proposal.depth:
        return draft
    chain = Proposal(proposal.tokens[:, :longest], proposal.real[:, :longest], longest)
    return Draft(chain, None if probs is None or not longest else probs[:, :longest], draft.peaks)


def verify_and_commit(setup: RoundSetup, state: RoundState, draft: Draft) -> tuple[RoundState, RoundResult]:
    """Verify a draft in one pass of the target and commit what stays."""
    proposal = draft.proposal
    tokens = torch.cat([state.root[:, None], proposal.tokens], 1)  # [B, 1 + N]
    nodes = None if proposal.parents is None else proposal.nodes
    out = setup.target.forward(tokens, state.cache, taps=setup.taps, nodes=nodes)
    verdict, best = judge(setup, state, draft, out.logits, state.keys)
    chosen = proposal.tokens
    hidden = out.hidden
    read = None
    if verdict.path is not None:
        tokens, hidden, read = _keep_path(state.cache, proposal, verdict.path, tokens, hidden)
        chosen = tokens[:, 1:]
    counts = RowLengths(verdict.accepted + 1)
    state.cache.advance(counts)
    state, packed = commit(state, chosen, verdict, proposal.lengths, _tried(proposal, verdict))
    return state, RoundResult(packed, tokens, hidden, counts, read, best)


def judge(
    setup: RoundSetup, state: RoundState, draft: Draft, logits: Tensor | None, keys: Keys
) -> tuple[Verdict, Tensor | None]:
    """Apply the rule to the target's logits after root and drafts, `[B, 1 + N, V]`.

    Also return the most probable token at each place, `[B, 1 + N]`, if a session wants to observe it.
    """
    assert logits is not None
    proposal, config = draft.proposal, setup.sampler_config
    if config.processors is not None and state.context is not None:
        logits = config.processors(logits, state.context.then(proposal.tokens, proposal.nodes.sees[:, :, 1:]))
    inputs = VerifyInputs(proposal, logits, draft.probs, config.sampling, keys)
    best = inputs.best if setup.abilities.observes and proposal.tokens.shape[1] else None
    verdict = JUDGES[setup.rule](inputs)
    if setup.on_verdict is not None:
        setup.on_verdict(verdict, inputs)
    if config.processors is None:
        return _marked_not_finite(verdict, [inputs.peaks, *draft.peaks]), best
    end = verdict.accepted  # the place after what was accepted
    if verdict.path is not None:
        end = pad(verdict.path + 1, (1, 0)).gather(1, end[:, None])[:, 0]
    dead = nothing_left(logits)
    dead_end = dead.gather(1, end[:, None])[:, 0]
    verdict = verdict._replace(following=verdict.following.masked_fill(dead_end, _NOTHING_LEFT))
    return _marked_not_finite(verdict, [inputs.peaks.masked_fill(dead, 0), *draft.peaks]), best


def _marked_not_finite(verdict: Verdict, peaks: list[Tensor]) -> Verdict:
    """Return the verdict, in which no token follows where logits of target or drafter are not finite."""
    return verdict._replace(following=torch.where(are_finite(peaks), verdict.following, _NOT_FINITE))


def _keep_path(
    cache: RaggedCache, proposal: Proposal, path: Tensor, tokens: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Keep of a tree's entries those of `path` `[B, D]`; return its tokens, hidden states, and when they were read."""
    assert proposal.read is not None
    nodes = path.clamp(min=0)
    cache.keep(torch.cat([torch.zeros_like(path[:, :1]), torch.where(path < 0, path, path + 1)], 1))
    places = pad((path + 1).clamp(min=0), (1, 0))
    if hidden is not None:
        hidden = hidden.gather(1, places[:, :, None, None].expand(-1, -1, *hidden.shape[2:]))
    tokens = torch.cat([tokens[:, :1], proposal.tokens.gather(1, nodes)], 1)
    return tokens, hidden, proposal.read.gather(1, nodes).masked_fill(path < 0, -1)


def _tried(proposal: Proposal, verdict: Verdict) -> Tensor:
    """Return how deep the drafts on the kept path were, the refused ones after its end included, `[B]`."""
    accepted, path = verdict.accepted, verdict.path
    if path is None or proposal.parents is None:
        return proposal.lengths
    end = pad(path, (1, 0), value=-1).gather(1, accepted[:, None])
    return accepted + ((proposal.parents == end) & proposal.real).any(1)


def commit(
    state: RoundState, chosen: Tensor, verdict: Verdict, drafted: Tensor, tried: Tensor
) -> tuple[RoundState, Tensor]:
    """Make the token that follows the root; also return the packed `RoundRow` of each sequence.

    Args:
        chosen: `[B, D]`, of which the first `verdict.accepted` stay.
        drafted, tried: of each row, see `stats.Round`, `[B]`.
    """
    accepted = verdict.accepted
    following = verdict.following
    context = state.context
    if context is not None:
        kept = torch.arange(chosen.shape[1], device=accepted.device) < accepted[:, None]
        emitted = torch.cat([kept, (following >= 0)[:, None]], 1)
        context = context.then(torch.cat([chosen, following[:, None]], 1), emitted[:, None])
    # Where no token follows, the host raises; a finished row that runs on idly needs one all the same.
    root = following.clamp(min=0)
    packed = RoundRow.pack(chosen, following, accepted, drafted, tried)
    return replace(state, root=root, context=context), packed


def update_session(session: Session, result: RoundResult) -> None:
    """Update a session with a round's result."""
    if result.best is not None:
        session.on_target_argmax(result.best)
    session.update(result.tokens, result.hidden, result.counts, result.read)
