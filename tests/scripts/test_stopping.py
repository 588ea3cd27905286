"""Real signals to real processes: every long verb says a sentence, ends with its code, and goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from outrider.train import checkpoints as folders

from .conftest import Command, succeeded, wait_for

TRAINING = ["training.max_steps=300", "training.save_strategy=no", "training.eval_strategy=no"]
CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}
# Two processes on a CPU, and what a launcher of one process leaves in the environment.
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
TRAIN = ["-m", "outrider.train"]
GRACE = 30  # seconds between SIGTERM and SIGKILL, of Slurm (KillWait) and Kubernetes


def started(command: Sequence[object], folder: Path) -> subprocess.Popen:
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "said").open("w"),
        start_new_session=True,
    )


def verb(name: str, *arguments: object) -> list[object]:
    return [sys.executable, "-m", "outrider.scripts.cli", name, *arguments]


def trains(folder: Path) -> Callable[[], bool]:
    """Tell whether the loop runs: it has logged a line."""
    return lambda: "step 1 " in (folder / "said").read_text()


def reached(folder: Path) -> int:
    last = folders.last_complete(folder / "checkpoints")
    assert last is not None
    return folders.step_of(last)


def weights(folder: Path) -> bytes:
    return (folder / "drafter" / "model.safetensors").read_bytes()


@pytest.fixture
def whole(outrider: Command, recipe_file: Path, tmp_path: Path) -> bytes:
    """The weights of the same training, never asked to stop."""
    succeeded(outrider("train", recipe_file, *TRAINING, f"output={tmp_path / 'whole'}"))
    return weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_train(outrider: Command, recipe_file: Path, tmp_path: Path, whole: bytes, number: int) -> None:
    process = started(verb("train", recipe_file, *TRAINING), tmp_path)
    wait_for(trains(tmp_path), process)
    process.send_signal(number)
    assert process.wait(GRACE) == CODES[number]
    said = (tmp_path / "said").read_text()
    assert f"stopped after step {reached(tmp_path / 'run')}; saved in" in said.replace("\n", " ")
    assert "Traceback" not in said
    succeeded(outrider("train", recipe_file, *TRAINING))
    assert weights(tmp_path / "run") == whole


@pytest.mark.slow
def test_workers_that_load_data_leave_the_checkpoint_to_their_parent(
    outrider: Command, recipe_file: Path, tmp_path: Path, whole: bytes
) -> None:
    """Slurm and systemd signal every process of a job."""
    changes = [*TRAINING, "training.dataloader_num_workers=2"]
    process = started(verb("train", recipe_file, *changes), tmp_path)
    wait_for(trains(tmp_path), process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(GRACE) == 143, (tmp_path / "said").read_text()
    assert "saved in" in (tmp_path / "said").read_text()
    succeeded(outrider("train", recipe_file, *TRAINING))
    assert weights(tmp_path / "run") == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "whom"),
    [
        (["--cpu"], "the launcher"),
        (["--multi_gpu", "--num_processes", "2", "--main_process_port", "29631"], "the launcher"),
        (["--multi_gpu", "--num_processes", "2", "--main_process_port", "29632"], "one of two"),
    ],
)
def test_under_accelerate(outrider: Command, recipe_file: Path, tmp_path: Path, launch: list[str], whom: str) -> None:
    """Whoever gets the signal, all processes stop at the same step, with one checkpoint."""
    changes = [*TRAINING, "training.per_device_train_batch_size=1"]
    succeeded(outrider("distill", recipe_file, *changes))
    process = started([*LAUNCH, *launch, *TRAIN, recipe_file, *changes], tmp_path)
    wait_for(trains(tmp_path), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if whom == "the launcher" else int(children[-1]), signal.SIGTERM)
    process.wait(GRACE)
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), None, GRACE)
    assert "saved in" in (tmp_path / "said").read_text(), (tmp_path / "said").read_text()
    assert 0 < reached(tmp_path / "run") <= 300
    assert process.returncode != 0


@pytest.mark.slow
def test_compare(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    out, budget = tmp_path / "compared", ["--budget", "6"]
    process = started(verb("compare", recipe_file, *budget, "--out", out), tmp_path)
    wait_for(lambda: (out / "tiny" / "recipe.yaml").is_file(), process)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(GRACE) == 143
    succeeded(outrider("compare", recipe_file, *budget, "--out", out))


@pytest.mark.slow
def test_refresh(outrider: Command, recipe_file: Path, tmp_path: Path, target_folder: Path) -> None:
    """The next version of a pair is the same, whether its making was stopped or not."""
    short = ["training.max_steps=20"]
    succeeded(outrider("train", recipe_file, *short))
    succeeded(outrider("pair", "new", tmp_path / "pair", recipe_file, *short))
    command = ["refresh", tmp_path / "pair", "--target", target_folder, "--out"]
    process = started(verb(*command, tmp_path / "stopped", *TRAINING), tmp_path)  # type: ignore[arg-type]
    wait_for(trains(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(GRACE) == 143
    for name in ("stopped", "whole"):
        succeeded(outrider(*command, tmp_path / name, *TRAINING))
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eval", "tune"])
def test_verbs_that_measure_write_nothing(outrider: Command, recipe_file: Path, tmp_path: Path, name: str) -> None:
    changes = ["training.max_steps=2"]
    succeeded(outrider("train", recipe_file, *changes))
    succeeded(outrider("pair", "new", tmp_path / "pair", recipe_file, *changes))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    subject = [tmp_path / "pair"] if name == "tune" else [recipe_file, "eval.repeats=1000"]
    process = started(verb(name, *subject), tmp_path)
    time.sleep(12)
    process.send_signal(signal.SIGTERM)
    assert process.wait(GRACE) == 143, (tmp_path / "said").read_text()
    assert "stopped by SIGTERM; nothing was written" in (tmp_path / "said").read_text()
    (tmp_path / "said").unlink()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
