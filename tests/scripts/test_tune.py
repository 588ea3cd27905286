"""`outrider tune`, and what uses what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.eval import tuner
from outrider.heads import DraftModel
from outrider.pair import Pair
from outrider.scripts.eval_setup import EvalOptions, load_setup
from outrider.targets import Target

from .conftest import Command, failed, words


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "WIDTHS", (0, 1, 8))


def test_tune_stores_a_plan_that_generate_eval_and_show_use(
    outrider: Command, ngram_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = words(outrider("tune", ngram_pair, "--batch", 1, "--batch", 2, "--limit", 2, "--max-new-tokens", 8))
    assert "batch 1, passes after" in shown
    assert "batch 2, passes after" in shown
    assert "predicted" in shown
    assert "kept in" in shown
    assert [b.batch_size for b in Pair.load(ngram_pair).manifest.tuning[0].batches] == [1, 2]
    assert "is intact" in words(outrider("pair", "verify", ngram_pair))
    listed = words(outrider("pair", "show", ngram_pair))
    assert "tuned batch 1, " in listed
    assert "tuned batch 2, " in listed

    monkeypatch.chdir(tmp_path)
    set_plan(ngram_pair, 3)
    generated = ["generate", ngram_pair, "def add(first", "--max-new-tokens", 8, "--no-compare"]
    assert "(depth up to 3)" in words(outrider(*generated))
    assert "(depth 1)" in words(outrider(*generated, "--depth", 1))
    words(outrider("eval", ngram_pair, "--tuned", "--limit", 1, "--out", tmp_path / "report"))
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


def test_a_dry_run_stores_nothing(outrider: Command, ngram_pair: Path) -> None:
    before = (ngram_pair / "pair.json").read_bytes()
    assert "kept in" not in words(outrider("tune", ngram_pair, "--limit", 1, "--max-new-tokens", 4, "--dry-run"))
    assert (ngram_pair / "pair.json").read_bytes() == before


def test_bad_input_is_clear(outrider: Command, ngram_pair: Path, recipe_file: Path, tmp_path: Path) -> None:
    failed(outrider("tune", ngram_pair, "--batch", 9, "--limit", 2), "got 9")
    (tmp_path / "empty.jsonl").write_text("")
    failed(outrider("tune", ngram_pair, "--suite", tmp_path / "empty.jsonl"), "empty")
    failed(outrider("tune", ngram_pair, "--suite", "cod"), "no suite 'cod'")
    failed(outrider("tune", tmp_path / "nothing"), "pair.json is missing")
    failed(outrider("eval", ngram_pair, "--tuned"), "was not tuned for this machine")
    failed(outrider("eval", recipe_file, "--tuned"), "is a recipe; tuned plans are kept in pairs")


def test_a_static_tree_of_the_recipe_is_measured_unless_another_shape_is_asked_for(
    ngram_pair: Path, recipe_file: Path, tmp_path: Path, target_folder: Path
) -> None:
    target = Target.load(target_folder)
    DraftModel(target.model).save(tmp_path / "run" / "drafter")
    tree = ["eval.tree=[-1, -1, 0]"]
    plan = load_setup(str(recipe_file), EvalOptions(tree)).plan
    assert plan.tree is not None
    assert plan.tree.parents == (-1, -1, 0)
    assert load_setup(str(recipe_file), EvalOptions(tree, {"depth": 3})).plan.tree is None
    assert load_setup(str(recipe_file), EvalOptions(tree, {"limit": 1})).plan == plan
