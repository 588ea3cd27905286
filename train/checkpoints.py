"""Checkpoint folders: which of them are whole, which is the last, which may go.

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
from pathlib import Path

from safetensors import SafetensorError
from transformers import TrainerState, TrainingArguments

from ..common import BadInputError, Refusal, digests
from ..common.atomic import CannotWriteError, failure, move, readable_bytes, write_atomically
from ..common.safe_load import read_json
from .launch import is_lost_peer

PREFIX = "checkpoint-"
LAUNCH = "launch.json"
STATE = "trainer_state.json"  # as transformers calls it
_OLD_MARKER = "complete.json"  # of versions without digests

_log = logging.getLogger(__name__)


def mark_complete(folder: Path) -> None:
    """Declare `folder` whole, once the disk holds it."""
    digests.seal(folder)


def is_marked(folder: Path) -> bool:
    """Tell whether `folder` was declared whole; whether its files still are what they were, `problems` tells."""
    return digests.is_sealed(folder) or (folder / _OLD_MARKER).is_file()


def problems(folder: Path) -> list[str]:
    """Return what differs from when `folder` was declared whole, one line each, with the file's name first."""
    if (folder / digests.LIST).exists() or not (folder / _OLD_MARKER).is_file():
        return digests.problems(folder)
    _log.warning("%s was written by an older Outrider: of its files only the sizes can be checked.", folder)
    sizes = read_json(folder / _OLD_MARKER).get("files", {})
    return [f"{name}: missing or cut short" for name, size in sizes.items() if not _has_size(folder / name, size)]


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def require_whole(folder: Path) -> None:
    """Refuse a checkpoint that was named and is not whole.

    Raises:
        Refusal: names the files that differ.
    """
    found = problems(folder) if folder.is_dir() else ["the folder is missing"]
    if found:
        raise Refusal(
            f"{folder} cannot be continued: {'; '.join(found)}. Leave out training.resume_from_checkpoint, and the "
            "last whole checkpoint of this output is taken."
        )


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def state_of(folder: Path) -> TrainerState:
    """Return what the trainer knew when it wrote a checkpoint: its steps, logs, and the best checkpoint."""
    return TrainerState.load_from_json(str(folder / STATE))


def best_before(folder: Path) -> Path:
    """Return the best checkpoint of the training that a checkpoint ended; that one itself where there is none.

    It is looked for beside the given one: an output may have been moved.
    """
    named = state_of(folder).best_model_checkpoint
    best = folder if named is None else folder.with_name(Path(named).name)
    if best != folder and problems(best):
        _log.warning("%s, the best checkpoint, is missing or damaged; %s is taken.", best, folder)
        return folder
    return best


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoint folders in `folder`, whole or not, by step."""
    found = [f for f in folder.glob(f"{PREFIX}*") if f.is_dir() and f.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=step_of)


def last_complete(folder: Path) -> Path | None:
    """Return the whole checkpoint with the highest step; later ones that are not whole are named in a warning."""
    for found in reversed(checkpoints(folder)):
        if not is_marked(found):
            _log.warning("%s is not a whole checkpoint (its writing was interrupted); skipped.", found)
            continue
        altered = problems(found)
        if not altered:
            return found
        _log.warning("%s was altered or damaged after it was written (%s); skipped.", found, "; ".join(altered))
    return None


def what_is_kept(args: TrainingArguments) -> str:
    """Return a sentence that says what a training which ends now leaves to continue from."""
    good = last_complete(Path(args.output_dir or ""))
    if good is not None:
        return f"The last good checkpoint is {good}."
    if args.save_strategy == "no":
        return "Nothing of the training was kept: training.save_strategy is 'no'."
    return "There is no checkpoint yet."


def write_launch(folder: Path, args: TrainingArguments) -> None:
    """Write into a checkpoint how many processes it is of, and how many rows all of them learned in a step."""
    values = {"processes": args.world_size, "rows_in_a_step": rows_in_step(args)}
    write_atomically(folder / LAUNCH, json.dumps(values) + "\n")


def rows_in_step(args: TrainingArguments) -> int:
    """Return the rows of an optimizer step, in all micro-batches of all processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def check_same_rows(folder: Path, args: TrainingArguments) -> None:
    """Refuse to continue a checkpoint with other steps; their rows may be spread over processes in another way.

    Raises:
        BadInputError: names both numbers.
    """
    if not (folder / LAUNCH).is_file():
        return
    saved, now = read_json(folder / LAUNCH), rows_in_step(args)
    if saved.get("rows_in_a_step") != now:
        raise BadInputError(
            f"{folder} learned {saved.get('rows_in_a_step')} rows in a step, in {saved.get('processes')} processes; "
            f"this run would learn {now} in {args.world_size}. Set training.per_device_train_batch_size and "
            "training.gradient_accumulation_steps so that their product with the number of processes stays the same, "
            "or start over (--fresh)."
        )


def remove_broken(folder: Path, after: Path | None) -> None:
    """Clear what was skipped on the way to the whole checkpoint `after`: the training writes it anew.

    What was never finished is deleted. What was once whole is moved aside: a disk that could not be read for a moment,
    or a list that was lost in a copy, must not cost a checkpoint.
    """
    for found in checkpoints(folder):
        if after is None or step_of(found) > step_of(after):
            if (found / digests.LIST).exists():
                aside = _free(found.with_name(f"damaged-{found.name}"))
                move(found, aside)
                _log.warning("%s was moved to %s.", found, aside)
            else:
                shutil.rmtree(found, ignore_errors=True)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints down to `limit`, and those that are not whole; the last and the `best` one stay."""
    found = checkpoints(folder)
    whole = [f for f in found if is_marked(f)]
    protected = {whole[-1]} | {f for f in whole if best is not None and f.resolve() == Path(best).resolve()}
    excess = 0 if not limit else max(len(whole) - max(limit, len(protected)), 0)
    doomed = [f for f in whole if f not in protected][:excess] + [f for f in found if f not in whole]
    for old in doomed:
        (old / digests.LIST).unlink(missing_ok=True)  # first: a kill from here on leaves one that is not whole
        shutil.rmtree(old, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier training out of the way, and return where; None if there were none."""
    if not checkpoints(folder):
        return None
    aside = _free(folder.with_name(f"{folder.name}.old"))
    move(folder, aside)
    return aside


def _free(place: Path) -> Path:
    """Return the first of `place`-1, `place`-2, … that is not there."""
    number = 1
    while (free := place.with_name(f"{place.name}-{number}")).exists():
        number += 1
    return free


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Leave nothing of a checkpoint that cannot be written inside, and raise an error that names the last good one."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_lost_peer(error):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if not folder.parent.exists() and (gone := failure(error, folder)) is not None:
            raise CannotWriteError(gone.what, "No checkpoint is left.", gone.advice) from error
        free = readable_bytes(shutil.disk_usage(folder.parent).free) if folder.parent.exists() else "nothing"
        shutil.rmtree(folder, ignore_errors=True)
        good = last_complete(folder.parent)
        what = str(error).strip().splitlines()[0]
        raise CannotWriteError(
            f"{folder} could not be written: {what} ({free} free on that disk).",
            f"The last good checkpoint is {good}." if good else "There is no earlier checkpoint.",
            "Make room there, then run the same command again: it continues.",
        ) from error
