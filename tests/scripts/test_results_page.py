"""The results page says what the result files say, with their machines and dates.

It is the page that its command makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.scripts.bench import page
from outrider.scripts.bench.page_tables import interval, table, tables_of

RESULTS = page.FOLDER / "results"


def test_the_committed_page_is_what_its_command_makes() -> None:
    """If this fails: python -m outrider.scripts.bench.page."""
    assert (page.FOLDER / page.PAGE).read_text(encoding="utf-8") == page.page(RESULTS)
    assert page.main(["--check"]) == 0


def test_every_result_has_a_section_with_its_machine_and_date() -> None:
    made = page.page(RESULTS)
    for entry in page.entries(RESULTS):
        section = made.split(f"## {entry.title}\n")[1].split("\n## ")[0]
        assert f"`{entry.file.name}` · {entry.date} · {entry.machine()}" in section
        assert entry.date != page.RECORDED, entry.file.name
        assert "| --- |" in section


def test_notes_speak_of_files_that_exist_and_of_no_title_twice() -> None:
    notes = page.yaml.safe_load((RESULTS / "notes.yaml").read_text(encoding="utf-8"))
    assert [name for name in notes if not (RESULTS / f"{name}.json").is_file()] == []
    titles = [entry.title for entry in page.entries(RESULTS)]
    assert len(set(titles)) == len(titles)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    conditions = {
        "device": "cpu",
        "device_name": "A Processor",
        "threads": 2,
        "dtype": "float32",
        "torch": "2",
        "seeds": 3,
    }
    tau = {"value": 1.234, "low": 1.2, "high": 1.3}
    quotient = {"value": 1.0, "low": 0.9, "high": 1.1}
    result = {
        "conditions": conditions,
        "temperature 1": {"tau": {"chain": tau}, "quotients": {"chain / chain": quotient}},
    }
    (tmp_path / "a.json").write_text(json.dumps(result))
    (tmp_path / "b.json").write_text(
        json.dumps(result | {"conditions": {"device": "cuda:0", "created": "2030-01-02T03:04:05"}})
    )
    (tmp_path / "notes.yaml").write_text("a:\n  title: Shapes\n  note: A note.\n")
    return tmp_path


def test_a_section_holds_the_figures_and_says_what_was_not_recorded(folder: Path) -> None:
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


def test_a_page_that_is_out_of_date_is_a_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "FOLDER", folder)
    (folder / "results").symlink_to(folder)
    assert page.main(["--check"]) == 1
    assert "run python -m outrider.scripts.bench.page" in capsys.readouterr().err
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0


def test_a_kind_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="keys conditions, waves has no table"):
        tables_of({"conditions": {}, "waves": []})


def test_tables_and_intervals() -> None:
    assert table(["a", "b"], [["x|y", "2"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 2 |"
    assert interval({"value": -0.0456, "low": -0.1, "high": 0.0}, sign="+") == "-0.05 [-0.10, +0.00]"
    assert interval(None) == "–"


def test_a_curve_says_how_much_of_a_full_retraining_was_needed() -> None:
    def learnt(*taus: float) -> dict[str, Any]:
        end = {"value": taus[-1], "low": 1.0, "high": 3.0}
        curve = [{"step": n, "tokens": 100 * n, "tau": tau} for n, tau in enumerate(taus, 1)]
        return {"curve": curve, "tau_decoded": end, "ratio_to_scratch": end}

    full = learnt(1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0)
    (made,) = tables_of({"curves": {"scratch": full, "warm": learnt(1.5, 1.7, 1.85, 1.9)}})
    scratch, warm = ([cell.strip() for cell in line.split("|")[1:-1]] for line in made.splitlines()[2:])
    assert scratch == [
        "scratch",
        "–",
        "1.100",
        "1.200",
        "1.400",
        "1.700",
        "2.000",
        "80%",
        *2 * ["2.000 [1.000, 3.000]"],
    ]
    assert warm == ["warm", "–", "1.500", "1.700", "1.900", "–", "–", "30%", *2 * ["1.900 [1.000, 3.000]"]]
