"""SIGKILL at random moments of answering: nothing that was finished is lost, and the end is that of a run without.

Lost is at most what was being answered: a batch for each process, or the requests that servers worked on and what they
answered since the last write.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from accelerate import PartialState

from outrider.common import file_process_group
from outrider.common.places import MARKER
from outrider.distill import distill, server_pool
from outrider.targets import Target

from .conftest import Place, Server

KILLS, SEED = 30, 20261122
TEXTS = [f"{text} {i}" for i in range(40) for text in ("def add(first, second):", "for name in", "class Stack:", "x")]

Process = Any


@pytest.fixture
def place(tmp_path: Path, tiny_target: Target) -> Place:
    return Place(tmp_path, tiny_target, [{"text": text} for text in TEXTS], {"max_new_tokens": 16, "batch_size": 4})


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.arrow")}


def answered(output: Path) -> int:
    """Return how many prompts are answered on the disk."""
    if (output / "data").exists():
        return len(TEXTS)
    listed = output / "data.partial" / "SHA256SUMS"
    names = [line.split()[1] for line in listed.read_text().splitlines()] if listed.exists() else []
    return sum(len((listed.parent / name).read_text().splitlines()) for name in names)


def start(act: Callable[[], object], size: int) -> list[Process]:
    """Start a launch of `size` processes which all do `act`, and wait until they know each other.

    Until then they are in torch's own rendezvous, which waits ten minutes for one that is gone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    met = fork.Barrier(size + 1)
    processes = [fork.Process(target=_act, args=(act, rank, size, port, met)) for rank in range(size)]
    for process in processes:
        process.start()
    met.wait(120)
    return processes


def _act(act: Callable[[], object], rank: int, size: int, port: int, met: Any) -> None:
    if size > 1:
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in launch.items()})
        PartialState(cpu=True)
    met.wait(120)
    act()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths are noticed soon."""
    monkeypatch.setattr(file_process_group, "SECONDS_BETWEEN_ROLL_CALLS", 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_killed_at_random_end_as_one_that_is_not(place: Place, tiny_target: Target, size: int) -> None:
    chance, made = random.Random(SEED + size), place.recipe("killed", sampling={"temperature": 1.0})
    whole = distill(place.recipe("whole", sampling={"temperature": 1.0}), tiny_target)
    kills = before = 0
    while kills < KILLS:
        running = start(partial(distill, made, tiny_target), size)
        running[0].join(chance.uniform(0.0, 0.8 * size))
        chosen = chance.choice(running)
        if chosen.is_alive():
            os.kill(chosen.pid, signal.SIGKILL)
            kills += 1
        for process in running:
            process.join(60)
            assert process.exitcode is not None, "it waits for one that is gone"
        now = answered(made.output_folder)
        assert now >= before, "what was finished is kept"
        before = now
        if (made.output_folder / "data").exists():  # from the beginning, until there were as many kills
            assert content(made.output_folder / "data") == content(whole)
            made, before = place.recipe(f"killed-{kills}", sampling={"temperature": 1.0}), 0
    for process in start(partial(distill, made, tiny_target), size):
        process.join(120)
        assert process.exitcode == 0
    assert content(made.output_folder / "data") == content(whole)
    assert sorted(p.name for p in made.output_folder.iterdir()) == [MARKER, "data"], "nothing is left beside it"


@pytest.mark.slow
def test_servers_and_those_who_ask_them_killed_at_random_answer_every_prompt_once(
    place: Place, tiny_target: Target, start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("SECONDS_BETWEEN_FILES", 0.1), ("FIRST_DELAY", 0.02), ("LONGEST_DELAY", 0.2)):
        monkeypatch.setattr(server_pool, name, seconds)
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.02)
    chance, fleet = random.Random(SEED), [start_server(), start_server()]
    asked = {"servers": [server.url for server in fleet], "requests": {"concurrency": 2, "patience": 20}}
    made, whole = place.recipe("killed", **asked), distill(place.recipe("whole"), tiny_target)
    kills = before = 0
    while kills < KILLS:
        (running,) = start(partial(distill, made, tiny_target), 1)
        running.join(chance.uniform(0.1, 0.8))
        victim = chance.choice(fleet)
        port = victim.port
        victim.stop()
        time.sleep(chance.uniform(0.0, 0.2))
        if running.is_alive():
            os.kill(running.pid, signal.SIGKILL)
            kills += 1
        running.join(30)
        victim.start(port)
        now = answered(made.output_folder)
        assert now >= before
        before = now
        if (made.output_folder / "data").exists():
            assert content(made.output_folder / "data") == content(whole)
            made, before = place.recipe(f"killed-{kills}", **asked), 0
    distill(made, tiny_target)
    assert content(made.output_folder / "data") == content(whole)
