"""Checkpoints: which folders are whole, which is the last, which may go; and what a training writes and reads there.

The trainer writes a checkpoint file by file. The sealed list of their digests, written when all of them are on the
disk, tells a whole checkpoint from one that a crash, a kill or a full disk cut short, or that was altered later; only
whole ones are ever resumed from.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from ..common import BadInputError, Refusal, digests
from ..common.atomic import CannotWriteError, clear_away, failure, move, readable_bytes, write_atomically
from ..common.errors import LIBRARY_ERRORS
from ..common.untrusted_files import FileLimits, read_json
from ..heads import restore_drafter
from .hooks import CheckpointIO, HookedTrainer
from .optimizer_state import (
    FsdpStates,
    States,
    WholeStates,
    ZeroStates,
    is_named,
    read_schedule,
    read_state,
    write_states,
)
from .processes import is_lost_peer
from .sharded_drafter import ShardedDrafter, WholeDrafter

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
LAUNCH = "launch.json"
STATE = "trainer_state.json"  # as transformers calls it

_log = logging.getLogger(__name__)


def require_whole(folder: Path) -> None:
    """Refuse a checkpoint that was named and is not whole, and name the files that differ."""
    altered = digests.problems(folder) if folder.is_dir() else ["the folder is missing"]
    if altered:
        raise Refusal(
            f"{folder} cannot be continued: {'; '.join(altered)}. Leave out training.resume_from_checkpoint, and the "
            "last whole checkpoint of this output is taken."
        )


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def state_of(folder: Path) -> TrainerState:
    return TrainerState.load_from_json(str(folder / STATE))


def require_own_state(folder: Path) -> None:
    """Refuse a checkpoint whose trainer_state.json is missing or damaged, or of another step than its name."""
    found = "no state of a training"
    try:
        read_json(folder / STATE, FileLimits(infinite=True))
        state = state_of(folder)
        found = f"step {state.global_step} of {state.max_steps}"
        fits = folder.name == f"{PREFIX}{state.global_step}" and 0 <= state.global_step <= state.max_steps
    except LIBRARY_ERRORS:
        fits = False
    if not fits:
        expected = f"that of {folder.name}"
        raise Refusal.of(folder / STATE, found, expected, "Remove this checkpoint, or start over (--fresh).")


def lacks_evaluation(folder: Path, args: TrainingArguments) -> bool:
    """Return whether a checkpoint's evaluation was left out, or cut short, by a request to stop."""
    state = state_of(folder)
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    is_due = args.eval_strategy == IntervalStrategy.STEPS and state.global_step % state.eval_steps == 0
    is_due = is_due or any("eval_runtime" in entry for entry in entries)
    return is_due and not any("eval_loss" in entry for entry in entries)


def best_before(folder: Path) -> Path:
    """Return the best checkpoint of the training that a checkpoint ended, wherever both were moved; else that one."""
    named = state_of(folder).best_model_checkpoint
    best = folder if named is None else folder.with_name(Path(named).name)
    if best != folder and digests.problems(best):
        _log.warning("%s, the best checkpoint, is missing or damaged; %s is taken.", best, folder)
        return folder
    return best


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoint folders in `folder`, whole or not, by step."""
    folders = (f for f in folder.glob(f"{PREFIX}*") if f.is_dir() and f.name.removeprefix(PREFIX).isdecimal())
    return sorted(folders, key=step_of)


def last_complete(folder: Path) -> Path | None:
    """Return the whole checkpoint with the highest step; later ones that are not whole are named in a warning."""
    for checkpoint in reversed(checkpoints(folder)):
        if not digests.is_sealed(checkpoint):
            _log.warning("%s is not a whole checkpoint (its writing was interrupted); skipped.", checkpoint)
            continue
        altered = digests.problems(checkpoint)
        if not altered:
            return checkpoint
        _log.warning("%s was altered or damaged after it was written (%s); skipped.", checkpoint, "; ".join(altered))
    return None


def what_is_kept(args: TrainingArguments) -> str:
    """Return a sentence about the checkpoint that a training which ends now leaves to continue from."""
    good = last_complete(Path(args.output_dir or ""))
    if good is not None:
        return f"The last good checkpoint is {good}."
    if args.save_strategy == "no":
        return "Nothing of the training was kept: training.save_strategy is 'no'."
    return "There is no checkpoint yet."


def write_launch(folder: Path, args: TrainingArguments) -> None:
    """Write the number of processes, and of rows that all of them train on in a step, into a checkpoint."""
    values = {"processes": args.world_size, "rows_in_a_step": rows_in_step(args)}
    write_atomically(folder / LAUNCH, json.dumps(values) + "\n")


def rows_in_step(args: TrainingArguments) -> int:
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def check_same_rows(folder: Path, args: TrainingArguments) -> None:
    """Refuse to continue a checkpoint with another number of rows in a step, however they are spread."""
    saved, now = read_json(folder / LAUNCH), rows_in_step(args)
    if saved.get("rows_in_a_step") != now:
        raise BadInputError(
            f"{folder} learned {saved.get('rows_in_a_step')} rows in a step, in {saved.get('processes')} processes; "
            f"this run would learn {now} in {args.world_size}. Set training.per_device_train_batch_size and "
            "training.gradient_accumulation_steps so that their product with the number of processes stays the same, "
            "or start over (--fresh)."
        )


def remove_broken(folder: Path, after: Path | None) -> None:
    """Delete unfinished checkpoints after the whole one `after`; those that were once whole are moved aside.

    A disk that could not be read for a moment must not cost a checkpoint.
    """
    for broken in checkpoints(folder):
        if after is not None and step_of(broken) <= step_of(after):
            continue
        if (broken / digests.LIST).exists():
            _log.warning("%s was moved to %s.", broken, _move_aside(broken, f"damaged-{broken.name}"))
        else:
            clear_away(broken)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints down to `limit`, and those that are not whole; the last and the `best` one stay.

    The library's own function takes `checkpoint-2.bak` for one, too.
    """
    present = checkpoints(folder)
    whole = [f for f in present if digests.is_sealed(f)]
    protected = {whole[-1]} | {f for f in whole if best is not None and f.resolve() == Path(best).resolve()}
    excess = 0 if not limit else max(len(whole) - max(limit, len(protected)), 0)
    doomed = [f for f in whole if f not in protected][:excess] + [f for f in present if f not in whole]
    for old in doomed:
        (old / digests.LIST).unlink(missing_ok=True)  # first: a kill from here on leaves one that is not whole
        clear_away(old)


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier training out of the way, and return where; None if there were none."""
    return _move_aside(folder, f"{folder.name}.old") if checkpoints(folder) else None


def _move_aside(folder: Path, name: str) -> Path:
    """Move a folder to the first of `name`-1, `name`-2, … beside it that is not there, and return that place."""
    aside = next(free for n in count(1) if not (free := folder.with_name(f"{name}-{n}")).exists())
    move(folder, aside)
    return aside


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Remove a checkpoint whose writing inside fails, and raise an error that names the last good one."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_lost_peer(error):
            clear_away(folder)
            raise
        if not folder.parent.exists() and (gone := failure(error, folder)) is not None:
            raise CannotWriteError(gone.what, "No checkpoint is left.", gone.advice) from error
        free = readable_bytes(shutil.disk_usage(folder.parent).free) if folder.parent.exists() else "nothing"
        clear_away(folder)
        good = last_complete(folder.parent)
        what = str(error).strip().splitlines()[0]
        raise CannotWriteError(
            f"{folder} could not be written: {what} ({free} free on that disk).",
            f"The last good checkpoint is {good}." if good else "There is no earlier checkpoint.",
            "Make room there, then run the same command again: it continues.",
        ) from error


class DrafterCheckpointIO(CheckpointIO):
    """The reading and writing of checkpoints that are loadable drafters, whatever engine spreads their training.

    `trainer` holds the optimizer and the schedule, `form` the drafter.
    """

    def __init__(self, trainer: HookedTrainer, form: ShardedDrafter | WholeDrafter):
        self.trainer, self.form = trainer, form

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Write a checkpoint inside, declare it whole, and only then delete older ones."""
        trainer, writes = self.trainer, self.trainer.args.should_save
        if writes:
            clear_away(folder)
        trainer.accelerator.wait_for_everyone()
        with explain_write_errors(folder):
            yield
            if writes:
                write_launch(folder, trainer.args)
        trainer.accelerator.wait_for_everyone()  # the sealed list has every process's random state
        if writes:
            with explain_write_errors(folder):
                digests.seal(folder)
            rotate(folder.parent, trainer.checkpoints_kept, trainer.state.best_model_checkpoint)

    def last_good(self) -> Path | None:
        """Return the last whole checkpoint; None before there is one."""
        return last_complete(Path(self.trainer.args.output_dir or ""))

    def save_weights(self, folder: Path) -> None:
        """Write the drafter into `folder`."""
        drafter = self.form.whole_in_first()
        if drafter is not None and self.trainer.args.should_save:
            drafter.save(folder)

    def load_weights(self, folder: Path) -> None:
        """Read a saved drafter into the one in training; refuse a damaged or another one."""
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

    def save_states(self, folder: Path) -> None:
        states = self._states()
        assert isinstance(states, FsdpStates | ZeroStates)
        write_states(states, self.trainer.lr_scheduler, folder)

    def reads_states(self, folder: Path) -> bool:
        """Return whether the drafter is sharded here, or was in the launch that wrote the checkpoint."""
        return self.trainer.is_sharded or is_named(folder)

    def load_states(self, folder: Path) -> None:
        trainer = self.trainer
        read_state(self._states(), folder)
        if trainer.lr_scheduler is not None and trainer.optimizer is not None:
            read_schedule(trainer.lr_scheduler, trainer.optimizer, folder)

    def _states(self) -> States:
        form, wrapper = self.form, cast(Any, self.trainer.optimizer)
        optimizer = wrapper.optimizer  # torch's, or DeepSpeed's, inside of accelerate's
        if not isinstance(form, ShardedDrafter):
            return WholeStates(form.drafter, optimizer)
        form.reshard()
        if self.trainer.is_fsdp_enabled:
            return FsdpStates(form, optimizer)
        decaying = set(self.trainer.get_decay_parameter_names(form))
        groups = [
            [name for name, p in form.named_parameters() if p.requires_grad and (name in decaying) == decays]
            for decays in (True, False)
        ]
        return ZeroStates(form, optimizer, [names for names in groups if names])
