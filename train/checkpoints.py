"""Checkpoint folders: which of them are whole, which is the last, which may go.

The trainer writes a checkpoint file by file. A marker, written when all of them are there, tells a whole checkpoint
from one that a crash, a kill or a full disk cut short; only whole ones are ever resumed from or counted.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import TrainingArguments

from ..ground import BadInputError
from ..ground.files import read_json, readable_bytes, write_atomically

MARKER = "complete.json"
PREFIX = "checkpoint-"

_log = logging.getLogger(__name__)


def mark_complete(folder: Path) -> None:
    """Declare `folder` whole: the marker lists each file with its size in bytes."""
    sizes = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    write_atomically(folder / MARKER, json.dumps({"files": sizes}, indent=2) + "\n")


def is_complete(folder: Path) -> bool:
    """Tell whether every file that was there when `folder` was declared whole is still there, at its full size."""
    if not (folder / MARKER).is_file():
        return False
    sizes = read_json(folder / MARKER)["files"]
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoint folders in `folder`, whole or not, by step."""
    found = [f for f in folder.glob(f"{PREFIX}*") if f.is_dir() and f.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=step_of)


def last_complete(folder: Path) -> Path | None:
    """Return the whole checkpoint with the highest step; later ones that are not whole are named in a warning."""
    for found in reversed(checkpoints(folder)):
        if is_complete(found):
            return found
        _log.warning("%s is not a whole checkpoint (its writing was interrupted); skipped.", found)
    return None


def what_is_kept(args: TrainingArguments) -> str:
    """Return a sentence that says what a training which ends now leaves to continue from."""
    good = last_complete(Path(args.output_dir or ""))
    if good is not None:
        return f"The last good checkpoint is {good}."
    if args.save_strategy == "no":
        return "Nothing of the training was kept: training.save_strategy is 'no'."
    return "There is no checkpoint yet."


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints down to `limit`, and those that are not whole; the last and the `best` one stay."""
    found = checkpoints(folder)
    whole = [f for f in found if is_complete(f)]
    protected = {whole[-1]} | {f for f in whole if best is not None and f.resolve() == Path(best).resolve()}
    excess = 0 if not limit else max(len(whole) - max(limit, len(protected)), 0)
    doomed = [f for f in whole if f not in protected][:excess] + [f for f in found if f not in whole]
    for old in doomed:
        shutil.rmtree(old, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier training out of the way, and return where; None if there were none."""
    if not checkpoints(folder):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Leave nothing of a checkpoint that cannot be written inside, and raise an error that names the last good one."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = readable_bytes(shutil.disk_usage(folder.parent).free)
        shutil.rmtree(folder, ignore_errors=True)
        good = last_complete(folder.parent)
        kept = f"The last good checkpoint is {good}" if good else "There is no earlier checkpoint"
        what = str(error).strip().splitlines()[0]
        raise BadInputError(
            f"{folder} could not be written: {what} ({free} free on that disk). {kept}. Make room there, then run the "
            "same command again: it continues."
        ) from error
