"""What a training writes into a checkpoint and reads from it: weights, the optimizer's state, and that it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common import BadInputError
from ..heads import restore_drafter
from . import checkpoints
from .hooks import HookedTrainer, Keeper
from .joint import ADAPTER, JointModule
from .optimizer_state import (
    FsdpStates,
    States,
    WholeStates,
    ZeroStates,
    is_named,
    read_schedule,
    read_state,
    write_schedule,
    write_state,
)
from .sharded_drafter import Parts, Undivided


class DrafterKeeper(Keeper):
    """A keeper of checkpoints that are loadable drafters, whatever engine spreads their training.

    Args:
        trainer: the training, whose optimizer and schedule are kept.
        form: the drafter as this process has it, as one or in parts.
        joint: what is trained with it; None for the drafter alone.
    """

    def __init__(self, trainer: HookedTrainer, form: Parts | Undivided, joint: JointModule | None):
        self.trainer, self.form, self.joint = trainer, form, joint

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Write a checkpoint inside, declare it whole, and only then delete older ones."""
        trainer, writes = self.trainer, self.trainer.args.should_save
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        with checkpoints.explained(folder):
            yield
            if writes:
                checkpoints.write_launch(folder, trainer.args)
        trainer.accelerator.wait_for_everyone()  # the marker lists every process's random state
        if writes:
            with checkpoints.explained(folder):
                checkpoints.mark_complete(folder)
            checkpoints.rotate(folder.parent, trainer.checkpoints_kept, trainer.state.best_model_checkpoint)

    def last_good(self) -> Path | None:
        """Return the last whole checkpoint; None before there is one."""
        return checkpoints.last_complete(Path(self.trainer.args.output_dir or ""))

    # ------------------------------------------------------------ weights

    def save_weights(self, folder: Path) -> None:
        """Write the drafter into `folder`, and the adapter of its target where that learns, too."""
        drafter = self.form.whole_in_first()
        if drafter is not None and self.trainer.args.should_save:
            drafter.save(folder)
            if self.joint is not None:
                self.joint.adapter.save(folder / ADAPTER)

    def load_weights(self, folder: Path) -> None:
        """Read the weights of a saved drafter into the one being trained, and those of its target's adapter.

        Raises:
            BadInputError: damaged weights, or a drafter of another type.
            IncompatibleError: other names or shapes.
        """
        saved, own = restore_drafter(folder), self.form.drafter
        if type(saved) is not type(own):
            raise BadInputError(
                f"{folder} holds a {saved.name} drafter, this run trains {own.name}; choose another output."
            )
        try:
            self.form.take(saved)
        except RuntimeError as error:
            raise BadInputError(
                f"{folder} holds a drafter of other sizes than this run's; choose another output, or start over. "
                f"{error}"
            ) from error
        if self.joint is not None:
            self.joint.adapter.load(folder / ADAPTER)

    # ------------------------------------------------------------ optimizer and schedule

    def save_states(self, folder: Path) -> None:
        """Write one state by the names of the weights, from the parts of all processes."""
        states = self._states()
        assert not isinstance(states, WholeStates)
        write_state(states, folder)
        if self.trainer.lr_scheduler is not None:
            write_schedule(self.trainer.lr_scheduler, folder)

    def reads_states(self, folder: Path) -> bool:
        """Tell whether this process has parts, or the checkpoint is from processes that had."""
        return self.trainer.in_parts or is_named(folder)

    def load_states(self, folder: Path) -> None:
        """Read a state by names, into parts or into one."""
        places, trainer = read_state(self._states(), folder), self.trainer
        if trainer.lr_scheduler is not None and trainer.optimizer is not None:
            read_schedule(trainer.lr_scheduler, trainer.optimizer, folder, places)

    def _states(self) -> States:
        form, optimizer = self.form, _of_torch(self.trainer.optimizer)
        if not isinstance(form, Parts):
            return WholeStates(form.drafter, optimizer)
        form.settle()
        if self.trainer.is_fsdp_enabled:
            return FsdpStates(form, optimizer)
        decaying = set(self.trainer.get_decay_parameter_names(form))
        trained = [name for name, p in form.named_parameters() if p.requires_grad]
        groups = [[n for n in trained if (n in decaying) == decays] for decays in (True, False)]
        return ZeroStates(form, optimizer, [names for names in groups if names])


def _of_torch(optimizer: Any) -> Any:
    """Return what accelerate's optimizer is around: torch's, or DeepSpeed's."""
    return optimizer.optimizer
