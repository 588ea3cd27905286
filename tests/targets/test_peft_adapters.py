"""A merged adapter makes the logits that peft makes beside the model, in memory and saved, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.common import BadInputError, IncompatibleError
from outrider.targets import Target
from outrider.targets.peft_adapters import merge_adapter

from .conftest import edit
from .small_models import NO_IDS, small_model

SLOW = ("qwen2", "gemma2")
FAMILIES = ("llama", "qwen2", "gemma2", "gemma3_text")  # Gemmas scale what they embed
TOKENS = torch.tensor([[1, 50, 2, 63, 5, 17, 3, 40, 8, 9, 1, 33]])
EMBED, HEAD = "embed_tokens", "lm_head"


def lora(*modules: str, **settings: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", *modules], **settings)


def rows(of: Any, **settings: Any) -> LoraConfig:
    return lora(trainable_token_indices=of, **settings)


# Adapters of the embeddings, and whether those of a tied model stay tied.
OF_EMBEDDINGS: dict[str, tuple[Callable[[], Any], bool]] = {
    "LoRA on the output": (lambda: lora(HEAD), False),
    "LoRA on the input": (lambda: lora(EMBED), False),
    "LoRA on both": (lambda: lora(EMBED, HEAD), False),
    "DoRA on the output": (lambda: lora(HEAD, use_dora=True), False),
    "DoRA on the input": (lambda: lora(EMBED, use_dora=True), False),
    "rank-stabilised, on the output": (lambda: lora(HEAD, use_rslora=True), False),
    "all linear layers, none of which is tied": (lambda: LoraConfig(r=4, target_modules="all-linear"), True),
    "the output as a whole": (lambda: lora(modules_to_save=[HEAD]), False),
    "the input as a whole": (lambda: lora(modules_to_save=[EMBED]), False),
    "both as a whole": (lambda: lora(modules_to_save=[EMBED, HEAD]), False),
    "the input as a whole, LoRA on the output": (lambda: lora(HEAD, modules_to_save=[EMBED]), False),
    "the output as a whole, LoRA on the input": (lambda: lora(EMBED, modules_to_save=[HEAD]), False),
    "rows of the input, and so of the output": (lambda: rows([1, 2, 50]), True),
    "rows of the output": (lambda: rows({HEAD: [1, 2, 50]}), False),
    "other rows of both": (lambda: rows({HEAD: [1, 2], EMBED: [3, 50]}), False),
    "tied: LoRA on the input": (lambda: lora(EMBED, ensure_weight_tying=True), True),
    "tied: LoRA on the output": (lambda: lora(HEAD, ensure_weight_tying=True), True),
    "tied: the input as a whole": (lambda: lora(modules_to_save=[EMBED], ensure_weight_tying=True), True),
    "tied: the output as a whole": (lambda: lora(modules_to_save=[HEAD], ensure_weight_tying=True), True),
    "tied: rows": (lambda: rows([1, 2, 50], ensure_weight_tying=True), True),
    "IA3 on the output": (lambda: IA3Config(target_modules=["q_proj", HEAD], feedforward_modules=[]), False),
    "IA3, the input as a whole": (
        lambda: IA3Config(target_modules=["q_proj"], feedforward_modules=[], modules_to_save=[EMBED]),
        False,
    ),
    "LoHa on the output": (lambda: LoHaConfig(r=4, alpha=8, target_modules=["q_proj", HEAD]), False),
    "LoKr on the output": (lambda: LoKrConfig(r=4, alpha=8, target_modules=["q_proj", HEAD]), False),
    "AdaLoRA on the output": (
        lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj", HEAD]),
        False,
    ),
    "OFT on the output": (lambda: OFTConfig(oft_block_size=8, target_modules=["q_proj", HEAD]), False),
    "HRA on the output": (lambda: HRAConfig(r=4, target_modules=["q_proj", HEAD]), False),
}
OF_LAYERS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "LoRA of several ranks": lambda: lora("down_proj", rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 32}),
    "LoRA with the model's biases": lambda: lora(bias="all"),
    "LoRA on a parameter": lambda: LoraConfig(r=4, target_modules=[], target_parameters=["self_attn.q_proj.weight"]),
    "DoRA": lambda: lora("down_proj", use_dora=True),
    "IA3": lambda: IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: LoHaConfig(r=4, alpha=8, target_modules=["q_proj", "down_proj"]),
    "LoKr": lambda: LoKrConfig(r=4, alpha=8, target_modules=["q_proj", "down_proj"]),
    "OFT": lambda: OFTConfig(oft_block_size=8, target_modules=["q_proj", "down_proj"]),
    "HRA": lambda: HRAConfig(r=4, target_modules=["q_proj", "down_proj"]),
}


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def trained(tmp_path: Path, config: Any, kind: str = "llama", tied: bool = True) -> tuple[Path, Path, Tensor]:
    """Save a model and an adapter of random weights for it; return both folders, and peft's own logits of the two."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    small_model(kind, initializer_range=0.3, tie_word_embeddings=tied, **NO_IDS).save_pretrained(base)
    with_adapter = get_peft_model(plain(base), config)
    for parameter in with_adapter.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    with_adapter.save_pretrained(folder)
    with torch.no_grad():
        return base, folder, PeftModel.from_pretrained(plain(base), folder).eval()(input_ids=TOKENS).logits


def require_merged(tmp_path: Path, config: Any, kind: str, tied: bool, stays_tied: bool) -> None:
    base, folder, expected = trained(tmp_path, config, kind, tied)
    merged = merge_adapter(plain(base), str(folder))
    merged.save_pretrained(tmp_path / "saved")
    for model in (merged, plain(tmp_path / "saved")):
        torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == stays_tied
    told = json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"]
    stored = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert (told, "lm_head.weight" in stored) == (stays_tied, not stays_tied), "an engine believes the config"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", OF_EMBEDDINGS)
def test_an_adapter_of_embeddings_changes_those_that_it_names_and_no_others(tmp_path, name, kind, tied):
    make, stays_tied = OF_EMBEDDINGS[name]
    require_merged(tmp_path, make(), kind, tied, tied and stays_tied)


@pytest.mark.parametrize("name", OF_LAYERS)
def test_an_adapter_of_layers_leaves_tied_embeddings_tied(tmp_path, name):
    require_merged(tmp_path, OF_LAYERS[name](), "llama", True, True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: lora(HEAD, trainable_token_indices=[1, 2]), "peft leaves a part of it at lm_head"),
        (lambda: lora(lora_bias=True), "Impossible to merge LoRA with `lora_bias=True`"),
    ],
    ids=["two kinds at one place", "a bias without a place"],
)
def test_an_adapter_that_peft_cannot_merge_is_refused(tmp_path, config, said):
    base, folder, _ = trained(tmp_path, config())
    with pytest.raises((BadInputError, IncompatibleError), match=said):
        merge_adapter(plain(base), str(folder))


def test_a_merged_model_that_makes_other_logits_is_refused(tmp_path):
    """Weights of float16 that overflow as they are merged; beside the model, products with small states do not."""
    base, folder, _ = trained(tmp_path, lora())
    edit(folder / "adapter_config.json", lora_alpha=2**20)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: weight * 10 for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    model = plain(base).half()
    for layer in model.model.layers:
        layer.input_layernorm.weight.data *= 1e-4
    with pytest.raises(IncompatibleError, match=r"merged by peft, makes other logits.*Take an adapter of another kind"):
        merge_adapter(model, str(folder))


def test_a_model_in_memory_whose_config_ties_what_differs_is_refused_before_it_decodes():
    model = small_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        Target(model).cache_layout()
    model.config.tie_word_embeddings = False
    Target(model).cache_layout()
