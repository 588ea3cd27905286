"""`outrider init` writes a recipe that loads and can be planned, for models of any kind, from their configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.recipes import load_recipe
from outrider.scripts.starter import ModelFacts, starter
from outrider.train.resource_estimate import plan

from ..targets.small_models import SIZES, VISION
from .conftest import Command, failed, words

TEXT = SIZES | {"head_dim": 8, "max_position_embeddings": 96}
KINDS: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "gemma3_text": TEXT,
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    "qwen3": TEXT | {"num_hidden_layers": 2},
    "qwen3_moe": TEXT | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "qwen3_next": TEXT
    | {"num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 96, "vocab_size": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_starter_recipe_can_be_planned(kind: str, outrider: Command, tmp_path: Path) -> None:
    AutoConfig.for_model(kind, **KINDS[kind]).save_pretrained(tmp_path / kind)
    file = tmp_path / "my.yaml"
    assert "fill in data.prompts" in words(outrider("init", tmp_path / kind, "--out", file))
    recipe = load_recipe(file)
    assert recipe.data.max_prompt_tokens + recipe.data.max_new_tokens == 96, "the target's context"
    assert recipe.drafter["type"] == ("eagle1" if KINDS[kind].get("num_hidden_layers") == 2 else "eagle3")
    needs = plan(recipe)
    assert (needs.drafter, needs.target) == (recipe.drafter["type"], str(tmp_path / kind))
    failed(outrider("init", tmp_path / kind, "--out", file), "is there already")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["steps: 5", "draft_vocab_size: 32000", "dtype: bfloat16", "bf16: true", "about 9.1B", "depth: 5"]),
        (
            {"num_hidden_layers": 2, "hidden_size": 64},
            ["eagle1", "feature_scale: 0", "steps: 3", "dtype: float32", "muon"],
        ),
        ({"num_hidden_layers": 8, "hidden_size": 64}, ["norm_taps: true", "norm_output: true"]),
        ({"vocab_size": 32_000}, ["!draft_vocab_size"]),
        ({"vocab_size": 49_152}, ["draft_vocab_size: 24576 # of 49,152"]),
        ({"num_experts": 64, "moe_intermediate_size": 512, "intermediate_size": None}, ["intermediate_size: 16384"]),
        ({"mtp_num_hidden_layers": 1}, ["{type: mtp, init: native}"]),
        ({"layer_types": ["linear_attention", "full_attention"]}, ["leave eval.width at 1"]),
        ({"layer_types": 5, "num_experts": [1, "x"], "num_local_experts": 2}, ["eagle3"]),
    ],
    ids=str,
)
def test_settings_follow_from_the_config(changes: dict[str, Any], said: list[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"dtype": "bfloat16"} | changes))
    text = starter(str(tmp_path), ["mine😀.jsonl", "org/set:train"])
    assert 'prompts: ["mine😀.jsonl", "org/set:train"]' in text
    assert [part for part in said if (part.removeprefix("!") in text) == part.startswith("!")] == [], text


def test_sampling_is_what_the_model_advises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64}')
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    assert '{"temperature": 0.6, "top_k": 20}' in starter(str(tmp_path))


def test_a_target_without_a_chat_template_is_given_raw_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64}')
    assert "prompts: [embedded:code, embedded:prose]" in starter(str(tmp_path))
    assert "suites: [code, docs] # or files" in starter("embedded")


def test_a_chat_model_is_not_taken_for_one_of_code(outrider: Command, tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **TEXT).save_pretrained(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    said = words(outrider("init", tmp_path / "chat", "--out", tmp_path / "my.yaml", "--prompts", "embedded:docs"))
    assert "fill in eval.suites" in said
    assert "suites: [docs, prose] # FILL IN files of your own prompts" in (tmp_path / "my.yaml").read_text()


WIDE = TEXT | {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
WIDE |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
COUNTED: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied by its family": ("gemma3_text", {}),
    "heads of their own width": ("qwen3", {"head_dim": 128}),
    "experts": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 256}),
    "images beside": ("gemma3", {"text_config": WIDE, "vision_config": VISION, "mm_tokens_per_image": 4}),
}


@pytest.mark.parametrize("case", COUNTED)
def test_parameters_are_about_those_of_the_model(case: str, tmp_path: Path) -> None:
    kind, changes = COUNTED[case]
    config = AutoConfig.for_model(kind, **(changes if kind == "gemma3" else WIDE | changes))
    config.save_pretrained(tmp_path)
    if "family" in case:
        values = json.loads((tmp_path / "config.json").read_text())
        values.pop("tie_word_embeddings", None)
        (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        counted = AutoModelForCausalLM.from_config(config).num_parameters()
    assert ModelFacts.of(tmp_path).parameters == pytest.approx(counted, rel=0.01)


def test_what_is_no_model_is_refused(outrider: Command, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "my.yaml"]
    failed(outrider("init", tmp_path / "nowhere", *out), "the folder does not exist")
    failed(outrider("init", "embedded", *out, "--prompts", "nowhere.jsonl"), "'nowhere.jsonl' does not exist")
    failed(outrider("init", tmp_path, *out), "the folder has no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    failed(outrider("init", tmp_path, *out), "names no hidden size")
    assert not (tmp_path / "my.yaml").exists()
