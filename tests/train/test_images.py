"""From prompts with images to a measured drafter: distilled, trained and measured with the images in every pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.distill import distill, load_responses
from outrider.distill.data_set import images_of
from outrider.distill.features import FeatureStore
from outrider.eval.measure import contestants, measure
from outrider.eval.suites import suites_of
from outrider.heads import load_drafter
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.targets.images import StoredImages
from outrider.train import train
from outrider.train.data import OnlineBatches, Rows, collate

from ..closeness import EXACT, assert_same
from .conftest import losses, trainings_in_float64

pytest.importorskip("PIL")
from ..targets.image_models import data_url, png, save_target

EAGLE3 = {"type": "eagle3", "steps": 2, "draft_vocab_size": 0}


def placed(folder: Path, family: str) -> Path:
    """Fill a folder with a target, prompts with images beside them, and a suite."""
    save_target(family, folder / "target")
    (folder / "pictures").mkdir()
    for number in range(4):
        (folder / "pictures" / f"{number}.png").write_bytes(png(seed=number, width=90 + 30 * number))
    rows = [row_of({"type": "image", "image": f"pictures/{n % 4}.png"}, f"What is picture {n}?") for n in range(6)]
    rows.append({"messages": [{"role": "user", "content": "What is this without a picture?"}]})
    write(folder / "prompts.jsonl", rows)
    suite = [row_of({"type": "image_url", "image_url": {"url": data_url(png(seed=9))}}, "And that?")]
    suite.append({"messages": [{"role": "user", "content": "And this?"}]})
    write(folder / "suite.jsonl", suite)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return placed(tmp_path_factory.mktemp("images"), "qwen2_5_vl")


def row_of(image: dict[str, Any], text: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "A picture.\n\n"}, image, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def allowing_change(made: Recipe) -> Recipe:
    return made.model_copy(update={"target": made.target.model_copy(update={"allow_changed": True})})


def recipe(place: Path, name: str, training: dict[str, Any] | None = None, **data: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "name": name,
            "target": {"path": str(place / "target"), "dtype": "float32"},
            "drafter": EAGLE3,
            "data": {"prompts": [str(place / "prompts.jsonl")], "max_new_tokens": 12, "holdout": 0.3} | data,
            "training": {
                "max_steps": 3,
                "per_device_train_batch_size": 2,
                "learning_rate": 0.001,
                "logging_steps": 1,
                "use_cpu": True,
                "report_to": "none",
                "disable_tqdm": True,
            }
            | (training or {}),
            "eval": {
                "suites": [str(place / "suite.jsonl")],
                "temperatures": [0.0],
                "max_new_tokens": 12,
                "repeats": 1,
                "training_prompts": 2,
            },
            "output": str(place / name),
        }
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_drafter_is_distilled_trained_and_measured_with_images(tmp_path: Path, family: str) -> None:
    place = placed(tmp_path, family)
    made = recipe(place, "whole", {"eval_steps": 2})
    result = train(made)
    table = load_responses(place / "whole" / "data")
    assert sorted(map(len, table["images"])) == [0, 1, 1, 1, 1, 1, 1]
    files = sorted(file.name for file in (place / "whole" / "data" / "images").iterdir())
    assert files == sorted({digest for row in table["images"] for digest in row})
    assert len(files) == 4
    assert len(losses(made)) == 3
    target = Target.load(place / "target", dtype="float32", device="cpu")
    drafter = load_drafter(result.drafter_folder, target)
    report = measure(target, contestants(target, drafter, made.eval), suites_of(target, made.eval), made.eval)
    assert {r.contestant for r in report.records} == {"eagle3", "ngram", "plain", "transformers.generate"}
    assert all(r.identical for r in report.records if r.contestant != "plain")


@pytest.fixture(scope="module")
def answered(place: Path) -> Path:
    """The data set of the recipe's prompts."""
    return distill(recipe(place, "answered"))


def test_losses_are_the_same_however_the_states_come(place: Path, answered: Path) -> None:
    """Online, from disk, one row at a time, and packed; with other pictures they are others."""
    made = {
        "online": recipe(place, "online", responses=str(answered)),
        "cached": recipe(place, "cached", responses=str(answered), features="cached"),
        "one": recipe(
            place,
            "one",
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
            responses=str(answered),
        ),
    }
    with trainings_in_float64():
        for each in made.values():
            train(allowing_change(each))  # of the target: the responses were written in float32
    for each in made.values():
        assert losses(each) == pytest.approx(losses(made["online"]), rel=EXACT)

    packed = [
        recipe(place, f"packed-{name}", {"packing": True, "max_length": 400}, responses=str(answered), features=name)
        for name in ("online", "cached")
    ]
    with trainings_in_float64():
        for each in packed:
            train(allowing_change(each))
    assert losses(packed[0]) == pytest.approx(losses(packed[1]), rel=EXACT)


def test_a_training_step_reads_the_pictures(place: Path, answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row with a picture makes its own pass with it, and its states are the library's."""
    target, table = Target.load(place / "target", dtype="float32", device="cpu"), load_responses(answered)
    images = images_of(answered, table, target)
    assert images is not None
    rows = Rows(table, range(len(table)))
    inputs = collate([rows[position] for position in range(len(rows))])
    batch = OnlineBatches(target, (1, 2, 4), images=images).of(inputs)
    blind = OnlineBatches(target, (1, 2, 4)).of(inputs)
    assert batch.hidden is not None
    for row in range(len(rows)):
        own, length = images.of(row), len(table[row]["input_ids"])
        tokens = torch.tensor([table[row]["input_ids"]])
        given = {} if own is None else target.image_arguments(tokens, own)
        expected = target.model(input_ids=tokens, **given, output_hidden_states=True).hidden_states
        assert_same(batch.last[row, :length], expected[-1][0])
        assert_same(batch.hidden[row, :length, 0], expected[1][0])
        if own is None:
            assert_same(blind.last[row, :length], expected[-1][0])
        else:
            assert (blind.last[row, :length] - expected[-1][0]).abs().max() > 1e-2


def test_states_on_disk_are_those_of_their_pictures(place: Path, answered: Path, tmp_path: Path) -> None:
    """Two data sets with the same tokens and other pictures have stores of their own."""
    target = Target.load(place / "target", dtype="float32", device="cpu")
    table = load_responses(answered)
    images = images_of(answered, table, target)
    assert images is not None
    first, again = (FeatureStore.build(tmp_path, target, table, (1,), images=images) for _ in range(2))
    turned = StoredImages(images.folder, list(reversed(images.rows)), images.reader)
    assert first.folder == again.folder
    assert turned.identity != images.identity
    assert FeatureStore.build(tmp_path, target, table, (1,)).folder != first.folder


def test_a_training_that_reads_text_alone_is_refused(place: Path, answered: Path) -> None:
    values = recipe(place, "refused", responses=str(answered)).model_dump(exclude_unset=True)
    values["data"] |= {"learn_prompts": True}
    with pytest.raises(BadInputError, match=r"data\.learn_prompts: this works with text alone"):
        train(Recipe.from_dict(values | {"output": str(place / "refused")}))


@pytest.mark.parametrize("setting", ["contexts", "batch_sizes"])
def test_what_is_not_measured_with_images_is_refused(place: Path, setting: str) -> None:
    target, made = Target.load(place / "target", dtype="float32", device="cpu"), recipe(place, "measured")
    longest = max(len(prompt.tokens) for suite in suites_of(target, made.eval) for prompt in suite.prompts)
    asked = made.eval.model_copy(update={setting: [longest if setting == "contexts" else 2]})
    with pytest.raises(BadInputError, match=f"eval.{setting}: prompts of the suite suite.* have images"):
        suites_of(target, asked)


def test_a_target_of_text_refuses_a_data_set_with_images(answered: Path, tiny_target: Target) -> None:
    with pytest.raises(BadInputError, match="its rows have images, and this target sees none"):
        images_of(answered, load_responses(answered), tiny_target)
