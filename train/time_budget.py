"""Training for a given time instead of steps: the end, the learning rate and the checkpoints follow the clock.

The time is that of training alone: batches, the target's passes, steps. Evaluation, checkpoints, and what happened
between an interruption and its continuation do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.trainer_utils import IntervalStrategy

from ..common import BadInputError
from ..common.progress import progress
from ..common.safe_load import read_json
from .hooks import states_explained

ENDLESS = 10**9  # steps
RESOLUTION = 10_000  # points of a schedule between the first second and the last
FOLLOWING = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
)
NUM_CHECKPOINTS = 5


def check_schedule(args: TrainingArguments) -> None:
    """Raise BadInputError for a schedule that is no function of how much of the training is over."""
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if kind not in FOLLOWING:
        raise BadInputError(
            f"training.lr_scheduler_type: {kind} cannot follow a time budget; use one of: {', '.join(FOLLOWING)}."
        )


def follow_clock(args: TrainingArguments) -> None:
    """Take out of `args` what counts steps: their number, checkpoints and evaluations along the way, the bar."""
    args.max_steps, args.disable_tqdm, args.load_best_model_at_end = ENDLESS, True, False
    args.eval_strategy = args.save_strategy = IntervalStrategy.NO
    args.logging_steps = max(1, int(args.logging_steps))


class Clock:
    """The factor of the learning rate, by the time that was spent.

    Torch saves the attributes of such an object with its scheduler, and restores them: so the time survives an
    interruption.

    Attributes:
        seconds: of the whole run. spent: of them, so far.
    """

    __slots__ = ("__dict__", "_shape", "_warmup_steps")  # what has a slot is not saved

    def __init__(self, seconds: float, args: TrainingArguments):
        self.seconds, self.spent = seconds, 0.0
        counted = args.warmup_steps >= 1
        self._warmup_steps = float(args.warmup_steps) if counted else 0.0
        nothing = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
        specific: Any = args.lr_scheduler_kwargs
        scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            nothing,
            num_warmup_steps=0 if counted else args.get_warmup_steps(RESOLUTION),
            num_training_steps=RESOLUTION,
            scheduler_specific_kwargs=specific,
        )
        self._shape: Callable[[int], float] = scheduler.lr_lambdas[0]

    def __call__(self, step: int) -> float:
        """Return the factor of the step after `step` others: a warm-up that is given in steps stays one."""
        warm = min(1.0, step / self._warmup_steps) if self._warmup_steps else 1.0
        return warm * self._shape(round(RESOLUTION * min(1.0, self.spent / self.seconds)))


class TimeBudget(TrainerCallback):
    """A callback that ends the training when its time is up, and saves a checkpoint then and a few times before.

    Args:
        seconds: of training.
        mean: of a number over all processes, which must hold the same clock: it decides their learning rates.
    """

    def __init__(self, seconds: float, args: TrainingArguments, mean: Callable[[float], float]):
        self.clock = Clock(seconds, args)
        self.mean = mean
        self._since, self._part = 0.0, 0
        self._advance: Callable[[int, str], None] = _ignore

    @property
    def is_over(self) -> bool:
        return self.clock.spent >= self.clock.seconds

    @contextmanager
    def watched(self, console: Console | None, name: str) -> Iterator[None]:
        """Show a bar of seconds inside."""
        with progress(console, name, round(self.clock.seconds), transient=True) as self._advance:
            yield

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._since, self._part = time.perf_counter(), self._current_part()
        self._advance(int(self.clock.spent), "")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the clock, because the scheduler is asked next."""
        now, before = time.perf_counter(), int(self.clock.spent)
        self.clock.spent += self.mean(now - self._since)
        self._since = now
        self._advance(min(int(self.clock.spent), round(self.clock.seconds)) - before, f"step {state.global_step + 1}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or self.is_over
        control.should_save = control.should_save or self._current_part() > self._part
        self._part = self._current_part()

    def _current_part(self) -> int:
        """Return which part of the time this is: a checkpoint is due where one ends, and so where the last one does."""
        return int(min(1.0, self.clock.spent / self.clock.seconds) * NUM_CHECKPOINTS)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    on_save = on_evaluate


def _ignore(count: int, note: str) -> None:
    """Draw nothing, where nobody watches."""


def check_same_budget(checkpoint: Path, seconds: float | None) -> None:
    """Refuse to continue a run with another budget, or with one where there was none: its learning rate would jump.

    Raises:
        BadInputError: names both.
    """
    if seconds is None and read_json(checkpoint / "trainer_state.json").get("max_steps") != ENDLESS:
        return
    clock = saved_clock(checkpoint)
    if clock.get("seconds") != seconds:
        then, now = (
            f"a budget of {s:g} seconds" if s is not None else "no time budget" for s in (clock.get("seconds"), seconds)
        )
        raise BadInputError(
            f"{checkpoint} was trained with {then}, this run has {now}. Choose another output, or start over (--fresh)."
        )


def saved_clock(checkpoint: Path) -> dict[str, float]:
    """Return `seconds` and `spent` of a checkpoint that was trained for a time; {} for others."""
    file = checkpoint / "scheduler.pt"
    if not file.is_file():
        return {}
    with states_explained(checkpoint):
        first = (torch.load(file, weights_only=True).get("lr_lambdas") or [None])[0]
    return first if isinstance(first, dict) and "spent" in first else {}
