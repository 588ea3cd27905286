"""Where nobody asks the target to answer, it is not loaded; the data set is that of the loaded one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState, debug_launcher
from safetensors.torch import load_file, save_file
from torch import distributed

from outrider.common import BadInputError
from outrider.distill import distill, provenance
from outrider.recipes import Recipe
from outrider.targets import Target, config_only

from .conftest import Place, Server, assistant, user

MakeRecipe = Callable[..., Recipe]
TEXTS = ["def add(first, second):", "for name in", "class Stack:", "x"]


@pytest.fixture
def saved(tiny_target: Target, tmp_path: Path) -> Path:
    tiny_target.model.save_pretrained(tmp_path / "target", max_shard_size="20KB")
    tiny_target.require_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def recipe(saved: Path, tmp_path: Path, tiny_target: Target, start_server: Callable[..., Server]) -> MakeRecipe:
    """`recipe(output, **data)`: a recipe that a server answers, unless `data` says otherwise."""
    rows = [{"messages": [user(text), assistant(text[::-1])]} for text in TEXTS]
    place = Place(tmp_path, tiny_target, rows, {"max_new_tokens": 8})
    return lambda output, **data: place.recipe(output, path=saved, **{"servers": [start_server().url]} | data)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a target is an error."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", never)


@pytest.mark.parametrize("first", ["loaded", "absent"])
def test_what_one_has_made_the_other_finds_finished(
    recipe: MakeRecipe, saved: Path, first: str, request: pytest.FixtureRequest
) -> None:
    whole, made = Target.load(saved, device="cpu"), recipe("run")
    request.getfixturevalue("unloaded")
    folder = distill(made, whole if first == "loaded" else None)
    said = provenance(folder)
    when = (folder / "provenance.json").stat().st_mtime_ns
    assert distill(made, None if first == "loaded" else whole) == folder
    assert (folder / "provenance.json").stat().st_mtime_ns == when
    assert said["target"] == whole.fingerprint().to_dict()
    assert said["source"]["target"] == whole.source
    assert said["counts"]["sequences"] == len(TEXTS)


def test_both_make_the_same_data_set(recipe: MakeRecipe, saved: Path) -> None:
    light, whole = distill(recipe("light")), distill(recipe("whole"), Target.load(saved, device="cpu"))
    assert provenance(light) == provenance(whole)
    names = [file.name for file in light.iterdir()]
    assert any(name.endswith(".arrow") for name in names)
    assert all((light / name).read_bytes() == (whole / name).read_bytes() for name in names)


def distil_together(recipe: Recipe) -> None:
    PartialState(cpu=True)
    distill(recipe)


@pytest.mark.usefixtures("unloaded")
def test_of_several_processes_the_first_alone_reads_the_weights(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, notes = config_only.load_causal_lm, tmp_path / "notes"
    notes.mkdir()

    def noted(*arguments: Any, **named: Any) -> Any:
        (notes / str(distributed.get_rank())).touch()
        return read(*arguments, **named)

    one = distill(recipe("one"))
    monkeypatch.setattr(config_only, "load_causal_lm", noted)
    several = recipe("several")
    debug_launcher(distil_together, (several,), num_processes=2)
    assert [file.name for file in notes.iterdir()] == ["0"]
    assert provenance(several.output_folder / "data") == provenance(one)


@pytest.mark.usefixtures("unloaded")
def test_a_changed_weight_is_another_target(recipe: MakeRecipe, saved: Path) -> None:
    made = recipe("run")
    distill(made)
    file = sorted(saved.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, file, metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"made with other settings: target \(1 of \d+ weights"):
        distill(made)


@pytest.mark.usefixtures("unloaded")
def test_answers_that_came_with_the_prompts_and_finished_ones_need_no_weights_either(recipe: MakeRecipe) -> None:
    folder = distill(recipe("given", servers=None, answers="given"))
    assert provenance(folder)["counts"]["sequences"] == len(TEXTS)
    assert distill(recipe("again", servers=None, responses=str(folder))) == folder


def test_our_own_decoder_has_them(recipe: MakeRecipe, unloaded: None) -> None:
    with pytest.raises(AssertionError, match="was loaded"):
        distill(recipe("own", servers=None))
