"""Many writers at once, and writers that die: nothing is lost, nothing is half there.

    OUTRIDER_SEED=1 python -m pytest -n 0 -m slow tests/pair/registry/test_writers.py

Each writer is a process of its own, which SIGKILL ends at a random moment; another then takes up its work.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.common.atomic import leftovers_within
from outrider.pair import Pair, verify
from outrider.pair.registry import PairReference, open_registry
from outrider.pair.registry.layout import BLOBS
from outrider.targets.fingerprint import digest_file

from .conftest import MakeVersion, retold

FORK = multiprocessing.get_context("fork")  # an interpreter of its own would import for seconds before it writes


def push_all(root: Path, folders: list[str], told: Path) -> None:
    """A writer: push these pairs one after the other, and tell how many were refused."""
    registry, refused = open_registry(str(root)), 0
    for folder in folders:
        try:
            registry.push(Pair.load(folder))
        except BadInputError as error:
            if "has another" not in str(error):
                raise
            refused += 1
    told.write_text(str(refused))


def run(root: Path, jobs: list[list[str]], kills: int, generator: random.Random) -> tuple[int, int]:
    """Run one writer per list of jobs; kill random ones, start them anew. Return kills done and pushes refused."""

    def start(index: int) -> Any:
        process = FORK.Process(target=push_all, args=(root, jobs[index], root.with_name(f"told-{index}")))
        process.start()
        return process

    running = {index: start(index) for index in range(len(jobs))}
    killed = 0
    while running:
        time.sleep(generator.uniform(0.0, 0.08))
        for index in [i for i, process in running.items() if not process.is_alive()]:
            assert running.pop(index).exitcode == 0
        if running and killed < kills:
            index = generator.choice(list(running))
            running[index].kill()
            running[index].join()
            killed += running[index].exitcode == -signal.SIGKILL
            running[index] = start(index)
    return killed, sum(int(root.with_name(f"told-{index}").read_text()) for index in range(len(jobs)))


def check(root: Path, expected: dict[str, Pair], tmp_path: Path) -> None:
    """Every version is there, whole, and as it was pushed; every blob is what its name says; nothing else is there."""
    registry = open_registry(str(root))
    found = {f"{v.entry.name}@{v.entry.version}": v for v in registry.versions()}
    assert set(found) == set(expected)
    for reference, pair in expected.items():
        pulled = registry.pull(PairReference.parse(reference), tmp_path / "pulled")
        assert verify(pulled.folder) == []
        assert pulled.manifest == pair.manifest
        shutil.rmtree(pulled.folder)
    for blob in (root / BLOBS).glob("*/[!.]*"):
        assert digest_file(blob) == blob.name


def pushed_by_many(
    make_version: MakeVersion, tmp_path: Path, num_writers: int, num_versions: int, kills: int, seed: int
) -> None:
    generator = random.Random(seed)
    shared = [os.urandom(200_000) for _ in range(4)]
    versions = [
        make_version(n, f"pair-{n % 5}", weights=shared[n % 4] + bytes([n % 7])) for n in range(1, num_versions + 1)
    ]
    expected = {f"{pair.name}@{pair.version}": pair for pair in versions}
    jobs = []
    for index in range(num_writers):  # every version by two writers, in two orders
        own = [str(p.folder) for i, p in enumerate(versions) if i % num_writers in (index, (index + 1) % num_writers)]
        generator.shuffle(own)
        jobs.append(own)
    root = tmp_path / "registry"
    killed, refused = run(root, jobs, kills, generator)
    assert (killed >= min(kills, 1), refused) == (True, 0)
    open_registry(str(root)).push(versions[0])
    check(root, expected, tmp_path)
    open_registry(str(root)).push(retold(versions[0]))  # the next writer sweeps
    assert list(leftovers_within(root)) == []
    print(f"{num_writers} writers, {num_versions} versions, {killed} SIGKILLs: all whole, nothing left over")


def test_two_writers_of_the_same_versions(make_version, tmp_path):
    pushed_by_many(make_version, tmp_path, num_writers=2, num_versions=6, kills=2, seed=0)


@pytest.mark.slow
def test_eight_writers_of_two_hundred_versions_with_kills(make_version, tmp_path):
    seed = int(os.environ.get("OUTRIDER_SEED", "0"))
    pushed_by_many(make_version, tmp_path, num_writers=8, num_versions=200, kills=60, seed=seed)


def test_of_two_pairs_with_one_version_exactly_one_is_published(make_version, tmp_path):
    """Processes race for the same names with other contents: each name has one winner, and the others are told."""
    rivals = [[make_version(n, "rival") for n in range(1, 5)] for _ in range(3)]
    jobs = [[str(pair.folder) for pair in versions] for versions in rivals]
    root = tmp_path / "registry"
    _, refused = run(root, jobs, 0, random.Random(0))
    assert refused == 2 * 4
    found = {v.entry.version: v for v in open_registry(str(root)).versions("rival")}
    for number in range(1, 5):
        assert [v[number - 1].digest for v in rivals].count(found[number].manifest.digest) == 1
        assert found[number].entry.revision == 1
