"""What our loop costs beside the model passes that it makes, which are run bare, round by round in turns with it.

A request is completed by the decoder once, which tells how many drafts each round kept. Then it is completed again,
and after each of its rounds the passes of that round are repeated without it: on the same tokens, after the same
context, in a cache of their own, as many drafts read and tokens verified; but nothing is chosen, judged, read back or
noted. So both see the same machine at the same time. What is compared are medians over rounds. The first round is
left out: a drafter reads the prompt there.

The clock of a bare round runs in its passes only. There are two clocks: the wall's, and the processor's, which does
not count what other programs took. All this is for rounds that run eagerly; where they are captured as CUDA graphs, a
round is compared with its parts, captured and timed apart (`Overhead.of_parts`).

Shapes: B rows, T tokens of a whole text.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.common.machine import clock
from outrider.eval import Interval, Ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.heads import Drafter, NodeSession
from outrider.targets import RowLengths, Target

from .loops import Ours, Texts, Timed
from .report import shown

Result = TypeVar("Result")


@dataclass(frozen=True)
class Overhead:
    """Seconds of a round, the mean over prompts of the medians over rounds.

    Attributes:
        rounds: None where a round and its passes were timed apart.
        share: (loop − bare) ÷ bare, with an interval over prompts. processor: the same of the processor's time.
    """

    loop_seconds: float
    bare_seconds: float
    rounds: int | None
    share: Interval
    processor: Interval | None

    @classmethod
    def of_parts(cls, round_seconds: float, parts: Sequence[float]) -> Overhead:
        """Return the figures from the time of a round and those of its passes, timed apart."""
        bare = sum(parts)
        return cls(round_seconds, bare, None, Interval(round_seconds / bare - 1, math.nan, math.nan), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "loop_seconds_per_round": self.loop_seconds,
            "bare_seconds_per_round": self.bare_seconds,
            "rounds": self.rounds,
            **_shown(self.share),
            "of_processor_time": self.processor and _shown(self.processor),
        }


def _shown(share: Interval) -> dict[str, float | None]:
    figures = shown(share, 5)
    return {"share": figures["value"], "low": figures["low"], "high": figures["high"]}


@dataclass(frozen=True)
class Clocks:
    """Seconds on the wall's clock and on the processor's."""

    wall: float
    processor: float

    @classmethod
    def now(cls, device: torch.device) -> Clocks:
        return cls(clock(device), time.process_time())

    def __sub__(self, earlier: Clocks) -> Clocks:
        return Clocks(self.wall - earlier.wall, self.processor - earlier.processor)

    def __add__(self, other: Clocks) -> Clocks:
        return Clocks(self.wall + other.wall, self.processor + other.processor)

    @classmethod
    def medians(cls, readings: Sequence[Clocks]) -> Clocks:
        return cls(statistics.median([r.wall for r in readings]), statistics.median([r.processor for r in readings]))


def loop_overhead(loop: Ours, batches: Sequence[Texts], repeats: int) -> Overhead:
    """Return the overhead over the rounds of each of `batches`, completed `repeats` times in turns with bare passes.

    The loop's plan is plain, or chains of a fixed depth. Of a batch, rounds count for as long as its first row runs.

    Raises:
        BadInputError: no batch takes more than one round.
    """
    pairs = [pair for batch in batches if (pair := _medians(loop, batch, repeats)) is not None]
    if not pairs:
        raise BadInputError(
            f"loop overhead: {loop.name} needs requests of two rounds at least; "
            f"ask for more new tokens than {loop.new_tokens}."
        )
    looped, bare, rounds = zip(*pairs, strict=True)
    wall = _share([c.wall for c in looped], [c.wall for c in bare])
    processor = _share([c.processor for c in looped], [c.processor for c in bare])
    loop_seconds, bare_seconds = (statistics.mean(c.wall for c in each) for each in (looped, bare))
    return Overhead(loop_seconds, bare_seconds, sum(rounds), wall, processor)


def _share(looped: list[float], bare: list[float]) -> Interval:
    ones = [1] * len(bare)
    quotient = Bootstrap([len(bare)]).quotient(Ratio(looped, ones), Ratio(bare, ones))
    return Interval(quotient.value - 1, quotient.low - 1, quotient.high - 1)


def _medians(loop: Ours, batch: Texts, repeats: int) -> tuple[Clocks, Clocks, int] | None:
    """Return the medians of a round by the loop and bare, and how many rounds there were."""
    known = loop(batch)  # also a warm-up
    looped: list[Clocks] = []
    bare: list[Clocks] = []
    for _ in range(repeats):
        turns = _Turns(Passes.of(loop, batch, known))
        loop(batch, turns.see)
        looped += turns.looped
        bare += turns.bare
    return (Clocks.medians(looped), Clocks.medians(bare), len(looped)) if looped else None


class _Turns:
    """Notes the time of each round of the loop after it, and then runs the passes of that round bare."""

    def __init__(self, passes: Passes):
        self.passes, self.device = passes, passes.target.device
        self.looped: list[Clocks] = []
        self.bare: list[Clocks] = []
        assert passes.known.accepted is not None
        # How many tokens the first row has when the first token of each round is added.
        self.due: list[int] = []
        length = 2
        for kept in passes.known.accepted[0]:
            self.due.append(length)
            length += kept + 1
        self.round, self.resumed = 0, Clocks.now(self.device)
        passes.prefill()

    def see(self, length: int) -> None:
        """Note that the first row has `length` new tokens."""
        if self.round < len(self.due) and length == self.due[self.round]:
            spent = Clocks.now(self.device) - self.resumed
            bare = self.passes.run(self.round)
            if self.round:
                self.looped.append(spent)
                self.bare.append(bare)
            self.round += 1
            self.resumed = Clocks.now(self.device)


@dataclass
class Passes:
    """The passes of one finished request, round by round."""

    target: Target
    drafter: Drafter | None
    depth: int
    prompts: Texts
    known: Timed

    @classmethod
    def of(cls, loop: Ours, prompts: Texts, known: Timed) -> Passes:
        drafter, depth = loop.decoder.drafter, loop.plan.depth
        if drafter is None or depth == 0:
            return cls(loop.decoder.target, None, 0, prompts, known)
        inner = drafter.packed_as(loop.decoder.target)
        return cls(loop.decoder.target, inner, min(depth, inner.max_depth or depth), prompts, known)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Read the prompts."""
        target, drafter = self.target, self.drafter
        counts = RowLengths.of([len(p) for p in self.prompts], target.device)
        self.texts, self.alive = self._texts(), list(range(len(self.prompts)))
        self.cache = target.new_cache(*self.texts.shape)
        tokens = self.texts[:, : max(counts.values)]
        out = target.forward(tokens, self.cache, taps=self._taps(), at=counts.tensor[:, None] - 1)
        self.cache.advance(counts)
        self.session: NodeSession | None = None
        if drafter is not None:
            session = drafter.open(target, *self.texts.shape)
            if not isinstance(session, NodeSession):
                raise BadInputError(f"{drafter.name} reads no nodes: its passes cannot be told from its loop.")
            session.update(tokens, out.hidden, counts)
            self.session = session

    def _texts(self) -> Tensor:
        """Return prompts and what followed them, `[B, T]`; after it zeros, for drafts past the end."""
        whole = [list(prompt) + new for prompt, new in zip(self.prompts, self.known.tokens, strict=True)]
        longest = max(map(len, whole)) + self.depth + 1
        return torch.tensor([text + [0] * (longest - len(text)) for text in whole], device=self.target.device)

    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None else ()

    @torch.inference_mode()
    def run(self, round: int) -> Clocks:
        """Return the time of the passes of a round; rounds come in their order."""
        target, session = self.target, self.session
        counts = self._counts(round)
        places = self.cache.lengths[:, None] + torch.arange(1 + self.depth, device=target.device)
        tokens = self.texts.gather(1, places.clamp(max=self.texts.shape[1] - 1))  # the root, and the right drafts
        spent = Clocks(0, 0)

        def timed(work: Callable[..., Result], *given: Any, **named: Any) -> Result:
            nonlocal spent
            began = Clocks.now(target.device)
            result = work(*given, **named)
            spent += Clocks.now(target.device) - began
            return result

        if session is not None:
            timed(session.prefill, tokens[:, 0])
            for i in range(1, self.depth):
                timed(session.decode, tokens[:, i : i + 1])
        out = timed(target.forward, tokens, self.cache, taps=self._taps())
        self.cache.advance(counts)
        if session is not None:
            timed(session.update, tokens, out.hidden, counts)  # some make a pass here
        return spent

    def _counts(self, round: int) -> RowLengths:
        """Return how many tokens each row keeps of this round, the root included; rows that are finished are freed."""
        assert self.known.accepted is not None
        rows = [row for row in self.alive if len(self.known.accepted[row]) > round]
        if rows != self.alive:
            where = [self.alive.index(row) for row in rows]
            self.alive, self.texts = rows, self.texts[where]
            self.cache.select(where)
            if self.session is not None:
                self.session.select(where)
        return RowLengths.of([self.known.accepted[row][round] + 1 for row in rows], self.target.device)
