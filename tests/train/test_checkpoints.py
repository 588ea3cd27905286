"""Checkpoint folders by themselves: which are whole, which is the last, which may go."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import TrainerState

from outrider.common import BadInputError, Refusal, digests
from outrider.common.atomic import CannotWriteError
from outrider.train import checkpoints as folders
from outrider.train.checkpoints import explain_write_errors

from .conftest import arguments

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> MakeCheckpoint:
    """`saved(step, whole=True)`: a checkpoint of three files, one in a folder, in `tmp_path / "checkpoints"`."""

    def make(step: int, whole: bool = True) -> Path:
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        (folder / "drafter").mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(b"optimizer")
        (folder / "empty").touch()
        (folder / "drafter" / "model.safetensors").write_bytes(b"weights")
        if whole:
            digests.seal(folder)
        return folder

    return make


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_one_altered_byte_makes_a_checkpoint_damaged_and_an_earlier_one_is_taken(saved, caplog):
    first, altered = saved(1), saved(20)
    (altered / "optimizer.pt").write_bytes(b"optimizes")
    with caplog.at_level(logging.WARNING):
        assert folders.last_complete(first.parent) == first
    assert f"{altered} was altered or damaged after it was written (optimizer.pt: content differs" in caplog.text
    with pytest.raises(Refusal, match=r"checkpoint-20 cannot be continued: optimizer\.pt: content differs"):
        folders.require_whole(altered)


def test_a_checkpoint_that_is_not_there_cannot_be_continued(tmp_path):
    with pytest.raises(Refusal, match=r"checkpoint-9 cannot be continued: the folder is missing\. Leave out"):
        folders.require_whole(tmp_path / "checkpoint-9")


def test_checkpoints_come_by_step_and_nothing_else_counts(saved):
    made = [saved(step, whole=step != 9) for step in (100, 9, 20)]
    parent = made[0].parent
    for other in ("checkpoint-best", "checkpoint-", "drafter"):
        (parent / other).mkdir()
    (parent / "checkpoint-7").touch()
    assert folders.checkpoints(parent) == [made[1], made[2], made[0]]
    assert [folders.step_of(f) for f in folders.checkpoints(parent)] == [9, 20, 100]


def test_the_last_whole_checkpoint_is_found_and_later_ones_are_named(saved, caplog):
    saved(1)
    last, broken = saved(20), saved(100, whole=False)
    with caplog.at_level(logging.WARNING):
        assert folders.last_complete(last.parent) == last
    assert caplog.messages == [f"{broken} is not a whole checkpoint (its writing was interrupted); skipped."]
    assert caplog.records[0].name == "outrider.train.checkpoints"


def test_without_a_whole_checkpoint_there_is_no_last_one(saved, tmp_path):
    assert folders.last_complete(saved(1, whole=False).parent) is None
    assert folders.last_complete(tmp_path / "nothing") is None


ALL = [(limit, None, [9, 20, 100]) for limit in (None, 0, 3, 4)] + [(None, 9, [9, 20, 100])]
TWO = [(2, None, [20, 100]), (2, 9, [9, 100]), (1, 9, [9, 100]), (2, 100, [20, 100])]


@pytest.mark.parametrize(("limit", "best", "left"), [*ALL, *TWO, (1, None, [100]), (1, 100, [100])])
def test_the_oldest_go_and_the_last_and_the_best_stay(saved, limit, best, left):
    made = {step: saved(step) for step in (9, 20, 100)}
    parent = made[9].parent
    folders.rotate(parent, limit, None if best is None else str(made[best]))
    assert [folders.step_of(f) for f in folders.checkpoints(parent)] == left


@pytest.mark.parametrize("limit", [None, 2])
def test_what_is_not_whole_goes_and_counts_for_nothing(saved, limit):
    made = [saved(step, whole=step not in (15, 200)) for step in (9, 15, 100, 200)]
    parent = made[0].parent
    folders.rotate(parent, limit, None)
    assert names(parent) == ["checkpoint-100", "checkpoint-9"]


def test_folders_with_other_names_are_left_alone(saved):
    made = [saved(step) for step in (1, 2, 3)]
    for name in ("checkpoint-1-keep", "checkpoint-2.bak"):
        shutil.copytree(made[0], made[0].with_name(name))
    folders.rotate(made[0].parent, 1, None)
    assert names(made[0].parent) == ["checkpoint-1-keep", "checkpoint-2.bak", "checkpoint-3"]


def test_a_checkpoint_that_was_being_deleted_when_its_run_was_killed_is_not_whole(saved, monkeypatch):
    made = [saved(step) for step in (1, 2, 3)]
    monkeypatch.setattr(shutil, "rmtree", lambda folder, ignore_errors: None)  # as a kill leaves it
    folders.rotate(made[0].parent, 2, None)
    assert [digests.is_sealed(folder) for folder in made] == [False, True, True]
    monkeypatch.undo()
    folders.rotate(made[0].parent, 2, None)
    assert names(made[0].parent) == ["checkpoint-2", "checkpoint-3"]


def test_the_best_one_is_known_by_any_path_to_it(saved, monkeypatch):
    """The trainer keeps its name as it was given, which may have been a relative one."""
    made = [saved(step) for step in (9, 20, 100)]
    monkeypatch.chdir(made[0].parent)
    folders.rotate(made[0].parent, 1, "checkpoint-9")
    assert names(made[0].parent) == ["checkpoint-100", "checkpoint-9"]


def test_a_checkpoint_that_cannot_be_deleted_stops_nothing(saved, monkeypatch):
    """Another process has always deleted a folder already."""
    delete = shutil.rmtree

    def late(folder: Path, ignore_errors: bool = False) -> None:
        delete(folder)
        delete(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", late)
    *_, last = (saved(step) for step in (9, 20, 100))
    parent = last.parent
    folders.rotate(parent, 1, None)
    assert names(parent) == ["checkpoint-100"]
    unfinished = saved(3, whole=False)
    folders.remove_broken(parent, None)
    assert not unfinished.exists()


def test_checkpoints_of_an_earlier_run_are_set_aside_under_the_first_free_number(saved, tmp_path):
    """A folder without any stays where it is."""
    (tmp_path / "checkpoints").mkdir()
    assert folders.set_aside(tmp_path / "checkpoints") is folders.set_aside(tmp_path / "nothing") is None
    assert names(tmp_path) == ["checkpoints"]
    for number in (1, 2):
        folder = saved(number).parent
        assert folders.set_aside(folder) == folder.with_name(f"checkpoints.old-{number}")
        assert not folder.exists()
        assert names(folder.with_name(f"checkpoints.old-{number}")) == [f"checkpoint-{number}"]


def test_what_cannot_be_continued_is_cleared_and_what_was_once_whole_is_kept(saved):
    """A disk that cannot be read for a moment must not cost a checkpoint."""
    whole, damaged, unfinished = (saved(step) for step in (1, 2, 3))
    (damaged / "trainer_state.json").write_text("{}")
    (unfinished / "SHA256SUMS").unlink()
    folders.remove_broken(whole.parent, whole)
    assert names(whole.parent) == ["checkpoint-1", "damaged-checkpoint-2-1"]


@pytest.fixture
def ended(saved: MakeCheckpoint) -> Callable[[str | None], Path]:
    """`ended(best)`: the last of two checkpoints, of a training whose best one was called `best`."""

    def make(best: str | None) -> Path:
        saved(4)
        last = saved(8, whole=False)
        TrainerState(best_model_checkpoint=best, global_step=8).save_to_json(str(last / "trainer_state.json"))
        digests.seal(last)
        return last

    return make


@pytest.mark.parametrize(
    ("best", "found"),
    [("where/it/was/checkpoint-4", 4), (None, 8), ("where/it/was/checkpoint-8", 8)],
    ids=["beside the last one, wherever both were moved", "none is named", "the last one itself"],
)
def test_the_best_checkpoint_is_found(ended, best, found):
    last = ended(best)
    assert folders.state_of(last).global_step == 8
    if found == 8:
        (last / "optimizer.pt").unlink()  # it was checked before, and is not again
    assert folders.best_before(last) == last.with_name(f"checkpoint-{found}")


def test_a_damaged_best_one_is_named_and_the_last_one_taken(ended, caplog):
    last = ended("checkpoint-4")
    best = last.with_name("checkpoint-4")
    (best / "optimizer.pt").write_bytes(b"optimizes")
    with caplog.at_level(logging.WARNING):
        assert folders.best_before(last) == last
    assert f"{best}, the best checkpoint, is missing or damaged; {last} is taken." in caplog.messages


def test_what_is_kept_is_said(saved):
    last = saved(4)
    assert folders.what_is_kept(arguments(last.parent)) == f"The last good checkpoint is {last}."
    (last / "SHA256SUMS").unlink()
    assert folders.what_is_kept(arguments(last.parent)) == "There is no checkpoint yet."
    kept = folders.what_is_kept(arguments(last.parent, save_strategy="no"))
    assert kept == "Nothing of the training was kept: training.save_strategy is 'no'."


def test_a_checkpoint_is_continued_with_as_many_rows_in_a_step(saved):
    folder = saved(4)
    written = arguments(folder.parent, per_device_train_batch_size=3, gradient_accumulation_steps=4)
    folders.write_launch(folder, written)
    assert (folder / "launch.json").read_text() == '{"processes": 1, "rows_in_a_step": 12}\n'
    same, other = (
        arguments(folder.parent, per_device_train_batch_size=6, gradient_accumulation_steps=n) for n in (2, 4)
    )
    folders.check_same_rows(folder, same)
    with pytest.raises(BadInputError) as refused:
        folders.check_same_rows(folder, other)
    assert f"{folder} learned 12 rows in a step, in 1 processes; this run would learn 24 in 1. " in str(refused.value)


@pytest.mark.parametrize("has_good", [True, False])
def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_names_the_last_good_one(saved, has_good):
    error = OSError(28, "No space left on device") if has_good else RuntimeError("unexpected pos 64 vs 0\nat a place")
    kept = f"The last good checkpoint is {saved(4)}." if has_good else "There is no earlier checkpoint."
    late = saved(8, whole=False)
    with pytest.raises(CannotWriteError) as failed, explain_write_errors(late):
        raise error
    assert not late.exists()
    assert f"{late} could not be written: {str(error).splitlines()[0]} (" in str(failed.value)
    assert kept in str(failed.value)


def test_a_folder_that_is_gone_is_said(saved):
    folder = saved(8, whole=False)
    shutil.rmtree(folder.parent)
    with pytest.raises(CannotWriteError, match="No checkpoint is left"), explain_write_errors(folder):
        (folder / "optimizer.pt").write_bytes(b"")
