"""The lossless speculative decoder: one loop for every drafter, every rule, and for no drafter at all.

`Decoder` is what users call. `Run` is the host's side of one generation: its sequences and their ends, what is emitted,
and how deep each round drafts; what happens inside a round is in `round`.

Shapes: B active rows, T tokens of the longest prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..common import BadInputError
from ..common.errors import LIBRARY_ERRORS, IncompatibleError, NotFiniteError, reason
from ..common.machine import clock
from ..heads import Abilities, Drafter, NoDraftSession, Session
from ..heads.session import model_drafts
from ..targets import RowLengths, Target
from ..targets.fast import by_library, use_fast_pass, use_fastest_pass
from ..targets.images import ImageInputs
from ..targets.prompts import prompt_parts, read_prompts, shared_tokens
from ..targets.split_attention import steady_kernels
from .control import Controller, Schedule
from .memory import Load, require_memory
from .nonfinite import NonFiniteTracer
from .plan import Plan
from .proposal_check import ProposalCheck
from .rng import Seed, seed_on
from .round import PendingRound, RoundRow, RoundSetup, RoundState, first_tokens, propose, step
from .sampling import Keys, Processors, SamplerConfig, Sampling
from .static_batch import StaticBatch, StaticBatches
from .stats import DecodeStats, Output, Round, Seconds, StreamEvent

Stop = Callable[[list[int]], bool]
_log = logging.getLogger(__name__)


class Decoder:
    """A decoder of a target, with a drafter if there is one.

    Args:
        drafter: None gives the plain target in the same engine: the baseline of every speedup.
        static: rounds of fixed shapes, captured as CUDA graphs on a GPU (see `decode.static_batch`). None for on a GPU,
            where drafter and target allow it.
        fast: whether the target reads few tokens at a time by kernels of our own. None for the way that is right and
            fastest on its device (see `targets.fast`). A target that has taken another way keeps it: with one that is
            packed (`Target.pack`), the drafter is, too.

    Raises IncompatibleError if the drafter cannot draft for this target (taps, sizes, vocabulary), or the fast pass is
    asked for and does not serve it.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, static: bool | None = None, fast: bool | None = None
    ):
        self.target, self.drafter = target, drafter
        on_gpu = target.device.type == "cuda" and not target.sharded
        if fast:
            use_fast_pass(target)
        elif fast is None:
            use_fastest_pass(target)
        self.static_batches = StaticBatches(target, on_gpu if static is None else static)
        self._is_static = bool(static)
        self._drafts = drafter  # as it drafts
        if drafter is not None:
            drafter.check(target)
            drafter.to(target.device).eval()
            self._drafts = drafter.packed_as(target)

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
        images: Sequence[ImageInputs | None] = (),
    ) -> Output:
        """Complete all `prompts` (token ids, of any lengths) in one batch.

        Args:
            stop: called with a sequence's new tokens after each token; True ends it there.
            sequence_ids: the key of each prompt's randomness (default: its index), so that a prompt gets the same text
                in whatever batch it runs. (Above temperature 0 a plan's controller looks at the whole batch: then only
                under the coupled rule.)
            speculate: False decodes plainly, whatever the plan; or a flag for each prompt.
            images: those of each prompt (see `Target.image_inputs`); () for prompts without any.

        Raises:
            BadInputError: an empty prompt, a prompt that leaves no room in the target's context, more than memory
                holds, a place at which `sampling` forbids every token, or images that do not fit their prompt.
            IncompatibleError: the plan drafts trees, and the target cannot verify them; or it sees no images.
        """
        settings = (sampling or Sampling(), plan or Plan(), stop, ignore_eos, sequence_ids, speculate, images)
        run = self.run(Request(prompts, max_new_tokens, *settings))
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
        images: ImageInputs | None = None,
    ) -> Iterator[StreamEvent]:
        """Complete one prompt, yielding what each round emits."""
        settings = (sampling or Sampling(), plan or Plan(), stop, ignore_eos, None, speculate, (images,))
        for events in self.run(Request([prompt], max_new_tokens, *settings)).steps():
            yield events[0]

    def run(self, request: Request) -> Run:
        """Prepare one generation; iterating over its `steps` runs it."""
        if not isinstance(new := request.max_new_tokens, Integral) or new < 1:
            raise BadInputError(f"max_new_tokens must be at least 1, got {new!r}.")
        request = replace(request, plan=request.plan.within(new))
        batches = self.static_batches
        if request.has_images and batches.wanted:
            if self._is_static:
                raise BadInputError("images: rounds of fixed shapes read none; leave out static=True.")
            batches = StaticBatches(self.target, False)
        drafter = self.drafter if self.target.packed is None else self._drafts
        return Run(self.target, drafter, request, batches)


@dataclass(frozen=True)
class Request:
    """A generation that a user asks for; see `Decoder.generate`."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    plan: Plan = field(default_factory=Plan)
    stop: Stop | None = None
    ignore_eos: bool = False
    sequence_ids: Sequence[int] | None = None
    speculate: bool | Sequence[bool] = True
    images: Sequence[ImageInputs | None] = ()  # of each prompt; () for none

    @cached_property
    def rows(self) -> list[Tensor]:
        """The prompts as tensors `[T]`; BadInputError for anything but whole numbers."""
        return [_whole_numbers(prompt, f"prompt {i}") for i, prompt in enumerate(self.prompts)]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt."""
        return [row.numel() for row in self.rows]

    @property
    def ids(self) -> list[int]:
        """The key of each prompt's randomness."""
        return list(range(len(self.prompts)) if self.sequence_ids is None else self.sequence_ids)

    @property
    def drafts(self) -> list[bool]:
        """Which prompts are drafted for."""
        flags = self.speculate
        return [flags] * len(self.prompts) if isinstance(flags, bool) else list(flags)

    @property
    def has_images(self) -> bool:
        return any(images is not None for images in self.images)

    def _check_images(self, target: Target) -> None:
        """Raise an error if `target` cannot read the images, or a prompt shows some that are not given."""
        token = target.image_token
        if not self.has_images:
            if token is not None and any(bool((row == token).any()) for row in self.rows):
                raise BadInputError(
                    f"a prompt holds image tokens ({token}), and no image is given with it: what was asked for reads "
                    "text alone. Leave out prompts with images."
                )
            return
        if (why := target.why_no_images()) is not None:
            raise IncompatibleError(f"{why} Take prompts without images.")
        if len(self.prompts) > 1 or len(self.images) > 1:
            raise BadInputError(f"prompts with images are decoded one at a time, not {len(self.prompts)} together.")

    def check(self, target: Target) -> None:
        """Raise BadInputError if `target` cannot serve the request."""
        count, new = len(self.prompts), self.max_new_tokens
        if not count:
            raise BadInputError("there are no prompts to complete.")
        if len(_whole_numbers(self.ids, "sequence_ids")) != count:
            raise BadInputError(f"{count} prompts, but {len(self.ids)} sequence ids.")
        if len(self.drafts) != count:
            raise BadInputError(f"{count} prompts, but {len(self.drafts)} flags for speculate.")
        if self.sampling.min_new_tokens > new:
            raise BadInputError(f"min_new_tokens is {self.sampling.min_new_tokens}, more than max_new_tokens ({new}).")
        limit = target.max_context
        for i, length in enumerate(self.lengths):
            if length == 0:
                raise BadInputError(f"prompt {i} is empty; give at least one token (for example the BOS token).")
            if limit is not None and length + new > limit:
                raise BadInputError(
                    f"prompt {i} has {length} tokens; with {new} new ones it exceeds the target's context of "
                    f"{limit}. Shorten the prompt or lower max_new_tokens."
                )
        self._check_images(target)

    def tokens(self, vocab: int) -> Tensor:
        """Return the prompts as a tensor `[B, T]`, zeros after the shorter ones.

        Raises BadInputError for a token outside the vocabulary.
        """
        tokens = pad_sequence(self.rows, batch_first=True)
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocab:
            outside = least if least < 0 else most
            raise BadInputError(f"a prompt holds token {outside}, outside the target's vocabulary of {vocab}.")
        return tokens


def _whole_numbers(values: Sequence[int], what: str) -> Tensor:
    """Return a sequence of ids as a tensor `[T]`; BadInputError for text, fractions, and numbers beyond 64 bits."""
    try:
        ids = torch.as_tensor(values, device="cpu") if len(values) else torch.zeros(0, dtype=torch.long)
        if ids.ndim == 1 and ids.dtype != torch.bool and not ids.is_floating_point() and not ids.is_complex():
            return ids.long()
        problem = f"{ids.dtype} in {ids.ndim} dimensions"
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        problem = reason(error)
    raise BadInputError(f"{what}: expected a sequence of ids, whole numbers of at most 64 bits; found {problem}.")


@dataclass
class _Sequence:
    """One prompt's text and rounds so far."""

    limit: int  # of its tokens
    ends: frozenset[int]  # tokens that end it
    stop: Stop | None
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    done: bool = False

    def emit(self, row: RoundRow) -> StreamEvent:
        """Append the tokens that a round adds, up to the sequence's end."""
        accepted = row.accepted
        drafted = row.drafted
        tried = row.tried
        emitted: list[int] = []
        for place, token in enumerate(row.tokens):
            if place == row.accepted and row.nothing_left:
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


class Run:
    """One generation, from its request to its output.

    `static_batches`: lend memory for rounds of fixed shapes, if such are wanted.

    Raises:
        BadInputError: see `Decoder.generate`.
        IncompatibleError: the plan drafts trees, and the target cannot verify them.
    """

    def __init__(self, target: Target, drafter: Drafter | None, request: Request, static_batches: StaticBatches):
        self.target = target
        self.request = request
        self.static_batches = static_batches
        self.device = target.device  # asked once: a model looks through its modules for it
        self.drafts = request.drafts
        self.drafter = drafter if any(self.drafts) and request.plan.depth else None
        request.check(target)
        target.check_batch(len(request.prompts))
        plan = request.plan if drafter is None else request.plan.up_to(drafter.max_depth)
        abilities = Abilities() if drafter is None else drafter.abilities
        if plan.is_tree and abilities.reads_nodes:
            target.check_trees()
        ends = frozenset(() if request.ignore_eos else target.eos_ids)
        processors = Processors(request.sampling, target.vocab_size, ends, target.device)
        # A drafter that copies would copy the tokens of images.
        undrafted = torch.tensor([target.image_token], device=target.device) if request.has_images else None
        idle = None if processors.idle else processors
        sampler_config = SamplerConfig(request.sampling, idle, target.vocab_size, undrafted)
        taps = () if self.drafter is None else self.drafter.taps
        check = None if self.drafter is None else ProposalCheck(target.vocab_size, self.drafter.max_nodes)
        self.setup = RoundSetup(target, plan, sampler_config, abilities, taps, proposals=check)
        self.controller = None if self.drafter is None else _controller(plan, abilities, len(request.prompts))
        self.sequences = [_Sequence(request.max_new_tokens, ends, request.stop) for _ in request.prompts]
        self._parts = prompt_parts(request.lengths, target)
        self._shared = shared_tokens(request.rows, target)  # tokens that all prompts begin with, and are read once
        self.active = [i for part in self._parts for i in part]  # active[i] is the sequence of row i
        self.seconds, self.rule = Seconds(), "none"
        self.static_batch: StaticBatch | None = None
        self.margin = 0  # entries that a round of fixed shape may write after the longest row
        self._pending: PendingRound | None = None  # a round that runs while the one before it is read
        self._launched = False  # a round of fixed shape
        self._drafted_at = 0.0  # when the round that is under way had drafted

    def output(self) -> Output:
        """Return the texts and figures so far."""
        tokens, rounds = [s.tokens for s in self.sequences], [s.rounds for s in self.sequences]
        stats = DecodeStats(rounds, sum(map(len, tokens)), self.seconds)
        return Output(tokens, rounds, stats, self.rule, self.setup.lossy)

    def steps(self) -> Iterator[list[StreamEvent]]:
        """Run to the end; yield, per step, one event for each prompt that was still active, in no fixed order."""
        try:
            began = time.perf_counter()
            with torch.inference_mode(), steady_kernels():  # per step: a generator must not leave them on in its caller
                state, events = self._prefill()
            self.seconds.total = time.perf_counter() - began
            yield events
            while not all(sequence.done for sequence in self.sequences):
                began = time.perf_counter()
                with torch.inference_mode(), steady_kernels():
                    state, events = self._round(self._without_finished(state))
                self.seconds.total += time.perf_counter() - began
                yield events
        finally:
            if self.static_batch is not None:
                self.static_batches.give_back(self.static_batch)

    def _prefill(self) -> tuple[RoundState, list[StreamEvent]]:
        """Process the prompts; the token that follows each becomes its root."""
        began = self._clock()
        tokens = self.request.tokens(self.target.vocab_size)[self.active].to(self.device)
        counts = RowLengths.of([self.request.lengths[i] for i in self.active], self.device)
        state = self._open(tokens, counts)
        images = next(iter(self.request.images), None)  # with images there is one prompt
        asked = self.setup.taps, list(map(len, self._parts)), self._shared, images
        logits, hidden = read_prompts(self.target, tokens, counts, state.cache, *asked)
        keys = Keys(state.seed, state.sequences, counts.tensor)
        state, packed = first_tokens(self.setup, state, logits, keys)
        state.session.update(tokens, hidden, counts)
        events = self._emit(RoundRow.unpack(packed.tolist()))
        for sequence in self.sequences:  # the first token belongs to no round
            sequence.rounds.clear()
        self.seconds.prefill += self._clock() - began
        return state, events

    def _open(self, tokens: Tensor, counts: RowLengths) -> RoundState:
        """Take memory for the prompts `[B, T]` and what follows, for the target and the drafter."""
        request = self.request
        drafter = self.drafter
        rows = len(tokens)
        fixed = self.static_batches.wanted and self.target.rewinds
        fixed = fixed and (drafter is None or self.setup.abilities.fixed_shapes or self.setup.abilities.from_text)
        depth = 0 if drafter is None else self.setup.plan.depth
        nodes = 0 if drafter is None or self.setup.abilities.reads_nodes else drafter.max_nodes(depth)
        sizes = (rows, max(counts.values), request.max_new_tokens, depth)
        part = max(len(part) * max(request.lengths[i] for i in part) for part in self._parts)
        ahead, shares = fixed and self._can_go_ahead, self._shared > 0
        load = Load(*sizes, self.setup.plan, request.sampling, fixed, nodes, ahead, part, shares)
        require_memory(self.target, drafter, load, self.static_batches.held(rows, drafter) if fixed else 0)
        session: Session
        if fixed:
            self.static_batch = self.static_batches.reserve(rows, load.length, load.spare, drafter)
            self.margin = load.margin
            self.setup = replace(self.setup, may_sync=False)
            _ = self.setup.static_tree  # made now: a capture may not copy from the host
            cache, session = self.static_batch.cache, self.static_batch.session
        else:
            cache, session = self.target.new_cache(rows, load.target_length), NoDraftSession()
            spare = load.spare if self.setup.abilities.reads_nodes else 0
            if drafter is not None:
                session = drafter.open(self.target, rows, load.length, spare, cache)
        self._check_output_ids(session)
        seed: Seed = seed_on(tokens.device, request.sampling.seed) if fixed else request.sampling.seed
        drafts = [self.drafts[i] for i in self.active]
        speculate = None if all(drafts) else torch.tensor(drafts, device=tokens.device)
        processors = self.setup.sampler_config.processors
        context = None if processors is None else processors.start(tokens, counts.tensor)
        ids = torch.tensor([request.ids[i] for i in self.active], device=tokens.device)
        return RoundState(tokens[:, 0], ids, seed, speculate, context, cache, session)

    def _check_output_ids(self, session: Session) -> None:
        """Raise IncompatibleError if the session, which may be somebody else's, drafts tokens that do not exist."""
        ids = None if session.model is None else session.model.output_ids
        if ids is None:
            return
        least, most = torch.stack(ids.aminmax()).tolist() if len(ids) else (-1, -1)  # one wait for the device
        if least >= 0 and most < self.target.vocab_size:
            return
        found = f"tokens from {least} to {most}" if len(ids) else "empty"
        raise IncompatibleError(
            f"the output_ids of the drafter's {type(session).__name__} are {found}; expected ids from 0 to "
            f"{self.target.vocab_size - 1}, the target's vocabulary. Mend the session "
            "(docs/developers/adding-a-drafter.md), or take another drafter."
        )

    def _round(self, state: RoundState) -> tuple[RoundState, list[StreamEvent]]:
        began = self._drafted_at = self._clock()
        state, depth = self._depth(state)
        current = self._pending or self._launch(state, depth)
        state = replace(current.state, session=state.session)  # plain from now on, where no row is drafted for
        self._pending = self._launch(state, depth) if self._goes_ahead(state, depth) else None
        rows = current.read() if self.static_batch is None else self.static_batch.read(current)
        if depth:
            self.rule = self.setup.rule
        events = self._emit(rows)
        self.seconds.draft += self._drafted_at - began
        self.seconds.verify += self._clock() - self._drafted_at
        return state if self._pending is None else self._pending.state, events

    def _launch(self, state: RoundState, depth: int) -> PendingRound:
        """Launch a round; where its shapes are not fixed, its drafting is timed."""
        if self.static_batch is None:
            proposal = propose(self.setup, state.session, state.root, depth)
            with_model = model_drafts(proposal, len(state.root))
            before = replace(state, proposal=proposal)
            after, result = step(self.setup, before, depth, with_model, self._note_drafted)
            return PendingRound(replace(after, proposal=None), result.packed.tolist)
        if not self._launched:  # only now: the first token is out
            state.session.read_ahead(1 + self.setup.plan.depth)
            self._launched = True
        idle = [row for row, i in enumerate(self.active) if self.sequences[i].done]
        return self.static_batch.launch(self.setup, state, depth, idle, self._longest(state) + self.margin)

    def _note_drafted(self) -> None:
        self._drafted_at = self._clock()

    @property
    def _can_go_ahead(self) -> bool:
        """Whether the host decides nothing between two rounds of this request."""
        return self.static_batches.ahead and self.controller is None and not self.setup.abilities.from_text

    def _goes_ahead(self, state: RoundState, depth: int) -> bool:
        """Return whether to launch the next round before this one is read: not where it may pass the context's end."""
        if self.static_batch is None or not self._can_go_ahead:
            return False
        limit = self.target.max_context
        return limit is None or self._longest(state) + 2 * (1 + depth) < limit

    def _without_finished(self, state: RoundState) -> RoundState:
        """Return the state without the rows of finished sequences (in rounds of fixed shapes they stay).

        The last rows take the places of those that leave, so that a cache moves no more entries than it must.
        """
        if self.static_batch is not None:
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
        """Return the time; after the device has finished, unless a round runs while the host reads."""
        return time.perf_counter() if self._pending is not None else clock(self.device)

    def _depth(self, state: RoundState) -> tuple[RoundState, int]:
        """Return the round's depth, inside the context: the plan's, its controller's, or 0 if no row drafts."""
        if self.drafter is None:
            return state, 0
        drafting = [i for i in self.active if self.drafts[i] and not self.sequences[i].done]
        if not drafting:
            return replace(state, session=NoDraftSession()), 0  # for good: the drafter is not needed again
        depth = self.setup.plan.depth if self.controller is None else self.controller.choose(drafting)
        limit = self.target.max_context
        return state, depth if limit is None else min(depth, limit - self._longest(state) - 1)

    def _longest(self, state: RoundState) -> int:
        """Return the committed entries of the longest row that has not finished."""
        rows = zip(self.active, state.cache.host_lengths, strict=True)
        return max(length for i, length in rows if not self.sequences[i].done)

    def _emit(self, rows: list[RoundRow]) -> list[StreamEvent]:
        """Record a round in every sequence that was still active."""
        self._require_finite(rows)
        events = []
        for i, row in zip(self.active, rows, strict=True):
            if self.sequences[i].done:
                continue
            events.append(self.sequences[i].emit(row))
            if self.controller is not None:
                self.controller.note(i, row.tried, row.accepted)
        return events

    def _require_finite(self, rows: list[RoundRow]) -> None:
        """Raise NotFiniteError, naming the layer, if the logits of an unfinished row are not finite."""
        for i, row in zip(self.active, rows, strict=True):
            if row.not_finite and not self.sequences[i].done:
                count, advice = len(self.sequences[i].tokens), "Take a good copy of the weights."
                if self.target.dtype == torch.float16:
                    advice += " Or load the target in bfloat16 or float32: float16 ends at 65504."
                raise NotFiniteError(
                    f"prompt {i}, after {count} new {'token' if count == 1 else 'tokens'}: the logits are not finite "
                    f"(NaN or infinite), so no token can be drawn from them. {self._traced(i).explanation()} {advice}"
                )

    def _traced(self, i: int) -> NonFiniteTracer:
        """Return a tracer after one prefill and one round of sequence `i` alone, up to where it is now."""
        models = {"the target": self.target.model} | ({} if self.drafter is None else {"the drafter": self.drafter})
        tracer, request = NonFiniteTracer(models), self.request
        tokens = [*request.prompts[i], *self.sequences[i].tokens[:-1]]
        again = replace(
            request,
            prompts=[tokens],
            max_new_tokens=2,
            sampling=replace(request.sampling, min_new_tokens=0),
            plan=replace(request.plan, control=None),
            stop=None,
            sequence_ids=[request.ids[i]],
            speculate=[self.drafts[i]],
            images=request.images[i : i + 1],
        )
        try:
            with tracer.tracing(), by_library(self.target):
                for _ in _Replay(self.target, self.drafter, again, StaticBatches(self.target, False)).steps():
                    pass
        except LIBRARY_ERRORS:  # too little memory for a second cache, for example; what was seen until then counts
            _log.debug("tracing logits that are not finite broke off", exc_info=True)
        return tracer


class _Replay(Run):
    """A generation that is repeated while its layers are traced: logits that are not finite do not end it."""

    def _require_finite(self, rows: list[RoundRow]) -> None:
        pass


def _controller(plan: Plan, abilities: Abilities, sequences: int) -> Controller | None:
    """Return the controller that the plan asks for; of a tree it may choose the whole tree or nothing."""
    if plan.control is None or isinstance(plan.control, Schedule) or not plan.depth:
        return None
    if plan.is_tree and abilities.reads_nodes:
        return Controller(plan.control, sequences, [plan.depth], [plan.max_nodes])
    depths = range(1, plan.depth + 1)
    return Controller(plan.control, sequences, depths, depths)
