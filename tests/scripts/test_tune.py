"""`outrider tune`, and what uses what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.eval import tuner
from outrider.pair import Pair, new_pair
from outrider.recipes import load_recipe
from outrider.scripts.eval_setup import EvalOptions, load_subject
from outrider.targets import Target

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "WIDTHS", (0, 1, 8))


@pytest.fixture
def pair(recipe_file: Path, tmp_path: Path, target_folder: Path) -> Path:
    from outrider.heads import Ngram

    recipe = load_recipe(str(recipe_file), ["drafter={type: ngram}", "eval.baselines=[]"])
    return new_pair(tmp_path / "pair", Target.load(target_folder), Ngram(), recipe, calibration=[]).folder


def succeeded(result: Result) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    return " ".join(result.stdout.split())


def failed(result: Result) -> str:
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_tune_stores_a_plan_that_generate_eval_and_show_use(
    outrider: Command, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = succeeded(outrider("tune", pair, "--batch", 1, "--batch", 2, "--limit", 2, "--max-new-tokens", 8))
    assert "batch 1, passes after" in shown
    assert "batch 2, passes after" in shown
    assert "predicted" in shown
    assert "kept in" in shown
    assert [b.batch_size for b in Pair.load(pair).manifest.tuning[0].batches] == [1, 2]
    assert "is intact" in succeeded(outrider("pair", "verify", pair))
    listed = succeeded(outrider("pair", "show", pair))
    assert "tuned batch 1, " in listed
    assert "tuned batch 2, " in listed

    monkeypatch.chdir(tmp_path)
    set_plan(pair, 3)
    assert "(depth up to 3)" in succeeded(
        outrider("generate", pair, "def add(first", "--max-new-tokens", 8, "--no-compare")
    )
    assert "(depth 1)" in succeeded(
        outrider("generate", pair, "def add(first", "--max-new-tokens", 8, "--no-compare", "--depth", 1)
    )
    succeeded(outrider("eval", pair, "--tuned", "--limit", 1, "--out", tmp_path / "report"))
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [(c["name"], c["depth"], c["control"] is not None) for c in report["contestants"][:2]] == [
        ("ngram", 2, False),
        ("ngram tuned", 3, True),
    ]


def set_plan(folder: Path, depth: int) -> None:
    """Put a controlled chain in place of what was chosen, which depends on this machine's mood."""
    pair = Pair.load(folder)
    (tuning,) = pair.manifest.tuning
    first = tuning.batches[0]
    chosen = first.chosen.model_copy(update={"plan": {"depth": depth}, "weight": 16.0})
    pair.store_tuning(
        tuning.model_copy(update={"batches": [first.model_copy(update={"chosen": chosen}), *tuning.batches[1:]]})
    )


def test_a_dry_run_stores_nothing(outrider: Command, pair: Path) -> None:
    before = (pair / "pair.json").read_bytes()
    assert "kept in" not in succeeded(outrider("tune", pair, "--limit", 1, "--max-new-tokens", 4, "--dry-run"))
    assert (pair / "pair.json").read_bytes() == before


def test_bad_input_is_clear(outrider: Command, pair: Path, recipe_file: Path, tmp_path: Path) -> None:
    assert "got 9" in failed(outrider("tune", pair, "--batch", 9, "--limit", 2))
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty" in failed(outrider("tune", pair, "--suite", tmp_path / "empty.jsonl"))
    assert "no suite 'cod'" in failed(outrider("tune", pair, "--suite", "cod"))
    assert "pair.json is missing" in failed(outrider("tune", tmp_path / "nothing"))
    assert "was not tuned for this machine" in failed(outrider("eval", pair, "--tuned"))
    assert "is a recipe; tuned plans are kept in pairs" in failed(outrider("eval", recipe_file, "--tuned"))


def test_a_static_tree_of_the_recipe_is_measured_unless_another_shape_is_asked_for(
    pair: Path, recipe_file: Path, tmp_path: Path, target_folder: Path
) -> None:
    from outrider.heads import DraftModel

    target = Target.load(target_folder)
    DraftModel(target.model).save(tmp_path / "run" / "drafter")
    tree = ["eval.tree=[-1, -1, 0]"]
    plan = load_subject(str(recipe_file), EvalOptions(tree)).plan
    assert plan.tree is not None
    assert plan.tree.parents == (-1, -1, 0)
    assert load_subject(str(recipe_file), EvalOptions(tree, {"depth": 3})).plan.tree is None
    assert load_subject(str(recipe_file), EvalOptions(tree, {"limit": 1})).plan == plan
