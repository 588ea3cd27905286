"""The lossless speculative decoder: one loop for every drafter, every rule, and for no drafter at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..common import BadInputError
from ..common.errors import LIBRARY_ERRORS
from ..common.machine import clock
from ..heads import Abilities, Drafter, NoDraftSession, Session
from ..targets import RowLengths, Target
from ..targets.attention import steady_kernels
from ..targets.fast import by_library, prefer_fast_pass, use_fast_pass
from . import round as stage
from .control import Controller, Schedule
from .drafting import SamplerConfig
from .finite import BROKEN, NonFiniteTracer, not_finite_error
from .hashing import Seed, seed_on
from .memory import Load, require_memory
from .plan import Plan
from .round import NOTHING, RoundState, Setup
from .sampling import Keys, Processors, Sampling
from .static_batch import PendingRound, StaticBatch, StaticBatches
from .stats import DecodeStats, Round, Seconds


class Decoder:
    """A decoder of a target, with a drafter if there is one.

    Args:
        drafter: None gives the plain target in the same engine: the baseline of every speedup.
        static: rounds of fixed shapes, captured as CUDA graphs on a GPU (see `decode.room`). None for on a GPU, where
            drafter and target allow it.
        fast: whether the target reads few tokens at a time by kernels of our own (see `targets.fast`). None for on
            a GPU, in bfloat16, where they serve the target and prove right. A target that has taken them keeps them.

    Raises:
        IncompatibleError: the drafter cannot draft for this target (taps, sizes, vocabulary), or the fast pass is asked
            for and does not serve it.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, static: bool | None = None, fast: bool | None = None
    ):
        self.target, self.drafter = target, drafter
        on_gpu = target.device.type == "cuda" and not target.sharded
        if fast:
            use_fast_pass(target)
        elif fast is None:
            prefer_fast_pass(target)
        self.rooms = StaticBatches(target, on_gpu if static is None else static)
        if drafter is not None:
            drafter.check(target)
            drafter.to(target.device).eval()

    @property
    def static(self) -> bool:
        """Whether rounds have fixed shapes, where drafter and target allow it."""
        return self.rooms.wanted

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
            sequence_ids: what keys each prompt's randomness (default: its index), so that a prompt gets the same text
                in whatever batch it runs. (Above temperature 0 a plan's controller looks at the whole batch: then only
                under the coupled rule.)
            speculate: False decodes plainly, whatever the plan; a sequence of flags says it for each prompt.

        Raises:
            BadInputError: an empty prompt, a prompt that leaves no room in the target's context, more than memory
                holds, or a place at which `sampling` forbids every token.
            IncompatibleError: the plan drafts trees, and the target cannot verify them.
        """
        how = (sampling or Sampling(), plan or Plan(), stop, ignore_eos, sequence_ids, speculate)
        run = self.run(Request(prompts, max_new_tokens, *how))
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
    ) -> Iterator[StreamEvent]:
        """Complete one prompt, yielding what each round emits."""
        how = (sampling or Sampling(), plan or Plan(), stop, ignore_eos, None, speculate)
        for events in self.run(Request([prompt], max_new_tokens, *how)).steps():
            yield events[0]

    def run(self, request: Request) -> Run:
        """Prepare one generation; its steps are taken by whoever iterates over them."""
        return Run(self.target, self.drafter, request, self.rooms)


Stop = Callable[[list[int]], bool]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a user asks the decoder for; see `Decoder.generate`."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    plan: Plan = field(default_factory=Plan)
    stop: Stop | None = None
    ignore_eos: bool = False
    sequence_ids: Sequence[int] | None = None
    speculate: bool | Sequence[bool] = True

    @property
    def ids(self) -> list[int]:
        """What keys each prompt's randomness."""
        return list(range(len(self.prompts)) if self.sequence_ids is None else self.sequence_ids)

    @property
    def wanting(self) -> list[bool]:
        """Which prompts want drafts."""
        flags = self.speculate
        return [flags] * len(self.prompts) if isinstance(flags, bool) else list(flags)

    def check(self, target: Target) -> None:
        """Raise BadInputError for what `target` cannot be asked."""
        count, new = len(self.prompts), self.max_new_tokens
        if not count:
            raise BadInputError("there are no prompts to complete.")
        if len(self.ids) != count:
            raise BadInputError(f"{count} prompts, but {len(self.ids)} sequence ids.")
        if len(self.wanting) != count:
            raise BadInputError(f"{count} prompts, but {len(self.wanting)} flags for speculate.")
        if new < 1:
            raise BadInputError(f"max_new_tokens must be at least 1, got {new}.")
        if self.sampling.min_new_tokens > new:
            raise BadInputError(f"min_new_tokens is {self.sampling.min_new_tokens}, more than max_new_tokens ({new}).")
        limit = target.max_context
        for i, prompt in enumerate(self.prompts):
            if len(prompt) == 0:
                raise BadInputError(f"prompt {i} is empty; give at least one token (for example the BOS token).")
            if limit is not None and len(prompt) + new > limit:
                raise BadInputError(
                    f"prompt {i} has {len(prompt)} tokens; with {new} new ones it exceeds the target's context of "
                    f"{limit}. Shorten the prompt or lower max_new_tokens."
                )

    def tokens(self, vocab: int) -> tuple[Tensor, list[int]]:
        """Return the prompts as a tensor `[B, T]`, zeros after the shorter ones, and their lengths.

        Raises:
            BadInputError: a token outside the vocabulary.
        """
        lengths = [len(prompt) for prompt in self.prompts]
        rows = [torch.as_tensor(prompt, dtype=torch.long, device="cpu") for prompt in self.prompts]
        tokens = pad_sequence(rows, batch_first=True)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocab:
            outside = least if least < 0 else most
            raise BadInputError(f"a prompt holds token {outside}, outside the target's vocabulary of {vocab}.")
        return tokens, lengths


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
class StreamEvent:
    """One step of a stream: tokens that were just emitted; the first `accepted` of them were drafted."""

    tokens: list[int]
    accepted: int
    drafted: int


@dataclass
class _Sequence:
    """One prompt's text and rounds so far.

    Attributes:
        limit: how many tokens it may have. ends: tokens that end it.
    """

    limit: int
    ends: frozenset[int]
    stop: Stop | None
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    done: bool = False

    def emit(self, new: list[int], drafted: int, tried: int) -> StreamEvent:
        """Append what a round gave, up to the sequence's end: accepted drafts, then the target's own token."""
        accepted = len(new) - 1
        emitted: list[int] = []
        for token in new:
            if token == NOTHING:
                raise BadInputError(
                    "sampling: bad_words, suppress and min_new_tokens together leave no token to go on with; "
                    "forbid less."
                )
            emitted.append(token)
            self.tokens.append(token)
            if token in self.ends or (self.stop is not None and self.stop(self.tokens)):
                # What was drafted from the end on was never wanted, and the end token counts as the target's own.
                self.done = True
                if len(emitted) <= accepted:
                    drafted = tried = accepted = len(emitted) - 1
                break
            if len(self.tokens) == self.limit:
                self.done = True
                break
        self.rounds.append(Round(drafted, accepted, len(emitted), None if tried == drafted else tried))
        return StreamEvent(emitted, min(accepted, len(emitted)), drafted)

    def start(self, token: int) -> StreamEvent:
        """Append the first token, which comes from the prefill and belongs to no round."""
        event = self.emit([token], 0, 0)
        self.rounds.clear()
        return event


class Run:
    """One generation, from its request to its output.

    Args:
        drafter: None for plain decoding.
        rooms: lend memory for rounds of fixed shapes, if such are wanted.

    Raises:
        BadInputError: see `Decoder.generate`.
        IncompatibleError: the plan drafts trees, and the target cannot verify them.
    """

    def __init__(self, target: Target, drafter: Drafter | None, request: Request, rooms: StaticBatches):
        self.target, self.request, self.rooms = target, request, rooms
        self.device = target.device  # asked once: a model looks through its modules for it
        self.drafter = drafter if any(request.wanting) and request.plan.depth else None
        request.check(target)
        target.check_batch(len(request.prompts))
        self.wanting = request.wanting
        plan = request.plan if drafter is None else request.plan.up_to(drafter.max_depth)
        abilities = Abilities() if drafter is None else drafter.abilities
        if plan.is_tree and abilities.reads_nodes:
            target.check_trees()
        ends = frozenset(() if request.ignore_eos else target.eos_ids)
        processors = Processors(request.sampling, target.vocab_size, ends, target.device)
        drawing = SamplerConfig(request.sampling, None if processors.idle else processors, target.vocab_size)
        taps = () if self.drafter is None else self.drafter.taps
        self.setup = Setup(target, plan, drawing, abilities, taps)
        self.controller = None if self.drafter is None else _controller(plan, abilities, len(request.prompts))
        self.sequences = [_Sequence(request.max_new_tokens, ends, request.stop) for _ in request.prompts]
        self.active = list(range(len(self.sequences)))  # active[i] is the sequence of row i
        self.seconds, self.rule = Seconds(), "none"
        self.room: StaticBatch | None = None
        self._launched: PendingRound | None = None  # a round that runs while the one before it is read
        self.margin = 0  # entries that a round of fixed shape may write after the longest row

    def output(self) -> Output:
        """Return what was written so far."""
        tokens, rounds = [s.tokens for s in self.sequences], [s.rounds for s in self.sequences]
        stats = DecodeStats(rounds, sum(map(len, tokens)), self.seconds)
        return Output(tokens, rounds, stats, self.rule, self.setup.lossy)

    # ------------------------------------------------------------ the loop

    def steps(self) -> Iterator[list[StreamEvent]]:
        """Run to the end; yield, per step, one event for each prompt that was still active.

        Inference mode is entered per step, as is the choice of kernels: a generator must not leave them on in its
        caller.
        """
        try:
            began = time.perf_counter()
            with torch.inference_mode(), steady_kernels():
                state, events = self._prefill()
            self.seconds.total = time.perf_counter() - began
            yield events
            while not all(sequence.done for sequence in self.sequences):
                began = time.perf_counter()
                with torch.inference_mode(), steady_kernels():
                    state, events = self._round(self._leave(state))
                self.seconds.total += time.perf_counter() - began
                yield events
        finally:
            if self.room is not None:
                self.rooms.give_back(self.room)

    def _prefill(self) -> tuple[RoundState, list[StreamEvent]]:
        """Process the prompts; the token that follows each becomes its root."""
        began = self._clock()
        tokens, lengths = self.request.tokens(self.target.vocab_size)
        tokens = tokens.to(self.target.device)
        counts = RowLengths.of(lengths, tokens.device)
        state = self._open(tokens, counts)
        out = self.target.forward(tokens, state.cache, taps=self.setup.taps, at=counts.tensor[:, None] - 1)
        state.cache.advance(counts)
        keys = Keys(state.seed, state.sequences, counts.tensor)
        verdict, _ = stage.judge(self.setup, state, stage.no_draft(self.setup, state.root), out.logits, keys)
        state.session.update(tokens, out.hidden, counts)
        nothing = verdict.accepted
        state, packed = stage.commit(state, tokens[:, :0], verdict, nothing, nothing)
        first = packed.tolist()
        self._require_finite(first)
        events = [sequence.start(row[0]) for sequence, row in zip(self.sequences, first, strict=True)]
        self.seconds.prefill += self._clock() - began
        return state, events

    def _open(self, tokens: Tensor, counts: RowLengths) -> RoundState:
        """Take memory for the prompts `[B, T]` and what follows, for the target and the drafter."""
        request, drafter, rows = self.request, self.drafter, len(tokens)
        fixed = self.rooms.wanted and self.target.rewinds
        fixed = fixed and (drafter is None or self.setup.abilities.fixed_shapes or self.setup.abilities.from_text)
        depth = 0 if drafter is None else self.setup.plan.depth
        nodes = 0 if drafter is None or self.setup.abilities.reads_nodes else drafter.max_nodes(depth)
        sizes = (rows, max(counts.values), request.max_new_tokens, depth)
        load = Load(*sizes, self.setup.plan, request.sampling, fixed, nodes, fixed and self._can_go_ahead)
        require_memory(self.target, drafter, load, self.rooms.held(rows, drafter) if fixed else 0)
        session: Session
        if fixed:
            self.room, self.margin = self.rooms.reserve(rows, load.length, load.spare, drafter), load.margin
            self.setup = replace(self.setup, asks=False)
            _ = self.setup.layout  # made now: a capture may not copy from the host
            cache, session = self.room.cache, self.room.session
        else:
            cache, session = self.target.new_cache(rows, load.target_length), NoDraftSession()
            spare = load.spare if self.setup.abilities.reads_nodes else 0
            if drafter is not None:
                session = drafter.open(self.target, rows, load.length, spare, cache)
        seed: Seed = seed_on(tokens.device, request.sampling.seed) if fixed else request.sampling.seed
        wanting = None if all(self.wanting) else torch.tensor(self.wanting, device=tokens.device)
        processors = self.setup.drawing.processors
        context = None if processors is None else processors.start(tokens, counts.tensor)
        ids = torch.tensor(request.ids, device=tokens.device)
        return RoundState(tokens[:, 0], ids, seed, wanting, context, cache, session)

    def _round(self, state: RoundState) -> tuple[RoundState, list[StreamEvent]]:
        began = drafted = self._clock()
        state, depth = self._depth(state)
        if self.room is not None:
            state, packed, rule = self._played(self.room, state, depth)
        else:
            proposed = stage.draft(self.setup, state, depth)
            drafted = self._clock()
            state, outcome = stage.verify_and_commit(self.setup, state, proposed)
            packed, rule = outcome.packed.tolist(), outcome.rule
            stage.update_session(state, outcome)
        if depth:
            self.rule = rule
        events = self._emit(packed)
        self.seconds.draft += drafted - began
        self.seconds.verify += self._clock() - drafted
        return state, events

    def _played(self, room: StaticBatch, state: RoundState, depth: int) -> tuple[RoundState, list[list[int]], str]:
        """Return what a round of fixed shape left and packed; the one after it may be launched before it is read."""
        played = self._launched or self._launch(room, state, depth)
        after = replace(played.state, session=state.session)  # which nobody may want any more
        self._launched = self._launch(room, after, depth) if self._goes_ahead(after, depth) else None
        return after if self._launched is None else self._launched.state, room.read(played), played.rule

    def _launch(self, room: StaticBatch, state: RoundState, depth: int) -> PendingRound:
        idle = [row for row, i in enumerate(self.active) if self.sequences[i].done]
        return room.launch(self.setup, state, depth, idle, self._longest(state) + self.margin)

    @property
    def _can_go_ahead(self) -> bool:
        """Whether the host decides nothing between two rounds of this request."""
        return self.rooms.ahead and self.controller is None and not self.setup.abilities.from_text

    def _goes_ahead(self, state: RoundState, depth: int) -> bool:
        """Tell whether the next round is launched before this one is read: not where it may pass the context's end."""
        limit = self.target.max_context
        return self._can_go_ahead and (limit is None or self._longest(state) + 2 * (1 + depth) < limit)

    def _leave(self, state: RoundState) -> RoundState:
        """Let the rows of finished sequences go (in rounds of fixed shapes they stay).

        The last rows take the places of those that leave, so that a cache moves no more entries than it must.
        """
        if self.room is not None:
            return state
        alive = [row for row, i in enumerate(self.active) if not self.sequences[i].done]
        if len(alive) == len(self.active):
            return state
        count, staying = len(alive), set(alive)
        late = (row for row in reversed(alive) if row >= count)
        rows = [row if row in staying else next(late) for row in range(count)]
        self.active = [self.active[row] for row in rows]
        return state.select(rows)

    def _clock(self) -> float:
        """Return the time; after the device has finished, where it has nothing to do while the host reads."""
        return time.perf_counter() if self._launched is not None else clock(self.device)

    # ------------------------------------------------------------ depth

    def _depth(self, state: RoundState) -> tuple[RoundState, int]:
        """Return the round's depth: the plan's, or its controller's; 0 if no row wants drafts.

        It never passes the end of the target's context.
        """
        if self.drafter is None:
            return state, 0
        wanting = [i for i in self.active if self.wanting[i] and not self.sequences[i].done]
        if not wanting:
            return replace(state, session=NoDraftSession()), 0  # for good: nobody will ask the drafter again
        depth = self.setup.plan.depth if self.controller is None else self.controller.choose(wanting)
        limit = self.target.max_context
        return state, depth if limit is None else min(depth, limit - self._longest(state) - 1)

    def _longest(self, state: RoundState) -> int:
        """Return the committed entries of the longest row that has not finished."""
        rows = zip(self.active, state.cache.host_lengths, strict=True)
        return max(length for i, length in rows if not self.sequences[i].done)

    # ------------------------------------------------------------ emission

    def _emit(self, packed: list[list[int]]) -> list[StreamEvent]:
        """Note a round's outcome for every sequence that was still active."""
        self._require_finite(packed)
        events = []
        for i, (*drafts, following, accepted, drafted, tried) in zip(self.active, packed, strict=True):
            if self.sequences[i].done:
                continue
            events.append(self.sequences[i].emit([*drafts[:accepted], following], drafted, tried))
            if self.controller is not None:
                self.controller.note(i, tried, accepted)
        return events

    # ------------------------------------------------------------ no numbers

    def _require_finite(self, packed: list[list[int]]) -> None:
        """Raise an error that names the layer, if the logits of an unfinished row are not finite.

        Raises:
            BadInputError: they are not.
        """
        for i, row in zip(self.active, packed, strict=True):
            if row[-4] == BROKEN and not self.sequences[i].done:
                witness = self._traced(i)
                raise not_finite_error(witness, self.target.dtype, i, len(self.sequences[i].tokens))

    def _traced(self, i: int) -> NonFiniteTracer:
        """Return a witness of one prefill and one round of sequence `i` alone, up to where it is now."""
        models = {"the target": self.target.model} | ({} if self.drafter is None else {"the drafter": self.drafter})
        witness, request = NonFiniteTracer(models), self.request
        tokens = [*request.prompts[i], *self.sequences[i].tokens[:-1]]
        again = replace(
            request,
            prompts=[tokens],
            max_new_tokens=2,
            sampling=replace(request.sampling, min_new_tokens=0),
            plan=replace(request.plan, control=None),
            stop=None,
            sequence_ids=[request.ids[i]],
            speculate=[self.wanting[i]],
        )
        try:
            with witness.watching(), by_library(self.target):
                for _ in _Replay(self.target, self.drafter, again, StaticBatches(self.target, False)).steps():
                    pass
        except LIBRARY_ERRORS:  # too little memory for a second cache, for example; what was seen until then counts
            _log.debug("tracing numbers that are not finite broke off", exc_info=True)
        return witness


class _Replay(Run):
    """A generation that is repeated for a witness: it goes on whatever its numbers are."""

    def _require_finite(self, packed: list[list[int]]) -> None:
        pass


def _controller(plan: Plan, abilities: Abilities, sequences: int) -> Controller | None:
    """Return the controller that the plan asks for; of a tree it may choose the whole tree or nothing."""
    if plan.control is None or isinstance(plan.control, Schedule) or not plan.depth:
        return None
    if plan.is_tree and abilities.reads_nodes:
        return Controller(plan.control, sequences, [plan.depth], [plan.max_nodes])
    depths = range(1, plan.depth + 1)
    return Controller(plan.control, sequences, depths, depths)
