"""The verbs at the doors, on a tiny pair: out to an engine, in again, and looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result


@pytest.fixture
def pair(recipe_file: Path, outrider: Callable[..., Result]) -> Path:
    """A trained, measured pair."""
    taps, folder = "drafter.taps=[1,3,5]", recipe_file.parent / "pair"
    for verb in (("train",), ("eval",), ("pair", "new", folder)):
        result = outrider(*verb, recipe_file, taps)
        assert result.exit_code == 0, result.output
    return folder


def test_a_pair_is_exported_with_its_launch_and_its_expectations(pair: Path, outrider: Callable[..., Result]) -> None:
    out = pair.parent / "vllm"
    result = outrider("export", pair, "--to", "vllm", "--out", out)
    assert result.exit_code == 0, result.output
    launch = json.loads((out / "launch.json").read_text())
    assert launch["settings"] == {
        "method": "eagle3",
        "model": str(out),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    assert launch["command"] in result.output
    assert launch["command"] in (out / "README.md").read_text()
    served = json.loads((out / "served.json").read_text())
    expected = served["expected"][0]
    report = json.loads(next((pair / "reports").rglob("report.json")).read_text())
    records = [r for r in report["records"] if r["contestant"] == "eagle3"]
    accepted = [a for r in records for a in r["accepted"]]
    assert expected["accepted_at"] == [n for n in (sum(a > d for a in accepted) for d in range(2)) if n]
    assert expected["tau"]["value"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert served["suites"] == json.loads((pair / "pair.json").read_text())["measurements"]["suites"]
