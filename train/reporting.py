"""What trackers (wandb, tensorboard, trackio) get beside transformers' own scalars and settings.

The recipe; at each evaluation a table of the target's text with what was drafted of it; and
in the end what the training says of itself.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..common import BadInputError, refuse_unknown_keys
from ..common.errors import reason
from ..recipes import Recipe
from .decode_eval import Sample
from .provenance import PROVENANCE, RECIPE

TABLE = "drafted"
COLUMNS = ["step", "prompt", "target", "drafted in brackets", "tau"]


def check_reports(args: TrainingArguments) -> None:
    """Refuse trackers that there are not, or whose package or account is missing.

    Raises:
        BadInputError: names what to install, or what to set.
    """
    names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    for name in names:
        refuse_unknown_keys({name: None}, INTEGRATION_TO_CALLBACK, "training.report_to")
        try:
            get_reporting_integration_callbacks([name])[0]()
        except (RuntimeError, ImportError) as error:
            raise BadInputError(
                f"training.report_to: {name} cannot report here: {reason(error)} Install its package (pip install "
                f"{name}), or leave it out."
            ) from error
    if "wandb" in names and args.process_index == 0:
        _check_account()


def _check_account() -> None:
    """Refuse a wandb run that nobody is logged in for."""
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is not None or wandb.Settings().mode in ("offline", "disabled", "dryrun"):
        return
    try:
        wandb.login()
    except Exception as error:  # of wandb's own kinds, which differ by version
        raise BadInputError(
            f"training.report_to: wandb cannot log in ({reason(error)}); run `wandb login`, or set WANDB_MODE=offline "
            "and `wandb sync` the run later."
        ) from error


class Reports(TrainerCallback):
    """A callback that gives trackers the recipe, and tables of text; see the top of this file.

    Args:
        samples: gives those of the last evaluation.
    """

    def __init__(self, recipe: Recipe, samples: Callable[[], Sequence[Sample]]):
        self.recipe, self.samples = recipe, samples

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        values = {"recipe": self.recipe.model_dump(mode="json")}
        for name in ("wandb", "trackio"):
            if state.is_world_process_zero and _runs(args, name):
                tracker: Any = importlib.import_module(name)
                tracker.config.update(values, **({"allow_val_change": True} if name == "wandb" else {}))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        rows = [[state.global_step, s.prompt, s.target, s.drafted, s.tau] for s in self.samples()]
        if not rows or not state.is_world_process_zero:
            return
        if _runs(args, "wandb"):
            wandb: Any = importlib.import_module("wandb")
            wandb.log({TABLE: wandb.Table(columns=COLUMNS, data=rows), "train/global_step": state.global_step})
        if _runs(args, "trackio"):
            trackio, frames = importlib.import_module("trackio"), importlib.import_module("pandas")
            trackio.log({TABLE: trackio.Table(dataframe=frames.DataFrame(rows, columns=COLUMNS))})
        if _runs(args, "tensorboard"):
            _write_text(args, state.global_step, rows)


def finish_reports(recipe: Recipe, args: TrainingArguments) -> None:
    """Keep what the training says of itself with its wandb run, which ends with the process."""
    wandb: Any = importlib.import_module("wandb") if _runs(args, "wandb") else None
    if wandb is None or wandb.run is None:
        return
    artifact = wandb.Artifact(f"{recipe.name}-report", type="report")
    for name in (RECIPE, PROVENANCE):
        artifact.add_file(str(recipe.output_folder / name))
    wandb.run.log_artifact(artifact)


def _runs(args: TrainingArguments, name: str) -> bool:
    return name in ([args.report_to] if isinstance(args.report_to, str) else args.report_to or [])


def _write_text(args: TrainingArguments, step: int, rows: Sequence[Sequence[Any]]) -> None:
    """Write a table as Markdown beside transformers' own event files."""
    board: Any = importlib.import_module("torch.utils.tensorboard")
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(str(v).replace("|", "\\|").replace("\n", "⏎") for v in row) + " |" for row in rows]
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(Path(args.output_dir or "") / "runs")
    with board.SummaryWriter(log_dir=str(Path(folder) / TABLE)) as writer:
        writer.add_text(TABLE, "\n".join(lines), step)
