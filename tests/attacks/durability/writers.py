"""Many writers at once: every store into one pair is kept, and of many trainings in one folder one wins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import Outcome, attempt, contents, names
from kills import _copy, _must_end
from subjects import Workshop, template, timed, tuning, verb

from outrider.pair import Pair, verify

STORES, TRAININGS = 16, 8


@dataclass
class Writers:
    """What many writers at once came to."""

    case: str
    writers: int
    won: int = 0
    refused: int = 0
    kept: int = 0
    failures: list[str] = field(default_factory=list)


def run_writers(root: Path) -> list[Writers]:
    workshop = Workshop(root)
    _ = workshop.target, workshop.prompts
    return [_stores(workshop), _trainings(workshop)]


def _stores(workshop: Workshop) -> Writers:
    """Store as many tunings at once, each of another machine."""
    _copy(template(workshop, verb("tune"), _must_end), workshop.work)

    def store(number: int) -> None:
        Pair.load(workshop.pair).store_tuning(tuning(1, f"machine {number}"))

    outcomes = _at_once([lambda n=n: store(n) for n in range(STORES)])  # type: ignore[misc]
    found = Writers("stores into one pair", STORES, won=sum(o.code == 0 for o in outcomes))
    found.kept = len(Pair.load(workshop.pair).manifest.tuning)
    found.failures += [o.said for o in outcomes if o.code] + verify(workshop.pair)
    found.failures += [] if found.kept == STORES else [f"{STORES - found.kept} tunings are lost"]
    return found


def _trainings(workshop: Workshop) -> Writers:
    """Start as many trainings at once, half of them with another recipe."""
    start = template(workshop, verb("train"), _must_end)
    _copy(start, workshop.work)
    _must_end(workshop.train)
    expected = {}
    for rate in (1e-3, 2e-3):
        _copy(start, workshop.work)
        _must_end(lambda rate=rate: _train(workshop, rate))
        expected[rate] = contents(workshop.work, timed)
    _copy(start, workshop.work)
    rates = [(1e-3, 2e-3)[n % 2] for n in range(TRAININGS)]
    outcomes = _at_once([lambda rate=rate: _train(workshop, rate) for rate in rates])  # type: ignore[misc]
    found = Writers("trainings in one folder", TRAININGS, won=sum(o.code == 0 for o in outcomes))
    found.refused = sum(o.is_refusal for o in outcomes)
    found.failures += [o.said for o in outcomes if o.code == 2 and "is being written by process" not in o.said]
    found.failures += [f"{o.code}: {o.said[-400:]}" for o in outcomes if o.code not in (0, 2)]
    found.failures += [] if (found.won, found.refused) == (1, TRAININGS - 1) else [f"{found.won} won"]
    found.failures += [] if contents(workshop.work, timed) in expected.values() else ["the result is nobody's"]
    found.failures += [] if ".out.lock" not in names(workshop.work) else ["a lock is left"]
    return found


def _train(workshop: Workshop, rate: float) -> None:
    from outrider.train import train

    train(workshop.recipe(learning_rate=rate, max_steps=30, save_steps=10), workshop.target)


def _at_once(actions: list[Callable[[], object]]) -> list[Outcome]:
    """Run all actions at the same time, each in a process of its own that another one watches."""
    begin = time.time() + 2.0
    reading, writing = os.pipe()
    for number, action in enumerate(actions):
        if os.fork() == 0:
            outcome = attempt(lambda action=action: (time.sleep(max(0.0, begin - time.time())), action()))
            os.write(writing, f"{number}\0{outcome.code}\0{outcome.said[-1500:]}\1".encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        rows = [row.split("\0", 2) for row in pipe.read().split("\1") if row]
    for _ in actions:
        os.wait()
    return [Outcome(int(code), said) for _, code, said in rows]
