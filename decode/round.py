"""One round: draft, verify, commit. Everything in it stays on the device, and nothing in it depends on a length.

A sequence is committed tokens plus a `root`: its last token, which the target has not processed yet. A round drafts
after the root, verifies root and drafts in one pass of the target, and ends with a new root. It takes a `RoundState`
and returns the next one with a `RoundResult`, of which the host reads one small tensor: a `RoundRow` per sequence.

Shapes: B active rows, N draft tokens, D of them on the longest path (in a chain all), V vocabulary, K taps,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..heads import Abilities, NodeSession, Proposal, Session
from ..heads.lookup.fusion import propose_after
from ..heads.session import handed
from ..targets import RaggedCache, RowLengths, Target
from .control import Schedule
from .drafting import (
    ChainDraft,
    Draft,
    DraftSampler,
    ProposalCheck,
    SamplerConfig,
    StaticTree,
    grow_dynamic,
    grow_static,
    propose_confidently,
)
from .nonfinite import are_finite
from .plan import Plan
from .rng import Seed
from .rule_table import LOSSY, RULES, DraftShape
from .rules import JUDGES, Verdict, VerifyInputs
from .sampling import Context, Keys, nothing_left

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
    proposals: ProposalCheck | None = None  # of what the drafter's session returns
    # Called with every verdict and what it was made of; for measurements.
    on_verdict: Callable[[Verdict, VerifyInputs], None] | None = None

    @property
    def lossy(self) -> bool:
        """Whether the text may be other than the target's own: the plan asked for such a rule."""
        return self.plan.verify in LOSSY

    def rule(self, deterministic: bool) -> str:
        """Return the name of the rule for proposals that are, or are not, deterministic."""
        return self.plan.rule(self.sampler_config.sampling.temperature, deterministic)

    @cached_property
    def static_tree(self) -> StaticTree | None:
        """The plan's static tree on the target's device; None if it has none."""
        return None if self.plan.tree is None else StaticTree.of(self.plan.tree, self.target.device)


@dataclass(frozen=True)
class RoundState:
    """What a round leaves for the round after it."""

    root: Tensor  # each row's last token, not processed yet, [B]
    sequences: Tensor  # which sequence each row is, [B]; keys its randomness, with `seed`
    seed: Seed
    speculate: Tensor | None  # rows that are drafted for, [B] bool; None for all
    context: Context | None  # the processors' view of the text, the root included; None without processors
    cache: RaggedCache  # the target's, of the committed tokens but the root
    session: Session  # the drafter's; an empty one where nothing is drafted

    @property
    def keys(self) -> Keys:
        """The keys of this round's draws: its first token follows the root."""
        return Keys(self.seed, self.sequences, self.cache.lengths + 1)

    def select(self, rows: list[int]) -> RoundState:
        """Keep only these rows, in this order."""
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
        """Return all tensors that a round reads and the round before, or the request, wrote; cache entries apart."""
        assert isinstance(self.seed, Tensor), "rounds of fixed shapes take their seed from the device"
        own = [self.seed, self.sequences, self.root, self.cache.lengths]
        own += [] if self.speculate is None else [self.speculate]
        own += [] if self.context is None else self.context.tensors()
        return own + [cache.lengths for cache in self.session.caches()] + self.session.carried()

    def at(self, tensors: list[Tensor]) -> RoundState:
        """Return this state in other places in memory, given in the order of `tensors`."""
        rest = iter(tensors)
        seed, sequences, root, self.cache.lengths = next(rest), next(rest), next(rest), next(rest)
        speculate = None if self.speculate is None else next(rest)
        context = None if self.context is None else self.context.at(rest)
        for cache in self.session.caches():
            cache.lengths = next(rest)
        self.session.carry(list(rest))
        return replace(self, seed=seed, sequences=sequences, root=root, speculate=speculate, context=context)


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
    rule: str  # the name of the rule that judged

    def select(self, rows: list[int]) -> RoundResult:
        """Return the result of these rows."""
        if len(rows) == len(self.packed):
            return self
        hidden, read, best = (None if t is None else t[rows] for t in (self.hidden, self.read, self.best))
        counts = self.counts.select(rows)
        return RoundResult(self.packed[rows], self.tokens[rows], hidden, counts, read, best, self.rule)

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
    rule: str  # the name of the rule that judges it
    idle: tuple[int, ...] = ()  # rows that had finished before it

    def read(self) -> list[RoundRow]:
        """Wait for the round and return its rows."""
        return RoundRow.unpack(self.packed())


def step(
    setup: RoundSetup, state: RoundState, depth: int, on_drafted: Callable[[], None] | None = None
) -> tuple[RoundState, RoundResult]:
    """Run a whole round of `depth` drafts: draft, verify, commit, and update the drafter's session.

    `on_drafted`: called between drafting and verification, to time them.
    """
    drafted = draft(setup, state, depth)
    if on_drafted is not None:
        on_drafted()
    try:
        state, result = verify_and_commit(setup, state, drafted)
    except IndexError:
        problem = None if setup.proposals is None else setup.proposals.problem_of_contents(drafted.proposal, None)
        if setup.proposals is None or problem is None:
            raise
        raise setup.proposals.refusal(state.session, problem) from None
    update_session(state, result)
    return state, result


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


def draft(setup: RoundSetup, state: RoundState, depth: int) -> Draft:
    """Draft up to `depth` tokens after the root, in the plan's shape if the session can."""
    if not depth:
        return no_draft(state.root)
    plan, session = setup.plan, state.session
    root = handed(session, state.root)
    rule = RULES[setup.rule(setup.abilities.deterministic)]
    sampler = DraftSampler(rule, setup.sampler_config, state.keys, state.context)
    undrafted = setup.sampler_config.undrafted
    if isinstance(session, NodeSession) and setup.abilities.reads_nodes:
        if setup.static_tree is not None and depth == plan.depth:
            return _masked(state, grow_static(session, root, setup.static_tree, sampler), None, undrafted)
        if plan.shape is DraftShape.DYNAMIC:
            grown = grow_dynamic(session, root, plan.width, plan.max_nodes, depth, sampler)
            return _masked(state, grown, None, undrafted)
    chain = ChainDraft(sampler, plan.confidence)
    if setup.proposals is not None and not setup.proposals.is_done:
        chain.tokens = []
    by_confidence = setup.abilities.confident and (plan.confidence or isinstance(plan.control, Schedule))
    if by_confidence and setup.abilities.reads_nodes and isinstance(session, NodeSession):
        proposal = propose_confidently(session, root, depth, chain, setup.may_sync)
    else:
        proposal = session.propose(root, depth, chain.next_token, chain.ended if setup.may_sync else None)
    if setup.proposals is not None:
        samples = RULES[setup.rule(proposal.deterministic)].samples
        setup.proposals(session, proposal, len(root), depth, chain if samples else None)
    lengths = chain.lengths  # of what each row really proposes, [B]; None for all
    if isinstance(plan.control, Schedule) and chain.reach:
        lengths = plan.control.lengths(torch.stack(chain.reach[: proposal.depth], 1))
    drafted = _masked(state, chain.draft(proposal), lengths, undrafted)
    return drafted if lengths is None or not setup.may_sync else _shortened(drafted)


def _masked(state: RoundState, draft: Draft, lengths: Tensor | None, undrafted: Tensor | None = None) -> Draft:
    """Return the draft with only each row's first `lengths` `[B]` tokens (None: all) real, none in a plain row.

    From the first of the tokens `undrafted` `[U]` on, none is real either.
    """
    real = draft.proposal.real
    if lengths is not None:
        real = real & (torch.arange(real.shape[1], device=real.device) < lengths[:, None])
    if state.speculate is not None:
        real = real & state.speculate[:, None]
    if undrafted is not None:  # copied from the text: drafts that were drawn hold none
        real = real & (torch.isin(draft.proposal.tokens, undrafted).cumsum(1) == 0)
    return draft if real is draft.proposal.real else replace(draft, proposal=replace(draft.proposal, real=real))


def _shortened(draft: Draft) -> Draft:
    """Return a chain cut to the longest that a row proposes: the target would read the rest in vain."""
    proposal, probs = draft.proposal, draft.probs
    longest = int(proposal.lengths.max())
    if longest == proposal.depth:
        return draft
    tokens, real = proposal.tokens[:, :longest], proposal.real[:, :longest]
    chain = Proposal(tokens, real, longest, deterministic=proposal.deterministic)
    return Draft(chain, None if probs is None or not longest else probs[:, :longest], draft.peaks)


@dataclass(frozen=True)
class ProposedRound:
    """A round whose proposal was made by the host: what verifying it reads."""

    state: RoundState
    proposal: Proposal  # of one size for every row and round, see `Proposal.spread`

    def tensors(self) -> list[Tensor]:
        """Return all that verification reads, in a fixed order."""
        proposal = self.proposal
        tree = [tensor for tensor in (proposal.parents, proposal.read) if tensor is not None]
        return [proposal.tokens, proposal.real, *tree, *self.state.tensors()]

    def at(self, tensors: list[Tensor]) -> ProposedRound:
        rest = iter(tensors)
        moved = replace(self.proposal, tokens=next(rest), real=next(rest))
        if moved.parents is not None:
            moved = replace(moved, parents=next(rest), read=next(rest))
        return ProposedRound(self.state.at(list(rest)), moved)


def step_proposed(setup: RoundSetup, proposed: ProposedRound, goes_on: bool) -> tuple[ProposedRound, RoundResult]:
    """Verify the host's proposal and commit what stays; the host's own session is updated by the caller.

    The state's session is that of the model of a fusion, or an empty one. The model drafts where the proposal ends if
    it `goes_on`; else it only reads what the last round kept.
    """
    state, copied = proposed.state, proposed.proposal
    drafted, lengths, session = Draft(copied), None, state.session
    if goes_on:
        rule, config = RULES[setup.rule(setup.abilities.deterministic)], setup.sampler_config
        chain = ChainDraft(DraftSampler(rule, config, state.keys, state.context), setup.plan.confidence)
        both = propose_after(copied, session, handed(session, state.root), copied.depth, chain.next_token, config.vocab)
        drafted, lengths = chain.draft(both), chain.lengths
    else:
        session.propose(handed(session, state.root), 1, lambda *_: handed(session, state.root))
    state, result = verify_and_commit(setup, state, _masked(state, drafted, lengths))
    session.update(result.tokens, result.hidden, result.counts)
    return replace(proposed, state=state), result


def verify_and_commit(setup: RoundSetup, state: RoundState, draft: Draft) -> tuple[RoundState, RoundResult]:
    """Verify a draft in one pass of the target and commit what stays."""
    proposal = draft.proposal
    tokens = torch.cat([state.root[:, None], proposal.tokens], 1)  # [B, 1 + N]
    nodes = None if proposal.parents is None else proposal.nodes
    out = setup.target.forward(tokens, state.cache, taps=setup.taps, nodes=nodes)
    verdict, best = judge(setup, state, draft, out.logits, state.keys)
    chosen, hidden, read = proposal.tokens, out.hidden, None
    if verdict.path is not None:
        tokens, hidden, read = _keep_path(state.cache, proposal, verdict.path, tokens, hidden)
        chosen = tokens[:, 1:]
    counts = RowLengths(verdict.accepted + 1)
    state.cache.advance(counts)
    state, packed = commit(state, chosen, verdict, proposal.lengths, _tried(proposal, verdict))
    return state, RoundResult(packed, tokens, hidden, counts, read, best, setup.rule(proposal.deterministic))


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
    verdict = JUDGES[setup.rule(proposal.deterministic)](inputs)
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
    accepted, following, context = verdict.accepted, verdict.following, state.context
    if context is not None:
        kept = torch.arange(chosen.shape[1], device=accepted.device) < accepted[:, None]
        emitted = torch.cat([kept, (following >= 0)[:, None]], 1)
        context = context.then(torch.cat([chosen, following[:, None]], 1), emitted[:, None])
    # Where no token follows, the host raises; a finished row that runs on idly needs one all the same.
    root = following.clamp(min=0)
    packed = RoundRow.pack(chosen, following, accepted, drafted, tried)
    return replace(state, root=root, context=context), packed


def update_session(state: RoundState, result: RoundResult) -> None:
    """Update the drafter's session with a round's result."""
    if result.best is not None:
        state.session.on_target_argmax(result.best)
    state.session.update(result.tokens, result.hidden, result.counts, result.read)
