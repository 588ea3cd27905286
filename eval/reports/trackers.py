"""A report in the trackers that a recipe's `training.report_to` names: its page, and its files as an artifact."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

from ...common.errors import reason
from ...common.untrusted_files import read_text
from ...recipes import Recipe

_RUNS = ("wandb", "trackio")  # which are called alike
_FILES = ("report.json", "report.md", "report.html")
_log = logging.getLogger(__name__)


def track_report(recipe: Recipe, folder: Path) -> None:
    """Give a written report to the recipe's trackers, each in a run of its own; a failure is only a warning."""
    asked = recipe.training.get("report_to") or []
    if asked in ("all", ["all"]):
        asked = importlib.import_module("transformers.integrations").get_available_reporting_integrations()
    for tracker in [asked] if isinstance(asked, str) else asked:
        try:
            if tracker in _RUNS:
                _log_run(tracker, recipe, folder)
            elif tracker == "tensorboard":
                _write_text(recipe, folder)
        except Exception as error:  # of any kind; the report is written
            _log.warning("%s did not take the report (%s); it is in %s.", tracker, reason(error), folder)


def _log_run(tracker: str, recipe: Recipe, folder: Path) -> None:
    library = importlib.import_module(tracker)
    project = recipe.training.get("project") or os.environ.get("WANDB_PROJECT") or "huggingface"  # as in training
    library.init(project=project, name=f"{recipe.name}-evaluated")
    try:
        artifact = library.Artifact(f"{recipe.name}-evaluated", type="report")
        for name in _FILES:
            artifact.add_file(str(folder / name))
        library.log_artifact(artifact)
        library.log({"report": library.Html(read_text(folder / "report.html"))})
    finally:
        library.finish()


def _write_text(recipe: Recipe, folder: Path) -> None:
    """Write the Markdown, which TensorBoard shows, beside the training's event files."""
    board = importlib.import_module("torch.utils.tensorboard")
    place = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(recipe.output_folder / "checkpoints" / "runs")
    with board.SummaryWriter(log_dir=str(Path(place) / "report")) as writer:
        writer.add_text("report", read_text(folder / "report.md"))
