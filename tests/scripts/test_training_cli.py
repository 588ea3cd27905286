"""`outrider compare`, `vocab` and `plan`, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import Command, failed, succeeded


@pytest.fixture
def medusa_file(recipe_file: Path) -> Path:
    """The same recipe with other heads."""
    values = yaml.safe_load(recipe_file.read_text()) | {"name": "heads", "drafter": {"type": "medusa", "num_heads": 2}}
    file = recipe_file.with_name("heads.yaml")
    file.write_text(yaml.safe_dump(values))
    return file


def test_compare_trains_and_measures(outrider: Command, recipe_file: Path, medusa_file: Path, tmp_path: Path) -> None:
    """Changes after the recipes are for all of them; repeated, only the measuring is done again."""
    arguments = ["compare", recipe_file, medusa_file, "eval.limit=2", "--budget", "0.5", "--out", tmp_path / "out"]
    shown = succeeded(outrider(*arguments)).stdout
    for words in ("tiny", "heads", "ngram", "plain", "τ at 0", "parameters"):
        assert words in shown
    files = {"report.json", "report.md", "report.html", "comparison.svg"}
    assert {p.name for p in (tmp_path / "out" / "report").iterdir()} == files
    before = (tmp_path / "out" / "tiny" / "provenance.json").stat().st_mtime_ns
    again = json.loads(succeeded(outrider(*arguments, "--json")).stdout)
    assert (tmp_path / "out" / "tiny" / "provenance.json").stat().st_mtime_ns == before
    assert [c["name"] for c in again["contestants"] if c["training"]] == ["tiny", "heads"]
    assert again["conditions"]["suites"][0]["num_prompts"] == 2


def test_compare_refuses_other_data(outrider: Command, recipe_file: Path, medusa_file: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(medusa_file.read_text())
    values["data"]["max_new_tokens"] = 9
    medusa_file.write_text(yaml.safe_dump(values))
    failed(outrider("compare", recipe_file, medusa_file, "--out", tmp_path / "out"), "data.max_new_tokens (8 and 9)")


def test_plan_needs_no_weights(outrider: Command, recipe_file: Path, target_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((target_folder / "config.json").read_text())
    shown = succeeded(outrider("plan", recipe_file, f"target.path={bare}")).stdout
    for words in ("Memory of one process", "H100", "6 with", "Assumed, not measured"):
        assert words in shown
    found: dict[str, Any] = json.loads(succeeded(outrider("plan", recipe_file, f"target.path={bare}", "--json")).stdout)
    assert found["peak_memory"] > found["memory"]["target_weights"] > 0
    assert not (tmp_path / "run").exists(), "nothing was spent"


def test_plan_reads_an_accelerate_config(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    zero = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 2}}
    sharded = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    for config, expected in ((zero, (8, "zero2")), (sharded, (2, "fsdp"))):
        file.write_text(yaml.safe_dump(config))
        found = json.loads(succeeded(outrider("plan", recipe_file, "--accelerate-config", file, "--json")).stdout)
        assert (found["processes"], found["sharding"]) == expected
    file.write_text(yaml.safe_dump(sharded | {"fsdp_config": {}}))
    failed(outrider("plan", recipe_file, "--accelerate-config", file), "set fsdp_version: 2")
    file.write_text("num_processes: 2\n")
    failed(outrider("plan", recipe_file, "--accelerate-config", file), "is no accelerate config")
