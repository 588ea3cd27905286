"""Trackers get the settings, the curves, the texts and the report; a tracker that cannot is refused first."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from outrider.common import BadInputError, progress
from outrider.recipes import Recipe
from outrider.train import TrainResult, train
from outrider.train import __main__ as entry
from outrider.train.callbacks import finish_reports, held_out_taus, log_line

from ..forked import Forked
from .conftest import MakeRecipe


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", r"training.report_to: unknown key 'tensorbord'; did you mean 'tensorboard'"),
        ("swanlab", r"training.report_to: swanlab cannot report here: .* Install its package \(pip install swanlab\)"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused_before_any_work(recipe, target, name, said):
    made = recipe(report_to=name)
    with pytest.raises(BadInputError, match=said):
        train(made, target)
    assert not made.output_folder.exists()


def test_wandb_without_an_account_is_refused_before_any_work(recipe, tmp_path):
    """In a process of its own: wandb keeps what it learned of its environment."""
    pytest.importorskip("wandb")
    (tmp_path / "recipe.yaml").write_text(recipe(report_to="wandb").to_yaml())
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}

    def main() -> int:
        for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
            del sys.modules[name]
        sys.stdin = io.StringIO()
        return entry.main([str(tmp_path / "recipe.yaml")])

    done = Forked(main, tmp_path, environment)
    _, said = done.communicate()
    assert done.returncode == 2, said
    assert "training.report_to: wandb cannot log in" in said
    assert "set WANDB_MODE=offline" in said


def test_the_analytic_tau_and_the_measured_one_have_names_of_their_own(
    recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the log, and at the end of a training: only the measured one can be compared with a report's."""
    logs = {"eval_loss": 1.5, "eval_tau": 3.474, "eval_alpha_d1": 0.7}
    assert log_line(logs, 20) == "step 20 held out  loss 1.5  analytic tau 3.47 (T=1)  alpha 0.70"
    assert "analytic tau 2.10 (T=1)  alpha" in log_line({"loss": 2.0, "tau": 2.1, "alpha_d1": 0.6}, 1)
    measured = logs | {"eval_measured_tau": 1.65}
    assert "analytic tau 3.47 (T=1)  measured tau 1.65  alpha" in log_line(measured, 20)
    assert held_out_taus({"train_loss": 1.0}) == ""
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    for metrics, said in ((logs, "; `outrider eval` measures it"), (measured, ", measured tau 1.65")):
        result = TrainResult(Path("here"), metrics, 7)
        monkeypatch.setattr("outrider.train.run.train", lambda *_, result=result, **__: result)
        given = argparse.Namespace(recipe=str(tmp_path / "recipe.yaml"), overrides=[], fresh=False)
        assert entry._train(given, None) == f"drafter after 7 steps: here; held out: analytic tau 3.47 (T=1){said}"


def test_a_training_whose_output_is_kept_writes_lines(recipe, target, monkeypatch, capfd):
    """One for each log, and one every ten seconds of how far it is; no bar, which a file holds as one endless line."""
    monkeypatch.setattr(progress, "EVERY", 0.001)
    out = io.StringIO()
    train(recipe(max_steps=3, disable_tqdm=False), target, console=Console(file=out, width=20))
    written = capfd.readouterr()
    assert {"step 1", "step 2", "step 3"} <= {line.partition("  ")[0] for line in out.getvalue().splitlines()}
    assert re.search(r"^training run: \d of 3, .* (left|so far)$", written.err, re.MULTILINE)
    assert "\r" not in written.err + written.out + out.getvalue()


def measuring(recipe: MakeRecipe, folder: Path, tracker: str) -> Recipe:
    (folder / "asked.jsonl").write_text(json.dumps({"text": "def add("}) + "\n")
    made = recipe("followed", max_steps=4, eval_steps=2, report_to=tracker).model_dump()
    spec = {"suites": [str(folder / "asked.jsonl")], "depth": 2, "max_new_tokens": 8, "training_prompts": 1}
    return Recipe.from_dict(made | {"eval": spec})


def test_an_offline_wandb_run_holds_everything(recipe, target, tmp_path, monkeypatch):
    """Read back from its file: settings, per-depth curves, a table of texts at each evaluation, and the report."""
    wandb: Any = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # what it learned of another test's environment is forgotten
    train(measuring(recipe, tmp_path, "wandb"), target)
    wandb.finish()
    wandb.teardown()  # what its service still held is in the file now
    found = records(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    history = [{item["key"]: item["value"] for item in record} for record in found["history"]]
    curves = {name for row in history for name in row}
    assert {f"{part}/{name}" for part in ("train", "eval") for name in ("alpha_d1", "alpha_d2", "tau")} <= curves
    assert {"eval/measured_tau", "eval/tau_gap"} <= curves
    # wandb writes the entries of a value one by one, or as a whole.
    tables = [json.loads(row["drafted"])["_type"] for row in history if "drafted" in row]
    tables += [json.loads(row["drafted._type"]) for row in history if "drafted._type" in row]
    assert tables == ["table-file"] * 2, sorted(curves)
    settings = {key for record in found["config"] for key in record}
    assert {"recipe", "learning_rate"} <= settings
    assert "followed-report" in found["artifacts"]


def test_a_tracker_that_fails_in_the_end_is_a_warning(recipe, monkeypatch, tmp_path, caplog):
    """The result is written by then: nobody should lose hours to a full quota."""

    def refuse(*_: Any) -> None:
        raise OSError("quota exceeded")

    made = recipe(report_to="wandb")
    made.output_folder.mkdir()
    for name in ("recipe.yaml", "provenance.json"):
        (made.output_folder / name).write_text("")
    artifact = SimpleNamespace(add_file=str)
    wandb = SimpleNamespace(run=SimpleNamespace(log_artifact=refuse), Artifact=lambda *_, **__: artifact)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    finish_reports(made, SimpleNamespace(report_to="wandb"))  # type: ignore[arg-type]
    assert "OSError: quota exceeded" in caplog.text
    assert str(made.output_folder) in caplog.text


def records(file: Path) -> dict[str, list[Any]]:
    """What a .wandb file holds of these kinds."""
    from wandb.proto import wandb_internal_pb2

    store: dict[str, list[Any]] = {"history": [], "config": [], "artifacts": []}
    for raw in entries(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            store["history"].append([{"key": i.key or ".".join(i.nested_key), "value": i.value_json} for i in items])
        elif kind in ("config", "run"):
            changes = record.config if kind == "config" else record.run.config
            store["config"].append({u.key or ".".join(u.nested_key) for u in changes.update})
        elif kind == "artifact":
            store["artifacts"].append(record.artifact.name)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            store["artifacts"].append(record.request.log_artifact.artifact.name)
    return store


def entries(log: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """The entries of a log in LevelDB's format, after wandb's header: each a checksum, a length, a kind and bytes."""
    place, parts = header, b""
    while place + header <= len(log):
        if block - place % block < header:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", log[place : place + header])
        parts += log[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["tensorboard", "trackio"])
def test_other_trackers_get_the_texts_too(recipe, target, tmp_path, monkeypatch, tracker):
    pytest.importorskip(tracker)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    made = measuring(recipe, tmp_path, tracker)
    train(made, target)
    if tracker == "tensorboard":
        assert list((made.output_folder / "checkpoints" / "runs").rglob("drafted/events.*"))
    else:
        assert list((tmp_path / "trackio").rglob("*.db"))
