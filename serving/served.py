"""Served equals measured: a pair's prompts through a running engine, and what parts from our own decoder."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import Any

from rich.console import Console

from ..common.progress import Advance, progress
from .comparison import Replies, Reply, Write, compare
from .counters import Counters
from .diagnosis import drafts_differ, suspicions
from .engine import Ask, Engine, EngineCompletion
from .fault_models import Explanation, explain
from .reference_run import DraftCounts, Expectation
from .result import TOLERANCE, ServedResult


def ask_all(
    engines: Sequence[Engine], expected: Expectation, temperature: float, advance: Advance
) -> tuple[list[list[Reply]], int]:
    """Send every prompt to every engine, in turns, and read the engine's counters after each answer.

    Above temperature 0 each prompt is sent as often as our own decoder answered it.

    Returns:
        The replies of each engine, and how many new tokens the engines counted that were not ours.
    """
    ask = Ask(expected.max_new_tokens, temperature)
    for engine in engines:
        engine.complete(expected.prompts[0].tokens, ask)  # first calls are slow
    looks = [engine.counters() for engine in engines]
    replies: list[list[Reply]] = [[] for _ in engines]
    foreign = 0
    for number, prompt in enumerate(expected.prompts):
        for i in range(len(engines)):
            turn = (number + i) % len(engines)
            found = []
            for _ in range(expected.seeds(temperature)):
                answer = engines[turn].complete(prompt.tokens, ask)
                now = engines[turn].settled(looks[turn], answer.num_tokens)
                counted, looks[turn] = now.since(looks[turn]), now
                foreign += max(0, round(counted.tokens) - answer.num_tokens)
                found.append((answer, counted))
            replies[turn].append(_reply(found))
        advance(1, "")
    return replies, foreign


def _reply(found: Sequence[tuple[EngineCompletion, Counters]]) -> Reply:
    """Return one prompt's reply: the text of the first answer, and the sums over all of them."""
    first = found[0][0]
    counted = reduce(Counters.plus, (c for _, c in found))
    counts = DraftCounts(
        rounds=counted.rounds,
        drafted=counted.drafted,
        accepted=counted.accepted,
        by_position=list(counted.by_position),
    )
    return Reply(
        text=first.text,
        tokens=None if first.tokens is None else list(first.tokens),
        lengths=[answer.num_tokens for answer, _ in found],
        seconds=sum(answer.seconds for answer, _ in found),
        counts=counts,
        uncounted=list(counted.uncounted),
    )


class Survey:
    """The replies of a drafting engine and, for the speedup there, of the same engine without drafts."""

    def __init__(self, expected: Expectation, console: Console | None = None):
        self.expected, self.console = expected, console
        self.drafting: dict[float, list[Reply]] = {}
        self.plain: dict[float, list[Reply]] = {}
        self.foreign = 0

    def ask(self, engine: Engine, plain: Engine | None = None) -> None:
        """Send every prompt at every temperature, to both in turns if there are two."""
        temperatures = self.expected.temperatures
        total = len(self.expected.prompts) * len(temperatures)
        engines = [engine] if plain is None else [engine, plain]
        with progress(self.console, "the engine", total, transient=True) as advance:
            for temperature in temperatures:
                replies, foreign = ask_all(engines, self.expected, temperature, advance)
                self.drafting[temperature] = replies[0]
                if plain is not None:
                    self.plain[temperature] = replies[1]
                self.foreign += foreign

    def ask_plain(self, engine: Engine) -> None:
        """Send every prompt at every temperature to the same engine without drafts, for the speedup there."""
        total = len(self.expected.prompts) * len(self.expected.temperatures)
        with progress(self.console, "the engine without drafts", total, transient=True) as advance:
            for temperature in self.expected.temperatures:
                (self.plain[temperature],), foreign = ask_all([engine], self.expected, temperature, advance)
                self.foreign += foreign

    @property
    def exact(self) -> bool:
        """Whether both sides compute in float32."""
        return self.expected.dtype == "float32"

    @property
    def counts_all(self) -> bool:
        """Whether the engine counts all that mistakes are told apart by."""
        return not any(reply.uncounted for replies in self.drafting.values() for reply in replies)

    def differs(self, tolerance: float) -> bool:
        """Tell whether the engine's drafts at temperature 0 are not ours."""
        drafting = self.drafting.get(0.0)
        if drafting is None:
            return False
        return drafts_differ(compare(self.expected, Replies(temperature=0.0, drafting=drafting)), tolerance, self.exact)

    def _explanation(self) -> Explanation | None:
        drafting = self.drafting.get(0.0)
        if drafting is None or not self.counts_all:
            return None
        return explain([r.counts for r in drafting], self.expected.at(0.0), self.expected.mistakes)

    def result(self, engine: dict[str, Any], write: Write, tolerance: float = TOLERANCE) -> ServedResult:
        """Return what both sides did, and what is probably wrong."""
        comparisons = [
            compare(self.expected, Replies(temperature=t, drafting=replies, plain=self.plain.get(t)), write)
            for t, replies in self.drafting.items()
        ]
        expected = self.expected
        return ServedResult(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            engine=engine,
            target=expected.target,
            drafter=expected.drafter,
            depth=expected.depth,
            max_new_tokens=expected.max_new_tokens,
            tolerance=tolerance,
            comparisons=comparisons,
            suspicions=suspicions(comparisons, tolerance, self.exact, self._explanation()),
            foreign=self.foreign,
        )


def engine_facts(engine: Engine, extra: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """Return what is known of a running engine."""
    return {"name": engine.counters().engine, "model": engine.model} | dict(extra)
