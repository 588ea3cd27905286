"""The check on configs alone decides as the training does, and earlier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import OutriderError
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train.check import check, check_by_configs
from outrider.train.compare import compare
from outrider.train.drafter_init import check_makes
from outrider.train.resource_estimate import plan

# As Qwen2.5, whose models of one tokenizer have 151,936 rows, or 152,064.
ROWS = {"target": 344, "narrow": 328, "wide": 360}

DRAFTERS: dict[str, tuple[dict[str, Any], str | None]] = {  # and why they are refused, if they are
    "a warm start with fewer rows": ({"type": "draft_model", "init": "narrow"}, None),
    "a warm start with more rows": ({"type": "draft_model", "init": "wide"}, None),
    "a model with fewer rows": ({"type": "draft_model", "path": "narrow"}, None),
    "a model with more rows": ({"type": "draft_model", "path": "wide"}, None),
    "a mask that is a row of padding": ({"type": "pard", "path": "narrow"}, None),
    "a pruned model": ({"type": "draft_model", "init": "prune", "model": {"num_hidden_layers": 2}}, None),
    "a head": ({"type": "eagle3", "draft_vocab_size": 96}, None),
    "too few rows for the tokens": (
        {"type": "draft_model", "model": {"vocab_size": 50, "num_hidden_layers": 1}},
        "their tokenizer has ids up to 319",
    ),
    "a warm start of other tokens": ({"type": "draft_model", "init": "other"}, "have different vocabularies"),
    "a model of other tokens": ({"type": "draft_model", "path": "other"}, "have different vocabularies"),
    "an exit without weights": (
        {"type": "self_speculative", "exit_layer": 1, "num_blocks": 0},
        "there is nothing to train",
    ),
    "a tap that is not there": ({"type": "eagle3", "taps": [1, 9]}, r"reads hidden_states\[9\]"),
    "a mask that ends texts": ({"type": "dflash", "mask_token_id": 1}, "ends or pads texts of this target"),
}


@pytest.fixture
def recipe(
    tmp_path: Path, tiny_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[[dict[str, Any]], Recipe]:
    """`recipe(drafter)`: of a target on disk, beside models of the same tokenizer, padded otherwise."""
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    for name, rows in ROWS.items():
        tiny_llama(layers=6 if name == "target" else 2, vocab=rows).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    tiny_llama(layers=2, vocab=ROWS["target"]).save_pretrained(tmp_path / "other")
    for file in ("tokenizer_config.json", "tokenizer.json"):
        text = (tmp_path / "target" / file).read_text()
        (tmp_path / "other" / file).write_text(text.replace("<|assistant|>", "<|helper|>"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(first, second):"}\n' * 4)

    def make(drafter: dict[str, Any], **training: Any) -> Recipe:
        places = {key: str(tmp_path / drafter[key]) for key in ("init", "path") if drafter.get(key) in [*ROWS, "other"]}
        return Recipe.from_dict(
            {
                "name": "checked",
                "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
                "drafter": drafter | places,
                "data": {"prompts": [str(tmp_path / "prompts.jsonl")], "max_new_tokens": 8},
                "training": {"max_steps": 2, "use_cpu": True, "report_to": "none"} | training,
                "output": str(tmp_path / "run"),
            }
        )

    return make


@pytest.mark.parametrize("name", DRAFTERS)
def test_configs_and_work_decide_alike(recipe, name):
    drafter, said = DRAFTERS[name]
    made = recipe(drafter)
    args = check(made)
    decide = [
        lambda: check_by_configs(made, args),
        lambda: plan(made),
        lambda: check_makes(made, Target.load(**made.target.to_load(), device="cpu")),
    ]
    for decided in decide:
        if said is None:
            decided()
        else:
            with pytest.raises(OutriderError, match=said):
                decided()


def test_a_comparison_refuses_what_a_training_would_before_another_is_trained(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("nothing is loaded"))
    for drafter, training, said in (
        (DRAFTERS["an exit without weights"][0], {}, "nothing to train"),
        (DRAFTERS["a head"][0], {"gradient_checkpointing": True}, "has one layer and keeps no logits"),
    ):
        recipes = [recipe(DRAFTERS["a head"][0]), recipe(drafter, **training).model_copy(update={"name": "second"})]
        with pytest.raises(OutriderError, match=said):
            compare(recipes, 1.0, tmp_path / "compared")
