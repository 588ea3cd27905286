"""A tiny target on disk and in memory, a tiny distilled data set, and recipes over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outrider.common import digests
from outrider.recipes import Recipe
from outrider.targets import Target

MakeRecipe = Callable[..., Recipe]

EAGLE3 = {"type": "eagle3", "steps": 3, "draft_vocab_size": 96}
DRAFT_MODEL = {"type": "draft_model", "model": {"num_hidden_layers": 1}}

# 61 rows, of which a few are held out: no global batch of 8 divides them, so the last one of an epoch is a short one.
NUM_ROWS = 61


def make_rows(vocab: int, count: int = NUM_ROWS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        prompt, response = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 8), (5, 16)))
        # Few different tokens, so that there is something to learn in a few dozen steps.
        tokens = torch.randint(0, vocab // 4, (prompt + response,), generator=generator).tolist()
        mask = [0] * prompt + [1] * response
        rows.append({"id": f"row-{i}", "suite": "tiny", "input_ids": tokens, "loss_mask": mask})
    return rows


def write_data(folder: Path, rows: list[dict[str, Any]], target: Target, **provenance: Any) -> Path:
    """A finished data folder, as `distill` leaves it; `provenance` is said of it beside what every folder says."""
    from datasets import Dataset
    from datasets.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    Dataset.from_list([{"content": row["id"]} | row for row in rows]).save_to_disk(str(folder))
    saved = {
        "schema_version": 2,
        "target": target.fingerprint().to_dict(),
        "prompts": "0" * 64,
        "sampling": {},
        "source": {},
        "counts": {},
    }
    (folder / "provenance.json").write_text(json.dumps(saved | provenance))
    digests.seal(folder)
    return folder


@pytest.fixture(scope="session")
def target(tiny_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    """One target for all tests: training never changes it (a test asserts that)."""
    return Target(tiny_llama(vocab=len(tiny_tokenizer)), tiny_tokenizer)


@pytest.fixture(scope="session")
def rows(target: Target) -> list[dict[str, Any]]:
    return make_rows(target.vocab_size)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, target: Target, rows: list[dict[str, Any]]) -> Path:
    return write_data(tmp_path_factory.mktemp("distilled") / "data", rows, target)


@pytest.fixture
def recipe(tmp_path: Path, data: Path) -> Callable[..., Recipe]:
    """`recipe(name="run", drafter=…, data={…}, **training)`: logs every step, one global batch is 8 rows."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a, b):\n")

    def make(
        name: str = "run",
        drafter: dict[str, Any] | None = None,
        data_changes: dict[str, Any] | None = None,
        **training: Any,
    ) -> Recipe:
        values = {
            "max_steps": 12,
            "per_device_train_batch_size": 8,
            "learning_rate": 3e-3,
            "logging_steps": 1,
            "disable_tqdm": True,
            "save_steps": 4,
        }
        return Recipe.from_dict(
            {
                "name": name,
                "target": {"path": "in memory"},
                "drafter": drafter or EAGLE3,
                "data": {"prompts": [str(prompts)], "responses": str(data), "holdout": 0.1, **(data_changes or {})},
                "training": values | training,
                "output": str(tmp_path / "{name}"),
            }
        )

    return make
