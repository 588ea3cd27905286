"""What watches the training loop: shuffling per epoch, the finite guard, requests to stop, and the progress line."""

from __future__ import annotations

import logging
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ..common import BadInputError
from ..common.signals import ECHO, StoppedError, listening
from .data import Order

_log = logging.getLogger(__name__)


class EpochOrder(TrainerCallback):
    """A callback that tells the sampler its epoch.

    accelerate's own loaders lose it when they resume in several processes.
    """

    def __init__(self, order: Order):
        self.order = order

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.order.set_epoch(int(state.epoch or 0))


@dataclass
class StepStats:
    """What an optimizer step has learned from so far.

    Attributes:
        loss: the sum of its micro-batches' losses, `[]`.
        inputs: the micro-batches, as the collator makes them.
    """

    loss: Tensor
    inputs: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, inputs: dict[str, Tensor], loss: Tensor) -> None:
        """Add a micro-batch."""
        self.inputs.append(inputs)
        self.loss = self.loss + loss.detach()


class FiniteGuard(TrainerCallback):
    """A callback that stops before an optimizer step whose loss or gradient is not finite: the weights stay good.

    Args:
        take: gives the step about to be applied, and begins the next one.
        describe: says which rows a step learned from, and what is wrong with them.
        last_good: the last whole checkpoint, if there is one.
        norm: gives the norm of the gradients; 0 where a scaler expects and skips overflowing steps itself.
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
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        taken = self.take()
        loss, norm = torch.stack([taken.loss, self.norm().to(taken.loss)]).tolist()
        self.check(args, state.global_step + 1, taken, loss, norm)

    def check(self, args: TrainingArguments, number: int, step: StepStats, loss: float, norm: float = 0.0) -> None:
        """Refuse the step `number` if its loss or its gradient is not finite."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise BadInputError(self._message(args, number, self.describe(step), loss, norm))

    def _message(self, args: TrainingArguments, step: int, rows: str, loss: float, norm: float) -> str:
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm} (loss {loss:.4g})"
        advice = [
            f"lower training.learning_rate (now {args.learning_rate:g})",
            f"lower training.max_grad_norm (now {args.max_grad_norm:g})",
        ]
        advice += ["train in fp32 (leave out training.bf16 and training.fp16)"] if args.bf16 or args.fp16 else []
        kept = self.last_good()
        after = (
            f"The last good checkpoint is {kept}; to go on from it, set drafter.init to it and choose another output."
            if kept
            else "No checkpoint yet."
        )
        return (
            f"training stopped before step {step}, which was not applied: {what}. {rows} "
            f"Try: {'; '.join(advice)}. {after}"
        )


class GracefulStop(TrainerCallback):
    """A callback by which a request to stop ends the step in progress with a checkpoint.

    The requests are those of `common.signals`. A second Ctrl-C ends at once; schedulers have SIGKILL for that.

    Attributes:
        number: the signal that asked this process; 0 if none did.
        stopped_at: the step after which training was stopped; None if it was not.
    """

    def __init__(self, any_process: Callable[[bool], bool]):
        self.any_process = any_process
        self.number = 0
        self.stopped_at: int | None = None
        self._since = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note inside what asks this process to stop."""
        with listening(self._ask):
            yield

    def is_asked(self) -> bool:
        """Tell whether any process was asked to stop. All of them must call this together."""
        return self.any_process(self.number != 0)

    def _ask(self, number: int) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            _log.warning("%s: stopping after this step, with a checkpoint%s.", signal.Signals(number).name, again)
        elif number == signal.SIGINT and now - self._since > ECHO[signal.SIGINT]:
            raise StoppedError(number=number)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Signals reach the processes at different steps; they must stop at the same one.
        if self.is_asked():
            control.should_evaluate = False
            self.stop(state, control)

    def stop(self, state: TrainerState, control: TrainerControl) -> None:
        """End the training after the step that was just taken, with a checkpoint."""
        self.stopped_at = state.global_step
        control.should_save = control.should_training_stop = True


class Progress(ProgressCallback):
    """A progress bar, transformers' own, where what is logged becomes one line that fits a terminal."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        line = describe(logs, state.global_step)
        if line and self.training_bar is not None:
            self.training_bar.write(line)


class LogLines(TrainerCallback):
    """A callback that logs the lines of `describe` without a bar (`disable_tqdm`)."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        line = describe(logs or {}, state.global_step)
        if line and state.is_world_process_zero:
            _log.info("%s", line)


def describe(logs: dict[str, Any], step: int) -> str:
    """Return a line such as `step 120  loss 1.83  tau 2.10  alpha 0.71 0.58 0.44  lr 2.9e-03`.

    It is empty for logs that are not about a step.
    """
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
