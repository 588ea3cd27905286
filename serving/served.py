"""Served equals measured: a pair's prompts through a running engine, and what parts from our own decoder."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from ..ground.progress import Advance, progress
from .comparison import Comparison, Replies, Reply, Write, compare
from .counters import Counters
from .engine import Ask, Completion, Engine
from .expectation import Counts, Expectation
from .hypotheses import Explanation, explain
from .suspicion import Suspicion, drafts_differ, suspicions

SCHEMA_VERSION = 1
TOLERANCE = 0.02  # of τ: a difference that is certain, but smaller than this, is nobody's concern


class ServedResult(BaseModel):
    """What `outrider served` found.

    Attributes:
        engine: what it is, what it said of itself, and how it was started.
        target, drafter, depth, max_new_tokens: what was compared.
        tolerance: see `Comparison.agrees`.
        foreign: new tokens that the engine counted and we did not ask for: traffic of others, in the counts too.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    created: str
    engine: dict[str, Any]
    target: str
    drafter: str
    depth: int
    max_new_tokens: int
    tolerance: float
    comparisons: list[Comparison]
    suspicions: list[Suspicion]
    foreign: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the engine does what our decoder does."""
        return not self.suspicions

    @property
    def exit_code(self) -> int:
        return 0 if self.agrees else 1

    def at(self, temperature: float) -> Comparison:
        """Return the comparison at a temperature."""
        return next(c for c in self.comparisons if c.temperature == temperature)


def ask_all(
    engines: Sequence[Engine], expected: Expectation, temperature: float, advance: Advance
) -> tuple[list[list[Reply]], int]:
    """Send every prompt to every engine, in turns, and read the engine's counters after each answer.

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
            found = engines[turn].complete(prompt.tokens, ask)
            now = engines[turn].settled(looks[turn], found.num_tokens)
            counted, looks[turn] = now.since(looks[turn]), now
            foreign += max(0, round(counted.tokens) - found.num_tokens)
            replies[turn].append(_reply(found, counted))
        advance(1, "")
    return replies, foreign


def _reply(found: Completion, counted: Counters) -> Reply:
    counts = Counts(
        rounds=counted.rounds,
        drafted=counted.drafted,
        accepted=counted.accepted,
        by_position=list(counted.by_position),
    )
    return Reply(
        text=found.text,
        tokens=None if found.tokens is None else list(found.tokens),
        length=found.num_tokens,
        ended=found.ended,
        seconds=found.seconds,
        counts=counts,
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

    @property
    def exact(self) -> bool:
        """Whether both sides compute in float32."""
        return self.expected.dtype == "float32"

    def differs(self, tolerance: float) -> bool:
        """Tell whether the engine's drafts at temperature 0 are not ours."""
        drafting = self.drafting.get(0.0)
        if drafting is None:
            return False
        return drafts_differ(compare(self.expected, Replies(temperature=0.0, drafting=drafting)), tolerance, self.exact)

    def _explanation(self) -> Explanation | None:
        drafting = self.drafting.get(0.0)
        if drafting is None:
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


# ------------------------------------------------------------ for people


def lines(result: ServedResult) -> list[str]:
    """Return the result in sentences, the verdict first."""
    verdict = "served equals measured" if result.agrees else "served differs from measured"
    found = [f"{verdict}: {result.drafter}, depth {result.depth}, {result.engine.get('name', 'engine')}"]
    for c in result.comparisons:
        found += _figures(c)
    if result.foreign:
        found.append(f"{result.foreign} tokens of others were counted too: measure on an engine that nobody else uses")
    return found + [str(s) for s in result.suspicions]


def _figures(found: Comparison) -> list[str]:
    texts = "" if found.identical is None else f"; {found.identical} of {found.num_prompts} texts identical"
    speed = "" if found.speedup is None else f"; {found.speedup.text(unit='×')} the speed of that engine without drafts"
    first = (
        f"temperature {found.temperature:g}: τ {found.served.text(3)} there, {found.own.text(3)} here, "
        f"difference {found.difference.value:+.3f} {found.difference.bounds(3)}{texts}{speed}"
    )
    positions = ", ".join(
        f"{p.position}: {p.served:.2f} / {p.own:.2f}{' !' if p.parted else ''}" for p in found.positions
    )
    return [first, f"  accepted by position, there / here: {positions}"] if positions else [first]


def engine_facts(engine: Engine, extra: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """Return what is known of a running engine."""
    return {"name": engine.counters().engine, "model": engine.model} | dict(extra)
