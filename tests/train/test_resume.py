"""Interruptions: killed, stopped, broken, full. What was done is kept, and continuing gives the same drafter."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.common.digests import LIST, problems, seal
from outrider.heads import DrafterLoss, Eagle3, load_drafter
from outrider.train import TrainingInterruptedError, train
from outrider.train import checkpoints as folders
from outrider.train.__main__ import main

from ..closeness import EXACT
from .conftest import (
    DRAFT_MODEL,
    EAGLE3,
    asked_in,
    halved,
    in_float64,
    in_loss,
    killed_after,
    losses,
    of_stored,
    provenance,
    require_same_drafter,
    train_alike,
    train_in_two,
    weights,
)


@pytest.mark.usefixtures("one_thread_as_forked")
def test_killed_and_resumed_equals_never_killed_bit_for_bit(recipe, stored, tmp_path):
    """A real SIGKILL; beside its checkpoints one that a kill left half written."""
    training = {"max_steps": 80, "save_steps": 10, "learning_rate": 1e-3, "logging_steps": 50}
    training["lr_scheduler_type"] = "cosine"
    killed, whole = (of_stored(recipe(name, **training), stored) for name in ("killed", "whole"))
    reached = killed_after(killed, 30, tmp_path)
    assert not killed.output_folder.joinpath("drafter").exists()
    shutil.copytree(reached, broken := reached.with_name("checkpoint-1000000"))
    (broken / LIST).unlink()
    (broken / "trainer_state.json").unlink()
    (broken / "optimizer.pt").write_bytes((reached / "optimizer.pt").read_bytes()[:100])
    resumed, uninterrupted = train(killed), train(whole)
    assert resumed.steps == uninterrupted.steps == 80
    assert weights(resumed) == weights(uninterrupted)


@pytest.mark.parametrize(("stop", "call"), [(7, 13), (10, 19)], ids=["at the end of an epoch", "within the second"])
def test_ctrl_c_saves_a_checkpoint_and_continuing_equals_never_stopping(recipe, target, monkeypatch, stop, call):
    settings: dict[str, Any] = {"max_steps": 12, "save_strategy": "no"}
    settings |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    said = rf"stopped after step {stop}; saved in .*checkpoint-{stop}\. Run the same command again"
    with monkeypatch.context() as patch:
        asked_in(patch, call, signal.SIGINT)
        with pytest.raises(TrainingInterruptedError, match=said):
            train(recipe("stopped", **settings), target)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train(recipe("stopped", **settings), target)
    assert weights(resumed) == weights(train(recipe("whole", **settings), target))


TIED = {"type": "draft_model", "model": {"num_hidden_layers": 1, "tie_word_embeddings": True}}
ON_POLICY = (DRAFT_MODEL, {"on_policy": 0.5, "max_new_tokens": 8})
PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("run", "shape"),
    [((TIED,), {}), (ON_POLICY, PARTS)],
    ids=["tied draft model", "on policy, several micro-batches"],
)
def test_a_run_that_lost_its_last_checkpoint_resumes_bit_for_bit(recipe, target, run, shape):
    """Within an epoch."""
    whole = train(recipe("whole", *run, **shape), target)
    halved(whole)
    assert weights(train(recipe("half", *run, **shape), target)) == weights(whole)


def test_a_finished_run_is_not_trained_further(recipe, target, caplog):
    first = train(recipe(), target)
    before = weights(first)
    with caplog.at_level("INFO"):
        again = train(recipe(), target)
    assert "step 12 held out" in caplog.text
    assert (again.steps, weights(again)) == (12, before)
    assert again.metrics["eval_tau"] == first.metrics["eval_tau"]


def test_a_finished_run_is_its_best_checkpoint_also_when_started_again(recipe, target):
    """The best of the highest loss is the first. It stays beside the last one, which is what is continued from."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    made = recipe(eval_steps=4, save_total_limit=1, **best)
    first = weights(train(made, target))
    saved = made.output_folder / "checkpoints"
    assert [folders.step_of(f) for f in folders.checkpoints(saved)] == [4, 12]
    again = train(made, target)
    assert (again.steps, weights(again)) == (12, first)
    assert first == weights(saved / "checkpoint-4")


def another_step(last: Path) -> None:
    state = json.loads((last / folders.STATE).read_text())
    (last / folders.STATE).write_text(json.dumps(state | {"global_step": -3}))


def no_state(last: Path) -> None:
    (last / folders.STATE).write_text('{"surprise": []}')


def another_name(last: Path) -> None:
    last.rename(last.with_name("checkpoint-99999999999999999999"))


def another_optimizer(last: Path) -> None:
    shutil.copy(last.with_name("checkpoint-4") / "optimizer.pt", last)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (another_step, r"trainer_state\.json: step -3 of 12; expected that of checkpoint-8"),
        (no_state, r"trainer_state\.json: no state of a training; expected that of checkpoint-8"),
        (another_name, r"trainer_state\.json: step 8 of 12; expected that of checkpoint-9999"),
        (another_optimizer, "the optimizer has taken 4 steps"),
    ],
)
def test_a_sealed_checkpoint_of_another_step_is_refused(recipe, target, alter, message):
    """A seal tells what was altered later, not what was sealed: whoever can write the folder can seal it."""
    made = recipe(save_steps=4, logging_steps=4, save_total_limit=3)
    train(made, target)
    saved = made.output_folder / "checkpoints"
    shutil.rmtree(saved / "checkpoint-12")
    alter(saved / "checkpoint-8")
    seal(last := folders.checkpoints(saved)[-1])
    assert not problems(last)
    with pytest.raises(BadInputError, match=message):
        train(made, target)


def test_a_scale_that_no_training_in_float32_has_changes_nothing(recipe, target):
    whole = train(recipe("whole", save_steps=4), target)
    made = recipe("more", save_steps=4)
    train(made, target)
    last = made.output_folder / "checkpoints" / "checkpoint-8"
    shutil.rmtree(last.with_name("checkpoint-12"))
    torch.save({"scale": 3.0}, last / "scaler.pt")
    seal(last)
    assert weights(train(made, target)) == weights(whole)


def test_a_named_checkpoint_is_continued_with_the_rows_of_its_steps(recipe, target):
    made = recipe(max_steps=4)
    train(made, target)
    named = str(made.output_folder / "checkpoints" / "checkpoint-4")
    with pytest.raises(BadInputError, match=r"8 rows in a step, in 1 processes; this run would learn 4 in 1\."):
        train(recipe("other", resume_from_checkpoint=named, per_device_train_batch_size=4), target)


def test_resume_false_starts_over_and_keeps_the_old_checkpoints(recipe, target):
    train(recipe(), target)
    again = train(recipe(learning_rate=1e-4), target, resume=False)
    assert again.steps == 12
    assert (again.drafter_folder.parent / "checkpoints.old-1" / "checkpoint-12").is_dir()


def test_the_rows_of_a_step_may_be_spread_in_another_way_and_stay_as_many(recipe, target):
    """As another number of processes needs it; sums are ordered differently, and so losses differ by rounding."""
    steady = {"max_steps": 8, "lr_scheduler_type": "constant"}
    with in_float64(target) as doubled:
        train(recipe("whole", **steady), doubled)
        train(recipe(**steady | {"max_steps": 4}), doubled)
        with pytest.raises(BadInputError, match=r"8 rows in a step, in 1 processes; this run would learn 4 in 1\."):
            train(recipe(**steady, per_device_train_batch_size=4), doubled)
        train(recipe(**steady, per_device_train_batch_size=4, gradient_accumulation_steps=2), doubled)
    assert losses(recipe()) == pytest.approx(losses(recipe("whole")), rel=EXACT)


def test_a_run_may_be_made_longer_and_is_not_continued_with_another_recipe(recipe, target, caplog):
    caplog.set_level("INFO")
    train(recipe(), target)
    assert "learning rates go on" not in caplog.text
    with pytest.raises(BadInputError, match=r"training.learning_rate \(was 0.003, is 0.001\)"):
        train(recipe(learning_rate=1e-3), target)
    with pytest.raises(BadInputError, match=r"drafter.steps \(was \d, is 9\)"):
        train(recipe(drafter={**EAGLE3, "steps": 9}), target)
    assert train(recipe(max_steps=15), target).steps == 15
    assert "training.max_steps was 12 and is 15: learning rates go on as of such a length" in caplog.text


def test_every_checkpoint_is_a_loadable_drafter_and_resuming_never_unpickles_code(recipe, target, monkeypatch):
    made = recipe()
    train(made, target)
    found = folders.checkpoints(made.output_folder / "checkpoints")
    assert [folders.step_of(f) for f in found] == [8, 12]
    for folder in found:
        assert isinstance(load_drafter(folder, target), Eagle3)
        assert not (folder / "training_args.bin").exists()
        torch.load(folder / "optimizer.pt", weights_only=True)
        torch.load(folder / "scheduler.pt", weights_only=True)
    shutil.rmtree(made.output_folder / "checkpoints" / "checkpoint-12")
    load, asked = torch.load, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("weights_only"))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", watched)
    train(made, target)
    assert asked == [True] * 4, "the optimizer (looked at, then read), the schedule, the random states"


def nan_loss(result: DrafterLoss) -> DrafterLoss:
    return DrafterLoss(result.total * float("nan"), result.count, result.metrics)


def nan_gradient(result: DrafterLoss) -> DrafterLoss:
    return DrafterLoss(result.total + 0 * (result.total - result.total.detach()).sqrt(), result.count, result.metrics)


@pytest.mark.parametrize(("act", "seen"), [(nan_loss, "the loss is nan"), (nan_gradient, "the gradient's norm is nan")])
def test_a_loss_that_is_not_finite_stops_before_the_step(recipe, target, monkeypatch, act, seen):
    in_loss(monkeypatch, 6, act)
    advice = r"training.learning_rate \(now 0.003\).*max_grad_norm.*checkpoint-4;"
    said = rf"before step 6, .*{seen}.* learned from the rows row-\d+, .*{advice}"
    with pytest.raises(BadInputError, match=said) as raised:
        train(recipe(), target)
    assert raised.value.exit_code == 2
    kept = load_drafter(folders.last_complete(recipe().output_folder / "checkpoints"), target)
    assert all(p.isfinite().all() for p in kept.parameters())


def test_a_target_whose_states_are_not_finite_is_blamed_for_the_loss(recipe, target, monkeypatch):
    forward = target.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return dataclasses.replace(out, last=out.last * float("nan"))

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(BadInputError, match=r"before step 1, .*The target's own hidden states of the rows row-\d+, "):
        train(recipe(), target)


def test_too_high_a_learning_rate_ends_with_exit_code_2(recipe, stored, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(learning_rate=1e30, max_grad_norm=0).to_yaml())
    assert main([str(file), f"target.path={stored}"]) == 2
    assert "lower training.learning_rate (now 1e+30)" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_good_one(recipe, target, monkeypatch):
    """The operating system refuses files beyond a few kB from the second checkpoint on, as a full disk would."""
    made, soft_hard = recipe(), resource.getrlimit(resource.RLIMIT_FSIZE)

    in_loss(monkeypatch, 7, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft_hard[1])))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = r"checkpoint-8 could not be written: .* free on that disk\)\. The last good checkpoint is .*checkpoint-4"
    try:
        with pytest.raises(BadInputError, match=said):
            train(made, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
        signal.signal(signal.SIGXFSZ, before)
    assert [f.name for f in (made.output_folder / "checkpoints").iterdir()] == ["checkpoint-4"]
    monkeypatch.undo()
    assert train(recipe(), target).steps == 12


def test_the_command_reports_bad_input_in_one_line(recipe, tmp_path, capsys):
    assert main([str(tmp_path / "missing.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: no recipe at")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe().to_yaml())
    assert main([str(file), "training.learning_rat=1"]) == 2
    assert "did you mean 'learning_rate'" in capsys.readouterr().err


def test_only_the_main_process_reports_success(monkeypatch, capsys, caplog):
    caplog.set_level("INFO", logger="outrider")  # the command makes it ERROR, and later tests would see no warnings
    monkeypatch.setenv("RANK", "1")
    assert main(["missing.yaml"]) == 2
    assert capsys.readouterr().err.startswith("[process 1] error: no recipe at")


def test_two_processes_give_the_loss_curve_of_one(recipe, target):
    """The same global batches of 8 rows over two epochs, features cached by the main process.

    Only sums are ordered differently.
    """
    features = {"features": "cached"}
    one = recipe("one", data_changes=features, max_steps=14)
    two = recipe("two", data_changes=features, max_steps=14, per_device_train_batch_size=4)
    train_alike(one, [two], target, start=train_in_two)
    assert len(losses(two)) == 14
    require_same_drafter(one, two)
    held_out = [provenance(made)["metrics"]["eval_loss"] for made in (one, two)]
    assert held_out[1] == pytest.approx(held_out[0], rel=EXACT)


@pytest.mark.slow
def test_torchrun_and_accelerate_launch_give_the_same_curve(recipe, target, stored, tmp_path):
    one = recipe("one")
    train(one, target)
    launchers = {
        "torchrun": "torch.distributed.run --nproc_per_node 2 --master_port 29611",
        "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 29612",
    }
    for name, launcher in launchers.items():
        made = recipe(name, per_device_train_batch_size=4)
        (tmp_path / f"{name}.yaml").write_text(made.to_yaml())
        arguments = ["-m", "outrider.train", str(tmp_path / f"{name}.yaml"), f"target.path={stored}"]
        command = [sys.executable, "-m", *launcher.split(), *arguments]
        subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, timeout=300)
        assert losses(made) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.slow
def test_accelerate_launch_cpu_with_two_processes_says_what_to_use_instead(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    launcher = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "outrider.train"]
    command = [sys.executable, "-m", *launcher, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes" in done.stderr
