"""The private parts of `transformers.Trainer` that a training of drafters needs, each under a public name of ours.

No other file of this room touches a private name of transformers or accelerate. `tests/train/test_hooks.py` has a test
for each of them; `TRIED` has the versions that they were tried with, and `pyproject.toml` allows no others.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from ..common.errors import Refusal, reason
from .processes import is_lost_peer

# The first and the last version that all tests passed with.
TRIED = {"transformers": ("5.17", "5.23"), "accelerate": ("1.10", "1.15")}

# What torch raises where a state is no state, or a pickle that asks for more than one: it opens nothing else.
_NO_STATE = (pickle.UnpicklingError, RuntimeError, KeyError, EOFError, TypeError, ValueError, AttributeError, OSError)


@contextmanager
def refuse_unreadable_states(checkpoint: str | Path | None) -> Iterator[None]:
    """Refuse a checkpoint whose states are not a training's; errors of lost processes and of memory pass."""
    try:
        yield
    except _NO_STATE as error:
        if is_lost_peer(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise Refusal.of(
            checkpoint or "the checkpoint",
            f"its optimizer, schedule or random states cannot be read ({reason(error)})",
            "those of a training",
            "Remove this checkpoint, and the one before it is taken, or start over (--fresh).",
        ) from error


class CheckpointIO(Protocol):
    """The reading and writing of a training's checkpoints. All processes call its methods together.

    The base class writes a checkpoint inside of `writing`. States are those of optimizer and schedule: `save_states`
    writes a sharded model's, and `reads_states` tells whether `load_states` reads them, and not the base class.
    """

    def writing(self, folder: Path) -> AbstractContextManager[None]: ...
    def save_weights(self, folder: Path) -> None: ...
    def load_weights(self, folder: Path) -> None: ...
    def save_states(self, folder: Path) -> None: ...
    def reads_states(self, folder: Path) -> bool: ...
    def load_states(self, folder: Path) -> None: ...


class HookedTrainer(Trainer, ABC):
    """A `transformers.Trainer` whose private hooks call its subclass (order of rows) and `checkpoint_io`."""

    checkpoint_io: CheckpointIO
    checkpoints_kept: int | None = None

    @abstractmethod
    def training_order(self) -> Sampler[int] | None:
        """Return the order of the training rows; None for the base class's."""

    @abstractmethod
    def evaluation_order(self, rows: Dataset) -> Sampler[int]:
        """Return the order of the rows `rows` that are evaluated."""

    @property
    def is_sharded(self) -> bool:
        """Whether an engine spreads the model, or the states of its optimizer, over the processes."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int] | None:
        order = self.training_order()
        return super()._get_train_sampler(train_dataset) if order is None else order

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler[int]:
        return self.evaluation_order(eval_dataset)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as the base class does, which may not delete any checkpoint meanwhile.

        It would delete some before we know that a new one is whole, and in the end the one that a signal asked for.
        """
        self.checkpoints_kept, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            trained: TrainOutput = super().train(*args, **kwargs)
        finally:
            self.args.save_total_limit = self.checkpoints_kept
        return trained

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.checkpoint_io.writing(folder):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the drafter's own format, so that every checkpoint is a drafter, and no pickled arguments."""
        self.checkpoint_io.save_weights(Path(output_dir or self.args.output_dir or ""))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.checkpoint_io.load_weights(Path(resume_from_checkpoint))

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        """Continue a sharded drafter in our own way: the base class would look for files of the engines."""
        own, theirs = (resume_from_checkpoint, None) if self.is_sharded else (None, resume_from_checkpoint)
        prepared: tuple[nn.Module, DataLoader] = super()._prepare_for_training(max_steps, train_dataloader, theirs)
        if own is not None:
            self._load_from_checkpoint(own)
            self._load_optimizer_and_scheduler(own)
            self._load_scaler(own)
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_sharded:
            self.checkpoint_io.save_states(Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with refuse_unreadable_states(checkpoint):
            if checkpoint is not None and self.checkpoint_io.reads_states(Path(checkpoint)):
                self.checkpoint_io.load_states(Path(checkpoint))
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
                _require_steps_of(self, checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with refuse_unreadable_states(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if getattr(self.accelerator, "scaler", None) is not None:  # of float16 alone; any other training has none
            with refuse_unreadable_states(checkpoint):
                super()._load_scaler(checkpoint)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether this evaluation is the best so far, and save it; one that was cut short has no figures."""
        name = str(self.args.metric_for_best_model or "").removeprefix("eval_")
        if f"eval_{name}" not in metrics:
            return False
        is_best = bool(super()._determine_best_metric(metrics, trial))
        self.control.should_save |= is_best and self.args.load_best_model_at_end
        return is_best

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Let an evaluation before the first step count, too, where it makes up for one that was cut short."""
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if skip_scheduler and self.state.global_step:
            self._determine_best_metric(metrics, trial)
        return metrics

    def _load_best_model(self) -> None:
        """Leave the last weights: which are kept is decided when those were evaluated, too."""

    def count_labels(self, columns: list[str]) -> None:
        """Let the base class count the labels of a global batch, whose `columns` all reach the collator."""
        self.model_accepts_loss_kwargs = True
        self._signature_columns = columns  # type: ignore[assignment]

    def use_scheduler(self, scheduler: LRScheduler) -> None:
        """Set a schedule of our own, which the base class takes for one that it made, and so saves and restores."""
        self.lr_scheduler = scheduler  # type: ignore[assignment]
        self._created_lr_scheduler = True

    def rows_at_once(self) -> int:
        """Return the rows of one process in a micro-batch."""
        return self._train_batch_size

    def on_device(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch of the evaluation's loader on the device of this process."""
        return self._prepare_inputs(inputs)

    def model_for_evaluation(self) -> nn.Module:
        """Return the model without its data parallel wrapper, with mixed precision."""
        # Training has prepared the model in place; a sharded one sees to its precision.
        if self.accelerator._models or self.is_sharded:
            return cast(nn.Module, self.model)
        return cast(nn.Module, self.accelerator.prepare_model(self.model, evaluation_mode=True))


def norm_of_last_step(trainer: Trainer) -> float:
    """Return the norm of all gradients of the step that DeepSpeed has just taken."""
    engine: Any = trainer.deepspeed
    return float(engine.get_global_grad_norm() or 0.0)


def _require_steps_of(trainer: Trainer, checkpoint: str | None) -> None:
    """Raise ValueError if the optimizer has taken other steps than the checkpoint's name has."""
    if checkpoint is None or trainer.optimizer is None or getattr(trainer.accelerator, "scaler", None) is not None:
        return  # float16 skips steps
    taken = [int(state["step"]) for state in trainer.optimizer.state.values() if "step" in state]
    if taken and PREFIX_CHECKPOINT_DIR + f"-{max(taken)}" != Path(checkpoint).name:
        raise ValueError(f"the optimizer has taken {max(taken)} steps")


def block_classes(model: PreTrainedModel) -> list[str]:
    """Return the classes of the layers that a Hugging Face model has many of."""
    known = {type(module).__name__ for module in model.modules()}
    return sorted(known & set(model._no_split_modules or ()))


def train_on_one_gpu(args: TrainingArguments) -> None:
    """Make one process use one GPU. Several would mean torch's DataParallel, which cannot carry a TargetBatch."""
    args._n_gpu = 1


def asks_for_checkpointing(args: TrainingArguments) -> bool:
    """Return whether activations are to be computed again on the way back, under the old name or the new one."""
    return bool(args.gradient_checkpointing or getattr(args, "activation_checkpointing", None))


def enable_checkpointing(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Turn activation checkpointing on in a Hugging Face model, if asked for; the base class would ask the drafter."""
    if not asks_for_checkpointing(args):
        return
    settings = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        args.activation_checkpointing = False
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    args.gradient_checkpointing = False
