"""The results page and the index are made from the result files, their notes, and a list of tables."""

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
    "passes": "passes-*",
    "real_size": "real-size-*",
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_benchmark_reads_the_results_that_it_made_before(name):
    if name == "kernels":
        pytest.importorskip("triton")
    made = importlib.import_module(f"benchmarks.{name}").tables
    files = sorted((page.FOLDER / "results").glob(f"{MAKERS[name]}.json"))
    assert files
    for file in files:
        assert "| --- |" in "\n\n".join(made(json.loads(file.read_text(encoding="utf-8")))), file.name


def test_the_committed_pages_are_what_their_command_makes():
    """If this fails: python -m benchmarks.page."""
    assert (page.FOLDER / page.PAGE).read_text(encoding="utf-8") == page.page(page.FOLDER)
    assert (page.FOLDER / page.INDEX).read_text(encoding="utf-8") == page.index(page.FOLDER)
    assert page.main(["--check"]) == 0


def test_the_page_has_ten_tables_and_is_short_enough_to_be_read():
    made = page.page(page.FOLDER)
    assert made.count("\n## ") == 10
    assert len(made.split()) <= 8000


def test_every_result_has_a_title_of_its_own_a_target_and_a_date():
    notes = page.yaml.safe_load((page.FOLDER / "results/notes.yaml").read_text(encoding="utf-8"))
    entries = page.entries(page.FOLDER)
    assert set(notes) == set(entries)
    assert len({entry.title for entry in entries.values()}) == len(entries)
    assert [name for name, entry in entries.items() if page.RECORDED in entry.date] == []
    assert [name for name, entry in entries.items() if entry.target == page.NO_TARGET] == []


TABLES = """
opening: "# Results"
targets: {abcdef01: embedded}
tables:
- question: What is it?
  answer: This.
  row: drafter
  columns: [{name: τ}, {name: speedup, unit: ×}, {name: same}, {name: least}, {name: count}]
  groups:
  - file: a
    paths:
    - [rows, {name: $}, tau]
    - [rows, {name: $}, speedup]
    - of: [[rows, {name: $}, same], [rows, {name: $}, prompts]]
    - {least: [tests], field: p}
    - {count: [tests], where: {said: yes}}
    rows: {chains: chain, trees: tree}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    conditions = {"device": "cpu", "device_name": "A Processor", "threads": 2, "dtype": "float32"}
    (tmp_path / "results").mkdir()
    conditions |= {"target": "abcdef0123", "suites": ["code"], "prompts": 3, "max_new_tokens": 8}
    tau = {"value": 1.234, "low": 1.2, "high": 1.3}
    rows = [{"name": "chain", "tau": tau, "speedup": tau, "same": 2, "prompts": 3}]
    rows.append({"name": "tree", "tau": tau, "speedup": 1.5, "same": None, "prompts": 3})
    tests = {"x": {"p": 0.5, "said": True}, "y": {"p": 0.25, "said": False}}
    publish({"conditions": conditions, "rows": rows, "tests": tests}, tmp_path / "results" / "a.json", [])
    other = {"conditions": {"device": "cuda:0", "created": "2030-01-02T03:04:05"}}
    publish(other, tmp_path / "results" / "b.json", [])
    (tmp_path / "results" / "notes.yaml").write_text("a:\n  title: Shapes\n  note: A note.\n")
    (tmp_path / "tables.yaml").write_text(TABLES)
    return tmp_path


def test_a_table_shows_figures_by_their_paths_and_each_file_with_its_conditions(folder):
    made = page.page(folder)
    assert "| chains | 1.23 [1.20, 1.30] | 1.23× [1.20, 1.30] | 2 of 3 | 0.25 | 1 | `a.json` |" in made
    assert "| trees | 1.23 [1.20, 1.30] | 1.50× | – | 0.25 | 1 | `a.json` |" in made
    about = "the embedded target alone · A Processor, 2 threads · float32 · 3 prompts (code) of at most 8 new tokens"
    assert f"- [`a.json`](results/a.json) · {about} · not recorded. A note." in made


def test_the_index_has_a_line_for_each_file(folder):
    lines = page.index(folder).splitlines()
    assert lines[-1] == "- [`b.json`](b.json): b · no target · cuda:0, processor not recorded · 2030-01-02"
    assert lines[-2].startswith("- [`a.json`](a.json): Shapes · the embedded target alone")


def test_a_figure_that_is_not_there_ends_the_page(folder):
    (folder / "tables.yaml").write_text(TABLES.replace("trees: tree", "trees: bush"))
    with pytest.raises(ValueError, match="unpack"):
        page.page(folder)


def test_a_page_that_is_out_of_date_is_a_finding(folder, monkeypatch, capsys):
    monkeypatch.setattr(page, "FOLDER", folder)
    assert page.main(["--check"]) == 1
    assert "run python -m benchmarks.page" in capsys.readouterr().err
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0


def test_tables_and_intervals():
    assert table(["a", "b"], [["x|y", "2"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 2 |"
    assert interval({"value": -0.0456, "low": -0.1, "high": 0.0}, sign="+") == "-0.05 [-0.10, +0.00]"
    assert interval(None) == interval({"value": None, "low": None, "high": None}) == "–"
    assert interval({"value": 1.5, "low": None, "high": None}) == "1.50"
