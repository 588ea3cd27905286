"""The results page is made from the result files, their notes, and the tables that benchmarks make of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.report import interval, publish, table

MAKERS = {
    "ablation": "ablation-*",
    "identity": "identity-*",
    "kernels": "kernels-interpreted",
    "load": "load-*",
    "passes": "passes-*",
    "real_size": "real-size-*",
    "shapes": "[rs][uh]*s-cpu-fp32",
}


@pytest.mark.parametrize("name", MAKERS)
def test_tables_are_made_from_the_figures(name):
    if name == "kernels":
        pytest.importorskip("triton")
    made = importlib.import_module(f"benchmarks.{name}").tables
    files = sorted((page.FOLDER / "results").glob(f"{MAKERS[name]}.json"))
    assert files
    for file in files:
        tables = "\n\n".join(made(json.loads(file.read_text(encoding="utf-8")))) + "\n"
        assert tables == file.with_suffix(".md").read_text(encoding="utf-8"), file.name


def test_the_committed_page_is_what_its_command_makes():
    """If this fails: python -m benchmarks.page."""
    assert (page.FOLDER / page.PAGE).read_text(encoding="utf-8") == page.page(page.FOLDER)
    assert page.main(["--check"]) == 0


def test_every_result_has_a_section_with_its_machine_and_date():
    made = page.page(page.FOLDER)
    for entry in page.entries(page.FOLDER):
        section = made.split(f"## {entry.title}\n")[1].split("\n## ")[0]
        assert f"`{entry.file.name}` · {entry.date} · {entry.machine()}" in section
        assert entry.date != page.RECORDED, entry.file.name
        assert "| --- |" in section


def test_notes_speak_of_files_that_exist_and_of_no_title_twice():
    notes = page.yaml.safe_load((page.FOLDER / "results/notes.yaml").read_text(encoding="utf-8"))
    entries = page.entries(page.FOLDER)
    assert set(notes) == {entry.file.stem for entry in entries}
    titles = [entry.title for entry in entries]
    assert len(set(titles)) == len(titles)


def test_every_archived_study_has_a_line_about_its_commit():
    """A script of the archive runs at the commit that it was last run at, and its folder says which."""
    for folder in (page.FOLDER / "archive").iterdir():
        assert "Ran at commit `" in (folder / "README.md").read_text(encoding="utf-8"), folder.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    conditions = {"device": "cpu", "device_name": "A Processor", "threads": 2, "dtype": "float32", "torch": "2"}
    conditions["seeds"] = 3
    (tmp_path / "results").mkdir()
    (tmp_path / "archive" / "study").mkdir(parents=True)
    tau = {"value": 1.234, "low": 1.2, "high": 1.3}
    tables = [table(["", "τ"], [["chain", interval(tau)]])]
    publish({"conditions": conditions}, tmp_path / "results" / "a.json", tables)
    other = {"conditions": {"device": "cuda:0", "created": "2030-01-02T03:04:05"}}
    publish(other, tmp_path / "archive" / "study" / "b.json", tables)
    (tmp_path / "results" / "notes.yaml").write_text("a:\n  title: Shapes\n  note: A note.\n")
    return tmp_path


def test_a_section_holds_the_figures_and_says_what_was_not_recorded(folder):
    made = page.page(folder)
    noted, bare = (entry.section() for entry in page.entries(folder))
    assert noted.startswith(
        "## Shapes\n\n`a.json` · not recorded · A Processor, 2 threads · float32 · torch 2\n\n"
        "A note.\n\nConditions: seeds: 3."
    )
    assert "| chain | 1.23 [1.20, 1.30] |" in noted
    assert "`b.json` · 2030-01-02 · cuda:0, processor not recorded" in bare
    assert "| [Shapes](#shapes) | `a.json` | A Processor, 2 threads | not recorded |" in made
    assert page.NO_GPU not in made


def test_a_page_that_is_out_of_date_is_a_finding(folder, monkeypatch, capsys):
    monkeypatch.setattr(page, "FOLDER", folder)
    assert page.main(["--check"]) == 1
    assert "run python -m benchmarks.page" in capsys.readouterr().err
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0


def test_a_result_is_written_with_its_tables_beside_it(folder):
    assert json.loads((folder / "results/a.json").read_text())["conditions"]["threads"] == 2
    assert (folder / "results/a.md").read_text(encoding="utf-8").splitlines()[0] == "|  | τ |"


def test_tables_and_intervals():
    assert table(["a", "b"], [["x|y", "2"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 2 |"
    assert interval({"value": -0.0456, "low": -0.1, "high": 0.0}, sign="+") == "-0.05 [-0.10, +0.00]"
    assert interval(None) == interval({"value": None, "low": None, "high": None}) == "–"
    assert interval({"value": 1.5, "low": None, "high": None}) == "1.50"
