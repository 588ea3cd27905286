"""Stored hidden states are the target's own, are found again only under the same key, and survive interruption."""

from __future__ import annotations

import pickle
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from outrider.common import BadInputError, IncompatibleError
from outrider.distill import FeatureStore
from outrider.targets import Target

LENGTHS = [5, 12, 3, 9, 12, 1, 7]
TAPS = (2, 3, 5)
SMALL = 4 * 32 * 4 * 20  # bytes of 20 tokens with three taps: several shards


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict({"input_ids": [torch.randint(0, 64, (n,), generator=generator).tolist() for n in LENGTHS]})


@pytest.fixture
def target(tiny_llama: Callable[..., Any]) -> Target:
    return Target(tiny_llama())


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


def test_a_batch_is_what_the_target_computes_padded_with_zeros(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.distill.features.AT_ONCE", 3)
    store = FeatureStore.build(tmp_path, target, dataset, TAPS, shard_bytes=SMALL)
    assert len(store) == len(LENGTHS)
    indices = [4, 0, 6]
    hidden, last = store.batch(indices, 15)
    assert hidden is not None
    assert (hidden.shape, last.shape) == ((3, 15, 3, 32), (3, 15, 32))
    for row, i in enumerate(indices):
        expected = target.forward(torch.tensor([dataset[i]["input_ids"]]), taps=TAPS, logits=False)
        torch.testing.assert_close(hidden[row, : LENGTHS[i]], expected.hidden[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last[row, : LENGTHS[i]], expected.last[0], rtol=1e-5, atol=1e-5)
        assert not hidden[row, LENGTHS[i] :].any()
        assert not last[row, LENGTHS[i] :].any()


def test_the_length_is_the_longest_rows_or_cuts(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    store = FeatureStore.build(tmp_path, target, dataset, TAPS)
    assert store.batch([2, 3])[1].shape == (2, 9, 32)
    assert torch.equal(store.batch([2, 3], 4)[1], store.batch([2, 3])[1][:, :4])


def test_without_taps_only_the_last_state_is_stored(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    store = FeatureStore.build(tmp_path, target, dataset, ())
    assert store.batch([0, 1])[0] is None
    with_taps = FeatureStore.build(tmp_path, target, dataset, TAPS)
    torch.testing.assert_close(store.batch([0, 1])[1], with_taps.batch([0, 1])[1])
    assert store.num_bytes < with_taps.num_bytes / 3


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_states_are_rounded_to_the_dtype_that_was_asked_for(
    tmp_path: Path, target: Target, dataset: Dataset, dtype: Any
) -> None:
    full, half = (
        FeatureStore.build(tmp_path, target, dataset, TAPS),
        FeatureStore.build(tmp_path, target, dataset, TAPS, dtype),
    )
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.batch([1, 4])[1], full.batch([1, 4])[1].bfloat16())
    assert half.num_bytes < 0.6 * full.num_bytes


def test_shards_hold_whole_sequences_of_about_the_size_asked_for(
    tmp_path: Path, target: Target, dataset: Dataset
) -> None:
    """20 tokens to a shard: 5+12+3 | 9 | 12+1+7."""
    store = FeatureStore.build(tmp_path, target, dataset, TAPS, shard_bytes=SMALL)
    assert len(list(store.folder.glob("*.safetensors"))) == 3
    one_each = FeatureStore.build(tmp_path, target, dataset, TAPS, shard_bytes=1)
    assert len(list(one_each.folder.glob("*.safetensors"))) == len(LENGTHS)
    for i in range(len(LENGTHS)):
        torch.testing.assert_close(one_each.batch([i])[1], store.batch([i])[1], rtol=1e-5, atol=1e-5)


def test_a_finished_store_is_reused(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FeatureStore.build(tmp_path, target, dataset, TAPS)
    passes = count_passes(monkeypatch)
    assert FeatureStore.build(tmp_path, target, dataset, TAPS).folder == first.folder
    assert passes == []


def test_another_target_data_set_taps_or_dtype_is_another_store(
    tmp_path: Path, target: Target, dataset: Dataset, tiny_llama: Callable[..., Any]
) -> None:
    other_target = Target(tiny_llama(seed=1))
    changed = dataset[:]["input_ids"]
    changed[3] = [*changed[3][:-1], (changed[3][-1] + 1) % 64]
    stores = [
        FeatureStore.build(tmp_path, target, dataset, TAPS),
        FeatureStore.build(tmp_path, other_target, dataset, TAPS),
        FeatureStore.build(tmp_path, target, Dataset.from_dict({"input_ids": changed}), TAPS),
        FeatureStore.build(tmp_path, target, dataset, (1, 3, 6)),
        FeatureStore.build(tmp_path, target, dataset, TAPS, "bfloat16"),
    ]
    assert len({s.folder for s in stores}) == len(stores)
    assert not torch.equal(stores[0].batch([0])[1], stores[1].batch([0])[1])


def test_an_interrupted_build_continues_with_the_missing_shards(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FeatureStore.build(tmp_path / "whole", target, dataset, TAPS, shard_bytes=SMALL)
    with monkeypatch.context() as patch:
        count_passes(patch, fail_at=1)
        with pytest.raises(KeyboardInterrupt):
            FeatureStore.build(tmp_path / "cut", target, dataset, TAPS, shard_bytes=SMALL)
    [unfinished] = (tmp_path / "cut").iterdir()
    with pytest.raises(BadInputError, match="holds no finished feature store"):
        FeatureStore(unfinished)
    passes = count_passes(monkeypatch)
    cut = FeatureStore.build(tmp_path / "cut", target, dataset, TAPS, shard_bytes=SMALL)
    assert passes == [1, 3], "the first shard's three sequences are not computed again"
    everything = list(range(len(LENGTHS)))
    assert torch.equal(cut.batch(everything)[1], whole.batch(everything)[1])


def test_a_disk_that_is_too_small_is_refused_before_any_pass(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    passes = count_passes(monkeypatch)
    with pytest.raises(BadInputError, match=r"needs 25\.1 kB, but its disk has 1 kB free.*data\.features=online"):
        FeatureStore.build(tmp_path, target, dataset, TAPS)
    assert passes == []


def test_a_disk_that_fills_while_writing_leaves_no_half_file(
    tmp_path: Path, target: Target, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    def full(tensors: Any, file: Path, *args: Any) -> None:
        file.write_bytes(b"half")
        raise safetensors.SafetensorError(
            'Error while serializing: IoError(Os { code: 28, message: "No space left on device" })'
        )

    monkeypatch.setattr("outrider.distill.features.save_file", full)
    with pytest.raises(BadInputError, match=r"the disk that holds .* is full.*finished shards are kept"):
        FeatureStore.build(tmp_path, target, dataset, TAPS)
    assert not list(next(tmp_path.iterdir()).iterdir())


def test_missing_and_damaged_shards_are_named(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    store = FeatureStore.build(tmp_path, target, dataset, TAPS, shard_bytes=SMALL)
    shard = store.folder / "states-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(BadInputError, match=r"states-00001\.safetensors: content differs .* only what is damaged"):
        FeatureStore(store.folder)
    with pytest.raises(BadInputError, match=r"states-00001\.safetensors: damaged"):
        FeatureStore(store.folder, check=False).batch([3])
    shard.unlink()
    with pytest.raises(BadInputError, match=r"states-00001\.safetensors: missing"):
        FeatureStore(store.folder)


@pytest.mark.parametrize("alter", ["flip", "truncate", "remove", "forget", "index"])
def test_a_damaged_shard_is_computed_again_and_said(
    tmp_path: Path, target: Target, dataset: Dataset, alter: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = FeatureStore.build(tmp_path, target, dataset, TAPS, shard_bytes=SMALL).folder
    good = {f.name: f.read_bytes() for f in folder.iterdir()}
    shard, content = folder / "states-00001.safetensors", good["states-00001.safetensors"]
    if alter == "flip":
        shard.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    elif alter == "truncate":
        shard.write_bytes(content[:-8])
    elif alter == "remove":
        shard.unlink()
    elif alter == "forget":
        (folder / "SHA256SUMS").unlink()
    else:
        (folder / "features.json").write_bytes(good["features.json"][:-1])
    times = (folder / "states-00000.safetensors").stat().st_mtime_ns
    FeatureStore.build(tmp_path, target, dataset, TAPS, shard_bytes=SMALL)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == good
    named = {"forget": "states-00000.safetensors: not in SHA256SUMS", "index": "features.json: content differs"}
    assert named.get(alter, "states-00001.safetensors: ") in caplog.text
    is_kept = (folder / "states-00000.safetensors").stat().st_mtime_ns == times
    assert is_kept == (alter != "forget"), "the others are not computed again, where they are known to be whole"


def test_a_store_travels_to_a_loaders_worker(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    store = FeatureStore.build(tmp_path, target, dataset, TAPS)
    expected = store.batch([0, 1])[1]
    assert torch.equal(pickle.loads(pickle.dumps(store)).batch([0, 1])[1], expected)


def test_wrong_input_is_refused(tmp_path: Path, target: Target, dataset: Dataset) -> None:
    with pytest.raises(IncompatibleError, match=r"hidden_states\[9\], but this target has 6 layers"):
        FeatureStore.build(tmp_path, target, dataset, (9,))
    with pytest.raises(BadInputError, match="the data set is empty"):
        FeatureStore.build(tmp_path, target, Dataset.from_dict({"input_ids": []}), TAPS)
    with pytest.raises(BadInputError, match="cannot be stored as 'int8'; expected one of float32, bfloat16, float16"):
        FeatureStore.build(tmp_path, target, dataset, TAPS, "int8")
