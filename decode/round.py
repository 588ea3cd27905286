"""One round: draft, verify, commit. Everything in it stays on the device, and nothing in it depends on a length.

A sequence is committed tokens plus a `root`: its last token, which the target has not processed yet. A round drafts
after the root, verifies root and drafts in one pass of the target, and ends with a new root. It takes a `RoundState`
and gives the next one, and an `RoundResult`, of which the host reads one small tensor.

Shapes: B active rows, N draft tokens, D of them on the longest path (in a chain all), V vocabulary, K taps,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..heads import Abilities, NodeSession, Proposal, Session
from ..targets import RaggedCache, RowLengths, Target
from .control import Schedule
from .drafting import DraftSampler, SamplerConfig, StaticTree, grow_dynamic, grow_static, propose_confidently
from .finite import BROKEN, are_finite
from .hashing import Seed
from .plan import Plan
from .rules import LOSSY, RULES, DraftShape, Verdict, VerifyInputs
from .sampling import Context, Keys, nothing_left

NOTHING = -1  # in place of a following token: the processors left none


@dataclass(frozen=True)
class Setup:
    """What does not change from round to round of one request.

    Attributes:
        target: verifies.
        plan: no deeper than the drafter drafts.
        drawing: how tokens are drawn from logits.
        abilities: the drafter's; all off where there is none.
        taps: hidden states that the drafter reads.
        asks: whether a round may ask the host if a chain has ended. A round of fixed shape may not.
        watch: told of every verdict; for measurements.
    """

    target: Target
    plan: Plan
    drawing: SamplerConfig
    abilities: Abilities = field(default_factory=Abilities)
    taps: tuple[int, ...] = ()
    asks: bool = True
    watch: Callable[[Verdict], None] | None = None

    @property
    def lossy(self) -> bool:
        """Whether the text may be other than the target's own: the plan asked for such a rule."""
        return self.plan.verify in LOSSY

    def rule(self, deterministic: bool) -> str:
        """Return the name of the rule for proposals that are, or are not, deterministic."""
        return self.plan.rule(self.drawing.sampling.temperature, deterministic)

    @cached_property
    def layout(self) -> StaticTree | None:
        """The plan's static tree on the target's device; None if it has none."""
        return None if self.plan.tree is None else StaticTree.of(self.plan.tree, self.target.device)


@dataclass(frozen=True)
class RoundState:
    """What a round leaves for the round after it.

    Attributes:
        root: each row's last token, not processed yet, `[B]`.
        sequences: which sequence each row is, `[B]`; keys its randomness, with `seed`.
        wanting: rows that want drafts, `[B]` bool; None for all.
        context: what the processors know of the committed text, the root included; None without processors.
        cache: the target's, of the committed tokens but the root.
        session: the drafter's; an empty one where nothing is drafted.
    """

    root: Tensor
    sequences: Tensor
    seed: Seed
    wanting: Tensor | None
    context: Context | None
    cache: RaggedCache
    session: Session

    @property
    def keys(self) -> Keys:
        """What draws of this round are keyed by: its first token follows the root."""
        return Keys(self.seed, self.sequences, self.cache.lengths + 1)

    def select(self, rows: list[int]) -> RoundState:
        """Keep only these rows, in this order."""
        self.cache.select(rows)
        self.session.select(rows)
        return replace(
            self,
            root=self.root[rows],
            sequences=self.sequences[rows],
            wanting=None if self.wanting is None else self.wanting[rows],
            context=None if self.context is None else self.context.select(rows),
        )

    # What a captured round reads and writes (see `graphs`); entries of caches are written where they are.

    def tensors(self) -> list[Tensor]:
        """Return everything that a round reads and the round before, or the request, wrote; entries of caches apart."""
        assert isinstance(self.seed, Tensor), "rounds of fixed shapes take their seed from the device"
        found = [self.seed, self.sequences, self.root, self.cache.lengths]
        found += [] if self.wanting is None else [self.wanting]
        found += [] if self.context is None else self.context.tensors()
        return found + [cache.lengths for cache in self.session.caches()] + self.session.carried()

    def at(self, tensors: list[Tensor]) -> RoundState:
        """Return this state in other places in memory, given in the order of `tensors`."""
        rest = iter(tensors)
        seed, sequences, root, self.cache.lengths = next(rest), next(rest), next(rest), next(rest)
        wanting = None if self.wanting is None else next(rest)
        context = None if self.context is None else self.context.at(rest)
        for cache in self.session.caches():
            cache.lengths = next(rest)
        self.session.carry(list(rest))
        return replace(self, seed=seed, sequences=sequences, root=root, wanting=wanting, context=context)


@dataclass(frozen=True)
class RoundResult:
    """What a round did, on the device.

    Attributes:
        packed: per row the kept path's drafts, then the token that follows, how many drafts were accepted, drafted, and
            tried (see `stats.Round`), `[B, D + 4]`: all that the host needs.
        tokens: root and drafts of the path, `[B, 1 + D]`.
        hidden: their tapped states, `[B, 1 + D, K, H]`; None without taps.
        counts: how many of them stay, `[B]`.
        read: when the session read each draft of a tree's path, `[B, D]`; None for a chain. See `Session.update`.
        best: the target's most probable token at every place of the proposal, `[B, 1 + N]`; None where no session
            observes it.
        rule: the name of the rule that judged.
    """

    packed: Tensor
    tokens: Tensor
    hidden: Tensor | None
    counts: RowLengths
    read: Tensor | None
    best: Tensor | None
    rule: str

    def of(self, rows: list[int]) -> RoundResult:
        """Return what it says of these rows."""
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


def step(setup: Setup, state: RoundState, depth: int) -> tuple[RoundState, RoundResult]:
    """Play a whole round of `depth` drafts: draft, verify, commit, and let the session take note."""
    state, outcome = verify_and_commit(setup, state, draft(setup, state, depth))
    update_session(state, outcome)
    return state, outcome


# ------------------------------------------------------------ draft


@dataclass(frozen=True)
class Draft:
    """A proposal on its way to the target.

    Attributes:
        probs: what its tokens were drawn from: for a chain `[B, N, V]`, for a tree at each place `[B, 1 + N, V]`; None
            if they were not drawn.
        rule: the name of the rule that will judge it.
        peaks: a number of each of the drafter's distributions, finite only if its logits are, `[B, …]` each.
    """

    proposal: Proposal
    probs: Tensor | None
    rule: str
    peaks: Sequence[Tensor] = ()


def no_draft(setup: Setup, root: Tensor) -> Draft:
    """Return a draft of nothing: plain decoding."""
    return Draft(Proposal.chain(root[:, None][:, :0]), None, setup.rule(deterministic=False))


def draft(setup: Setup, state: RoundState, depth: int) -> Draft:
    """Let the session propose up to `depth` tokens after the root, in the plan's shape where it can."""
    if not depth:
        return no_draft(setup, state.root)
    rule = RULES[setup.rule(setup.abilities.deterministic)]
    chooser = DraftSampler(rule, setup.drawing, state.keys, state.context, setup.plan.confidence)
    proposal, probs = _propose(setup, state, depth, chooser)
    peaks = chooser.peaks if probs is None else [*chooser.peaks, probs[:, :, 0]]
    lengths = _lengths(setup, chooser, proposal)
    proposal = _wanted(state, proposal, lengths)
    if lengths is not None and setup.asks:
        proposal, probs = _cut(proposal, probs)
    return Draft(proposal, probs, setup.rule(proposal.deterministic), peaks)


def _propose(setup: Setup, state: RoundState, depth: int, chooser: DraftSampler) -> tuple[Proposal, Tensor | None]:
    plan, session, root = setup.plan, state.session, state.root
    if isinstance(session, NodeSession) and setup.abilities.reads_nodes:
        if setup.layout is not None and depth == plan.depth:
            return grow_static(session, root, setup.layout, chooser)
        if plan.shape is DraftShape.DYNAMIC:
            return grow_dynamic(session, root, plan.width, plan.max_nodes, depth, chooser), None
        if setup.abilities.confident and (plan.confidence or isinstance(plan.control, Schedule)):
            proposal = propose_confidently(session, root, depth, chooser, setup.asks)
            return proposal, torch.stack(chooser.probs, 1) if chooser.probs else None
    proposal = session.propose(root, depth, chooser, chooser.ended if setup.asks else None)
    return proposal, torch.stack(chooser.probs, 1) if chooser.probs else None


def _lengths(setup: Setup, chooser: DraftSampler, proposal: Proposal) -> Tensor | None:
    """Return how many tokens of its chain each row really proposes, `[B]`; None for all."""
    if isinstance(setup.plan.control, Schedule) and chooser.reach:
        return setup.plan.control.lengths(torch.stack(chooser.reach[: proposal.depth], 1))
    return chooser.lengths


def _wanted(state: RoundState, proposal: Proposal, lengths: Tensor | None) -> Proposal:
    """Take out what follows a row's first `lengths` `[B]` tokens (None: all), and the drafts of rows that want none."""
    real = proposal.real
    if lengths is not None:
        real = real & (torch.arange(real.shape[1], device=real.device) < lengths[:, None])
    if state.wanting is not None:
        real = real & state.wanting[:, None]
    return proposal if real is proposal.real else replace(proposal, real=real)


def _cut(proposal: Proposal, probs: Tensor | None) -> tuple[Proposal, Tensor | None]:
    """Return a chain, and what it was drawn from, without what no row proposes: the target would read it in vain."""
    longest = int(proposal.lengths.max())
    if longest == proposal.depth:
        return proposal, probs
    chain = Proposal(
        proposal.tokens[:, :longest], proposal.real[:, :longest], longest, deterministic=proposal.deterministic
    )
    return chain, None if probs is None or not longest else probs[:, :longest]


# ------------------------------------------------------------ verify


@dataclass(frozen=True)
class Drafted:
    """A round whose proposal was made by the host: what verifying it reads.

    Attributes:
        proposal: of one size for every row and round, see `Proposal.spread`.
    """

    state: RoundState
    proposal: Proposal

    def tensors(self) -> list[Tensor]:
        """Return everything that verification reads, in a fixed order."""
        proposal = self.proposal
        tree = [tensor for tensor in (proposal.parents, proposal.read) if tensor is not None]
        return [proposal.tokens, proposal.real, *tree, *self.state.tensors()]

    def at(self, tensors: list[Tensor]) -> Drafted:
        """Return the same in other places in memory, given in the order of `tensors`."""
        rest = iter(tensors)
        moved = replace(self.proposal, tokens=next(rest), real=next(rest))
        if moved.parents is not None:
            moved = replace(moved, parents=next(rest), read=next(rest))
        return Drafted(self.state.at(list(rest)), moved)


def verify(setup: Setup, drafted: Drafted) -> tuple[Drafted, RoundResult]:
    """Verify what the host proposed and commit what stays; its session takes note elsewhere."""
    proposal = _wanted(drafted.state, drafted.proposal, None)
    state, outcome = verify_and_commit(setup, drafted.state, Draft(proposal, None, setup.rule(proposal.deterministic)))
    return replace(drafted, state=state), outcome


def verify_and_commit(setup: Setup, state: RoundState, draft: Draft) -> tuple[RoundState, RoundResult]:
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
    return state, RoundResult(packed, tokens, hidden, counts, read, best, draft.rule)


def judge(
    setup: Setup, state: RoundState, draft: Draft, logits: Tensor | None, keys: Keys
) -> tuple[Verdict, Tensor | None]:
    """Let the rule decide, from the target's logits after root and drafts, `[B, 1 + N, V]`.

    Also return the most probable token at each place, `[B, 1 + N]`, if a session wants to observe it.
    """
    assert logits is not None
    proposal, drawing = draft.proposal, setup.drawing
    if drawing.processors is not None and state.context is not None:
        logits = drawing.processors(logits, state.context.then(proposal.tokens, proposal.nodes.sees[:, :, 1:]))
    case = VerifyInputs(proposal, logits, draft.probs, drawing.sampling, keys)
    best = case.best if setup.abilities.observes and proposal.tokens.shape[1] else None
    verdict = RULES[draft.rule].judge(case)
    if setup.watch is not None:
        setup.watch(verdict)
    if drawing.processors is None:
        return _unless_broken(verdict, [case.peaks, *draft.peaks]), best
    end = verdict.accepted  # the place after what was accepted
    if verdict.path is not None:
        end = torch.nn.functional.pad(verdict.path + 1, (1, 0)).gather(1, end[:, None])[:, 0]
    dead = nothing_left(logits)
    dead_end = dead.gather(1, end[:, None])[:, 0]
    verdict = verdict._replace(following=verdict.following.masked_fill(dead_end, NOTHING))
    return _unless_broken(verdict, [case.peaks.masked_fill(dead, 0), *draft.peaks]), best


def _unless_broken(verdict: Verdict, peaks: list[Tensor]) -> Verdict:
    """Return the verdict, in which no token follows where logits of target or drafter are not finite."""
    return verdict._replace(following=torch.where(are_finite(peaks), verdict.following, BROKEN))


def _keep_path(
    cache: RaggedCache, proposal: Proposal, path: Tensor, tokens: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Keep of a tree's entries those of `path` `[B, D]`; return its tokens, hidden states, and when they were read."""
    assert proposal.read is not None
    nodes = path.clamp(min=0)
    cache.keep(torch.cat([torch.zeros_like(path[:, :1]), torch.where(path < 0, path, path + 1)], 1))
    places = torch.nn.functional.pad((path + 1).clamp(min=0), (1, 0))
    if hidden is not None:
        hidden = hidden.gather(1, places[:, :, None, None].expand(-1, -1, *hidden.shape[2:]))
    tokens = torch.cat([tokens[:, :1], proposal.tokens.gather(1, nodes)], 1)
    return tokens, hidden, proposal.read.gather(1, nodes).masked_fill(path < 0, -1)


def _tried(proposal: Proposal, verdict: Verdict) -> Tensor:
    """Return how deep the drafts on the kept path were, the refused ones after its end included, `[B]`."""
    accepted, path = verdict.accepted, verdict.path
    if path is None or proposal.parents is None:
        return proposal.lengths
    end = torch.nn.functional.pad(path, (1, 0), value=-1).gather(1, accepted[:, None])
    return accepted + ((proposal.parents == end) & proposal.real).any(1)


# ------------------------------------------------------------ commit


def commit(
    state: RoundState, chosen: Tensor, verdict: Verdict, drafted: Tensor, tried: Tensor
) -> tuple[RoundState, Tensor]:
    """Make the token that follows the root; return what the host needs of the round, too (see `RoundResult.packed`).

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
    packed = torch.cat([chosen, torch.stack([following, accepted, drafted, tried], 1)], 1)
    return replace(state, root=root, context=context), packed


def update_session(state: RoundState, outcome: RoundResult) -> None:
    """Let the session take note of a round."""
    if outcome.best is not None:
        state.session.on_target_argmax(outcome.best)
    state.session.update(outcome.tokens, outcome.hidden, outcome.counts, outcome.read)
