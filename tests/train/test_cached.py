"""Training on stored hidden states: how far rounding them moves it, and a disk that may be too small is named early."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.targets import Target
from outrider.train import train
from outrider.train.arguments import training_arguments
from outrider.train.check import check_with_target
from outrider.train.planning import plan

from .conftest import MakeRecipe, losses, of_stored

# The largest relative difference of any of twelve losses from those of states that are computed in the loop.
NEAR = {"auto": 1e-6, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-3, "float8_e4m3fn": 2e-2}


@pytest.mark.parametrize("dtype", NEAR)
def test_losses_of_rounded_states_are_near_those_of_the_loop(recipe: MakeRecipe, target: Target, dtype: str) -> None:
    online = recipe("online")
    cached = recipe(dtype, data_changes={"features": "cached", "features_dtype": dtype})
    train(online, target)
    train(cached, target)
    assert losses(cached) == pytest.approx(losses(online), rel=NEAR[dtype])
    assert (losses(cached) == pytest.approx(losses(online), rel=1e-6)) == (dtype in ("auto", "float32"))


def test_a_dtype_of_states_that_are_not_stored_is_refused_with_the_recipe(recipe: MakeRecipe) -> None:
    with pytest.raises(BadInputError, match="features_dtype is how features are stored, and online ones are not"):
        recipe(data_changes={"features_dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("features", "free", "is_named"), [("cached", 10**9, False), ("cached", 10**4, True), ("online", 0, False)]
)
def test_a_disk_on_which_states_may_not_fit_is_named_before_any_prompt_is_answered(
    recipe: MakeRecipe,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    features: str,
    free: int,
    is_named: bool,
) -> None:
    """Nothing is said where they are not stored."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - free, free))
    data: dict[str, Any] = {"responses": None, "features": features, "max_prompt_tokens": 40, "max_new_tokens": 60}
    made = recipe(data_changes=data)
    with caplog.at_level(logging.WARNING):
        check_with_target(made, training_arguments(made), target)
    said = "data.features: cached takes up to 51.2 kB on the disk of"  # 100 tokens of 3 taps and the last state
    assert (said in caplog.text) == ("takes up to" in caplog.text) == is_named


def test_a_plan_counts_states_as_they_are_stored(recipe: MakeRecipe, target: Target, stored: Path) -> None:
    def planned(dtype: str) -> int:
        made = recipe("planned", data_changes={"features": "cached", "features_dtype": dtype})
        return plan(of_stored(made, stored)).feature_bytes

    size = target.hidden_size
    assert planned("auto") == planned("float32") == 2 * planned("bfloat16")
    assert planned("float8_e4m3fn") * 4 * size == planned("float32") * (size + 4)
