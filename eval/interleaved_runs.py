"""Contestants that complete the same jobs in turns.

Every racer completes every job once in each repeat. The order rotates from turn to turn, so that whatever else the
machine does slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..costs.timing import rotated
from ..decode import Round

# A racer's job, and its result.
Job = TypeVar("Job", contravariant=True)
Done = TypeVar("Done", covariant=True)
J = TypeVar("J")
D = TypeVar("D")


@dataclass
class TimedCompletion:
    """One completion of one prompt: new tokens, rounds, and wall time by phase (`total` is the whole request)."""

    tokens: list[int]
    seconds: dict[str, float]
    rounds: list[Round] = field(default_factory=list)
    rule: str = "none"


class Racer(Protocol[Job, Done]):
    """A contestant that completes a job at a temperature, and times itself."""

    name: str

    def __call__(self, job: Job, temperature: float) -> Done: ...


def race(
    racers: Sequence[Racer[J, D]],
    jobs: Sequence[J],
    temperature: float,
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[list[D]]]:
    """Let every racer complete every job `repeats` times; the one that starts changes with each turn.

    Returns:
        Per racer and job, its results in the order of the repeats.
    """
    done: dict[str, list[list[D]]] = {r.name: [[] for _ in jobs] for r in racers}
    for i, job in enumerate(jobs):
        for repeat in range(repeats):
            for racer in rotated(racers, i * repeats + repeat):
                done[racer.name][i].append(racer(job, temperature))
                tick()
    return done
