"""DeepSpeed's ZeRO on CPU processes learns what one process learns (needs the `deepspeed` extra, a compiler, ninja)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"),
]


def losses(recipe: Recipe) -> list[float]:
    last = max(recipe.output_folder.glob("checkpoints/checkpoint-*"), key=lambda f: int(f.name.rpartition("-")[2]))
    return [e["loss"] for e in json.loads((last / "trainer_state.json").read_text())["log_history"] if "loss" in e]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_gives_the_loss_curve_of_one_process(
    recipe: Callable[..., Recipe], target: Target, tmp_path: Path, stage: int
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.require_tokenizer().save_pretrained(tmp_path / "target")
    one, made = recipe("one", optim="adamw_torch"), recipe("zero", optim="adamw_torch", per_device_train_batch_size=4)
    train(one, target)
    (tmp_path / "zero.yaml").write_text(made.to_yaml())
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", str(stage)]
    command = [*launcher, "--num_processes", "2", "--main_process_port", str(29620 + stage), "-m", "outrider.train"]
    changes = [f"target.path={tmp_path / 'target'}", "training.use_cpu=true"]
    # An environment that is not activated does not have its ninja on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [*command, str(tmp_path / "zero.yaml"), *changes],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "ACCELERATE_USE_CPU": "true"},
        timeout=600,
    )
    assert losses(made) == pytest.approx(losses(one), rel=1e-4)
