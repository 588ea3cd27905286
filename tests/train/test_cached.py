"""Training on stored hidden states: how far rounding them moves it, and a disk that may be too small is named early."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.arguments import training_arguments
from outrider.train.check import check_with_target
from outrider.train.planning import plan

from .conftest import MakeRecipe
from .test_run import losses

# The largest relative difference of any of twelve losses from those of states that are computed in the loop.
NEAR = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-3, "float8_e4m3fn": 2e-2}


@pytest.mark.parametrize("dtype", NEAR)
def test_losses_of_rounded_states_are_near_those_of_the_loop(recipe: MakeRecipe, target: Target, dtype: str) -> None:
    online = recipe("online")
    cached = recipe(dtype, data_changes={"features": "cached", "features_dtype": dtype})
    train(online, target)
    train(cached, target)
    assert losses(cached) == pytest.approx(losses(online), rel=NEAR[dtype])
    assert (losses(cached) == pytest.approx(losses(online), rel=1e-6)) == (dtype == "float32")


def test_a_dtype_of_states_that_are_not_stored_is_refused_with_the_recipe(recipe: MakeRecipe) -> None:
    with pytest.raises(BadInputError, match="features_dtype is how features are stored, and online ones are not"):
        recipe(data_changes={"features_dtype": "bfloat16"})


@pytest.mark.parametrize("free", [10**9, 10**4])
def test_a_disk_on_which_states_may_not_fit_is_named_before_any_prompt_is_answered(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - free, free))
    data: dict[str, Any] = {"responses": None, "features": "cached", "max_prompt_tokens": 40, "max_new_tokens": 60}
    made = recipe(data_changes=data)
    check_with_target(made, training_arguments(made), target)
    said = "data.features: cached takes up to 51.2 kB on the disk of"  # 100 tokens of 3 taps and the last state
    assert (said in caplog.text) == (free == 10**4)


def test_a_plan_counts_states_as_they_are_stored(recipe: MakeRecipe, target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.require_tokenizer().save_pretrained(tmp_path / "target")

    def planned(dtype: str) -> int:
        made = recipe("planned", data_changes={"features": "cached", "features_dtype": dtype})
        values = made.model_dump() | {"target": {"path": str(tmp_path / "target")}}
        return plan(Recipe.from_dict(values)).feature_bytes

    size = target.hidden_size
    assert planned("auto") == planned("float32") == 2 * planned("bfloat16")
    assert planned("float8_e4m3fn") * 4 * size == planned("float32") * (size + 4)


def test_nothing_is_said_where_states_are_not_stored(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 0))
    made = recipe(data_changes={"responses": None})
    with caplog.at_level(logging.WARNING):
        check_with_target(made, training_arguments(made), target)
    assert "takes up to" not in caplog.text
