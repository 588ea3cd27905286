"""`--dry-run` says what a verb would read, write, spend and send, and touches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.heads import Drafter, drafter_config
from outrider.pair import new_pair
from outrider.recipes import load_recipe
from outrider.targets import Target

from .conftest import Command, answer, succeeded, words


@pytest.fixture
def pair(recipe_file: Path, tmp_path: Path, target_folder: Path) -> Path:
    target = Target.load(target_folder)
    recipe = load_recipe(str(recipe_file))
    head, config = drafter_config(recipe.drafter)
    drafter: Drafter = head.build(config, target, torch.ones(target.vocab_size, dtype=torch.long))
    return new_pair(tmp_path / "trained", target, drafter, recipe, calibration=[]).folder


def here(folder: Path) -> dict[str, int]:
    """Return everything in a folder, with when it was last changed."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def intent(outrider: Command, words: Sequence[object], place: Path) -> dict[str, str]:
    """Return the sentences of a dry run by kind, after a look that it left everything in `place` as it was."""
    before = here(place)
    shown = outrider(*words, "--dry-run")
    assert {line.split()[0] for line in succeeded(shown).stdout.splitlines() if line} >= {*KINDS}
    found = answer("dry-run", outrider(*words, "--dry-run", "--json"))
    assert here(place) == before
    return {kind: "; ".join(found[kind]) for kind in KINDS}


KINDS = ("reads", "writes", "spends", "sends")


def test_distilling(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    servers = "data.servers=[http://gpu1:8000/v1]"
    found = intent(outrider, ["distill", recipe_file, servers], tmp_path)
    assert str(tmp_path / "prompts.jsonl") in found["reads"]
    assert found["writes"] == f"responses: {tmp_path / 'run' / 'data'}"
    assert found["spends"].startswith("sequences: 6 with ")
    assert found["sends"] == "prompts to http://gpu1:8000/v1"


def test_training(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    push = ["training.push_to_hub=true", "training.hub_model_id=org/name", "training.report_to=tensorboard"]
    found = intent(outrider, ["train", recipe_file, *push], tmp_path)
    assert "training: 2 steps of about " in found["spends"]
    assert f"checkpoints, drafter and recipe: {tmp_path / 'run'}" in found["writes"]
    assert found["sends"] == "figures to tensorboard; the drafter, its recipe and a card to hf://org/name"
    words(outrider("distill", recipe_file))
    again = intent(outrider, ["train", recipe_file], tmp_path)
    assert f"the responses in {tmp_path / 'run' / 'data'}, which are there already" in again["reads"]
    assert "responses" not in again["writes"]
    assert (
        "99" in answer("error", outrider("train", recipe_file, "drafter.taps=[99]", "--dry-run", "--json"), 3)["error"]
    )


def test_comparing(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    words = ["compare", recipe_file, "--budget", 7, "--out", tmp_path / "out", "training.push_to_hub=true"]
    found = intent(outrider, [*words, "training.hub_model_id=org/name"], tmp_path)
    assert "7 seconds of training: tiny" in found["spends"]
    assert "measuring: 3 prompts of each of " in found["spends"]
    assert f"responses: {tmp_path / 'out' / 'data'}" in found["writes"]
    assert found["sends"] == "", "a comparison pushes nothing"


def test_refreshing(outrider: Command, pair: Path, ngram_pair: Path, changed_target: Path, tmp_path: Path) -> None:
    words = ["--target", changed_target, "--out", tmp_path / "next"]
    found = intent(outrider, ["refresh", pair, *words], tmp_path)
    assert str(changed_target) in found["reads"]
    assert found["writes"].endswith(f"the next version: {tmp_path / 'next' / 'pair'}")
    assert "training: 1 steps" in found["spends"], "0.4 of the first training's two"
    timed = intent(outrider, ["refresh", pair, *words, "--seconds", 9], tmp_path)
    assert "9 seconds of training: tiny" in timed["spends"]
    unlearned = intent(outrider, ["refresh", ngram_pair, *words], tmp_path)
    assert "training" not in unlearned["spends"]


def test_pushing(outrider: Command, ngram_pair: Path, tmp_path: Path) -> None:
    found = intent(outrider, ["pair", "push", ngram_pair, "--registry", tmp_path / "registry"], tmp_path)
    assert (found["writes"].startswith("tiny@1: "), found["sends"]) == (True, "")
    found = intent(outrider, ["pair", "push", ngram_pair, "--registry", "hf://org/pairs"], tmp_path)
    assert found["sends"].endswith("to hf://org/pairs")
    assert found["writes"] == ""
