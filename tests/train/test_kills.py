"""SIGKILL at random moments of a whole training: how much work is lost, and is the end the same?

One process answers prompts, writes hidden states, and trains with a checkpoint every few steps. It is killed in each of
these phases, and while a checkpoint is written, at moments drawn from a seed, and started again until it ends. Then all
that it leaves must be, bit for bit, what a training without kills leaves. What a kill hit is read from the disk.

Kills of several processes at once are in test_launches.py, those of answering in tests/attacks/durability.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError, digests
from outrider.common.atomic import write_atomically
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import checkpoints, train

GENERATION, FEATURES, TRAINING, CHECKPOINT = "generation", "hidden states", "training", "a checkpoint's writing"
PHASES = (GENERATION, FEATURES, TRAINING, CHECKPOINT)
SPANS = {GENERATION: 2.0, FEATURES: 0.3, TRAINING: 1.0, CHECKPOINT: 0.05}  # seconds from its begin to a kill, at most
INTERVAL, STEPS, PROMPTS = 3, 24, 32
_LIMIT = 120.0  # seconds that a phase may take to begin

Process = Any


@dataclass
class Found:
    """What came of all kills so far."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))  # that hit each phase
    ended: int = 0  # trainings that ran to their end after some
    lost: list[int] = field(default_factory=list)  # steps since the last whole checkpoint, for each kill of a training
    failures: list[str] = field(default_factory=list)  # of what must hold, one line each

    @property
    def count(self) -> int:
        return sum(self.kills.values())


@dataclass(frozen=True)
class Attempt:
    target: Target
    output: Path

    @property
    def said(self) -> Path:
        """The output of the last process."""
        return self.output.with_suffix(".said")

    @property
    def checkpoints(self) -> list[Path]:
        return checkpoints.checkpoints(self.output / "checkpoints")

    def start(self) -> Process:
        self.said.unlink(missing_ok=True)
        process = multiprocessing.get_context("fork").Process(target=self._train)
        process.start()
        return process

    def _train(self) -> None:
        said = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        # Under pytest there are other handlers, and stderr need not be file 2.
        handlers: list[logging.Handler] = [logging.FileHandler(self.said)]
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers, force=True)
        train(recipe(self.output), self.target)

    def phase(self) -> str:
        """Return what the files of a process that was killed say it was doing."""
        if not (self.output / "data").exists():
            return GENERATION
        if not any(map(digests.is_sealed, (self.output / "features").glob("*"))):
            return FEATURES
        return TRAINING if all(map(digests.is_sealed, self.checkpoints)) else CHECKPOINT

    def has_begun(self, phase: str) -> bool:
        """Tell whether the process that runs has come to a phase."""
        if phase == GENERATION:
            return True
        if phase == FEATURES:
            return (self.output / "data").exists()
        if not self.steps_taken():
            return False
        return phase == TRAINING or self.phase() == CHECKPOINT

    def steps_taken(self) -> int:
        """Return the last step that the last process logged; 0 for none."""
        said = self.said.read_text() if self.said.exists() else ""
        steps = re.findall(r"^step (\d+)", said, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def reached(self) -> int:
        """Return the step that the next process continues from; 0 for the beginning."""
        whole = [checkpoints.step_of(folder) for folder in self.checkpoints if digests.is_sealed(folder)]
        return max(whole, default=0)

    def answers(self) -> int:
        return sum(file.stat().st_size for file in self.output.glob("data*/*.jsonl"))

    def left(self) -> dict[str, str]:
        """Return the digest of every file that a training leaves, but for those with times, and its losses."""
        kept = [f for f in self.output.rglob("*") if f.is_file() and not _holds_times(f)]
        found = {str(file.relative_to(self.output)): digests.file_digest(file) for file in kept}
        history = json.loads((self.checkpoints[-1] / checkpoints.STATE).read_text())["log_history"]
        return found | {"losses": json.dumps([entry["loss"] for entry in history if "loss" in entry])}


def _holds_times(file: Path) -> bool:
    if "checkpoints" in file.parts:
        return file.name in (checkpoints.STATE, digests.LIST)
    return file.name in ("recipe.yaml", "provenance.json") or (file.parent.name, file.name) == ("data", digests.LIST)


def recipe(output: Path) -> Recipe:
    """Return what is trained, on prompts that are written beside `output`."""
    prompts = output.with_name("prompts.jsonl")
    texts = [f"def function_{i}(first, second):\n" for i in range(PROMPTS)]
    write_atomically(prompts, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    answers = {"max_new_tokens": 24, "batch_size": 4}
    settings = {"max_steps": STEPS, "save_steps": INTERVAL, "save_total_limit": 2, "per_device_train_batch_size": 4}
    return Recipe.from_dict(
        {
            "name": "kills",
            "target": {"path": "embedded", "dtype": "float32"},
            "drafter": {"type": "eagle3", "steps": 2, "draft_vocab_size": 1024},
            "data": {"prompts": [str(prompts)], "features": "cached", "allow_leaks": True} | answers,
            "training": settings | {"learning_rate": 1e-3, "logging_steps": 1, "disable_tqdm": True, "use_cpu": True},
            "output": str(output),
        }
    )


def attack(target: Target, work: Path, count: int, seed: int) -> Iterator[Found]:
    """Kill trainings in `work` until there were so many kills and the last one has ended; yield after each of them."""
    chance, found = random.Random(seed), Found()
    whole = Attempt(target, work / "whole")
    _must_end(whole)
    expected = whole.left()
    while found.count < count:
        attempt = Attempt(target, work / f"killed-{found.ended}")
        _kill_in_turns(attempt, chance, found)
        _must_end(attempt)
        found.ended += 1
        there = attempt.left()
        differing = sorted(n for n in expected.keys() | there.keys() if expected.get(n) != there.get(n))
        found.failures += [f"{attempt.output.name}: differs: {name}" for name in differing]
        yield found


def _must_end(attempt: Attempt) -> None:
    process = attempt.start()
    process.join()
    if process.exitcode != 0:
        raise BadInputError(f"{attempt.output} ended with {process.exitcode}: {attempt.said.read_text()[-3000:]}")


def _kill_in_turns(attempt: Attempt, chance: random.Random, found: Found) -> None:
    """Kill a training once in each phase, and start it again."""
    for phase in PHASES:
        before = attempt.answers(), attempt.reached()
        process = attempt.start()
        begun = _wait(process, partial(attempt.has_begun, phase))
        process.join(chance.uniform(0, SPANS[phase]))
        if not begun or not process.is_alive():
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        _judge(attempt, before, found)


def _wait(process: Process, has_begun: Callable[[], bool]) -> bool:
    until = time.monotonic() + _LIMIT
    while process.is_alive() and time.monotonic() < until:
        if has_begun():
            return True
        time.sleep(0.001)
    return False


def _judge(attempt: Attempt, before: tuple[int, int], found: Found) -> None:
    hit, taken, reached = attempt.phase(), attempt.steps_taken(), attempt.reached()
    found.kills[hit] += 1
    place = f"{attempt.output.name}, kill {found.count} in {hit}"
    if hit == GENERATION and attempt.answers() < before[0]:
        found.failures.append(f"{place}: answers are gone")
    if hit in (TRAINING, CHECKPOINT):
        lost = max(taken - reached, 0)
        found.lost.append(lost)
        if lost > INTERVAL or reached < before[1]:
            found.failures.append(f"{place}: step {taken} was taken, and {reached} is what there is")


@pytest.mark.slow
def test_fifty_kills_in_all_phases_end_as_a_training_without_kills(tmp_path):
    """Bit for bit: responses, hidden states, checkpoints, the drafter and all losses."""
    target = Target.load("embedded", dtype="float32", device="cpu")
    *_, found = attack(target, tmp_path, 50, seed=1)
    assert found.failures == []
    assert found.count >= 50
    assert min(found.kills.values()) >= 5, found.kills
    assert max(found.lost) <= INTERVAL
