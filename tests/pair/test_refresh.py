"""A refresh writes the next version of a pair, for a changed target, from the old drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from outrider.ground import BadInputError, IncompatibleError
from outrider.pair import Pair, probe, verify
from outrider.pair.refresh import refresh, refresh_recipe
from outrider.recipes import Recipe
from outrider.targets import Target

TEXTS = [
    "def add(first, second):",
    "for name in sorted(names):\n",
    "The target verifies",
    "class Stack:\n    def",
    "print(len(name))",
    "return first + second",
]


@pytest.fixture
def trained(tmp_path: Path, recipe: Recipe, make_pair: Callable[..., Pair]) -> Callable[..., Pair]:
    """`trained(type, **training)`: a pair whose recipe can be run again."""
    rows = [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(kind: str = "eagle3", **training: Any) -> Pair:
        values = recipe.model_dump() | {
            "drafter": {"type": kind, "steps": 3} if kind == "eagle3" else {"type": kind},
            "data": {"prompts": [str(tmp_path / "prompts.jsonl")], "max_new_tokens": 12, "holdout": 0.0},
            "training": {
                "report_to": "none",
                "per_device_train_batch_size": 2,
                "save_strategy": "no",
                "disable_tqdm": True,
            }
            | training,
            "output": str(tmp_path / "run"),
        }
        values["eval"] = values["eval"] | {
            "suites": [str(tmp_path / "prompts.jsonl")],
            "limit": 2,
            "max_new_tokens": 8,
            "baselines": ["ngram"],
        }
        return make_pair(kind, recipe=Recipe.from_dict(values), calibration=None)

    return make


def test_a_refresh_writes_version_two_with_its_parent(
    trained: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
    first, changed = trained(max_steps=5, learning_rate=1e-2), make_target(noise=0.03)
    second = refresh(first, changed, tmp_path / "refreshed")
    assert second.folder == tmp_path / "refreshed" / "pair"
    assert (second.name, second.version) == (first.name, 2)
    assert second.manifest.lineage.parent is not None
    assert second.manifest.lineage.parent.digest == first.digest
    assert second.fingerprint() == changed.fingerprint()
    assert verify(second.folder, changed) == verify(first.folder) == []
    assert second.manifest.measurements.headline
    assert [p.id for p in second.calibration()] == [p.id for p in first.calibration()]
    assert probe(second, changed).ratio.value == 1.0
    old, new = (load_file(p.drafter_folder / "model.safetensors")["fc.weight"] for p in (first, second))
    assert 0 < (old - new).norm() < 0.5 * old.norm(), "trained on from the old weights, not from new ones"

    written = (second.folder / "pair.json").stat().st_mtime_ns
    assert refresh(first, changed, tmp_path / "refreshed").manifest == second.manifest
    assert (second.folder / "pair.json").stat().st_mtime_ns == written


def test_a_drafter_without_weights_is_measured_again(
    trained: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
    second = refresh(trained("ngram"), make_target(noise=0.03), tmp_path / "refreshed")
    assert second.version == 2
    assert not (tmp_path / "refreshed" / "data").exists()


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"max_steps": 50}, {"max_steps": 20}),
        ({"num_train_epochs": 5}, {"num_train_epochs": 2.0}),
        ({}, {"num_train_epochs": pytest.approx(1.2)}),
    ],
)
def test_the_budget_is_a_share_of_the_first_training(
    training: dict[str, Any],
    expected: dict[str, Any],
    trained: Callable[..., Pair],
    make_target: Callable[..., Target],
    tmp_path: Path,
) -> None:
    found = refresh_recipe(trained(**training), make_target(), tmp_path / "out").training
    assert {key: found[key] for key in expected} == expected


def test_the_recipe_of_a_refresh_points_at_the_new_target_and_the_old_drafter(
    trained: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
    pair, target = trained(max_steps=50), make_target()
    target.source = {"path": "base", "revision": None, "adapter": "tuned"}
    recipe = refresh_recipe(pair, target, tmp_path / "out", ["training.max_steps=3", "data.limit=2"])
    assert (recipe.target.path, recipe.target.adapter, recipe.target.dtype) == ("base", "tuned", "float32")
    assert Path(recipe.drafter["init"]).samefile(pair.drafter_folder)
    assert (recipe.training["max_steps"], recipe.data.limit, recipe.output_folder) == (3, 2, tmp_path / "out")


def test_a_refreshed_pair_is_not_cut_again(
    trained: Callable[..., Pair], make_pair: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
    first = trained("ngram", max_steps=50)
    second = make_pair("ngram", tmp_path / "second", recipe=first.recipe(), parent=first)
    assert refresh_recipe(second, make_target(), tmp_path / "out").training["max_steps"] == 50


def test_an_incompatible_target_is_refused_before_any_work(
    trained: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match="hidden_states"):
        refresh(trained(), make_target(layers=2), tmp_path / "refreshed")
    assert not (tmp_path / "refreshed").exists()


def test_a_refresh_never_writes_into_the_pair(trained: Callable[..., Pair], make_target: Callable[..., Target]) -> None:
    pair = trained()
    with pytest.raises(BadInputError, match="lies inside the pair"):
        refresh(pair, make_target(), pair.folder / "next")
    assert verify(pair.folder) == []


@pytest.mark.parametrize("override", ["target.path=elsewhere", "target={path: x}", "output=elsewhere"])
def test_overrides_that_a_refresh_cannot_follow_are_refused(
    trained: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path, override: str
) -> None:
    with pytest.raises(BadInputError, match="a refresh cannot follow"):
        refresh(trained("ngram"), make_target(), tmp_path / "out", [override])
