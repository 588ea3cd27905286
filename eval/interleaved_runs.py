"""Contestants that complete the same jobs in turns.

Every racer completes every job once in each repeat. The order of each turn is drawn, so that whatever else the machine
does slows all of them alike, and no rhythm of its own can favour one: only then do intervals over jobs hold.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..decode import Round

# A racer's job, and its result.
Job = TypeVar("Job", contravariant=True)
Done = TypeVar("Done", covariant=True)
J = TypeVar("J")
D = TypeVar("D")


@dataclass
class TimedCompletion:
    """One completion of one prompt: new tokens, rounds, and wall time by phase (`total` is the whole request).

    `joules`: used by the whole GPU; None where that is not known.
    """

    tokens: list[int]
    seconds: dict[str, float]
    rounds: list[Round] = field(default_factory=list)
    rule: str = "none"
    joules: float | None = None


class Racer(Protocol[Job, Done]):
    """A contestant that completes a job at a temperature, and times itself."""

    name: str

    def __call__(self, job: Job, temperature: float) -> Done: ...


def race(
    racers: Sequence[Racer[J, D]],
    jobs: Iterable[J],
    temperature: float,
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[list[D]]]:
    """Let every racer complete every job `repeats` times, each time in another order, drawn anew in every race.

    Returns:
        Per racer and job, its results in the order of the repeats.
    """
    done: dict[str, list[list[D]]] = {r.name: [] for r in racers}
    order = random.Random()
    for i, job in enumerate(jobs):
        for per_job in done.values():
            per_job.append([])
        for _ in range(repeats):
            for racer in order.sample(racers, len(racers)):
                done[racer.name][i].append(racer(job, temperature))
                tick()
    return done


def in_time(jobs: Sequence[J], until: float, least: int) -> Iterator[J]:
    """Yield jobs while one more, at the mean pace so far, would be done by `until`; the first `least` in any case.

    Args:
        until: by `time.perf_counter`.
    """
    began = time.perf_counter()
    for count, job in enumerate(jobs):
        now = time.perf_counter()
        if count >= least and now + (now - began) / max(1, count) > until:
            return
        yield job
