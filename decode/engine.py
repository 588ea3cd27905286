"""The lossless speculative decoder: one loop for every drafter, every rule, and for no drafter at all.

Shapes: B active rows, k draft tokens, Q = k + 1 tokens of a verification pass, V vocabulary.

A sequence is committed tokens plus a `root`: its last token, which the target has not processed yet. A round drafts
behind the root, verifies root and drafts in one pass, and ends with a new root. What a round emits is read by the host
once; everything else stays on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..heads import Drafter, Proposal
from ..target import BadInputError, Counts, RaggedCache, Target
from . import verify
from .sampling import ACCEPT, CORRECT, DRAFT, Context, Processors, Sampling, draw, gumbel, nothing_left, probabilities, uniforms
from .stats import DecodeStats, Round, Seconds

Stop = Callable[[list[int]], bool]

_NOTHING = -1  # in place of a following token: the processors left none


@dataclass(frozen=True)
class Plan:
    """The shape of a proposal and how it is verified.

    Attributes:
        depth: draft tokens per round; 0 is plain decoding.
        verify: "auto", or one of `decode.verify.RULES`. Auto is greedy at temperature 0, candidates for deterministic
            drafters, else rejection.
    """

    depth: int = 4
    verify: str = "auto"

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise BadInputError(f"plan: depth must be >= 0, got {self.depth}.")
        if self.verify not in ("auto", *verify.RULES):
            raise BadInputError(f"plan: unknown verification rule {self.verify!r}; known: auto, {', '.join(verify.RULES)}.")


@dataclass
class Output:
    """What `Decoder.generate` returns.

    Attributes:
        tokens: new tokens per prompt, the prompt excluded.
        rounds: rounds per prompt. The first token comes from the prefill and belongs to no round.
        stats: figures over all of them.
        rule: the verification rule that ran ("auto" resolved), or "none" if nothing was drafted.
    """

    tokens: list[list[int]]
    rounds: list[list[Round]]
    stats: DecodeStats
    rule: str = "none"


@dataclass(frozen=True)
class Event:
    """One step of a stream: tokens that were just emitted; the first `accepted` of them were drafted."""

    tokens: list[int]
    accepted: int
    drafted: int


@dataclass
class _Batch:
    """The state of a running batch; `active[i]` is the prompt that row i belongs to."""

    active: list[int]
    root: Tensor  # [B]
    cache: RaggedCache
    sequences: Tensor  # [B]
    context: Context | None  # of what is committed, the root included; None without processors
    drafting: object = None


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

    Raises:
        IncompatibleError: the drafter cannot draft for this target (taps, sizes, vocabulary).
    """

    def __init__(self, target: Target, drafter: Drafter | None = None):
        self.target, self.drafter = target, drafter
        if drafter is not None:
            drafter.check(target)
            drafter.to(target.device).eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        plan: Plan | None = None,
        stop: Stop | None = None,
        ignore_eos: bool = False,
        sequence_ids: Sequence[int] | None = None,
    ) -> Output:
        """Complete all `prompts` (token ids, of any lengths) in one batch.

        Args:
            stop: called with a sequence's new tokens after each token; True ends it there.
            sequence_ids: what keys each prompt's randomness (default: its index), so that a prompt gets the same text in
                whatever batch it runs.

        Raises:
            BadInputError: an empty prompt, a prompt that leaves no room in the target's context, or a place at which
                `sampling` forbids every token.
        """
        run = _Run(self, prompts, max_new_tokens, sampling or Sampling(), plan or Plan(), stop, ignore_eos, sequence_ids)
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
    ) -> Iterator[Event]:
        """Complete one prompt, yielding what each round emits."""
        run = _Run(self, [prompt], max_new_tokens, sampling or Sampling(), plan or Plan(), stop, ignore_eos, None)
        for events in run.steps():
            yield events[0]


class _Run:
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
    ):
        self.target, self.drafter = decoder.target, decoder.drafter
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.sampling, self.stop = sampling, stop
        self.depth = plan.depth if self.drafter is not None else 0
        self.plan = plan
        self.eos = frozenset(() if ignore_eos else self.target.eos_ids)
        processors = Processors(sampling, self.target.vocab_size, self.eos, self.target.device)
        self.processors = None if processors.idle else processors
        self.ids = list(sequence_ids) if sequence_ids is not None else list(range(len(prompts)))
        self.sequences = [_Sequence() for _ in prompts]
        self.seconds = Seconds()
        self.rule = "none"
        self._check()

    def _check(self) -> None:
        if not self.prompts:
            raise BadInputError("there are no prompts to complete.")
        if len(self.ids) != len(self.prompts):
            raise BadInputError(f"{len(self.prompts)} prompts, but {len(self.ids)} sequence ids.")
        if self.max_new_tokens < 1:
            raise BadInputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if self.sampling.min_new_tokens > self.max_new_tokens:
            raise BadInputError(f"min_new_tokens is {self.sampling.min_new_tokens}, more than max_new_tokens ({self.max_new_tokens}).")
        limit = self.target.max_context
        for i, prompt in enumerate(self.prompts):
            if len(prompt) == 0:
                raise BadInputError(f"prompt {i} is empty; give at least one token (for example the BOS token).")
            if limit is not None and len(prompt) + self.max_new_tokens > limit:
                raise BadInputError(
                    f"prompt {i} has {len(prompt)} tokens; with {self.max_new_tokens} new ones it exceeds the target's context of {limit}. "
                    "Shorten the prompt or lower max_new_tokens."
                )

    def output(self) -> Output:
        tokens = [s.tokens for s in self.sequences]
        rounds = [s.rounds for s in self.sequences]
        return Output(tokens, rounds, DecodeStats(rounds, sum(map(len, tokens)), self.seconds), self.rule)

    # ------------------------------------------------------------ the loop

    def steps(self) -> Iterator[list[Event]]:
        """Run to the end; yields, per step, one event for each prompt that was still active.

        Inference mode is entered per step: a generator must not leave it on in its caller.
        """
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

    def _prefill(self) -> tuple[_Batch, list[Event]]:
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
        room = width + self.max_new_tokens + self.depth + 1
        batch = _Batch(list(range(rows)), tokens[:, 0], self.target.new_cache(rows, room), torch.tensor(self.ids, device=device), None)
        if self.processors is not None:
            batch.context = self.processors.start(tokens, counts.tensor)
        out = self.target.forward(tokens, batch.cache, taps=self._taps(), at=counts.tensor[:, None] - 1)
        batch.cache.advance(counts)
        assert out.logits is not None
        empty = Proposal.chain(tokens[:, :0])
        _, following = self._verify(batch, empty, out.logits, [], counts.tensor)
        if self.depth:
            assert self.drafter is not None
            batch.drafting = self.drafter.open(self.target, rows, room)
            self.drafter.absorb(batch.drafting, tokens, out.hidden, counts)
        events, _ = self._commit(batch, empty, torch.zeros_like(following), following, prefill=True)
        self.seconds.prefill += self._clock() - started
        return batch, events

    def _check_tokens(self, tokens: Tensor) -> None:
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.target.vocab_size:
            raise BadInputError(
                f"a prompt holds token {int(tokens.max() if tokens.min() >= 0 else tokens.min())}, outside the target's vocabulary of {self.target.vocab_size}."
            )

    def _round(self, batch: _Batch) -> list[Event]:
        started = self._clock()
        proposal, draft_probs = self._draft(batch)
        drafted = self._clock()
        tokens = torch.cat([batch.root[:, None], proposal.tokens], 1)  # [B, k + 1]
        out = self.target.forward(tokens, batch.cache, taps=self._taps())
        assert out.logits is not None
        accepted, following = self._verify(batch, proposal, out.logits, draft_probs, batch.cache.lengths + 1)
        events, kept = self._commit(batch, proposal, accepted, following)
        counts = Counts(accepted + 1, [k + 1 for k in kept])
        batch.cache.advance(counts)
        if self.drafter is not None and batch.drafting is not None:
            self.drafter.absorb(batch.drafting, tokens, out.hidden, counts)
        verified = self._clock()
        self.seconds.draft += drafted - started
        self.seconds.verify += verified - drafted
        return events

    def _free_rows(self, batch: _Batch) -> bool:
        """Drop the rows of finished sequences; False when none is left."""
        alive = [row for row, i in enumerate(batch.active) if not self.sequences[i].done]
        if not alive or len(alive) == len(batch.active):
            return bool(alive)
        batch.active = [batch.active[r] for r in alive]
        batch.root, batch.sequences = batch.root[alive], batch.sequences[alive]
        batch.context = None if batch.context is None else batch.context.select(alive)
        batch.cache.select(alive)
        if self.drafter is not None and batch.drafting is not None:
            self.drafter.select(batch.drafting, alive)
        return True

    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None and self.depth else ()

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    # ------------------------------------------------------------ drafting

    def _draft(self, batch: _Batch) -> tuple[Proposal, list[Tensor]]:
        """A proposal, and the distributions its tokens were drawn from (`[B, V]` per depth; empty for none)."""
        depth = self._room(batch)
        if self.drafter is None or not depth:
            return Proposal.chain(batch.root[:, None][:, :0]), []
        chooser = _Chooser(self, batch)
        proposal = self.drafter.propose(batch.drafting, batch.root, depth, chooser)
        self.rule = self._rule(proposal.deterministic)
        return proposal, chooser.probs

    def _room(self, batch: _Batch) -> int:
        """The depth of this round: the plan's, unless the target's context ends before it."""
        limit = self.target.max_context
        return self.depth if limit is None else min(self.depth, limit - batch.cache.longest - 1)

    def _rule(self, deterministic: bool) -> str:
        if self.sampling.greedy:
            return "greedy"
        if self.plan.verify == "auto":
            return "candidates" if deterministic else "rejection"
        if self.plan.verify == "greedy":
            raise BadInputError(f"the greedy rule needs temperature 0, got {self.sampling.temperature}.")
        # A deterministic proposal has no distribution to reject against.
        return "candidates" if deterministic and self.plan.verify == "rejection" else self.plan.verify

    # ------------------------------------------------------------ verification

    def _verify(self, batch: _Batch, proposal: Proposal, logits: Tensor, draft_probs: list[Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted drafts and the following token, `[B]` each, from the target's logits `[B, k + 1, V]`.

        `first` `[B]` is the index in its sequence of the token that the first logits predict.
        """
        if self.processors is None or batch.context is None:
            return self._apply_rule(batch, proposal, logits, draft_probs, first)
        logits = self.processors(logits, batch.context.then(proposal.tokens, _paths(proposal)))
        accepted, following = self._apply_rule(batch, proposal, logits, draft_probs, first)
        return accepted, following.masked_fill(nothing_left(logits).gather(1, accepted[:, None])[:, 0], _NOTHING)

    def _apply_rule(self, batch: _Batch, proposal: Proposal, logits: Tensor, draft_probs: list[Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
        """The same, from processed logits."""
        drafts, lengths = proposal.tokens, proposal.lengths
        rule = self._rule(proposal.deterministic)
        if rule == "greedy":
            return verify.match(drafts, lengths, logits.argmax(-1))
        sequences = batch.sequences
        positions = first[:, None] + torch.arange(logits.shape[1], device=logits.device)
        probs = probabilities(logits, self.sampling)
        seed = self.sampling.seed
        if rule == "coupled":
            noise = gumbel(seed, sequences[:, None], positions, probs.shape[-1])
            return verify.match(drafts, lengths, (probs.double().log() + noise).argmax(-1))
        if rule == "candidates" or not draft_probs:
            return verify.match(drafts, lengths, draw(probs, uniforms(seed, CORRECT, sequences[:, None], positions)))
        return verify.rejection(
            drafts, lengths, probs, torch.stack(draft_probs, 1),
            uniforms(seed, ACCEPT, sequences[:, None], positions[:, :1], positions[:, :-1]),
            uniforms(seed, CORRECT, sequences, positions[:, 0]),
        )  # fmt: skip

    # ------------------------------------------------------------ committing

    def _commit(self, batch: _Batch, proposal: Proposal, accepted: Tensor, following: Tensor, prefill: bool = False) -> tuple[list[Event], list[int]]:
        """Read the round's outcome back, once, and note it for every sequence; returns the events and the accepted counts."""
        packed = torch.cat([proposal.tokens, following[:, None], accepted[:, None], proposal.lengths[:, None]], 1).tolist()
        if batch.context is not None:
            kept = torch.arange(proposal.tokens.shape[1], device=accepted.device) < accepted[:, None]
            emitted = torch.cat([kept, (following != _NOTHING)[:, None]], 1)
            batch.context = batch.context.then(torch.cat([proposal.tokens, following[:, None]], 1), emitted[:, None])
        batch.root = following
        events = []
        for i, (*drafts, last, kept_count, drafted) in zip(batch.active, packed, strict=True):
            events.append(self._emit(self.sequences[i], [*drafts[:kept_count], last], drafted, prefill))
        return events, [row[-2] for row in packed]

    def _emit(self, sequence: _Sequence, new: list[int], drafted: int, prefill: bool) -> Event:
        """Append what a round gave to one sequence, up to its end."""
        accepted = len(new) - 1
        emitted = []
        for token in new:
            if token == _NOTHING:
                raise BadInputError("sampling: bad_words, suppress and min_new_tokens together leave no token to go on with; forbid less.")
            emitted.append(token)
            sequence.tokens.append(token)
            if token in self.eos or (self.stop is not None and self.stop(sequence.tokens)):
                # What was drafted from the end on was never wanted, and the end token counts as the target's own.
                sequence.done = True
                if len(emitted) <= accepted:
                    drafted = accepted = len(emitted) - 1
                break
            if len(sequence.tokens) == self.max_new_tokens:
                sequence.done = True
                break
        if not prefill:
            sequence.rounds.append(Round(drafted, accepted, len(emitted)))
        return Event(emitted, min(accepted, len(emitted)), drafted)


class _Chooser:
    """Picks draft tokens from a drafter's logits under the same filters as the target's, and remembers the distributions."""

    def __init__(self, run: _Run, batch: _Batch):
        self.run, self.batch = run, batch
        self.context = batch.context
        self.depth = 0
        self.probs: list[Tensor] = []
        self.rule = run._rule(deterministic=False)

    def __call__(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        self.depth += 1
        if self.rule in ("greedy", "candidates") and self.context is None:
            best = logits.argmax(-1)
            return best if token_ids is None else token_ids[best]
        logits = _spread(logits.float(), token_ids, self.run.target.vocab_size)
        if self.context is None:
            return self._pick(logits)
        chosen = self._pick(self._process(logits, self.context))
        self.context = self.context.then(chosen[:, None], torch.ones(1, 1, 1, dtype=torch.bool, device=chosen.device))
        return chosen

    def _process(self, logits: Tensor, context: Context) -> Tensor:
        assert self.run.processors is not None
        processed = self.run.processors(logits[:, None], context)[:, 0]
        # A pruned vocabulary may hold no token that is allowed here. What is drafted then is refused, but must be a draw from what it is scored with.
        return torch.where(nothing_left(processed)[:, None], logits, processed)

    def _pick(self, logits: Tensor) -> Tensor:
        if self.rule in ("greedy", "candidates"):
            return logits.argmax(-1)
        sampling, sequences = self.run.sampling, self.batch.sequences
        probs = probabilities(logits, sampling)
        positions = self.batch.cache.lengths + self.depth
        if self.rule == "coupled":
            return (probs.double().log() + gumbel(sampling.seed, sequences, positions, probs.shape[-1])).argmax(-1)
        self.probs.append(probs)
        # Keyed by the root's position too: a token drafted again in a later round is a new draw.
        return draw(probs, uniforms(sampling.seed, DRAFT, sequences, self.batch.cache.lengths, positions))


def _spread(logits: Tensor, token_ids: Tensor | None, vocab: int) -> Tensor:
    """Logits over a pruned vocabulary `[B, V']` as logits over the whole one `[B, V]`."""
    if token_ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab), float("-inf"))
    return whole.scatter(1, token_ids.expand(len(logits), -1), logits)


def _paths(proposal: Proposal) -> Tensor:
    """Which drafts stand before the token that each node's logits predict, `[1, k + 1, k]`; node 0 is the root."""
    depth = proposal.tokens.shape[1]
    return torch.ones(1, depth + 1, depth, dtype=torch.bool, device=proposal.tokens.device).tril(-1)
