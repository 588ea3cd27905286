"""Ends of a training before its last step: patience, enough tokens, no more gain, or the end of its time.

`Until` gives the curve τ(tokens): τ is the held-out rows' analytic one, which costs an evaluation each time; the tokens
are those that the drafter has been trained to predict.

A time budget replaces the number of steps: the end, the learning rate and the checkpoints follow the clock. The time is
that of training alone: batches, the target's passes (those of cached features, too), steps. Evaluation, checkpoints,
and the time between an interruption and its continuation do not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import get_scheduler
from transformers.trainer_utils import IntervalStrategy

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.progress import progress
from ..common.untrusted_files import read_json
from .hooks import refuse_unreadable_states

ENDLESS = 10**9  # steps
RESOLUTION = 10_000  # points of a schedule between the first second and the last
FOLLOWING: tuple[str, ...] = ("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial")
FOLLOWING += ("constant", "constant_with_warmup")
NUM_CHECKPOINTS = 5


@dataclass(frozen=True)
class Until:
    """When a training ends before its last step."""

    tokens: int | None = None  # after so many; None for any number
    gain: float | None = None  # when τ rose by less than this share over the last `patience` evaluations; None never
    patience: int = 2
    every: int = 20  # steps between two evaluations

    def __post_init__(self) -> None:
        for name in ("tokens", "patience", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInputError(f"{name}: expected at least 1, got {value}.")
        if self.gain is not None and not 0 <= self.gain < 1:
            raise BadInputError(f"gain is the share by which τ must rise, at least 0 and below 1; got {self.gain}.")


class Patience(EarlyStoppingCallback):
    """A callback that ends the training after so many evaluations without a better one, resumes included."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self.early_stopping_patience_counter = self._evaluations_since_best(state)

    def is_over(self, state: TrainerState) -> bool:
        """Return whether a training that reached `state` ended there without a better evaluation."""
        return self._evaluations_since_best(state) >= self.early_stopping_patience

    @staticmethod
    def _evaluations_since_best(state: TrainerState) -> int:
        best = state.best_global_step
        steps = {entry["step"] for entry in state.log_history if "eval_loss" in entry}
        return 0 if best is None else sum(step > best for step in steps)


@dataclass(frozen=True)
class TauPoint:
    """τ on held-out rows after so many steps and tokens."""

    step: int
    tokens: int
    tau: float


class TauWatch(TrainerCallback):
    """A callback that evaluates along the way, keeps the curve, and ends the training by `until`."""

    def __init__(self, until: Until, tokens: Callable[[], int], evaluates: bool):
        self.until = until
        self.tokens = tokens
        self.evaluates = evaluates
        if until.gain is not None and not evaluates:
            raise BadInputError(
                "nothing is held out, so no evaluation shows when τ is flat; set data.holdout to 0.05, or end by "
                "tokens."
            )
        self.curve: list[TauPoint] = []  # one for each evaluation
        self.reason = ""  # of the end; none at the last step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.until.tokens is not None and self.tokens() >= self.until.tokens:
            self._end(control, f"{self.tokens():,} tokens were learnt from, of {self.until.tokens:,}")
        elif self.evaluates and state.global_step % self.until.every == 0:
            control.should_evaluate = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        tau = (kwargs["metrics"] or {}).get("eval_tau")
        if tau is None or (self.curve and self.curve[-1].step == state.global_step):
            return
        self.curve.append(TauPoint(state.global_step, self.tokens(), tau))
        patience, gain = self.until.patience, self.until.gain
        if gain is None or len(self.curve) <= patience:
            return
        before, after = (max(p.tau for p in part) for part in (self.curve[:-patience], self.curve[-patience:]))
        if after < (1 + gain) * before:
            self._end(control, f"τ has risen by less than {gain:.1%} over {patience} evaluations")

    def _end(self, control: TrainerControl, reason: str) -> None:
        self.reason = reason
        control.should_training_stop = control.should_save = True

    def facts(self) -> dict[str, Any]:
        """Return the entries of provenance.json: the curve, and why it ended."""
        return {"curve": [asdict(point) for point in self.curve], "ended": self.reason or "the last step"}


def check_schedule(args: TrainingArguments) -> None:
    """Raise BadInputError for a schedule that is no function of how much of the training is over."""
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if kind not in FOLLOWING:
        raise BadInputError(
            f"training.lr_scheduler_type: {kind} cannot follow a time budget; use one of: {', '.join(FOLLOWING)}."
        )


def follow_clock(args: TrainingArguments) -> None:
    """Remove settings that count steps from `args`: their number, checkpoints and evaluations on the way, the bar."""
    args.max_steps = ENDLESS
    args.disable_tqdm = True
    args.load_best_model_at_end = False
    args.eval_strategy = args.save_strategy = IntervalStrategy.NO
    args.logging_steps = max(1, int(args.logging_steps))


class Clock:
    """The factor of the learning rate, by the time spent; of it `begun` went by before the first step.

    Torch saves and restores the attributes of such an object with its scheduler: so the time survives an interruption.
    """

    __slots__ = ("__dict__", "_shape", "_warmup_steps")  # attributes in slots are not saved

    def __init__(self, seconds: float, args: TrainingArguments):
        self.seconds = seconds
        self.spent = 0.0
        self.begun = 0.0
        counted, specific = args.warmup_steps >= 1, cast(Any, args.lr_scheduler_kwargs)
        self._warmup_steps = float(args.warmup_steps) if counted else 0.0
        nothing = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
        warm = 0 if counted else args.get_warmup_steps(RESOLUTION)
        scheduler: Any = get_scheduler(args.lr_scheduler_type, nothing, warm, RESOLUTION, specific)
        self._shape: Callable[[int], float] = scheduler.lr_lambdas[0]

    @property
    def share(self) -> float:
        """Which share of the time for steps is over, from 0 to 1."""
        return min(1.0, (self.spent - self.begun) / (self.seconds - self.begun)) if self.begun < self.seconds else 1.0

    def __call__(self, step: int) -> float:
        """Return the factor of the step after `step` others: a warm-up that is given in steps stays one."""
        warm = min(1.0, step / self._warmup_steps) if self._warmup_steps else 1.0
        return warm * self._shape(round(RESOLUTION * self.share))


class TimeBudget(TrainerCallback):
    """A callback that ends the training when its time is up, and saves a checkpoint then and a few times before.

    Args:
        seconds: of training.
        mean: of a number over all processes, which must hold the same clock: it decides their learning rates.
    """

    @staticmethod
    def now() -> float:
        """Return the seconds of the clock, which is the wall's."""
        return time.perf_counter()

    def __init__(self, seconds: float, args: TrainingArguments, mean: Callable[[float], float]):
        self.clock = Clock(seconds, args)
        self.mean = mean
        self._since, self._part = 0.0, 0
        self._advance: Callable[[int, str], None] = lambda _count, _note: None

    @contextmanager
    def watched(self, console: Console | None, name: str) -> Iterator[None]:
        """Show a bar of seconds inside."""
        with progress(console, name, round(self.clock.seconds), transient=True) as self._advance:
            yield

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._since, self._part = self.now(), self._current_part()
        self._advance(int(self.clock.spent), "")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the clock, because the scheduler is called next."""
        now, before = self.now(), int(self.clock.spent)
        self.clock.spent += self.mean(now - self._since)
        self._since = now
        self._advance(min(int(self.clock.spent), round(self.clock.seconds)) - before, f"step {state.global_step + 1}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or self.clock.spent >= self.clock.seconds
        control.should_save = control.should_save or self._current_part() > self._part
        self._part = self._current_part()

    def _current_part(self) -> int:
        """Return which part of the time this is: a checkpoint is due where one ends, and so where the last one does."""
        return int(min(1.0, self.clock.spent / self.clock.seconds) * NUM_CHECKPOINTS)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = self.now()

    on_save = on_evaluate


@contextmanager
def counted(file: Path) -> Iterator[Callable[[], float]]:
    """Add the seconds inside to those that `file` holds, also when they are interrupted; yield a getter of the sum."""
    total, began = read_json(file)["seconds"] if file.is_file() else 0.0, TimeBudget.now()
    try:
        yield lambda: total + TimeBudget.now() - began
    finally:
        if file.parent.is_dir():  # else nothing was begun
            write_atomically(file, json.dumps({"seconds": total + TimeBudget.now() - began}))


def check_same_budget(checkpoint: Path, seconds: float | None) -> None:
    """Refuse to continue a run with another budget, or with one where there was none: its learning rate would jump."""
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
    with refuse_unreadable_states(checkpoint):
        first = (torch.load(file, weights_only=True).get("lr_lambdas") or [None])[0]
    return first if isinstance(first, dict) and "spent" in first else {}
