"""Every way to launch a training on CPU processes, and the losses that it logged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
