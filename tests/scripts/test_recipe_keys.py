"""Every key of a recipe is explained: by the command, and on the page, which is made from the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outrider.heads.registry import HEADS, with_defaults
from outrider.recipes import load_recipe, packaged_recipes
from outrider.scripts.recipe_keys import page, typed_keys

from .conftest import Command, failed, words

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipe-keys.md"


def test_the_page_is_the_schemas() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m outrider.scripts.recipe_keys writes it anew"


def test_every_typed_key_has_a_meaning() -> None:
    assert [key.path for key in typed_keys() if not key.meaning] == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("eval.repeats", "eval.repeats: an integer ≥ 1, default 3 timed passes over each suite"),
        ("target.dtype", "one of 'auto', 'float32', 'bfloat16', 'float16', default \"auto\""),
        ("data.sampling.top_p", "a number or null > 0 ≤ 1, default null"),
        ("data.prompts", "data.prompts: a list, required"),
        ("data.prompts", "data.prompts.weight: a number or null > 0"),
        ("eval", "eval.max_new_tokens: an integer ≥ 1, default 128 length limit"),
        ("drafter.type", "'eagle3'"),
        ("drafter.block_size", "dflash.block_size: an integer, default 8 slots of a block"),
        ("training.warmup_steps", "linear warmup"),
        ("training.packing", "training.packing: true or false, default False rows are packs"),
    ],
)
def test_a_key_is_explained(outrider: Command, key: str, said: str) -> None:
    assert said in words(outrider("recipe", "--explain", key))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("eval.repeat", "unknown key eval.repeat; did you mean eval.repeats?"),
        ("drafter.stepz", "did you mean 'steps'?"),
        ("evl.repeats", "did you mean eval?"),
        ("training.warmup", "did you mean 'warmup_"),
    ],
)
def test_an_unknown_key_has_a_neighbour(outrider: Command, key: str, said: str) -> None:
    failed(outrider("recipe", "--explain", key), said)


def test_a_recipe_is_printed_with_every_default(outrider: Command) -> None:
    """The same text is a pair's recipe.yaml: each key of each section that is there."""
    printed = outrider("recipe", "embedded-eagle3", "data.limit=5").stdout
    values = yaml.safe_load(printed)
    made = load_recipe("embedded-eagle3", ["data.limit=5"])
    drafter = with_defaults(made.drafter)
    assert printed.rstrip() == made.to_yaml(drafter=drafter).rstrip()
    assert drafter.keys() == {"type", *HEADS["eagle3"].config_class().to_dict()}
    assert drafter.items() >= made.drafter.items()
    for key in typed_keys():
        *sections, name = key.path.split(".")
        here = values
        for section in sections:
            here = here[section] if isinstance(here, dict) else None
        assert not isinstance(here, dict) or name in here, key.path
    failed(outrider("recipe"), "which recipe?")
    failed(outrider("recipe", "embedded-eagle3", "drafter.type=eagel3"), "did you mean 'eagle3'?")
    failed(outrider("recipe", "embedded-eagle3", "training.learning_rat=1"), "did you mean 'learning_rate'?")


def test_a_recipe_that_starts_from_a_saved_drafter_leaves_its_settings_to_it() -> None:
    assert with_defaults({"type": "eagle3", "init": "runs/first"}) == {"type": "eagle3", "init": "runs/first"}
    assert with_defaults({"type": "mtp", "init": "native"})["init"] == "native"


def test_a_packaged_recipe_is_copied_with_its_comments_and_never_over_a_file(outrider: Command, tmp_path: Path) -> None:
    copy = tmp_path / "new" / "my.yaml"
    assert "my.yaml" in words(outrider("recipe", "embedded-eagle3", "--out", copy))
    assert copy.read_text(encoding="utf-8") == packaged_recipes()["embedded-eagle3"].read_text(encoding="utf-8")
    assert "#" in copy.read_text(encoding="utf-8")
    assert load_recipe(str(copy)) == load_recipe("embedded-eagle3")
    copy.write_text("mine")
    failed(outrider("recipe", "embedded-eagle3", "--out", copy), "is there already")
    failed(outrider("recipe", "embedded-eagle3", "data.limit=5", "--out", tmp_path / "b.yaml"), "changes in the copy")
    failed(outrider("recipe", "embedded-eagle9", "--out", tmp_path / "b.yaml"), "embedded-eagle3")
    assert copy.read_text() == "mine"
    assert not (tmp_path / "b.yaml").exists()
