"""The lossless speculative decoder: one loop for every drafter, every rule, and for no drafter at all.

Shapes: B active rows, N draft tokens, D of them on the longest path (in a chain all), V vocabulary.

A sequence is committed tokens plus a `root`: its last token, which the target has not processed yet. A round drafts
behind the root, verifies root and drafts in one pass, and ends with a new root. What a round emits is read by the host
once; everything else stays on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..ground import BadInputError
from ..ground.machine import clock
from ..heads import Drafter, Proposal
from ..targets import Counts, RaggedCache, Target
from . import verify, verify_tree
from .control import Controller
from .drafting import Chooser, grow_dynamic, grow_static
from .memory import Load, require_memory
from .plan import LOSSY, Plan
from .sampling import (
    ACCEPT,
    CORRECT,
    Context,
    Processors,
    Sampling,
    Seed,
    draw,
    most_probable,
    nothing_left,
    probabilities,
    shared_gumbel,
    uniforms,
)
from .static import StaticRounds
from .stats import DecodeStats, Round, Seconds

Stop = Callable[[list[int]], bool]

_NOTHING = -1  # in place of a following token: the processors left none


@dataclass
class Output:
    """What `Decoder.generate` returns.

    Attributes:
        tokens: new tokens per prompt, the prompt excluded.
        rounds: rounds per prompt. The first token comes from the prefill and belongs to no round.
        stats: figures over all of them.
        rule: the verification rule that ran ("auto" resolved), or "none" if nothing was drafted.
        lossy: whether the text may be other than the target's own: the plan asked for such a rule.
    """

    tokens: list[list[int]]
    rounds: list[list[Round]]
    stats: DecodeStats
    rule: str = "none"
    lossy: bool = False


@dataclass(frozen=True)
class Event:
    """One step of a stream: tokens that were just emitted; the first `accepted` of them were drafted."""

    tokens: list[int]
    accepted: int
    drafted: int


@dataclass
class Batch:
    """The state of a running batch; `active[i]` is the prompt that row i belongs to."""

    active: list[int]
    root: Tensor  # [B]
    sequences: Tensor  # [B]
    wanting: Tensor | None  # rows that want drafts, [B] bool; None for all
    cache: RaggedCache = field(init=False)
    context: Context | None = None  # of what is committed, the root included; None without processors
    drafting: Any = None


@dataclass(frozen=True)
class Outcome:
    """What a round did, on the device.

    Attributes:
        packed: per row the kept path's drafts, then the token that follows, how many drafts were accepted, drafted, and tried (see
            `Round`), `[B, D + 4]`: all that the host needs.
        tokens: root and drafts of the path, `[B, 1 + D]`. hidden: their tapped states. counts: how many of them stay.
        read: see `Drafter.absorb`.
    """

    packed: Tensor
    tokens: Tensor
    hidden: Tensor | None
    counts: Counts
    read: Tensor | None

    def cloned(self) -> Outcome:
        hidden, read = (None if t is None else t.clone() for t in (self.hidden, self.read))
        return Outcome(self.packed, self.tokens.clone(), hidden, Counts(self.counts.tensor.clone()), read)


@dataclass
class _Sequence:
    """The host's side of one prompt."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    done: bool = False


class Decoder:
    """Generates with a target, and a drafter if there is one.

    Args:
        drafter: None gives the plain target in the same engine: the baseline of every speedup.
        static: rounds of fixed shapes, captured as CUDA graphs on a GPU (see `decode.static`). None for on a GPU, where drafter and
            target allow it.

    Raises:
        IncompatibleError: the drafter cannot draft for this target (taps, sizes, vocabulary).
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, static: bool | None = None):
        self.target, self.drafter = target, drafter
        self.static = target.device.type == "cuda" and not target.sharded if static is None else static
        self.rounds: dict[tuple[int, bool], StaticRounds] = {}
        if drafter is not None:
            drafter.check(target)
            drafter.to(target.device).eval()

    def reserve(self, rows: int, length: int, spare: int, drafter: Drafter | None) -> StaticRounds:
        """Memory for rounds of fixed shapes, lent until `give_back`: what an earlier request of as many rows left, if it is large enough."""
        found = self.rounds.pop((rows, drafter is not None), None)
        if found is None or not found.fits(length, spare):
            found = None  # freed before more is asked for
            found = StaticRounds(self.target, drafter, rows, length, spare)
        found.reset()
        return found

    def give_back(self, rounds: StaticRounds) -> None:
        """Keep what `reserve` lent for later requests."""
        self.rounds[rounds.cache.batch_size, rounds.drafter is not None] = rounds

    def held(self, rows: int, drafter: Drafter | None) -> int:
        """Bytes that `reserve` would reuse or free."""
        found = self.rounds.get((rows, drafter is not None))
        return 0 if found is None else found.num_bytes()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        stop: Stop | None = None,
        ignore_eos: bool = False,
        sequence_ids: Sequence[int] | None = None,
        speculate: bool | Sequence[bool] = True,
    ) -> Output:
        """Complete all `prompts` (token ids, of any lengths) in one batch.

        Args:
            stop: called with a sequence's new tokens after each token; True ends it there.
            sequence_ids: what keys each prompt's randomness (default: its index), so that a prompt gets the same text in
                whatever batch it runs. (Above temperature 0 a plan's controller looks at the whole batch: then only under the
                coupled rule.)
            speculate: False decodes plainly, whatever the plan; a sequence of flags says it for each prompt.

        Raises:
            BadInputError: an empty prompt, a prompt that leaves no room in the target's context, more than memory holds, or a
                place at which `sampling` forbids every token.
            IncompatibleError: the plan drafts trees, and the target cannot verify them.
        """
        run = Run(
            self,
            prompts,
            max_new_tokens,
            sampling or Sampling(),
            plan or Plan(),
            stop,
            ignore_eos,
            sequence_ids,
            speculate,
        )
        for _ in run.steps():
            pass
        return run.output()

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        stop: Stop | None = None,
        ignore_eos: bool = False,
        speculate: bool = True,
    ) -> Iterator[Event]:
        """Complete one prompt, yielding what each round emits."""
        run = Run(
            self, [prompt], max_new_tokens, sampling or Sampling(), plan or Plan(), stop, ignore_eos, None, speculate
        )
        for events in run.steps():
            yield events[0]


class Run:
    """One call of `generate`."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        plan: Plan,
        stop: Stop | None,
        ignore_eos: bool,
        sequence_ids: Sequence[int] | None,
        speculate: bool | Sequence[bool],
    ):
        self.decoder, self.target, self.drafter = decoder, decoder.target, decoder.drafter
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.sampling, self.stop = sampling, stop
        self.seed: Seed = sampling.seed
        self.speculate = [speculate] * len(prompts) if isinstance(speculate, bool) else list(speculate)
        plan = plan if self.drafter is None else plan.up_to(self.drafter.max_depth)
        self.depth = plan.depth if self.drafter is not None and any(self.speculate) else 0
        self.plan = plan
        self.controller = self._controller()
        self.eos = frozenset(() if ignore_eos else self.target.eos_ids)
        processors = Processors(sampling, self.target.vocab_size, self.eos, self.target.device)
        self.processors = None if processors.idle else processors
        self.ids = list(sequence_ids) if sequence_ids is not None else list(range(len(prompts)))
        self.sequences = [_Sequence() for _ in prompts]
        self.seconds = Seconds()
        self.rule = "none"
        self.rounds: StaticRounds | None = None
        self.margin = 0
        self._drafted = 0.0  # when the round's drafts were there
        self._check()

    def _check(self) -> None:
        if not self.prompts:
            raise BadInputError("there are no prompts to complete.")
        if len(self.ids) != len(self.prompts):
            raise BadInputError(f"{len(self.prompts)} prompts, but {len(self.ids)} sequence ids.")
        if len(self.speculate) != len(self.prompts):
            raise BadInputError(f"{len(self.prompts)} prompts, but {len(self.speculate)} flags for speculate.")
        if self.max_new_tokens < 1:
            raise BadInputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if self.sampling.min_new_tokens > self.max_new_tokens:
            raise BadInputError(
                f"min_new_tokens is {self.sampling.min_new_tokens}, more than max_new_tokens ({self.max_new_tokens})."
            )
        if self.plan.is_tree and self.drafter is not None and self.drafter.abilities.reads_nodes:
            self.target.check_trees()
        limit = self.target.max_context
        for i, prompt in enumerate(self.prompts):
            if len(prompt) == 0:
                raise BadInputError(f"prompt {i} is empty; give at least one token (for example the BOS token).")
            if limit is not None and len(prompt) + self.max_new_tokens > limit:
                raise BadInputError(
                    f"prompt {i} has {len(prompt)} tokens; with {self.max_new_tokens} new ones it exceeds the target's context of {limit}. "
                    "Shorten the prompt or lower max_new_tokens."
                )

    def _controller(self) -> Controller | None:
        plan = self.plan
        if plan.control is None or not self.depth:
            return None
        if plan.is_tree and self.drafter is not None and self.drafter.abilities.reads_nodes:
            return Controller(plan.control, len(self.prompts), [plan.depth], [plan.max_nodes])
        return Controller(plan.control, len(self.prompts), range(1, plan.depth + 1), range(1, plan.depth + 1))

    def output(self) -> Output:
        tokens = [s.tokens for s in self.sequences]
        rounds = [s.rounds for s in self.sequences]
        return Output(
            tokens,
            rounds,
            DecodeStats(rounds, sum(map(len, tokens)), self.seconds),
            self.rule,
            self.plan.verify in LOSSY,
        )

    # ------------------------------------------------------------ the loop

    def steps(self) -> Iterator[list[Event]]:
        """Run to the end; yields, per step, one event for each prompt that was still active.

        Inference mode is entered per step: a generator must not leave it on in its caller.
        """
        try:
            began = time.perf_counter()
            with torch.inference_mode():
                batch, events = self._prefill()
            self.seconds.total = time.perf_counter() - began
            yield events
            while self._free_rows(batch):
                began = time.perf_counter()
                with torch.inference_mode():
                    events = self._round(batch)
                self.seconds.total += time.perf_counter() - began
                yield events
        finally:
            if self.rounds is not None:
                self.decoder.give_back(self.rounds)

    def _prefill(self) -> tuple[Batch, list[Event]]:
        """Process the prompts; the token that follows each becomes its root."""
        started = self._clock()
        device, rows = self.target.device, len(self.prompts)
        counts = Counts.of([len(p) for p in self.prompts], device)
        width = max(counts.values)
        tokens = torch.zeros(rows, width, dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        self._check_tokens(tokens)
        tokens = tokens.to(device)
        batch = self._open(tokens, counts)
        if self.processors is not None:
            batch.context = self.processors.start(tokens, counts.tensor)
        out = self.target.forward(tokens, batch.cache, taps=self._taps(), at=counts.tensor[:, None] - 1)
        batch.cache.advance(counts)
        assert out.logits is not None
        empty = Proposal.chain(tokens[:, :0])
        nothing, _, following = self._verify(batch, empty, out.logits, None, counts.tensor)
        if self.drafter is not None and batch.drafting is not None:
            batch.drafting.absorb(tokens, out.hidden, counts)
        events = self._emit_all(
            batch, self._commit(batch, empty.tokens, nothing, following, nothing, nothing).tolist(), prefill=True
        )
        self.seconds.prefill += self._clock() - started
        return batch, events

    def _open(self, tokens: Tensor, counts: Counts) -> Batch:
        """Room for the prompts `[B, T]` and what follows, in both caches."""
        rows, plan, device = len(tokens), self.plan, tokens.device
        drafter = self.drafter if self.depth else None
        fixed = self.decoder.static and self.target.rewinds and (drafter is None or drafter.abilities.reads_nodes)
        nodes = 0 if drafter is None or drafter.abilities.reads_nodes else drafter.max_nodes(self.depth)
        load = Load(rows, max(counts.values), self.max_new_tokens, self.depth, plan, self.sampling, fixed, nodes)
        require_memory(self.target, drafter, load, self.decoder.held(rows, drafter) if fixed else 0)
        wanting = None if all(self.speculate) else torch.tensor(self.speculate, device=device)
        batch = Batch(list(range(rows)), tokens[:, 0], torch.tensor(self.ids, device=device), wanting)
        if fixed:
            self.margin = load.margin
            self.rounds = self.decoder.reserve(rows, load.length, load.spare, drafter)
            self.seed = torch.full((), (self.sampling.seed + 2**63) % 2**64 - 2**63, dtype=torch.long, device=device)
            batch.cache, batch.drafting = self.rounds.cache, self.rounds.drafting
            return batch
        batch.cache = self.target.new_cache(rows, load.target_length)
        if drafter is not None:
            batch.drafting = drafter.open(
                self.target, rows, load.length, load.spare if drafter.abilities.reads_nodes else 0, batch.cache
            )
        return batch

    def _check_tokens(self, tokens: Tensor) -> None:
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.target.vocab_size:
            raise BadInputError(
                f"a prompt holds token {int(tokens.max() if tokens.min() >= 0 else tokens.min())}, outside the target's vocabulary of {self.target.vocab_size}."
            )

    def _round(self, batch: Batch) -> list[Event]:
        started = self._clock()
        depth = self._round_depth(batch)
        if self.rounds is not None:
            idle = [row for row, i in enumerate(batch.active) if self.sequences[i].done]
            packed = self.rounds.round(self, batch, depth, idle, self._longest(batch) + self.margin)
        else:
            outcome = self.compute(batch, depth)
            packed = outcome.packed.tolist()
            self.absorb(batch, outcome)
        events = self._emit_all(batch, packed)
        self.seconds.draft += max(0.0, self._drafted - started)
        self.seconds.verify += self._clock() - max(started, self._drafted)
        return events

    def compute(self, batch: Batch, depth: int) -> Outcome:
        """Draft, verify and accept; all of it on the device."""
        proposal, draft_probs = self._draft(batch, depth)
        if self.rounds is None:
            self._drafted = self._clock()
        tokens = torch.cat([batch.root[:, None], proposal.tokens], 1)  # [B, 1 + N]
        out = self.target.forward(
            tokens, batch.cache, taps=self._taps(), nodes=None if proposal.parents is None else proposal.nodes
        )
        assert out.logits is not None
        accepted, path, following = self._verify(batch, proposal, out.logits, draft_probs, batch.cache.lengths + 1)
        chosen, hidden, read = proposal.tokens, out.hidden, None
        if path is not None:
            assert proposal.read is not None
            chosen = proposal.tokens.gather(1, path.clamp(min=0))  # [B, D]
            batch.cache.keep(torch.cat([torch.zeros_like(path[:, :1]), torch.where(path < 0, path, path + 1)], 1))
            where = torch.nn.functional.pad((path + 1).clamp(min=0), (1, 0))
            tokens = torch.cat([tokens[:, :1], chosen], 1)
            hidden = (
                None if hidden is None else hidden.gather(1, where[:, :, None, None].expand(-1, -1, *hidden.shape[2:]))
            )
            read = proposal.read.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
        counts = Counts(accepted + 1)
        batch.cache.advance(counts)
        packed = self._commit(batch, chosen, accepted, following, proposal.lengths, _tried(proposal, accepted, path))
        return Outcome(packed, tokens, hidden, counts, read)

    def absorb(self, batch: Batch, outcome: Outcome) -> None:
        """Let the drafter take note of a round."""
        if self.drafter is not None and batch.drafting is not None:
            batch.drafting.absorb(outcome.tokens, outcome.hidden, outcome.counts, outcome.read)

    def _free_rows(self, batch: Batch) -> bool:
        """Drop the rows of finished sequences (in rounds of fixed shapes they stay); False when none is left."""
        alive = [row for row, i in enumerate(batch.active) if not self.sequences[i].done]
        if not alive or len(alive) == len(batch.active) or self.rounds is not None:
            return bool(alive)
        batch.active = [batch.active[r] for r in alive]
        batch.root, batch.sequences = batch.root[alive], batch.sequences[alive]
        batch.context = None if batch.context is None else batch.context.select(alive)
        batch.wanting = None if batch.wanting is None else batch.wanting[alive]
        batch.cache.select(alive)
        if self.drafter is not None and batch.drafting is not None:
            batch.drafting.select(alive)
        return True

    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None and self.depth else ()

    def _clock(self) -> float:
        return clock(self.target.device)

    # ------------------------------------------------------------ drafting

    def _draft(self, batch: Batch, depth: int) -> tuple[Proposal, Tensor | None]:
        """A proposal, and what its tokens were drawn from: of a chain `[B, k, V]`, of a tree at each place `[B, 1 + N, V]`; None for no draws."""
        if self.drafter is None or not depth:
            return Proposal.chain(batch.root[:, None][:, :0]), None
        plan, state = self.plan, batch.drafting
        rule = plan.rule(self.sampling.temperature, self.drafter.abilities.deterministic)
        chooser = Chooser(
            rule,
            self.sampling,
            self.seed,
            self.target.vocab_size,
            batch.sequences,
            batch.cache.lengths + 1,
            self.processors,
            batch.context,
            confidence=plan.confidence,
        )
        if plan.tree is not None and self.drafter.abilities.reads_nodes and depth == plan.depth:
            proposal, probs = grow_static(state, batch.root, plan.tree, chooser)
        elif plan.tree is None and plan.is_tree and self.drafter.abilities.reads_nodes:
            proposal, probs = grow_dynamic(state, batch.root, plan, depth, chooser), None
        else:
            # Asking whether a chain has ended reads from the device, which a round of fixed shapes must not.
            proposal = state.propose(batch.root, depth, chooser, chooser.ended if self.rounds is None else None)
            probs = torch.stack(chooser.probs, 1) if chooser.probs else None
        self.rule = self._rule(proposal)
        return self._wanted(batch, proposal, chooser.lengths), probs

    def _wanted(self, batch: Batch, proposal: Proposal, lengths: Tensor | None) -> Proposal:
        """Without what stands behind a row's first `lengths` `[B]` tokens (None: all), and without the drafts of rows that want none."""
        real = proposal.real
        if lengths is not None:
            real = real & (torch.arange(real.shape[1], device=real.device) < lengths[:, None])
        if batch.wanting is not None:
            real = real & batch.wanting[:, None]
        return proposal if real is proposal.real else replace(proposal, real=real)

    def _round_depth(self, batch: Batch) -> int:
        """The plan's, or its controller's; 0 if no row wants drafts. It never passes the end of the target's context."""
        wanting = [i for i in batch.active if self.speculate[i] and not self.sequences[i].done]
        if not wanting:
            batch.drafting = None  # for good: nobody will ask the drafter again
        if not self.depth or not wanting:
            return 0
        depth = self.depth if self.controller is None else self.controller.choose(wanting)
        limit = self.target.max_context
        return depth if limit is None else min(depth, limit - self._longest(batch) - 1)

    def _longest(self, batch: Batch) -> int:
        """Committed entries of the longest row that has not finished."""
        return max(
            length
            for i, length in zip(batch.active, batch.cache.host_lengths, strict=True)
            if not self.sequences[i].done
        )

    def _rule(self, proposal: Proposal) -> str:
        return self.plan.rule(self.sampling.temperature, proposal.deterministic)

    # ------------------------------------------------------------ verification

    def _verify(
        self, batch: Batch, proposal: Proposal, logits: Tensor, draft_probs: Tensor | None, first: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Accepted drafts `[B]`, their path `[B, D]` in a tree (None for a chain), and the token that follows `[B]`.

        Args:
            logits: the target's behind root and drafts, `[B, 1 + N, V]`.
            first: index in its sequence of the token that the first logits predict, `[B]`.
        """
        if self.processors is not None and batch.context is not None:
            logits = self.processors(logits, batch.context.then(proposal.tokens, proposal.nodes.sees[:, :, 1:]))
        accepted, path, following = self._apply_rule(batch, proposal, logits, draft_probs, first)
        if self.processors is not None:
            end = (
                accepted
                if path is None
                else torch.nn.functional.pad(path + 1, (1, 0)).gather(1, accepted[:, None])[:, 0]
            )
            following = following.masked_fill(nothing_left(logits).gather(1, end[:, None])[:, 0], _NOTHING)
        return accepted, path, following

    def _apply_rule(
        self, batch: Batch, proposal: Proposal, logits: Tensor, draft_probs: Tensor | None, first: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The same, from processed logits, which the drafter may observe. Every draw is keyed by its place in the text, or by the round and the node."""
        rule, sampling = self._rule(proposal), self.sampling
        observer = (
            self.drafter
            if self.drafter is not None and self.drafter.abilities.observes and proposal.tokens.shape[1]
            else None
        )
        if observer is not None or rule == "greedy":
            best = most_probable(logits)
            if observer is not None:
                batch.drafting.observe(best)
            if rule == "greedy":
                return self._match(proposal, best)
        if rule in LOSSY:
            probs = logits.float().softmax(-1) if sampling.greedy else probabilities(logits, sampling)
            return self._typical(proposal, probs)
        sequences, positions = batch.sequences[:, None], first[:, None] + proposal.nodes.depths
        probs = probabilities(logits, sampling)
        if rule == "coupled":
            return self._match(
                proposal,
                (probs.double().log() + shared_gumbel(self.seed, sequences, positions, probs.shape[-1])).argmax(-1),
            )
        if rule == "candidates" or draft_probs is None:
            return self._match(proposal, draw(probs, uniforms(self.seed, CORRECT, sequences, positions)))
        numbers = torch.arange(1, positions.shape[1], device=positions.device)
        accepts = uniforms(self.seed, ACCEPT, sequences, first[:, None], first[:, None] + numbers - 1)
        corrects = uniforms(self.seed, CORRECT, batch.sequences, first)
        if proposal.parents is None:
            judge = verify.block if rule in ("block", "traversal") else verify.rejection
            accepted, following = judge(proposal.tokens, proposal.lengths, probs, draft_probs, accepts, corrects)
            return accepted, None, following
        walk = verify_tree.traversal if rule == "traversal" else verify_tree.without_replacement
        return walk(
            proposal.tokens, proposal.parents, proposal.real, probs, draft_probs, accepts, corrects, proposal.depth
        )

    @staticmethod
    def _match(proposal: Proposal, wanted: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        if proposal.parents is not None:
            return verify_tree.match_tree(proposal.tokens, proposal.parents, proposal.real, wanted, proposal.depth)
        accepted, following = verify.match(proposal.tokens, proposal.lengths, wanted)
        return accepted, None, following

    @staticmethod
    def _typical(proposal: Proposal, probs: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        chain = torch.arange(-1, proposal.depth - 1, device=probs.device).expand(len(probs), -1)
        parents = chain if proposal.parents is None else proposal.parents
        accepted, path, following = verify_tree.typical(proposal.tokens, parents, proposal.real, probs, proposal.depth)
        return accepted, None if proposal.parents is None else path, following

    # ------------------------------------------------------------ committing

    def _commit(
        self, batch: Batch, chosen: Tensor, accepted: Tensor, following: Tensor, drafted: Tensor, tried: Tensor
    ) -> Tensor:
        """Make the token that follows the root; returns what the host needs of the round, see `Outcome.packed`.

        Args:
            chosen: `[B, D]`, of which the first `accepted` stay. drafted, tried: of each row, see `Round`, `[B]`.
        """
        if batch.context is not None:
            kept = torch.arange(chosen.shape[1], device=accepted.device) < accepted[:, None]
            emitted = torch.cat([kept, (following != _NOTHING)[:, None]], 1)
            batch.context = batch.context.then(torch.cat([chosen, following[:, None]], 1), emitted[:, None])
        # Where nothing is left to go on with, the host raises; a finished row that runs on idly needs a token all the same.
        batch.root = following if self.processors is None else following.clamp(min=0)
        return torch.cat([chosen, torch.stack([following, accepted, drafted, tried], 1)], 1)

    def _emit_all(self, batch: Batch, packed: list[list[int]], prefill: bool = False) -> list[Event]:
        """Note a round's outcome for every sequence that was still active."""
        events = []
        for i, (*drafts, last, kept, count, reach) in zip(batch.active, packed, strict=True):
            if self.sequences[i].done:
                continue
            events.append(self._emit(self.sequences[i], [*drafts[:kept], last], count, reach, prefill))
            if self.controller is not None and not prefill:
                self.controller.note(i, reach, kept)
        return events

    def _emit(self, sequence: _Sequence, new: list[int], drafted: int, tried: int, prefill: bool) -> Event:
        """Append what a round gave to one sequence, up to its end."""
        accepted = len(new) - 1
        emitted = []
        for token in new:
            if token == _NOTHING:
                raise BadInputError(
                    "sampling: bad_words, suppress and min_new_tokens together leave no token to go on with; forbid less."
                )
            emitted.append(token)
            sequence.tokens.append(token)
            if token in self.eos or (self.stop is not None and self.stop(sequence.tokens)):
                # What was drafted from the end on was never wanted, and the end token counts as the target's own.
                sequence.done = True
                if len(emitted) <= accepted:
                    drafted = tried = accepted = len(emitted) - 1
                break
            if len(sequence.tokens) == self.max_new_tokens:
                sequence.done = True
                break
        if not prefill:
            sequence.rounds.append(Round(drafted, accepted, len(emitted), None if tried == drafted else tried))
        return Event(emitted, min(accepted, len(emitted)), drafted)


def _tried(proposal: Proposal, accepted: Tensor, path: Tensor | None) -> Tensor:
    """How deep the drafts on the kept path were, the refused ones behind its end included, `[B]`."""
    if path is None or proposal.parents is None:
        return proposal.lengths
    end = torch.nn.functional.pad(path, (1, 0), value=-1).gather(1, accepted[:, None])
    return accepted + ((proposal.parents == end) & proposal.real).any(1)
