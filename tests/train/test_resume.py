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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError, digests
from outrider.common.digests import LIST
from outrider.heads import DrafterLoss, Eagle3, load_drafter
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import TrainingInterruptedError, train
from outrider.train import checkpoints as folders
from outrider.train.__main__ import main

from .conftest import MakeRecipe


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def in_call(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[DrafterLoss], DrafterLoss]) -> None:
    """Let `act` change the result of the drafter's `number`-th training loss."""
    original, calls = Eagle3.loss, [0]

    def loss(self: Eagle3, batch: Any) -> DrafterLoss:
        result = original(self, batch)
        calls[0] += self.training
        return act(result) if self.training and calls[0] == number else result

    monkeypatch.setattr(Eagle3, "loss", loss)


def cut_short(folder: Path) -> Path:
    """A checkpoint whose writing was killed: some of its files are there, one of them half."""
    shutil.copytree(folder, broken := folder.with_name("checkpoint-1000000"))
    (broken / LIST).unlink()
    (broken / "trainer_state.json").unlink()
    (broken / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:100])
    return broken


def test_killed_and_resumed_equals_never_killed_bit_for_bit(recipe: MakeRecipe, target: Target, tmp_path: Path) -> None:
    """A real SIGKILL of `python -m outrider.train`, and beside its checkpoints one whose writing was cut short."""
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    training = {
        "max_steps": 120,
        "save_steps": 10,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 50,
    }
    spec = {"path": str(tmp_path / "target"), "dtype": "float32"}
    killed, whole = (
        r.model_copy(update={"target": r.target.model_validate(spec)})
        for r in (recipe("killed", **training), recipe("whole", **training))
    )
    (tmp_path / "killed.yaml").write_text(killed.to_yaml())
    process = subprocess.Popen([sys.executable, "-m", "outrider.train", str(tmp_path / "killed.yaml")], cwd=tmp_path)
    saved = killed.output_folder / "checkpoints"
    deadline = time.time() + 120
    while not (saved.exists() and (last := folders.last_complete(saved)) and folders.step_of(last) >= 30):
        assert process.poll() is None, "it ended by itself"
        assert time.time() < deadline, "no checkpoint in two minutes"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not killed.output_folder.joinpath("drafter").exists()
    reached = folders.last_complete(saved)
    assert reached is not None
    cut_short(reached)
    resumed, uninterrupted = train(killed), train(whole)
    assert resumed.steps == uninterrupted.steps == 120
    assert weights(resumed.drafter_folder) == weights(uninterrupted.drafter_folder)


@pytest.mark.parametrize(("stop", "call"), [(7, 13), (10, 19)], ids=["at the end of an epoch", "within the second"])
def test_ctrl_c_saves_a_checkpoint_and_continuing_equals_never_stopping(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, stop: int, call: int
) -> None:
    settings = {
        "max_steps": 12,
        "save_strategy": "no",
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    }

    def interrupt(result: DrafterLoss) -> DrafterLoss:
        signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        in_call(patch, call, interrupt)
        with pytest.raises(
            TrainingInterruptedError,
            match=rf"stopped after step {stop}; saved in .*checkpoint-{stop}\. Run the same command again",
        ):
            train(recipe("stopped", **settings), target)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train(recipe("stopped", **settings), target)
    whole = train(recipe("whole", **settings), target)
    assert weights(resumed.drafter_folder) == weights(whole.drafter_folder)


def test_a_draft_model_resumes_bit_for_bit(recipe: MakeRecipe, target: Target) -> None:
    drafter = {"type": "draft_model", "model": {"num_hidden_layers": 1, "tie_word_embeddings": True}}
    whole = train(recipe("whole", drafter), target)
    shutil.copytree(whole.drafter_folder.parent, whole.drafter_folder.parent.with_name("half"))
    shutil.rmtree(whole.drafter_folder.parent.with_name("half") / "checkpoints" / "checkpoint-12")
    assert weights(train(recipe("half", drafter), target).drafter_folder) == weights(whole.drafter_folder)


def test_a_finished_run_is_not_trained_further(recipe: MakeRecipe, target: Target) -> None:
    first = train(recipe(), target)
    before = weights(first.drafter_folder)
    again = train(recipe(), target)
    assert (again.steps, weights(again.drafter_folder)) == (12, before)
    assert again.metrics["eval_tau"] == pytest.approx(first.metrics["eval_tau"], rel=1e-6)


def test_a_finished_run_is_its_best_checkpoint_also_when_started_again(recipe: MakeRecipe, target: Target) -> None:
    """The best of the highest loss is the first. It stays beside the last one, which is what is continued from."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    made = recipe(eval_steps=4, save_total_limit=1, **best)
    first = weights(train(made, target).drafter_folder)
    saved = made.output_folder / "checkpoints"
    assert [folders.step_of(f) for f in folders.checkpoints(saved)] == [4, 12]
    again = train(made, target)
    assert (again.steps, weights(again.drafter_folder)) == (12, first)
    assert first == weights(saved / "checkpoint-4")


def test_a_named_checkpoint_is_continued_with_the_rows_of_its_steps(recipe: MakeRecipe, target: Target) -> None:
    made = recipe(max_steps=4)
    train(made, target)
    named = str(made.output_folder / "checkpoints" / "checkpoint-4")
    with pytest.raises(BadInputError, match=r"8 rows in a step, in 1 processes; this run would learn 4 in 1\."):
        train(recipe("other", resume_from_checkpoint=named, per_device_train_batch_size=4), target)


def test_resume_false_starts_over_and_keeps_the_old_checkpoints(recipe: MakeRecipe, target: Target) -> None:
    train(recipe(), target)
    again = train(recipe(learning_rate=1e-4), target, resume=False)
    assert again.steps == 12
    assert (again.drafter_folder.parent / "checkpoints.old-1" / "checkpoint-12").is_dir()


def test_another_recipe_does_not_continue_a_run(recipe: MakeRecipe, target: Target) -> None:
    train(recipe(), target)
    with pytest.raises(BadInputError, match=r"training.learning_rate \(was 0.003, is 0.001\)"):
        train(recipe(learning_rate=1e-3), target)


def test_the_rows_of_a_step_may_be_spread_in_another_way_and_stay_as_many(recipe: MakeRecipe, target: Target) -> None:
    """As another number of processes needs it; sums are ordered differently, and so losses differ by rounding."""
    steady = {"max_steps": 8, "lr_scheduler_type": "constant"}
    train(recipe("whole", **steady), target)
    train(recipe(**steady | {"max_steps": 4}), target)
    with pytest.raises(BadInputError, match=r"8 rows in a step, in 1 processes; this run would learn 4 in 1\."):
        train(recipe(**steady, per_device_train_batch_size=4), target)
    train(recipe(**steady, per_device_train_batch_size=4, gradient_accumulation_steps=2), target)
    assert losses(recipe()) == pytest.approx(losses(recipe("whole")), rel=1e-4)


def test_a_run_may_be_made_longer(recipe: MakeRecipe, target: Target) -> None:
    train(recipe(), target)
    assert train(recipe(max_steps=15), target).steps == 15


def test_every_checkpoint_is_a_loadable_drafter_and_holds_no_pickled_objects(
    recipe: MakeRecipe, target: Target
) -> None:
    made = recipe()
    train(made, target)
    found = folders.checkpoints(made.output_folder / "checkpoints")
    assert [folders.step_of(f) for f in found] == [8, 12]
    for folder in found:
        assert isinstance(load_drafter(folder, target), Eagle3)
        assert not (folder / "training_args.bin").exists()
        torch.load(folder / "optimizer.pt", weights_only=True)
        torch.load(folder / "scheduler.pt", weights_only=True)


def test_resuming_never_unpickles_code(recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe()
    train(made, target)
    shutil.rmtree(made.output_folder / "checkpoints" / "checkpoint-12")
    load, asked = torch.load, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("weights_only"))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", watched)
    train(recipe(), target)
    assert asked == [True] * 4, "the optimizer (looked at, then read), the schedule, the random states"


# ------------------------------------------------------------ checkpoint folders


def test_a_checkpoint_that_lost_bytes_is_skipped(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(100))
        digests.seal(folder)
    assert folders.last_complete(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(bytes(99))
    assert folders.last_complete(tmp_path) == tmp_path / "checkpoint-1"
    (tmp_path / "checkpoint-1" / LIST).unlink()
    assert folders.last_complete(tmp_path) is None


def test_rotation_keeps_the_last_the_best_and_only_whole_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        digests.seal(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-4").mkdir()
    folders.rotate(tmp_path, 2, str(tmp_path / "checkpoint-1"))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-10"]


# ------------------------------------------------------------ things that go wrong


def nan_loss(result: DrafterLoss) -> DrafterLoss:
    return DrafterLoss(result.total * float("nan"), result.count, result.metrics)


def nan_gradient(result: DrafterLoss) -> DrafterLoss:
    return DrafterLoss(result.total + 0 * (result.total - result.total.detach()).sqrt(), result.count, result.metrics)


@pytest.mark.parametrize(("act", "seen"), [(nan_loss, "the loss is nan"), (nan_gradient, "the gradient's norm is nan")])
def test_a_loss_that_is_not_finite_stops_before_the_step(
    recipe: MakeRecipe,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[DrafterLoss], DrafterLoss],
    seen: str,
) -> None:
    in_call(monkeypatch, 6, act)
    with pytest.raises(
        BadInputError,
        match=rf"before step 6, .*{seen}.* learned from the rows row-\d+, .*"
        r"training.learning_rate \(now 0.003\).*max_grad_norm.*checkpoint-4;",
    ) as raised:
        train(recipe(), target)
    assert raised.value.exit_code == 2
    kept = load_drafter(folders.last_complete(recipe().output_folder / "checkpoints"), target)
    assert all(p.isfinite().all() for p in kept.parameters())


def test_a_target_whose_states_are_not_finite_is_blamed_for_the_loss(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = target.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return dataclasses.replace(out, last=out.last * float("nan"))

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(BadInputError, match=r"before step 1, .*The target's own hidden states of the rows row-\d+, "):
        train(recipe(), target)


def test_too_high_a_learning_rate_ends_with_exit_code_2(
    recipe: MakeRecipe, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe(learning_rate=1e30, max_grad_norm=0).to_yaml())
    assert main([str(file), f"target.path={tmp_path / 'target'}"]) == 2
    assert "lower training.learning_rate (now 1e+30)" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_good_one(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system refuses files beyond a few kB from the second checkpoint on, as a full disk would."""
    made, soft_hard = recipe(), resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(result: DrafterLoss) -> DrafterLoss:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft_hard[1]))
        return result

    in_call(monkeypatch, 7, fill)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(
            BadInputError,
            match=r"checkpoint-8 could not be written: .* free on that disk\)\. "
            r"The last good checkpoint is .*checkpoint-4",
        ):
            train(made, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
        signal.signal(signal.SIGXFSZ, before)
    assert [f.name for f in (made.output_folder / "checkpoints").iterdir()] == ["checkpoint-4"]
    monkeypatch.undo()
    assert train(recipe(), target).steps == 12


def test_the_command_reports_bad_input_in_one_line(
    recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "missing.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: no recipe at")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe().to_yaml())
    assert main([str(file), "training.learning_rat=1"]) == 2
    assert "did you mean 'learning_rate'" in capsys.readouterr().err


def test_only_the_main_process_reports_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="outrider")  # the command makes it ERROR, and later tests would see no warnings
    monkeypatch.setenv("RANK", "1")
    assert main(["missing.yaml"]) == 2
    assert capsys.readouterr().err.startswith("[process 1] error: no recipe at")


# ------------------------------------------------------------ processes


def losses(made: Recipe) -> list[float]:
    last = folders.last_complete(made.output_folder / "checkpoints")
    assert last is not None
    return [e["loss"] for e in json.loads((last / "trainer_state.json").read_text())["log_history"] if "loss" in e]


def test_two_processes_give_the_loss_curve_of_one(recipe: MakeRecipe, target: Target) -> None:
    """The same global batches of 8 rows over two epochs, features cached by the main process.

    Only sums are ordered differently: 1e-5.
    """
    from accelerate import debug_launcher

    features = {"features": "cached"}
    one, two = (
        recipe("one", data_changes=features, max_steps=14),
        recipe("two", data_changes=features, max_steps=14, per_device_train_batch_size=4),
    )
    train(one, target)
    debug_launcher(train, (two, target), num_processes=2)
    assert len(losses(two)) == 14
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    ours, theirs = (load_drafter(r.output_folder / "drafter").state_dict() for r in (one, two))
    assert all(torch.allclose(ours[n].float(), theirs[n].float(), atol=1e-4) for n in ours)
    held_out = [
        json.loads((r.output_folder / "provenance.json").read_text())["metrics"]["eval_loss"] for r in (one, two)
    ]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


@pytest.mark.slow
def test_torchrun_and_accelerate_launch_give_the_same_curve(recipe: MakeRecipe, target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    one = recipe("one")
    train(one, target)
    launchers = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29611"],
        "accelerate": [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            "29612",
        ],
    }
    for name, command in launchers.items():
        made = recipe(name, per_device_train_batch_size=4)
        (tmp_path / f"{name}.yaml").write_text(made.to_yaml())
        arguments = ["-m", "outrider.train", str(tmp_path / f"{name}.yaml"), f"target.path={tmp_path / 'target'}"]
        subprocess.run(
            command + arguments, check=True, cwd=tmp_path, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, timeout=300
        )
        assert losses(made) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.slow
def test_accelerate_launch_cpu_with_two_processes_says_what_to_use_instead(recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "-m",
        "outrider.train",
        str(tmp_path / "recipe.yaml"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes" in done.stderr
