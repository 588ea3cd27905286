"""Every recipe that ships with the package trains what it says, on the target it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.decode import Decoder, Plan
from outrider.heads import load_drafter
from outrider.recipes import load_recipe, packaged_recipes
from outrider.target import Target
from outrider.train import train

SMALL = ["data.limit=6", "data.holdout=0", "data.max_prompt_tokens=24", "data.max_new_tokens=8", "training.max_steps=2", "training.disable_tqdm=true"]


@pytest.fixture(scope="module")
def embedded() -> Target:
    return Target.load("embedded", dtype="float32")


@pytest.mark.parametrize("name", packaged_recipes())
def test_two_steps_of_a_packaged_recipe_give_a_drafter_that_drafts_losslessly(name: str, embedded: Target, tmp_path: Path) -> None:
    recipe = load_recipe(name, [*SMALL, f"output={tmp_path}"])
    result = train(recipe, embedded)
    drafter = load_drafter(result.drafter_folder, embedded)
    assert result.steps == 2
    assert drafter.name == recipe.drafter["type"]
    prompt = [embedded.require_tokenizer().encode("def add(first, second):\n")]
    out = Decoder(embedded, drafter).generate(prompt, 12, plan=Plan(recipe.eval.depth))
    assert out.tokens == Decoder(embedded).generate(prompt, 12).tokens
    assert max(r.drafted for r in out.rounds[0]) == recipe.eval.depth, "the depth it is measured at is one that it drafts"
