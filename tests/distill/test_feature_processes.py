"""A store of hidden states is the same whoever wrote it and however often they were killed; it says how it rounds."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState, debug_launcher
from datasets import Dataset
from torch import distributed

from outrider.common import BadInputError
from outrider.distill import FeatureStore
from outrider.distill.features import LEAST_BYTES, MOST_BYTES, FeatureStoreBuilder, precision_of, shard_size
from outrider.distill.launch import launch_group
from outrider.targets import Target

TAPS = (2, 3, 6)  # the last one is the last state
SMALL = 3 * 32 * 4 * 20  # bytes of 20 tokens: nine shards


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 12, 3, 9, 12, 1, 7, 20, 4, 16, 11, 2, 18, 6, 13]
    return Dataset.from_dict({"input_ids": [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]})


@pytest.fixture
def target(tiny_llama: Callable[..., Any]) -> Target:
    return Target(tiny_llama())


def build_together(folder: Path, target: Target, dataset: Dataset) -> None:
    PartialState(cpu=True)
    torch.set_num_threads(1)
    with launch_group(folder) as group:
        FeatureStore.build(folder / "features", target, dataset, TAPS, shard_bytes=SMALL, group=group)


def store_in(folder: Path) -> Path:
    [found] = (path for path in (folder / "features").iterdir() if path.is_dir())
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store_in(folder).iterdir()}


def places(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files there are: a file that is written again is another one."""
    return {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in store_in(folder).glob("states-*")}


def note_who_computes(monkeypatch: pytest.MonkeyPatch, notes: Path) -> None:
    """Write down who computes each shard; process 1 takes a second for each."""
    notes.mkdir()
    compute = FeatureStoreBuilder._compute

    def noted(self: FeatureStoreBuilder, shard: int) -> None:
        rank = distributed.get_rank()
        time.sleep(1.0 if rank == 1 else 0.1)
        assert not (notes / str(shard)).exists(), "a shard is computed once"
        (notes / str(shard)).write_text(str(rank))
        compute(self, shard)

    monkeypatch.setattr(FeatureStoreBuilder, "_compute", noted)


def test_two_processes_leave_the_files_of_one_and_a_slow_one_holds_nobody_up(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_together(tmp_path / "one", target, dataset)
    with monkeypatch.context() as patch:
        note_who_computes(patch, tmp_path / "notes")
        debug_launcher(build_together, (tmp_path / "two", target, dataset), num_processes=2)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    done = Counter(file.read_text() for file in (tmp_path / "notes").iterdir())
    assert 1 <= done["1"] <= 3 < done["0"]
    assert sum(done.values()) == len(places(tmp_path / "one")) > 6
    assert [p.name for p in (tmp_path / "two").iterdir()] == ["features"], "nothing is left beside it"


def killed_at(count: int, folder: Path, target: Target, dataset: Dataset) -> None:
    """Build in a process of its own, which is killed when it has begun shard `count`."""
    compute, begun = FeatureStoreBuilder._compute, []

    def counted(self: FeatureStoreBuilder, shard: int) -> None:
        begun.append(shard)
        if len(begun) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        compute(self, shard)

    def build() -> None:
        FeatureStoreBuilder._compute = counted  # type: ignore[method-assign]
        build_together(folder, target, dataset)

    child = multiprocessing.get_context("fork").Process(target=build)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def test_what_a_killed_build_has_finished_is_kept_also_by_two_processes(
    tmp_path: Path, target: Target, dataset: Dataset
) -> None:
    build_together(tmp_path / "whole", target, dataset)
    cut = tmp_path / "cut"
    killed_at(4, cut, target, dataset)
    kept = places(cut)
    assert len(kept) == 3
    debug_launcher(build_together, (cut, target, dataset), num_processes=2)
    assert content(cut) == content(tmp_path / "whole"), "and no claim of the dead process is left"
    assert kept.items() <= places(cut).items()
    assert len(list((cut / "features").iterdir())) == 1, "nor its lock"


@pytest.mark.parametrize("alter", ["flip", "cut", "remove"])
def test_two_processes_write_a_damaged_shard_again_and_leave_the_others_alone(
    tmp_path: Path, target: Target, dataset: Dataset, alter: str
) -> None:
    build_together(tmp_path, target, dataset)
    good, before = content(tmp_path), places(tmp_path)
    shard = store_in(tmp_path) / "states-00002.safetensors"
    if alter == "remove":
        shard.unlink()
    else:
        whole = good[shard.name]
        shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:] if alter == "flip" else whole[:-20])
    debug_launcher(build_together, (tmp_path, target, dataset), num_processes=2)
    assert content(tmp_path) == good
    after = places(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {shard.name}


# ------------------------------------------------------------ how much it takes


def test_the_last_state_is_stored_once(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    """Tap 6 of six layers is the last state: a batch has it, and the disk does not have it twice."""
    store = FeatureStore.build(tmp_path, target, dataset, (6, 2))
    hidden, last = store.batch([3, 7])
    assert hidden is not None
    assert torch.equal(hidden[:, :, 0], last)
    for row, i in enumerate((3, 7)):
        live = target.forward(torch.tensor([dataset[i]["input_ids"]]), taps=(6, 2), logits=False).hidden
        torch.testing.assert_close(hidden[row, : len(dataset[i]["input_ids"])], live[0], rtol=1e-5, atol=1e-5)
    alone = FeatureStore.build(tmp_path, target, dataset, (2,))
    assert alone.folder == store.folder
    assert torch.equal(alone.batch([3, 7])[0], hidden[:, :, 1:])
    with pytest.raises(BadInputError, match=r"holds hidden_states\[2\] and the last, not \[3\]"):
        FeatureStore(store.folder, (3,))


def test_eight_bits_are_off_by_at_most_what_is_stated(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    """|x̂ − x| ≤ max(|x| / 16, m / 2^18), m the largest of the vector; a quarter of float32's bytes, and the scales."""
    exact, rough = (FeatureStore.build(tmp_path, target, dataset, TAPS, dtype) for dtype in ("auto", "float8_e4m3fn"))
    assert rough.dtype == torch.float32, "what a batch holds"
    for true, found in zip(exact.batch([7, 3]), rough.batch([7, 3]), strict=True):
        assert true is not None
        assert found is not None
        bound = torch.maximum(true.abs() / 16, true.abs().amax(-1, keepdim=True) / 2**18)
        assert bool(((found - true).abs() <= bound * (1 + 1e-5)).all())
        assert not torch.equal(found, true)
        assert (found - true).norm() < 0.03 * true.norm()
    assert rough.num_bytes < 0.32 * exact.num_bytes  # 32 numbers have a scale of four bytes; real ones are thousands


def test_eight_bits_keep_zeros_and_what_is_no_number() -> None:
    """So that a target that made no numbers is still found out."""
    precision = precision_of("float8_e4m3fn", torch.float32)
    states = torch.tensor([[0.0, 0.0], [1.0, float("inf")], [float("nan"), 1.0], [-3e38, 1e-38]])
    parts = precision.kept("last", states)
    found = precision.read([parts[name] for name in precision.names("last")], torch.float32)
    assert found[0].tolist() == [0.0, 0.0]
    assert not bool(found[1:3].isfinite().all(-1).any())
    assert found[3].tolist() == [pytest.approx(-3e38), 0.0]


def test_a_full_disk_is_told_what_would_fit(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 9000, 9000))
    with pytest.raises(
        BadInputError,
        match=r"needs 53\.4 kB, but its disk has 9 kB free\. Free some, store less \(data\.features_dtype: bfloat16 "
        r"takes 26\.7 kB, float16 takes 26\.7 kB, float8_e4m3fn takes 15 kB\), or .* \(data\.features=online\)",
    ):
        FeatureStore.build(tmp_path, target, dataset, TAPS)


def test_shards_suit_the_store_and_not_the_number_of_processes() -> None:
    assert shard_size(1000) == LEAST_BYTES
    assert shard_size(64 * 10**7) == 10**7
    assert shard_size(10**12) == MOST_BYTES
