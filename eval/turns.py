"""Contestants take turns: for each prompt, for each repeat, every one of them completes it once.

The order rotates from turn to turn, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..common import BadInputError
from ..costs.timing import rotated
from ..decode import Round
from ..distill.prompts import Prompt
from ..recipes import EvalSpec
from ..targets import Target
from .suites import Suite

# What a racer is given, and what it makes of it.
Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)
G = TypeVar("G")
M = TypeVar("M")


@dataclass(frozen=True)
class PromptJob:
    """One prompt to complete; `sequence` keys its randomness, so that it does not depend on what else is measured."""

    suite: str
    prompt: Prompt
    sequence: int


@dataclass
class TimedCompletion:
    """One completion of one prompt: new tokens, rounds, and wall time by phase (`total` is the whole request)."""

    tokens: list[int]
    seconds: dict[str, float]
    rounds: list[Round] = field(default_factory=list)
    rule: str = "none"


class Racer(Protocol[Given, Made]):
    """What takes turns: it completes a job at a temperature, and times itself."""

    name: str

    def __call__(self, job: Given, temperature: float) -> Made: ...


def race(
    racers: Sequence[Racer[G, M]],
    jobs: Sequence[G],
    temperature: float,
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[list[M]]]:
    """Let every racer complete every job `repeats` times; who starts moves on by one with each turn.

    Returns:
        Per racer, per job, what it made of it in each repeat, in their order.
    """
    made: dict[str, list[list[M]]] = {r.name: [[] for _ in jobs] for r in racers}
    for i, job in enumerate(jobs):
        for repeat in range(repeats):
            for racer in rotated(racers, i * repeats + repeat):
                made[racer.name][i].append(racer(job, temperature))
            tick()
    return made


# ------------------------------------------------------------ jobs


def make_jobs(suites: Sequence[Suite], limit: int | None = None) -> list[PromptJob]:
    """Return the first `limit` prompts of each suite, suite by suite."""
    return [PromptJob(s.name, p, zlib.crc32(f"{s.name}/{p.id}".encode())) for s in suites for p in s.prompts[:limit]]


def check_lengths(target: Target, jobs: Sequence[PromptJob], settings: EvalSpec) -> None:
    """Raise BadInputError for a prompt that leaves no room for the answer."""
    longest = max(jobs, key=lambda job: len(job.prompt.tokens))
    needed = len(longest.prompt.tokens) + settings.max_new_tokens
    if target.max_context is not None and needed > target.max_context:
        raise BadInputError(
            f"prompt {longest.prompt.id!r} has {len(longest.prompt.tokens)} tokens; with {settings.max_new_tokens} "
            f"new ones it exceeds the target's context of {target.max_context}. "
            "Lower eval.max_new_tokens or leave that prompt out."
        )
