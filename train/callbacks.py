"""Callbacks of the training loop: shuffling per epoch, the finite guard, requests to stop, progress, and trackers.

Trackers (wandb, tensorboard, trackio) get, beside transformers' own scalars and settings, the recipe; at each
evaluation a table of the target's text with the drafted parts in it; and in the end recipe.yaml and provenance.json.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ..common import BadInputError
from ..common.signals import ECHO, StoppedError, listening
from ..recipes import Recipe
from .data import Order
from .decoding import Sample
from .provenance import PROVENANCE, RECIPE

_log = logging.getLogger(__name__)


class EpochOrder(TrainerCallback):
    """A callback that sets the epoch of the sampler, which accelerate's loaders lose in resumed processes."""

    def __init__(self, order: Order):
        self.order = order

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.order.set_epoch(int(state.epoch or 0))


@dataclass
class StepStats:
    """The micro-batches of an optimizer step so far, as the collator makes them, and the sum of their losses, `[]`."""

    loss: Tensor
    inputs: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, inputs: dict[str, Tensor], loss: Tensor) -> None:
        self.inputs.append(inputs)
        self.loss = self.loss + loss.detach()


class FiniteGuard(TrainerCallback):
    """A callback that stops before an optimizer step whose loss or gradient is not finite: the weights stay good.

    Args:
        take: returns the step about to be applied, and begins the next one.
        describe: returns a sentence about the rows of a step, and what is wrong with them.
        last_good: returns the last whole checkpoint, or None.
        norm: returns the norm of the gradients; 0 where a scaler expects and skips overflowing steps itself.
    """

    def __init__(
        self,
        take: Callable[[], StepStats],
        describe: Callable[[StepStats], str],
        last_good: Callable[[], Path | None],
        norm: Callable[[], Tensor],
    ):
        self.take, self.describe, self.last_good, self.norm = take, describe, last_good, norm

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        taken = self.take()
        loss, norm = torch.stack([taken.loss, self.norm().to(taken.loss)]).tolist()
        self.check(args, state.global_step + 1, taken, loss, norm)

    def check(self, args: TrainingArguments, number: int, step: StepStats, loss: float, norm: float = 0.0) -> None:
        """Refuse the step `number` if its loss or its gradient is not finite."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm} (loss {loss:.4g})"
        half = "; train in fp32 (leave out training.bf16 and training.fp16)" if args.bf16 or args.fp16 else ""
        way_on, kept = "No checkpoint yet.", self.last_good()
        if kept is not None:
            way_on = f"The last good checkpoint is {kept}; to go on, set drafter.init to it and choose another output."
        raise BadInputError(
            f"training stopped before step {number}, which was not applied: {what}. {self.describe(step)} "
            f"Try: lower training.learning_rate (now {args.learning_rate:g}); lower training.max_grad_norm (now "
            f"{args.max_grad_norm:g}){half}. {way_on}"
        )


class GracefulStop(TrainerCallback):
    """A callback by which a request to stop (`common.signals`) ends the step in progress with a checkpoint.

    A second Ctrl-C ends at once. `number` is the signal that this process received, 0 for none; `stopped_at` the step.
    """

    def __init__(self, any_process: Callable[[bool], bool]):
        self.any_process = any_process
        self.number = 0
        self.stopped_at: int | None = None
        self._since = 0.0

    def listening(self) -> AbstractContextManager[None]:
        """Return a context manager that records requests to stop inside."""
        return listening(self._request)

    def is_requested(self) -> bool:
        """Tell whether any process received a request. All of them must call this together."""
        return self.any_process(self.number != 0)

    def _request(self, number: int) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            _log.warning("%s: stopping after this step, with a checkpoint%s.", signal.Signals(number).name, again)
        elif number == signal.SIGINT and now - self._since > ECHO[signal.SIGINT]:
            raise StoppedError(number=number)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Signals reach the processes at different steps; they must stop at the same one.
        if self.is_requested():
            control.should_evaluate = False
            self.stop(state, control)

    def stop(self, state: TrainerState, control: TrainerControl) -> None:
        """End the training after the step that was just taken, with a checkpoint."""
        self.stopped_at = state.global_step
        control.should_save = control.should_training_stop = True


class Progress(ProgressCallback):
    """A progress bar, transformers' own, where what is logged becomes one line that fits a terminal."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        line = log_line(logs, state.global_step)
        if line and state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line)


class LogLines(TrainerCallback):
    """A callback that logs the lines of `log_line` without a bar (`disable_tqdm`)."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        line = log_line(kwargs["logs"], state.global_step)
        if line and state.is_world_process_zero:
            _log.info("%s", line)


def log_line(logs: dict[str, Any], step: int) -> str:
    """Return a line such as `step 120  loss 1.83  tau 2.10  alpha 0.71 0.58  lr 2.9e-03`; "" for other logs."""
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs:
        return ""
    parts = [f"step {step}" + (" held out" if prefix else ""), f"loss {logs[f'{prefix}loss']:.4g}"]
    if f"{prefix}tau" in logs:
        parts.append(f"tau {logs[f'{prefix}tau']:.2f}")
    depths = sorted((int(m[1]), v) for k, v in logs.items() if (m := re.fullmatch(rf"{prefix}alpha_d(\d+)", k)))
    parts += ["alpha " + " ".join(f"{value:.2f}" for _, value in depths)] if depths else []
    parts += [f"lr {logs['learning_rate']:.1e}"] if "learning_rate" in logs else []
    return "  ".join(parts)


TABLE = "drafted"
TABLE_COLUMNS = ["step", "prompt", "target", "drafted in brackets", "tau"]


class Reports(TrainerCallback):
    """A callback that gives trackers the recipe, and tables of the last evaluation's `samples`."""

    def __init__(self, recipe: Recipe, samples: Callable[[], Sequence[Sample]]):
        self.recipe, self.samples = recipe, samples

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        values = {"recipe": self.recipe.model_dump(mode="json")}
        for name in ("wandb", "trackio"):
            if state.is_world_process_zero and _runs(args, name):
                tracker: Any = importlib.import_module(name)
                tracker.config.update(values, **({"allow_val_change": True} if name == "wandb" else {}))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        rows = [[state.global_step, s.prompt, s.target, s.drafted, s.tau] for s in self.samples()]
        if not rows or not state.is_world_process_zero:
            return
        if _runs(args, "wandb"):
            wandb: Any = importlib.import_module("wandb")
            wandb.log({TABLE: wandb.Table(columns=TABLE_COLUMNS, data=rows), "train/global_step": state.global_step})
        if _runs(args, "trackio"):
            trackio, frames = importlib.import_module("trackio"), importlib.import_module("pandas")
            trackio.log({TABLE: trackio.Table(dataframe=frames.DataFrame(rows, columns=TABLE_COLUMNS))})
        if _runs(args, "tensorboard"):
            _write_text(args, state.global_step, rows)


def finish_reports(recipe: Recipe, args: TrainingArguments) -> None:
    """Add the recipe and provenance to the wandb run, which ends with the process."""
    wandb: Any = importlib.import_module("wandb") if _runs(args, "wandb") else None
    if wandb is None or wandb.run is None:
        return
    artifact = wandb.Artifact(f"{recipe.name}-report", type="report")
    for name in (RECIPE, PROVENANCE):
        artifact.add_file(str(recipe.output_folder / name))
    wandb.run.log_artifact(artifact)


def _runs(args: TrainingArguments, name: str) -> bool:
    return name in ([args.report_to] if isinstance(args.report_to, str) else args.report_to or [])


def _write_text(args: TrainingArguments, step: int, rows: Sequence[Sequence[Any]]) -> None:
    """Write a table as Markdown beside transformers' own event files."""
    board: Any = importlib.import_module("torch.utils.tensorboard")
    lines = ["| " + " | ".join(TABLE_COLUMNS) + " |", "| --- " * len(TABLE_COLUMNS) + "|"]
    lines += ["| " + " | ".join(str(v).replace("|", "\\|").replace("\n", "⏎") for v in row) + " |" for row in rows]
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(Path(args.output_dir or "") / "runs")
    with board.SummaryWriter(log_dir=str(Path(folder) / TABLE)) as writer:
        writer.add_text(TABLE, "\n".join(lines), step)
