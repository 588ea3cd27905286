"""`outrider pair push | pull | log | diff`, from the command line, by their words and by their JSON."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from outrider.heads import Ngram, NgramConfig
from outrider.pair import Pair, new_pair, verify
from outrider.recipes import load_recipe
from outrider.targets import Target
from outrider.targets.fingerprint import digest_file

from ..eval.conftest import make_tuning
from .conftest import Command, answer, failed, words


@pytest.fixture
def pairs(recipe_file: Path, tmp_path: Path, target_folder: Path) -> list[Pair]:
    """Version 1, and version 2 of a changed target, with another recipe."""
    target = Target.load(target_folder)
    recipe = load_recipe(str(recipe_file), ["drafter={type: ngram}"])
    first = new_pair(tmp_path / "1", target, Ngram(), recipe)
    target.model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    changed = load_recipe(str(recipe_file), ["drafter={type: ngram}", "data.limit=5", "training.max_steps=9"])
    second = new_pair(tmp_path / "2", target, Ngram(NgramConfig()), changed, parent=first)
    return [first, second]


def test_versions_go_in_and_out(outrider: Command, pairs: list[Pair], tmp_path: Path) -> None:
    place = ["--registry", tmp_path / "registry"]
    assert "tiny@1 (revision 1) is in" in words(outrider("pair", "push", pairs[0].folder, *place))
    pushed = answer("pair-push", outrider("pair", "push", pairs[1].folder, *place, "--json"))
    assert (pushed["name"], pushed["version"], pushed["revision"], pushed["digest"]) == ("tiny", 2, 1, pairs[1].digest)
    pulled = answer("pair-pull", outrider("pair", "pull", "tiny@1", tmp_path / "pulled", *place, "--json"))
    assert pulled["digest"] == pairs[0].digest
    assert verify(tmp_path / "pulled") == []
    assert "version 2" in words(outrider("pair", "pull", "tiny", tmp_path / "newest", *place))
    refused = outrider("pair", "pull", "tiny@7", tmp_path / "none", *place)
    assert (refused.exit_code, (tmp_path / "none").exists()) == (2, False)
    assert "in the versions 1, 2" in " ".join(refused.stderr.split())


def test_log_draws_the_lineage(outrider: Command, pairs: list[Pair], tmp_path: Path) -> None:
    """A version stands below the one that it was made from; where that is missing, it says so."""
    place = ["--registry", tmp_path / "registry"]
    failed(outrider("pair", "log", *place), "there is no registry at")
    (tmp_path / "registry").mkdir()
    assert "no versions yet" in words(outrider("pair", "log", *place))
    outrider("pair", "push", pairs[1].folder, *place)
    assert "from tiny version 1, which is not here" in words(outrider("pair", "log", *place))
    outrider("pair", "push", pairs[0].folder, *place)
    drawn = outrider("pair", "log", *place).stdout
    assert "not here" not in drawn
    lines = [line for line in drawn.splitlines() if "@" in line]
    assert [line.index("tiny@") for line in lines] == [4, 8]
    assert "the target changed" in drawn
    listed = answer("pair-log", outrider("pair", "log", "tiny", *place, "--json"))["versions"]
    assert [(v["version"], v["digest"]) for v in listed] == [(1, pairs[0].digest), (2, pairs[1].digest)]
    assert listed[1]["lineage"]["parent"]["digest"] == pairs[0].digest
    assert answer("pair-log", outrider("pair", "log", "other", *place, "--json"))["versions"] == []
    assert "no pair called 'other'; there are tiny" in words(outrider("pair", "log", "other", *place))


def test_log_shows_tuned_plans(outrider: Command, pairs: list[Pair], tmp_path: Path) -> None:
    place = ["--registry", tmp_path / "registry"]
    pairs[0].store_tuning(make_tuning({1: 5}))
    outrider("pair", "push", pairs[0].folder, *place)
    said = "batch 1, depth up to 5: 1.50× the plain target's speed (temperature 0, float32 on a CPU, 2031-01-01)"
    assert f"tuned: {said}" in words(outrider("pair", "log", *place))
    (listed,) = answer("pair-log", outrider("pair", "log", *place, "--json"))["versions"]
    assert listed["tuned"] == [said]


def test_diff_says_what_differs(outrider: Command, pairs: list[Pair], tmp_path: Path) -> None:
    """Of two folders, and the same of two versions in a registry."""
    place = ["--registry", tmp_path / "registry"]
    for pair in pairs:
        outrider("pair", "push", pair.folder, *place)
    found = answer("pair-diff", outrider("pair", "diff", pairs[0].folder, pairs[1].folder, "--json"))
    assert found == answer("pair-diff", outrider("pair", "diff", "tiny@1", "tiny", *place, "--json"))
    differences = found["differences"]
    weights = len(pairs[0].fingerprint().tensors)
    assert differences["target"] == [f"1 of {weights} weights (first: model.layers.0.mlp.down_proj.weight)"]
    assert differences["recipe"] == ["training.max_steps: 2 → 9"]
    assert differences["data"] == ["data.limit: null → 5"]
    assert differences["tokenizer"] == differences["drafter"] == []
    shown = words(outrider("pair", "diff", pairs[0].folder, pairs[1].folder))
    assert "tokenizer the same" in shown
    assert "training.max_steps: 2 → 9" in shown
    same = answer("pair-diff", outrider("pair", "diff", pairs[0].folder, pairs[0].folder, "--json"))["differences"]
    assert not any(lines for part, lines in same.items() if part != "tau")


@pytest.mark.parametrize("recipe", ["- a\n- list\n", "5\n", "text\n"])
def test_a_recipe_that_is_none_cannot_be_compared(
    outrider: Command, pairs: list[Pair], tmp_path: Path, recipe: str
) -> None:
    altered = shutil.copytree(pairs[0].folder, tmp_path / "altered")
    (altered / "recipe.yaml").write_text(recipe)
    sizes = pairs[0].manifest.sizes | {"recipe.yaml": len(recipe)}
    changed = {"recipe": digest_file(altered / "recipe.yaml"), "sizes": sizes}
    pairs[0].manifest.model_copy(update=changed).sealed().write(altered)
    result = outrider("pair", "diff", altered, pairs[1].folder)
    assert result.exit_code == 2
    assert "recipe.yaml of tiny version 1 is a" in " ".join(result.stderr.split())


def test_a_registry_is_asked_for_or_taken_from_the_environment(
    outrider: Command, pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_REGISTRY", raising=False)
    assert "OUTRIDER_REGISTRY" in outrider("pair", "log").stderr
    monkeypatch.setenv("OUTRIDER_REGISTRY", str(tmp_path / "registry"))
    words(outrider("pair", "push", pairs[0].folder))
    assert (tmp_path / "registry" / "pairs" / "tiny" / "1.1.json").is_file()


def test_a_push_that_wandb_keeps_offline_names_the_command_that_sends_it(
    outrider: Command, ngram_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = words(outrider("pair", "push", ngram_pair, "--registry", "wandb://team/drafters"))
    kept = re.search("waits for `wandb sync (.+?)`, which sends it to wandb://team/drafters", said)
    assert kept is not None
    assert Path(kept[1]).is_dir(), "wherever wandb keeps runs that it has not sent"
