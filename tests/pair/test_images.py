"""A pair of a target that sees images keeps what travels with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.heads import Ngram
from outrider.pair import new_pair
from outrider.recipes import Recipe

pytest.importorskip("PIL")
from ..targets.image_models import data_url, png, target_for


def suite(folder: Path, image: dict[str, Any]) -> str:
    content = [image, {"type": "text", "text": "What is it?"}]
    rows = [{"messages": [{"role": "user", "content": said}]} for said in (content, "No picture.", "What is text?")]
    (folder / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "suite.jsonl")


def recipe_of(file: str) -> Recipe:
    target, data = {"path": "in-memory"}, {"prompts": ["unused"]}
    evaluation = {"suites": [file], "max_new_tokens": 8, "temperatures": [0.0]}
    return Recipe.from_dict(
        {"name": "seeing", "target": target, "drafter": {"type": "ngram"}, "data": data, "eval": evaluation}
    )


def test_a_pair_keeps_images_that_stand_in_their_rows_and_is_calibrated_on_text(tmp_path: Path) -> None:
    file = suite(tmp_path, {"type": "image_url", "image_url": {"url": data_url(png())}})
    target = target_for("llava")
    pair = new_pair(tmp_path / "pair", target, Ngram.build(Ngram.config_class(), target), recipe_of(file))
    calibration = (tmp_path / "pair" / "calibration.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in calibration] == ["suite/2", "suite/3"]
    assert len(pair.manifest.suites) == 1


def test_a_suite_whose_images_would_stay_behind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    file, target = suite(tmp_path, {"type": "image", "image": "a.png"}), target_for("llava")
    with pytest.raises(BadInputError, match="row 1: its image is a file, and a pair keeps its suites alone"):
        new_pair(tmp_path / "pair", target, Ngram.build(Ngram.config_class(), target), recipe_of(file))
