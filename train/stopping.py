"""Ends of a training before its last step: enough tokens, or nothing more gained. Both give the curve τ(tokens).

τ is the held-out rows' analytic one, which costs an evaluation each time; the tokens are those that the drafter has
learnt to predict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..common import BadInputError


@dataclass(frozen=True)
class Until:
    """When a training ends before its last step.

    Attributes:
        tokens: after so many; None for any number.
        gain: when τ has risen by less than this share over the last `patience` evaluations; None never.
        every: steps between two evaluations.
    """

    tokens: int | None = None
    gain: float | None = None
    patience: int = 2
    every: int = 20

    def __post_init__(self) -> None:
        for name in ("tokens", "patience", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInputError(f"{name}: expected at least 1, got {value}.")
        if self.gain is not None and not 0 <= self.gain < 1:
            raise BadInputError(f"gain is the share by which τ must rise, at least 0 and below 1; got {self.gain}.")


class Patience(EarlyStoppingCallback):
    """A callback that ends the training after so many evaluations without a better one, resumes included."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter = evaluations_since_best(state)

    def is_over(self, state: TrainerState) -> bool:
        """Tell whether a training that reached `state` ended there for want of a better evaluation."""
        return evaluations_since_best(state) >= self.early_stopping_patience


def evaluations_since_best(state: TrainerState) -> int:
    """Return how many evaluations followed the best one; 0 before there is one."""
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
    """A callback that evaluates along the way, keeps the curve, and ends the training when `until` says.

    Args:
        tokens: gives how many were learnt from.
        evaluates: whether there are held-out rows.

    Attributes:
        curve: one point for each evaluation. reason: why the training ended; "" if it ran to its last step.
    """

    def __init__(self, until: Until, tokens: Callable[[], int], evaluates: bool):
        self.until, self.tokens, self.evaluates = until, tokens, evaluates
        if until.gain is not None and not evaluates:
            raise BadInputError(
                "nothing is held out, so nobody sees when τ is flat; set data.holdout to 0.05, or end by tokens."
            )
        self.curve: list[TauPoint] = []
        self.reason = ""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.until.tokens is not None and self.tokens() >= self.until.tokens:
            self._end(control, f"{self.tokens():,} tokens were learnt from, of {self.until.tokens:,}")
        elif self.evaluates and state.global_step % self.until.every == 0:
            control.should_evaluate = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        tau = (metrics or {}).get("eval_tau")
        if tau is None or (self.curve and self.curve[-1].step == state.global_step):
            return
        self.curve.append(TauPoint(state.global_step, self.tokens(), tau))
        if self.is_flat():
            self._end(control, f"τ has risen by less than {self.until.gain:.1%} over {self.until.patience} evaluations")

    def is_flat(self) -> bool:
        """Tell whether the last evaluations brought too little over the best one before them."""
        patience, gain = self.until.patience, self.until.gain
        if gain is None or len(self.curve) <= patience:
            return False
        before = max(point.tau for point in self.curve[:-patience])
        return max(point.tau for point in self.curve[-patience:]) < (1 + gain) * before

    def _end(self, control: TrainerControl, reason: str) -> None:
        self.reason = reason
        control.should_training_stop = control.should_save = True

    def facts(self) -> dict[str, Any]:
        """Return what provenance says: the curve, and why it ended."""
        return {"curve": [asdict(point) for point in self.curve], "ended": self.reason or "the last step"}
