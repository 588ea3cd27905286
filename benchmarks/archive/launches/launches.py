"""One training, launched in every way, on CPU processes: the same losses? And what does a process hold at most?

    python -m benchmarks.launches embedded-eagle3 --work build/launches --out launches-cpu.json

    python -m benchmarks.launches embedded-draft-model --memory --work build/memory --out memory-cpu.json

Each launch trains the same rows with the same number of rows in a step, and its losses stand beside those of one
process. With --memory a larger draft model is trained, and what the largest process held at most stands beside it:
all that the system gave it, libraries and target included. Nothing is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.common import BadInputError
from outrider.common.atomic import write_atomically
from outrider.distill.responses import distill
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target

from .report import command, conditions, options, publish, table, write

STEPS = (1, 10, 100)
Row = dict[str, Any]
_ACCELERATE = (
    *("-m", "accelerate.commands.launch"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)


@dataclass(frozen=True)
class Launch:
    """A way to launch a training.

    Attributes:
        kind: `one`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`.
        accumulation: micro-batches of a step.
    """

    kind: str
    processes: int = 1
    accumulation: int = 1

    @property
    def name(self) -> str:
        words = {"one": "", "ddp": " DDP", "fsdp2": " FSDP2"}.get(self.kind, f" ZeRO-{self.kind[-1]}")
        accumulated = f", {self.accumulation} micro-batches" if self.accumulation > 1 else ""
        return f"{self.processes}{words or ' process'}{accumulated}"

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

    def rows(self, in_step: int) -> int:
        """Return the rows of a process in a micro-batch, of so many in a step."""
        rows, rest = divmod(in_step, self.processes * self.accumulation)
        if rest:
            raise BadInputError(f"{in_step} rows cannot be divided over {self.name}.")
        return rows


LAUNCHES = (
    Launch("one"),
    Launch("one", 1, 8),
    Launch("ddp", 2),
    Launch("fsdp2", 2),
    Launch("zero2", 2),
    Launch("zero3", 2),
    Launch("ddp", 2, 2),
    Launch("fsdp2", 4),
    Launch("zero3", 4),
)


def losses(output: Path) -> list[float]:
    """Return the losses of all steps of a training, which logged each."""
    folders = (output / "checkpoints").glob("checkpoint-*")
    last = max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def launched(
    launch: Launch, recipe: Recipe, work: Path, in_step: int, port: int, more: Mapping[str, str] | None = None
) -> Path:
    """Train a recipe and return its output; what `work` holds of an earlier run is used again.

    Args:
        more: variables of its environment.
    """
    work.mkdir(parents=True, exist_ok=True)
    output = work / launch.name.replace(" ", "-").replace(",", "")
    changes = [
        f"output={output}",
        f"training.per_device_train_batch_size={launch.rows(in_step)}",
        f"training.gradient_accumulation_steps={launch.accumulation}",
    ]
    if (output / "provenance.json").is_file():
        return output
    write_atomically(work / "recipe.yaml", recipe.to_yaml())
    done = subprocess.run(
        launch.command(work / "recipe.yaml", port, changes),
        cwd=work,
        env={**launch.environment(), **(more or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BadInputError(f"{launch.name} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return output


def with_responses(recipe: Recipe, work: Path, steps: int) -> Recipe:
    """Return the recipe for so many steps on responses that are there, with every loss logged."""
    responses = recipe.data.responses or str(_answered(recipe, work))
    training = {
        "max_steps": steps,
        "logging_steps": 1,
        "save_steps": steps,
        "eval_strategy": "no",
        "optim": "adamw_torch",
        "disable_tqdm": True,
    }
    kept = {k: v for k, v in recipe.training.items() if k not in ("num_train_epochs", "eval_steps")}
    changes = {
        "training": kept | training,
        "data": recipe.data.model_copy(update={"responses": responses}),
    }
    return recipe.model_copy(update=changes)


def _answered(recipe: Recipe, work: Path) -> Path:
    target = Target.load(**recipe.target.to_load())
    return distill(recipe.model_copy(update={"output": str(work / "asked")}), target).resolve()


def equality(recipe: Recipe, work: Path, steps: int, in_step: int, launches: Sequence[Launch]) -> Iterator[Row]:
    """Yield a row for each launch: its losses at some steps, and how far any is from that of one process."""
    made, one = with_responses(recipe, work, steps), None
    for place, launch in enumerate(launches):
        found = losses(launched(launch, made, work, in_step, 29700 + place))
        one = one or found
        furthest = max(abs(a - b) / abs(b) for a, b in zip(found, one, strict=True))
        at = {str(step): found[step - 1] for step in STEPS if step <= steps}
        print(f"{launch.name}: {at}, at most {furthest:.1e} from one process", flush=True)
        yield {"launch": launch.name, "loss": at, "furthest": furthest}


# A draft model of 59 million parameters for the embedded target: 0.9 GiB of weights, gradients and Adam's states.
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
MEMORY = (Launch("one"), *(Launch(kind, n) for kind in ("fsdp2", "zero3", "zero2", "ddp") for n in (2, 4)))
# What is freed goes back to the system at once, so that a peak is of what is held and not of what malloc keeps.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def memory(recipe: Recipe, work: Path, in_step: int) -> Iterator[Row]:
    """Yield a row for each launch: what its largest and its smallest process held at most in ten steps and a save."""
    drafter = {"type": "draft_model", "model": {**LARGE, "num_key_value_heads": 8, "head_dim": 96}}
    made = with_responses(recipe, work, 10).model_copy(update={"drafter": drafter})
    for place, launch in enumerate(MEMORY):
        output = launched(launch, made, work, in_step, 29740 + place, GIVE_BACK)
        facts = json.loads((output / "provenance.json").read_text())
        parameters, peaks = facts["drafter"]["parameters"], facts["training"]["peak_bytes"]
        print(f"{launch.name}: {max(peaks) / 2**20:,.0f} MiB", flush=True)
        yield {
            "launch": launch.name,
            "parameters": parameters,
            "peak_bytes": max(peaks),
            "least_peak_bytes": min(peaks),
        }


def tables(result: dict[str, Any]) -> list[str]:
    """Return the losses of each launch, or the memory of its processes."""
    if rows := result.get("launches"):
        steps = list(rows[0]["loss"])
        losses = ([row["launch"], *(f"{row['loss'][s]:.6f}" for s in steps), f"{row['furthest']:.1e}"] for row in rows)
        return [table(["launch", *(f"loss, step {s}" for s in steps), "any step from one process, at most"], losses)]
    head = ["launch", "parameters of the drafter", "peak of the largest process", "of the smallest"]
    peaks = ("peak_bytes", "least_peak_bytes")
    cells = [
        [row["launch"], f"{row['parameters'] / 1e6:.1f} M", *(f"{row[peak] / 2**20:,.0f} MiB" for peak in peaks)]
        for row in result["memory"]
    ]
    return [table(head, cells)]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--memory", action="store_true", help="peak memory of a larger draft model instead")
    parser.add_argument("--steps", type=int, default=STEPS[-1])
    parser.add_argument("--rows", type=int, default=8, help="of a step, in all processes together")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe, given.overrides)
    work = given.work.resolve()
    if given.memory:
        name, found = "memory", memory(recipe, work, given.rows)
    else:
        name, found = "launches", equality(recipe, work, given.steps, given.rows, LAUNCHES)
    target, rows = Target.load(**recipe.target.to_load()), list[Row]()
    changes = " ".join(given.overrides)
    settings = conditions(
        target, recipe=recipe.name, changes=changes, rows_in_a_step=given.rows, optimizer="adamw_torch"
    )
    for row in found:
        rows.append(row)
        result = {"conditions": settings, name: rows}
        write(result, given.out)
    publish(result, given.out, tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(command(main))
