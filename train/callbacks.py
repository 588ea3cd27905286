"""Callbacks of the training loop: shuffling per epoch, requests to stop, progress, and trackers.

Trackers (wandb, tensorboard, trackio) get, beside transformers' own scalars and settings, the recipe; at each
evaluation a table of the target's text with the drafted parts in it; and in the end recipe.yaml and provenance.json.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..common.errors import reason
from ..common.progress import Advance, announce, progress
from ..common.signals import ECHO, StoppedError, listening
from ..recipes import Recipe
from .arguments import MEASURED, trackers
from .data import Order
from .decoding import Sample
from .forecast import Forecast
from .provenance import PROVENANCE, RECIPE

_log = logging.getLogger(__name__)


class EpochOrder(TrainerCallback):
    """A callback that sets the epoch of the sampler, which accelerate's loaders lose in resumed processes."""

    def __init__(self, order: Order):
        self.order = order

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.order.set_epoch(int(state.epoch or 0))


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
        return listening(self._request, patience=60)  # on a CPU the gradients of a step are one call

    def is_requested(self) -> bool:
        """Return whether any process received a request. All of them must call this together."""
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


class StepLines(TrainerCallback):
    """A callback that counts the steps taken for `progress`, and prints the lines of `log_line`, or logs them."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._name, self._counted = "", 0
        self._shown = ExitStack()
        self._advance: Advance = lambda _count, _note: None

    @contextmanager
    def watched(self, console: Console | None, name: str) -> Iterator[None]:
        """Show the steps of the training inside, where there is a console."""
        self._console, self._name = console, name
        with self._shown:
            yield

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._counted = state.global_step
        shown = progress(self._console, self._name, state.max_steps, self._counted, transient=True)
        self._advance = self._shown.enter_context(shown)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._advance(state.global_step - self._counted, "")
        self._counted = state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        line = log_line(kwargs["logs"], state.global_step)
        if not line or not state.is_world_process_zero:
            return
        if self._console is None:
            _log.info("%s", line)
        else:
            announce(self._console, line)


def log_line(logs: dict[str, Any], step: int) -> str:
    """Return a line such as `step 120  loss 1.83  analytic tau 2.10 (T=1)  alpha 0.71 0.58`; "" for other logs."""
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs:
        return ""
    parts = [f"step {step}" + (" held out" if prefix else ""), f"loss {logs[f'{prefix}loss']:.4g}"]
    parts += taus(logs, prefix)
    depths = sorted((int(m[1]), v) for k, v in logs.items() if (m := re.fullmatch(rf"{prefix}alpha_d(\d+)", k)))
    parts += ["alpha " + " ".join(f"{value:.2f}" for _, value in depths)] if depths else []
    parts += [f"lr {logs['learning_rate']:.1e}"] if "learning_rate" in logs else []
    parts += [f"tau {foreseen.text()}"] if (foreseen := Forecast.read(logs)) else []
    return "  ".join(parts)


def taus(metrics: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the figures called τ, each by its own name.

    The analytic one is an expectation at temperature 1, over the depths that are trained; the measured one is the
    decoder's, at the temperature and depth of `eval`, as in reports.
    """
    known = (("tau", "analytic tau {:.2f} (T=1)"), (MEASURED, "measured tau {:.2f}"))
    return [words.format(metrics[prefix + name]) for name, words in known if prefix + name in metrics]


@dataclass(frozen=True)
class KeptWeights:
    """The weights that a training leaves, among those that were evaluated on held-out rows.

    Attributes:
        step: after which they were; 0 for the weights before the training, of a drafter that goes on from another.
        name: of the figure that they were chosen by.
        figures: by step, of all evaluations. greater: a greater one is better.
    """

    step: int
    name: str
    figures: dict[int, float]
    greater: bool = True

    @property
    def best(self) -> int:
        """The step with the best figure, the first of several."""
        return (max if self.greater else min)(sorted(self.figures), key=lambda step: self.figures[step])

    def __str__(self) -> str:
        """Return how they were chosen; "" without figures."""
        if len(self.figures) < 2:
            once = ", of one evaluation: whether a drafter before the end was better is not known"
            return once if self.figures else ""
        last = max(self.figures)
        if self.figures[self.best] != self.figures[self.step]:
            said = f"{self.name} was {self.figures[self.best]:.3f} after step {self.best}, whose weights were not kept"
            return f"; {said} (training.load_best_model_at_end)"
        chosen = f", the best of {len(self.figures)} evaluations by {self.name}"
        if self.step == last:
            return chosen
        when = f"after step {self.step}" if self.step else "before the training"
        return f"{chosen}, {when} ({self.figures[self.step]:.3f}; {self.figures[last]:.3f} at the end)"


def held_out_taus(metrics: Mapping[str, Any], kept: KeptWeights | None = None) -> str:
    """Return the end of a training's last line: the figures called τ on held-out rows; "" without any."""
    found = taus(metrics, "eval_")
    unmeasured = "" if f"eval_{MEASURED}" in metrics else "; `outrider eval` measures it"
    return f"; held out: {', '.join(found)}{kept or ''}{unmeasured}" if found else ""


TABLE = "drafted"
TABLE_COLUMNS = ["step", "prompt", "target", "drafted in brackets", "tau"]


class Reports(TrainerCallback):
    """A callback that gives trackers the recipe, and tables of the last evaluation's `samples`."""

    def __init__(self, recipe: Recipe, samples: Callable[[], Sequence[Sample]]):
        self.recipe, self.samples = recipe, samples

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        values = {"recipe": self.recipe.model_dump(mode="json")}
        for name in ("wandb", "trackio"):
            if state.is_world_process_zero and name in trackers(args):
                tracker: Any = importlib.import_module(name)
                tracker.config.update(values, **({"allow_val_change": True} if name == "wandb" else {}))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        rows = [[state.global_step, s.prompt, s.target, s.drafted, s.tau] for s in self.samples()]
        if not rows or not state.is_world_process_zero:
            return
        if "wandb" in trackers(args):
            wandb: Any = importlib.import_module("wandb")
            wandb.log({TABLE: wandb.Table(columns=TABLE_COLUMNS, data=rows), "train/global_step": state.global_step})
        if "trackio" in trackers(args):
            trackio, frames = importlib.import_module("trackio"), importlib.import_module("pandas")
            trackio.log({TABLE: trackio.Table(dataframe=frames.DataFrame(rows, columns=TABLE_COLUMNS))})
        if "tensorboard" in trackers(args):
            _write_text(args, state.global_step, rows)


def finish_reports(recipe: Recipe, args: TrainingArguments) -> None:
    """Add the recipe and provenance to the wandb run, which ends with the process; a failure is only a warning."""
    wandb: Any = importlib.import_module("wandb") if "wandb" in trackers(args) else None
    if wandb is None or wandb.run is None:
        return
    try:
        artifact = wandb.Artifact(f"{recipe.name}-report", type="report")
        for name in (RECIPE, PROVENANCE):
            artifact.add_file(str(recipe.output_folder / name))
        wandb.run.log_artifact(artifact)
    except Exception as error:  # of any kind; the result is written, and hours of work are in it
        _log.warning(
            "wandb did not take the recipe and provenance (%s); both are in %s.", reason(error), recipe.output_folder
        )


def _write_text(args: TrainingArguments, step: int, rows: Sequence[Sequence[Any]]) -> None:
    """Write a table as Markdown beside transformers' own event files."""
    board: Any = importlib.import_module("torch.utils.tensorboard")
    lines = ["| " + " | ".join(TABLE_COLUMNS) + " |", "| --- " * len(TABLE_COLUMNS) + "|"]
    lines += ["| " + " | ".join(str(v).replace("|", "\\|").replace("\n", "⏎") for v in row) + " |" for row in rows]
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(Path(args.output_dir or "") / "runs")
    with board.SummaryWriter(log_dir=str(Path(folder) / TABLE)) as writer:
        writer.add_text(TABLE, "\n".join(lines), step)
