"""Stored hidden states are the target's own, are found again only under the same key, and survive interruption.

A store is the same whoever wrote it and however often they were killed; it says how it rounds.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from accelerate import PartialState, debug_launcher
from datasets import Dataset
from torch import distributed

from outrider.common import BadInputError, IncompatibleError
from outrider.distill import FeatureStore
from outrider.distill.features import (
    LEAST_BYTES,
    MOST_BYTES,
    PRECISIONS,
    FeatureStoreBuilder,
    Precision,
    precision_of,
    shard_size,
)
from outrider.distill.launch import launch_group
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from .conftest import killed

LENGTHS = [5, 12, 3, 9, 12, 1, 7]
TAPS, LAST_TAPS = (2, 3, 5), (2, 3, 6)  # tap 6 is the last state
SMALL = 4 * 32 * 4 * 20  # bytes of 20 tokens with three taps: several shards
SMALLER = 3 * 32 * 4 * 20  # the same with the last state among the taps: nine shards of `longer`

Build = Callable[..., FeatureStore]


def dataset_of(lengths: list[int]) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict({"input_ids": [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]})


@pytest.fixture
def dataset() -> Dataset:
    return dataset_of(LENGTHS)


@pytest.fixture
def longer() -> Dataset:
    return dataset_of([5, 12, 3, 9, 12, 1, 7, 20, 4, 16, 11, 2, 18, 6, 13])


@pytest.fixture
def target(tiny_llama: Callable[..., Any]) -> Target:
    return Target(tiny_llama())


@pytest.fixture
def build(
    tmp_path: Path, target: Target, dataset: Dataset, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> Build:
    """`build(taps, dtype, **changes)`: a store, of this target and data set if `changes` do not say otherwise."""
    if precision == torch.float64:
        monkeypatch.setitem(PRECISIONS, "float64", Precision("float64", precision))

    def made(taps: Any = TAPS, dtype: Any = "auto", **changes: Any) -> FeatureStore:
        given = {"folder": tmp_path, "target": target, "dataset": dataset} | changes
        return FeatureStore.build(taps=taps, dtype=dtype, **given)

    return made


def count_passes(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[int]:
    """Record the rows of each pass of any target; raise in pass number `fail_at`."""
    passes: list[int] = []
    forward = Target.forward

    def counted(self: Target, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(passes) == fail_at:
            raise KeyboardInterrupt
        passes.append(len(tokens))
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Target, "forward", counted)
    return passes


@both_precisions
def test_a_batch_is_what_the_target_computes_padded_with_zeros(
    build: Build, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.distill.features.AT_ONCE", 3)
    store = build(shard_bytes=SMALL)
    assert len(store) == len(LENGTHS)
    indices = [4, 0, 6]
    hidden, last = store.batch(indices)
    assert hidden is not None
    assert (hidden.shape, last.shape) == ((3, 12, 3, 32), (3, 12, 32))
    for row, i in enumerate(indices):
        expected = target.forward(torch.tensor([dataset[i]["input_ids"]]), taps=TAPS, logits=False)
        assert_same(hidden[row, : LENGTHS[i]], expected.hidden[0])
        assert_same(last[row, : LENGTHS[i]], expected.last[0])
        assert not hidden[row, LENGTHS[i] :].any()
        assert not last[row, LENGTHS[i] :].any()


@both_precisions
def test_without_taps_only_the_last_state_is_stored(build: Build) -> None:
    store = build(())
    assert store.batch([0, 1])[0] is None
    with_taps = build()
    assert_same(store.batch([0, 1])[1], with_taps.batch([0, 1])[1])
    assert store.num_bytes < with_taps.num_bytes / 3


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_states_are_rounded_to_the_dtype_that_was_asked_for(build: Build, dtype: Any) -> None:
    full, half = build(), build(TAPS, dtype)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.batch([1, 4])[1], full.batch([1, 4])[1].bfloat16())
    assert half.num_bytes < 0.6 * full.num_bytes


@both_precisions
def test_shards_hold_whole_sequences_of_about_the_size_asked_for(build: Build, precision: torch.dtype) -> None:
    """20 tokens to a shard: 5+12+3 | 9 | 12+1+7."""
    store = build(shard_bytes=SMALL * precision.itemsize // 4)
    assert len(list(store.folder.glob("*.safetensors"))) == 3
    one_each = build(shard_bytes=1)
    assert len(list(one_each.folder.glob("*.safetensors"))) == len(LENGTHS)
    for i in range(len(LENGTHS)):
        assert_same(one_each.batch([i])[1], store.batch([i])[1])


def test_a_finished_store_is_reused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build()
    passes = count_passes(monkeypatch)
    assert build().folder == first.folder
    assert passes == []


def test_another_target_data_set_taps_or_dtype_is_another_store(
    build: Build, dataset: Dataset, tiny_llama: Callable[..., Any]
) -> None:
    other_target = Target(tiny_llama(seed=1))
    changed = dataset[:]["input_ids"]
    changed[3] = [*changed[3][:-1], (changed[3][-1] + 1) % 64]
    stores = [build(), build(target=other_target), build(dataset=Dataset.from_dict({"input_ids": changed}))]
    stores += [build((1, 3, 6)), build(TAPS, "bfloat16")]
    assert len({s.folder for s in stores}) == len(stores)
    assert not torch.equal(stores[0].batch([0])[1], stores[1].batch([0])[1])


def test_an_interrupted_build_is_continued(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(folder=tmp_path / "whole", shard_bytes=SMALL)
    with monkeypatch.context() as patch:
        count_passes(patch, fail_at=1)
        with pytest.raises(KeyboardInterrupt):
            build(folder=tmp_path / "cut", shard_bytes=SMALL)
    [unfinished] = (tmp_path / "cut").iterdir()
    with pytest.raises(BadInputError, match="holds no finished feature store"):
        FeatureStore(unfinished)
    passes = count_passes(monkeypatch)
    cut = build(folder=tmp_path / "cut", shard_bytes=SMALL)
    assert passes == [1, 3], "the first shard's three sequences are not computed again"
    everything = list(range(len(LENGTHS)))
    assert torch.equal(cut.batch(everything)[1], whole.batch(everything)[1])


def leave_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - free, free))


def test_a_disk_that_is_too_small_is_refused_before_any_pass(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_room(monkeypatch, 1000)
    passes = count_passes(monkeypatch)
    with pytest.raises(BadInputError, match=r"needs 25\.1 kB, but its disk has 1 kB free.*data\.features=online"):
        build()
    assert passes == []


def test_a_disk_that_fills_leaves_no_half_file(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = 'Error while serializing: IoError(Os { code: 28, message: "No space left on device" })'

    def full(tensors: Any, file: Path, *args: Any) -> None:
        for half in (file, file.with_name(".tmpAbC")):  # safetensors writes beside its file, under names of its own
            half.write_bytes(b"half")
        raise safetensors.SafetensorError(error)

    monkeypatch.setattr("outrider.distill.features.save_file", full)
    with pytest.raises(BadInputError, match=r"the disk that holds .* is full.*finished shards are kept"):
        build()
    assert not list(next(tmp_path.iterdir()).iterdir())


def test_missing_and_damaged_shards_are_named(build: Build) -> None:
    store = build(shard_bytes=SMALL)
    shard = store.folder / "states-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(BadInputError, match=r"states-00001\.safetensors: content differs .* only what is damaged"):
        FeatureStore(store.folder)
    with pytest.raises(BadInputError, match=r"states-00001\.safetensors: damaged"):
        FeatureStore(store.folder, check=False).batch([3])
    shard.unlink()
    with pytest.raises(BadInputError, match=r"states-00001\.safetensors: missing"):
        FeatureStore(store.folder)


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("alter", ["flip", "truncate", "remove", "forget", "index"])
def test_a_damaged_shard_is_computed_again_and_said(build: Build, alter: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = build(shard_bytes=SMALL).folder
    good = {f.name: f.read_bytes() for f in folder.iterdir()}
    name = {"forget": "SHA256SUMS", "index": "features.json"}.get(alter, "states-00001.safetensors")
    {"flip": flip, "truncate": truncate, "index": truncate}.get(alter, Path.unlink)(folder / name)
    times = (folder / "states-00000.safetensors").stat().st_mtime_ns
    build(shard_bytes=SMALL)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == good
    named = {"forget": "states-00000.safetensors: not in SHA256SUMS", "index": "features.json: content differs"}
    assert named.get(alter, "states-00001.safetensors: ") in caplog.text
    is_kept = (folder / "states-00000.safetensors").stat().st_mtime_ns == times
    assert is_kept == (alter != "forget"), "the others are not computed again, where they are known to be whole"


def test_a_store_travels_to_a_loaders_worker(build: Build) -> None:
    store = build()
    expected = store.batch([0, 1])[1]
    assert torch.equal(pickle.loads(pickle.dumps(store)).batch([0, 1])[1], expected)


def test_wrong_input_is_refused(build: Build) -> None:
    with pytest.raises(IncompatibleError, match=r"hidden_states\[9\], but this target has 6 layers"):
        build((9,))
    with pytest.raises(BadInputError, match="the data set is empty"):
        build(dataset=Dataset.from_dict({"input_ids": []}))
    with pytest.raises(BadInputError, match="cannot be stored as 'int8'; expected one of float32, bfloat16, float16"):
        build(TAPS, "int8")


def build_together(folder: Path, target: Target, longer: Dataset) -> None:
    PartialState(cpu=True)
    torch.set_num_threads(1)
    with launch_group(folder) as group:
        FeatureStore.build(folder / "features", target, longer, LAST_TAPS, shard_bytes=SMALLER, group=group)


@pytest.fixture
def together(target: Target, longer: Dataset) -> Callable[..., None]:
    """`together(folder, processes)`: a store that so many processes build."""

    def build(folder: Path, processes: int = 1) -> None:
        if processes == 1:
            build_together(folder, target, longer)
        else:
            debug_launcher(build_together, (folder, target, longer), num_processes=processes)

    return build


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
    tmp_path: Path, together: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    together(tmp_path / "one")
    with monkeypatch.context() as patch:
        note_who_computes(patch, tmp_path / "notes")
        together(tmp_path / "two", 2)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    done = Counter(file.read_text() for file in (tmp_path / "notes").iterdir())
    assert 1 <= done["1"] <= 3 < done["0"]
    assert sum(done.values()) == len(places(tmp_path / "one")) > 6
    assert [p.name for p in (tmp_path / "two").iterdir()] == ["features"], "nothing is left beside it"


def test_what_a_killed_build_has_finished_is_kept_also_by_two_processes(
    tmp_path: Path, together: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when it has begun the fourth shard."""
    compute = FeatureStoreBuilder._compute
    begun = []
    cut = tmp_path / "cut"

    def counted(self: FeatureStoreBuilder, shard: int) -> None:
        begun.append(shard)
        if len(begun) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        compute(self, shard)

    together(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(FeatureStoreBuilder, "_compute", counted)
        killed(lambda: together(cut))
    kept = places(cut)
    assert len(kept) == 3
    together(cut, 2)
    assert content(cut) == content(tmp_path / "whole"), "and no claim of the dead process is left"
    assert kept.items() <= places(cut).items()
    assert len(list((cut / "features").iterdir())) == 1, "nor its lock"


@both_precisions
def test_the_last_state_is_stored_once(build: Build, target: Target, longer: Dataset) -> None:
    """Tap 6 of six layers is the last state: a batch has it, and the disk does not have it twice."""
    store = build((6, 2), dataset=longer)
    hidden, last = store.batch([3, 7])
    assert hidden is not None
    assert torch.equal(hidden[:, :, 0], last)
    for row, i in enumerate((3, 7)):
        live = target.forward(torch.tensor([longer[i]["input_ids"]]), taps=(6, 2), logits=False).hidden
        assert_same(hidden[row, : len(longer[i]["input_ids"])], live[0])
    alone = build((2,), dataset=longer)
    assert alone.folder == store.folder
    assert torch.equal(alone.batch([3, 7])[0], hidden[:, :, 1:])
    with pytest.raises(BadInputError, match=r"holds hidden_states\[2\] and the last, not \[3\]"):
        FeatureStore(store.folder, (3,))


def test_eight_bits_are_off_by_at_most_what_is_stated(build: Build, longer: Dataset) -> None:
    """|x̂ − x| ≤ max(|x| / 16, m / 2^18), m the largest of the vector; a quarter of float32's bytes, and the scales."""
    exact, rough = (build(LAST_TAPS, dtype, dataset=longer) for dtype in ("auto", "float8_e4m3fn"))
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


def test_a_full_disk_is_told_what_would_fit(build: Build, longer: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_room(monkeypatch, 9000)
    less = r"bfloat16 takes 26\.7 kB, float16 takes 26\.7 kB, float8_e4m3fn takes 15 kB"
    expected = rf"store less \(data\.features_dtype: {less}\), or .* \(data\.features=online\)"
    with pytest.raises(BadInputError, match=rf"needs 53\.4 kB, but its disk has 9 kB free\. Free some, {expected}"):
        build(LAST_TAPS, dataset=longer)


def test_shards_suit_the_store_and_not_the_number_of_processes() -> None:
    assert shard_size(1000) == LEAST_BYTES
    assert shard_size(64 * 10**7) == 10**7
    assert shard_size(10**12) == MOST_BYTES
