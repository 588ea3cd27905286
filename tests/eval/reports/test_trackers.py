"""A recipe's trackers get its report: the page, and its files as an artifact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.eval.reports.trackers import track_report
from outrider.recipes import Recipe

from ...train.test_callbacks import records


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "report"
    folder.mkdir()
    for name, text in (("json", "{}"), ("md", "| τ |\n|---|\n| 2.5 |\n"), ("html", "<h1>τ is 2.5</h1>")):
        (folder / f"report.{name}").write_text(text, encoding="utf-8")
    return folder


def recipe(folder: Path, tracker: str) -> Recipe:
    values = {"name": "mine", "target": {"path": "embedded"}, "drafter": {"type": "ngram"}, "output": str(folder)}
    return Recipe.from_dict(values | {"data": {"prompts": ["p.jsonl"]}, "training": {"report_to": tracker}})


def test_wandb_gets_page_and_artifact(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # what it learned of another test's environment is forgotten
    track_report(recipe(tmp_path, "wandb"), report)
    wandb.teardown()
    [run] = tmp_path.glob("wandb/offline-run-*")
    assert "mine-evaluated" in records(next(run.glob("run-*.wandb")))["artifacts"]
    assert "τ is 2.5" in next(run.glob("files/media/html/report_*.html")).read_text(encoding="utf-8")


def test_trackio_gets_page_and_artifact(report: Path, tmp_path: Path) -> None:
    """In a process of its own: trackio takes its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    (tmp_path / "recipe.yaml").write_text(recipe(tmp_path, "trackio").to_yaml())
    line = "import sys, pathlib, outrider.recipes as r, outrider.eval.reports.trackers as t; "
    line += "t.track_report(r.load_recipe(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "kept")}
    subprocess.run([sys.executable, "-c", line, tmp_path / "recipe.yaml", report], env=environment, check=True)
    [page] = (tmp_path / "kept" / "media").rglob("*.html")
    assert "τ is 2.5" in page.read_text(encoding="utf-8")
    assert len([file for file in (tmp_path / "kept" / "artifacts").rglob("*") if file.is_file()]) >= 3


@pytest.mark.parametrize("named", ["tensorboard", "all"])
def test_tensorboard_gets_the_tables(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: ["tensorboard"])
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    track_report(recipe(tmp_path, named), report)
    [events] = (tmp_path / "board" / "report").glob("events.out.tfevents.*")
    assert "2.5" in events.read_bytes().decode("utf-8", "replace")


def test_a_tracker_that_fails_is_a_warning(report: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (report / "report.html").unlink()
    (report / "report.md").unlink()
    track_report(recipe(tmp_path, "tensorboard"), report)
    assert "tensorboard did not take the report" in caplog.text
    assert str(report) in caplog.text
