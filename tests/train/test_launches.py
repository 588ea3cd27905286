"""Every way to launch a training learns what one process learns, and leaves what one process leaves.

All processes are real, on a CPU. ZeRO needs the `deepspeed` extra, a compiler and ninja; where it is missing, its rows
are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.heads import load_drafter
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.checkpoints import checkpoints, last_complete, step_of

from .conftest import DRAFT_MODEL, EAGLE3, provenance

pytestmark = pytest.mark.slow

_ACCELERATE = (
    *("-m", "accelerate.commands.launch"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)


@dataclass(frozen=True)
class Launch:
    """A way to launch a training.

    Attributes:
        kind: `one`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`.
    """

    kind: str
    processes: int = 1

    def command(self, recipe: Path, port: int, changes: Sequence[str] = ()) -> list[str]:
        """Return the command line that trains `recipe` with these changes."""
        program, own = ["-m", "outrider.train"], ["training.use_cpu=true"]
        if self.kind == "one":
            return [sys.executable, *program, str(recipe), *own, *changes]
        options = ["--multi_gpu"]
        if self.kind.startswith("zero"):
            options = ["--use_deepspeed", "--zero_stage", self.kind[-1]]
        elif self.kind == "fsdp2":
            options = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
            program, own = [str(Path(__file__).with_name("fsdp_on_cpu.py"))], ["training.use_cpu=false"]
        where = ["--num_processes", str(self.processes), "--main_process_port", str(port)]
        return [sys.executable, *_ACCELERATE, *options, *where, *program, str(recipe), *own, *changes]

    def environment(self) -> dict[str, str]:
        """Return the environment of the launch: one thread each, and what accelerate wants to hear on a CPU."""
        # An environment that is not activated does not have its ninja, which DeepSpeed needs, on the path.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"ACCELERATE_USE_CPU": "true"} if self.kind == "ddp" else {}
        return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | own


def losses(output: Path) -> list[float]:
    """Return the losses of all steps of a training, which logged each."""
    folders = (output / "checkpoints").glob("checkpoint-*")
    last = max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


ONE = Launch("one")
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")
ENGINES = [
    pytest.param(Launch("fsdp2", 2), id="fsdp2"),
    pytest.param(Launch("zero2", 2), id="zero2", marks=needs_deepspeed),
    pytest.param(Launch("zero3", 2), id="zero3", marks=needs_deepspeed),
]
ALL = [pytest.param(Launch("ddp", 2), id="ddp"), *ENGINES]
TIED = {"type": "draft_model", "model": {"num_hidden_layers": 2, "tie_word_embeddings": True}}
MTP = {"type": "mtp", "steps": 3}
PEAGLE = {"type": "peagle", "steps": 3}
PARD = {"type": "pard", "model": {"num_hidden_layers": 2}, "steps": 3, "mask_token_id": 319}
MEDUSA = {"type": "medusa", "num_heads": 2}  # has neither norms nor biases

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Run:
    """`run(launch, recipe)` trains in processes of its own; an exit code other than `ends` fails."""

    def start(launch: Launch, recipe: Recipe, ends: int = 0) -> subprocess.CompletedProcess[str]:
        command, environment = command_of(launch, recipe, tmp_path), launch.environment()
        done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=400, capture_output=True, text=True)
        assert (done.returncode != 0) == (ends != 0), done.stderr[-3000:]
        return done

    return start


def command_of(launch: Launch, recipe: Recipe, folder: Path) -> list[str]:
    (folder / f"{recipe.name}.yaml").write_text(recipe.to_yaml())
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        free_port = int(asked.getsockname()[1])
    changes = [f"target.path={folder / 'target'}", "target.dtype=float32"]
    return launch.command(folder / f"{recipe.name}.yaml", free_port, changes)


def launch_alike(one: Recipe, made: Recipe, target: Target, rel: float, start: Callable[[Recipe], Any]) -> None:
    """Train here and in processes of their own, which are of float32: losses are the same but for rounding."""
    train(one, target)
    start(made)
    assert losses(made.output_folder) == pytest.approx(losses(one.output_folder), rel=rel)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def are_close(ours: Path, theirs: Path) -> bool:
    one, other = tensors(ours), tensors(theirs)
    return one.keys() == other.keys() and all(torch.allclose(one[n].float(), other[n].float(), atol=2e-3) for n in one)


@pytest.mark.parametrize("launch", ENGINES)
@pytest.mark.parametrize("drafter", [EAGLE3, TIED, MEDUSA], ids=["a head", "a tied draft model", "matrices alone"])
def test_a_drafter_in_parts_learns_what_one_process_learns(launch, drafter, recipe, target, run):
    """The same losses in training (1e-4) and on held-out rows, the same weights in the result and in a checkpoint.

    With weight decay, and 61 rows, of which the last batch of an epoch leaves one process nothing.
    """
    settings = {"optim": "adamw_torch", "weight_decay": 0.1}
    one = recipe("one", drafter, **settings)
    made = recipe("parts", drafter, per_device_train_batch_size=4, **settings)
    launch_alike(one, made, target, 1e-4, partial(run, launch))
    ours, theirs = provenance(made), provenance(one)
    assert ours["metrics"]["eval_loss"] == pytest.approx(theirs["metrics"]["eval_loss"], rel=1e-4)
    assert ours["drafter"] == theirs["drafter"]
    folders = [r.output_folder for r in (made, one)]
    assert are_close(*(f / "drafter" for f in folders))
    assert are_close(*(checkpoints(f / "checkpoints")[0] for f in folders))
    load_drafter(checkpoints(folders[0] / "checkpoints")[0], target)


@pytest.mark.parametrize("launch", ALL)
@pytest.mark.parametrize("drafter", [MTP, PEAGLE, PARD], ids=["mtp", "peagle", "pard"])
def test_packs_whose_texts_are_read_alone_want_other_numbers_of_passes_in_each_process(
    launch, drafter, recipe, target, run
):
    """The drafter is gathered as one for a step, so that nobody waits for a pass that another does not make."""
    settings = {"optim": "adamw_torch", "packing": True, "max_length": 64, "max_steps": 6, "eval_strategy": "no"}
    one = recipe("one", drafter, per_device_train_batch_size=4, **settings)
    made = recipe("packs", drafter, per_device_train_batch_size=2, **settings)
    launch_alike(one, made, target, 1e-4, partial(run, launch))


@pytest.mark.parametrize("launch", ENGINES)
@pytest.mark.parametrize("drafter", [EAGLE3, MEDUSA], ids=["a head", "matrices alone"])
def test_a_drafter_in_parts_continues_in_any_number_of_processes(launch, drafter, recipe, target, run):
    """From step 4 of two processes on: in two, in three under FSDP2, and in one with the whole drafter.

    And in two from step 4 of one. The losses are those of no stop; states are read without unpickling any code.
    """
    settings = {"optim": "adamw_torch", "max_steps": 8, "per_device_train_batch_size": 6}
    whole = recipe("whole", drafter, **settings)
    alone = recipe("alone", drafter, **settings | {"per_device_train_batch_size": 12})
    run(launch, whole)
    train(alone, target)
    ours, theirs = (checkpoints(r.output_folder / "checkpoints")[0] for r in (whole, alone))
    assert set(torch.load(ours / "optimizer.pt", weights_only=True)) == {"state", "param_groups"}
    starts = [(ours, launch), (ours, Launch("fsdp2", 3)), (ours, ONE), (theirs, launch)]
    for place, (first, other) in enumerate(starts):
        rows = {"per_device_train_batch_size": 12 // other.processes}
        again = recipe(f"again-{place}", drafter, **settings | rows)
        shutil.copytree(first, again.output_folder / "checkpoints" / first.name)
        assert "continuing from" in run(other, again).stderr
        assert losses(again.output_folder)[4:] == pytest.approx(losses(whole.output_folder)[4:], rel=1e-3)


@pytest.mark.parametrize("launch", ENGINES)
def test_a_drafter_in_parts_learns_from_its_own_text_and_keeps_the_best_checkpoint(launch, recipe, target, run):
    """Text is written by a whole copy in each process: figures and the best checkpoint are those of one process."""
    settings = {"optim": "adamw_torch", "eval_steps": 4, "eval_strategy": "steps"}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "tau", "greater_is_better": True}
    data = {"on_policy": 0.5, "max_new_tokens": 8}
    one = recipe("one", DRAFT_MODEL, data, **settings)
    made = recipe("parts", DRAFT_MODEL, data, per_device_train_batch_size=4, **settings)
    launch_alike(one, made, target, 2e-3, partial(run, launch))
    assert are_close(made.output_folder / "drafter", one.output_folder / "drafter")


@pytest.mark.parametrize("launch", ENGINES[1:])
@pytest.mark.parametrize("drafter", [EAGLE3, TIED], ids=["a head", "a tied draft model"])
def test_mixed_precision_is_that_of_one_process(launch, drafter, recipe, target, run):
    """In bfloat16 weights stay float32, so that losses differ only by rounding; checkpoints hold float32.

    (Not under FSDP2: transformers refuses bfloat16 where it is told of an accelerator that is not there.)
    """
    settings = {"optim": "adamw_torch", "bf16": True, "max_steps": 6, "save_steps": 6}
    one = recipe("one", drafter, **settings)
    made = recipe("parts", drafter, per_device_train_batch_size=4, **settings)
    launch_alike(one, made, target, 5e-3, partial(run, launch))
    saved = tensors(made.output_folder / "drafter").values()
    assert {w.dtype for w in saved if w.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("launch", ENGINES)
def test_a_loss_that_is_not_finite_ends_a_training_in_parts(launch, recipe, run):
    made = recipe("wild", optim="adamw_torch", learning_rate=1e30, max_grad_norm=0, per_device_train_batch_size=4)
    said = run(launch, made, ends=2).stderr
    assert "training stopped before step" in said
    assert "lower training.learning_rate (now 1e+30)" in said


@pytest.mark.parametrize("launch", ALL)
def test_muon_needs_whole_matrices(launch, recipe, run):
    made = recipe("muon", optim="muon", max_steps=2, per_device_train_batch_size=4)
    if launch.kind == "ddp":
        assert "find_unused_parameters" not in run(launch, made).stderr
    else:
        assert "muon moves whole matrices" in run(launch, made, ends=2).stderr


def started(launch: Launch, made: Recipe, folder: Path) -> subprocess.Popen[bytes]:
    """A training in the background, of which `folder/said` has what it says."""
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "start_new_session": True}
    with (folder / "said").open("w") as said:
        command, environment = command_of(launch, made, folder), launch.environment()
        return subprocess.Popen(command, cwd=folder, env=environment, stderr=said, **streams)


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for(said: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 200
    while text not in said.read_text():
        assert process.poll() is None, said.read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("launch", ALL)
def test_a_worker_that_dies_ends_the_run_within_a_minute(launch, recipe, run, tmp_path):
    """By SIGKILL, as from a machine without memory: the other one says what happened, and what is kept."""
    made = recipe("run", optim="adamw_torch", max_steps=5000, save_steps=5, per_device_train_batch_size=4)
    process = started(launch, made, tmp_path)
    wait_for(tmp_path / "said", "step 6 ", process)
    os.kill(workers(process)[-1], signal.SIGKILL)
    assert process.wait(60) != 0
    said = " ".join((tmp_path / "said").read_text().split())
    assert "another process of this launch ended in the middle of the training" in said
    assert "The last good checkpoint is" in said


@pytest.mark.parametrize("launch", ENGINES)
def test_sigterm_saves_and_the_same_command_continues(launch, recipe, run, tmp_path):
    """One of two processes gets the signal; both stop after the same step, with a checkpoint."""
    made = recipe("run", optim="adamw_torch", max_steps=60, save_strategy="no", per_device_train_batch_size=4)
    process = started(launch, made, tmp_path)
    wait_for(tmp_path / "said", "step 3 ", process)
    os.kill(workers(process)[-1], signal.SIGTERM)
    process.wait(60)
    assert "saved in" in (tmp_path / "said").read_text()
    again = run(launch, made)
    assert "continuing from" in again.stderr
    assert "60 steps" in again.stderr


@pytest.mark.parametrize("launch", ALL)
def test_kills_of_all_processes_at_random_times_lose_no_more_than_an_interval(launch, recipe, run, tmp_path):
    """Three times SIGKILL to the launcher and its processes; in the end the losses are those of no kill (1e-4)."""
    settings = {"optim": "adamw_torch", "max_steps": 240, "save_steps": 3, "per_device_train_batch_size": 4}
    whole = recipe("whole", **settings)
    made = recipe("killed", **settings)
    chance = random.Random(7)
    run(launch, whole)
    for _ in range(3):
        process = started(launch, made, tmp_path)
        said, before = tmp_path / "said", reached(made)
        wait_for(said, f"step {before + 1}  loss", process)
        time.sleep(chance.uniform(0, 1.5))
        logged = [int(step) for step in re.findall(r"step (\d+)  loss", said.read_text())]
        for number in [*workers(process), process.pid]:  # a worker that outlives its launcher would save once more
            os.kill(number, signal.SIGKILL)
        process.wait(60)
        assert reached(made) >= max(logged) - 2 * settings["save_steps"], "a checkpoint may be half written"
    run(launch, made)
    assert losses(made.output_folder) == pytest.approx(losses(whole.output_folder), rel=1e-4)


def reached(made: Recipe) -> int:
    last = last_complete(made.output_folder / "checkpoints")
    return 0 if last is None else step_of(last)
