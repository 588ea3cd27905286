"""From prompts with images to a measured drafter: distilled, trained and measured with the images in every pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.distill import distill, load_responses
from outrider.distill.data_set import images_of
from outrider.eval.measure import contestants, measure
from outrider.eval.suites import suites_of
from outrider.heads import load_drafter
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train

from .conftest import losses

pytest.importorskip("PIL")
from ..targets.image_models import data_url, png, save_target

EAGLE3 = {"type": "eagle3", "steps": 2, "draft_vocab_size": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, prompts with images beside them, and a suite."""
    folder = tmp_path_factory.mktemp("images")
    save_target("qwen2_5_vl", folder / "target")
    (folder / "pictures").mkdir()
    for number in range(4):
        (folder / "pictures" / f"{number}.png").write_bytes(png(seed=number, width=90 + 30 * number))
    rows = [row_of({"type": "image", "image": f"pictures/{n % 4}.png"}, f"What is picture {n}?") for n in range(6)]
    rows.append({"messages": [{"role": "user", "content": "What is this without a picture?"}]})
    write(folder / "prompts.jsonl", rows)
    suite = [row_of({"type": "image_url", "image_url": {"url": data_url(png(seed=9))}}, "And that?"), rows[-1]]
    suite[1] = {"messages": [{"role": "user", "content": "And this?"}]}
    write(folder / "suite.jsonl", suite)
    return folder


def row_of(image: dict[str, Any], text: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "A picture.\n\n"}, image, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def test_a_drafter_is_distilled_trained_and_measured_with_images(place: Path) -> None:
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
