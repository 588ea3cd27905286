"""A drafter that is pushed when its training ends, by the real client, to a Hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from outrider.common import BadInputError
from outrider.common.untrusted_files import parse_yaml
from outrider.heads import load_drafter
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.compare import placed
from outrider.train.run import TrainResult

from ..hub_server import TOKEN, FakeHub, running_hub
from .conftest import MakeRecipe, weights

PUSHED = {"push_to_hub": True, "hub_model_id": "org/head", "hub_private_repo": True, "max_steps": 4}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with running_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def written(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_finished_drafter_is_on_the_hub_byte_for_byte_and_again_changes_nothing(hub, recipe, target, tmp_path):
    made: Recipe = recipe(**PUSHED)
    result: TrainResult = train(made, target)
    files = hub.files("org/head")
    folder = result.drafter_folder
    assert {name: files[name] for name in files if name not in (".gitattributes", "README.md", "recipe.yaml")} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }
    assert (hub.private["org/head"], len(hub.commits["org/head"])) == (True, 2)
    load_drafter(written(files, tmp_path / "taken"), target)
    again = train(made, target)
    assert (again.steps, weights(again)) == (result.steps, weights(result))
    assert len(hub.commits["org/head"]) == 2, "nothing new"


def test_its_recipe_and_card_name_no_place_on_this_machine(hub, recipe, target, tmp_path):
    made = recipe(**PUSHED)
    train(made, target)
    files = hub.files("org/head")
    values = parse_yaml(files["recipe.yaml"].decode(), "recipe.yaml")
    assert str(tmp_path) not in files["recipe.yaml"].decode() + files["README.md"].decode()
    assert (values["data"]["prompts"], values["data"]["responses"], values["output"]) == (
        ["prompts.txt"],
        "data",
        "{name}",
    )
    again = load_recipe(written(files, tmp_path / "taken") / "recipe.yaml")
    assert again.training == recipe(max_steps=4).training, "who takes it cannot push there"
    card = files["README.md"].decode()
    assert ModelCard(card).data.tags == ["speculative-decoding", "eagle3"]
    for said in (
        f"SHA-256 `{target.fingerprint().digest}`",
        "analytic tau",
        "**No speedup was measured**",
        "outrider train recipe.yaml target.path=path/to/target",
        "hf download org/head --local-dir drafter",
        "--to vllm",
    ):
        assert said in card


def test_what_people_added_to_the_card_is_kept(hub, recipe, target):
    train(recipe(**PUSHED), target)
    hub.files("org/head")["README.md"] += b"Ours.\n"
    train(recipe(**PUSHED), target)
    assert hub.files("org/head")["README.md"].endswith(b"kept. -->\nOurs.\n")


def test_a_drafter_of_a_finished_training_can_be_pushed_later(hub, recipe, target):
    result = train(recipe(max_steps=4), target)
    assert hub.commits == {}
    train(recipe(**PUSHED), target)
    assert hub.files("org/head")["model.safetensors"] == weights(result)


def test_no_access_is_said_before_any_work(hub, recipe, monkeypatch):
    monkeypatch.setattr(Target, "load", None)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(BadInputError, match=r"org/head: .*401.* your access .* Nothing was trained\.") as refused:
        train(recipe(**PUSHED))
    assert "hf_wrong" not in str(refused.value)


def test_a_push_that_fails_leaves_the_drafter_and_says_how_to_go_on(hub, recipe, target, monkeypatch):
    made = recipe(**PUSHED)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_commit", lambda *_: (403, {"error": f"no {TOKEN}"}), raising=False)
        with pytest.raises(BadInputError, match="the same command again trains nothing, and pushes it") as refused:
            train(made, target)
    assert TOKEN not in str(refused.value)
    result = train(made, target)
    assert hub.files("org/head")["model.safetensors"] == weights(result)


@pytest.mark.parametrize("place", [None, "head", "org/head/more", "org/he ad"])
def test_a_push_needs_a_place(recipe, monkeypatch, place):
    monkeypatch.setattr(Target, "load", None)
    with pytest.raises(BadInputError, match=r"hub_model_id: expected ORG/NAME, .* found "):
        train(recipe(push_to_hub=True, hub_model_id=place))


def test_a_comparison_pushes_nothing(recipe: MakeRecipe, tmp_path: Path) -> None:
    assert placed(recipe(**PUSHED), tmp_path).training == recipe(max_steps=4).training
