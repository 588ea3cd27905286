"""`outrider lab report`: forms are written and checked, versions are drawn, and what is not understood is refused."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from outrider.common.atomic import machine_tag
from outrider.eval.reports.figures import Interval
from outrider.eval.reports.render import write_report
from outrider.lab.trend import by_version
from outrider.scripts.cli import app

from ..eval.conftest import make_report
from ..scripts.conftest import answer


def outrider(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_forms_are_written_checked_and_believed_no_longer_when_they_contradict_themselves(tmp_path: Path) -> None:
    folder = write_report(make_report([[0, 1, 4], [2, 3]] * 6), tmp_path / "report")
    left = tmp_path / "forms" / f".profile.json.outrider-{2**22}-{machine_tag()}-0.tmp"  # by a process that was killed
    left.parent.mkdir()
    left.touch()
    made = outrider("lab", "report", folder, "--to", "modelopt", "--to", "vllm", "--out", tmp_path / "forms", "--json")
    assert not left.exists()
    by_form = answer("report-forms", made)["files"]
    assert sorted(by_form) == ["modelopt", "vllm"]
    files = list(by_form.values())
    checks = [word for file in files for word in ("--check", file)]
    assert outrider("lab", "report", *checks).exit_code == 0
    profile = json.loads(Path(by_form["modelopt"]).read_text())
    Path(files[0]).write_text(json.dumps(profile | {"mean_accept_length": profile["mean_accept_length"] - 1}))
    said = answer("report-check", outrider("lab", "report", *checks, "--json"), code=1)["files"]
    assert [[c["name"] for c in said[file]] for file in files] == [["length without the bonus"], []]


def test_versions_are_drawn_with_what_changed_between_them(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [2, 3, 1]] * 6
    reports = [make_report(rows), make_report([[0, 0, 1]] * 12, device_name="<another> CPU")]
    folders = [write_report(report, tmp_path / f"v{i}") for i, report in enumerate(reports)]
    made = outrider("lab", "report", *folders, "--out", tmp_path / "trend", "--json")
    first, second = answer("report-trend", made)["versions"]
    assert (first["version"], first["changes"]) == ("v0", [])
    assert any(line.startswith("machine: float32 on a CPU") for line in second["changes"])
    page = (tmp_path / "trend" / "trend.html").read_text()
    assert "0.44× [all alike]" in page, "τ is 4/3 after 3, on every prompt"
    assert "1 threads" not in page
    assert "&lt;another&gt; CPU" in page
    assert "<another>" not in page
    assert "| v1 |" in (tmp_path / "trend" / "trend.md").read_text()
    alike = [write_report(report, tmp_path / f"v{i}" / "report") for i, report in enumerate(reports)]
    made = outrider("lab", "report", *alike, "--out", tmp_path / "trend", "--json")
    assert [v["version"] for v in answer("report-trend", made)["versions"]] == list(map(str, alike))


def test_versions_are_told_apart_where_their_names_begin_alike() -> None:
    names = [f"assistant-eagle3@v{i}" for i in range(8, 12)]
    drawn = by_version("τ", names, [Interval(2.0, 1.5, 2.5)] * 4, 1.0, "")
    assert all(f">v{i}</text>" in drawn for i in range(8, 12))


def test_what_is_not_understood_is_refused_with_what_there_is(tmp_path: Path) -> None:
    folder = write_report(make_report([[1, 2]] * 3), tmp_path / "report")
    for words, said in (
        ((), "say what is wanted"),
        ((folder,), "say what is wanted"),
        ((folder, "--to", "onnx"), "no such form; there are modelopt"),
        ((tmp_path, "--to", "card"), "no report at"),
        (("--check", tmp_path / "nothing.json"), "nothing.json"),
        (("name", "--registry", tmp_path / "none"), "none"),
    ):
        result = outrider("lab", "report", *words)
        assert result.exit_code == 2, (words, result.output)
        assert said in " ".join(result.stderr.split()), words
