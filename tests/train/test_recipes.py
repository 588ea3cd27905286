"""Every recipe that ships with the package trains what it says: the embedded ones on the target they name.

The others name models of the Hub: here each is a random one of the same architecture with a few dimensions, and numbers
of rows, tokens and steps are small. All else is as it ships.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from outrider.decode import Decoder, Plan
from outrider.heads import load_drafter
from outrider.recipes import Recipe, load_recipe, packaged_recipes
from outrider.targets import Target
from outrider.train import train
from outrider.train.arguments import training_arguments
from outrider.train.resource_estimate import plan

TRAINING = ["training.max_steps=2", "training.disable_tqdm=true"]
SMALL = ["data.limit=6", "data.holdout=0", "data.max_new_tokens=8", *TRAINING]
EMBEDDED = [name for name in packaged_recipes() if load_recipe(name).target.path == "embedded"]
PUBLISHED = [name for name in packaged_recipes() if name not in EMBEDDED]

LAST_TOKEN = 319  # of the tiny tokenizer: a published mask's id is far outside of its vocabulary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LLAMA3 |= {"original_max_position_embeddings": 256}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 512}
# Shared experts and linear attention of Qwen3-Next, small.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
NEXT = {**EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 16, **LINEAR}
SLIDING = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
# By Hub id, or the name it is fetched under: the config's class, its fields, and the padding of its vocabulary.
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, {"num_hidden_layers": 6, "rope_parameters": LLAMA3}, 0),
    "meta-llama/Llama-3.3-70B-Instruct": (LlamaConfig, {"num_hidden_layers": 8, "rope_parameters": LLAMA3}, 0),
    "Qwen/Qwen3-8B": (Qwen3Config, {"num_hidden_layers": 6, "head_dim": 16}, 16),
    "Qwen/Qwen3-4B": (Qwen3Config, {"num_hidden_layers": 4, "head_dim": 16, "tie_word_embeddings": True}, 16),
    "Qwen/Qwen3-0.6B": (Qwen3Config, {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}, 16),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, {"num_hidden_layers": 4}, 32),
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, {"num_hidden_layers": 2, "tie_word_embeddings": True}, 16),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (Qwen3NextConfig, {"num_hidden_layers": 4, **NEXT}, 16),
    "openai/gpt-oss-20b": (GptOssConfig, {"num_hidden_layers": 6, **SLIDING}, 16),
    "openai/gpt-oss-120b": (GptOssConfig, {"num_hidden_layers": 6, **SLIDING}, 16),
    "smollm2": (LlamaConfig, {"num_hidden_layers": 6, "tie_word_embeddings": True}, 0),
    "Qwen/Qwen3-235B-A22B": (Qwen3MoeConfig, {"num_hidden_layers": 6, "head_dim": 16, **EXPERTS}, 16),
}


@pytest.fixture(scope="module")
def embedded() -> Target:
    return Target.load("embedded", dtype="float32")


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    """The folder of a small random checkpoint in the place of the published one of this Hub id."""
    root, made = tmp_path_factory.mktemp("published"), {}

    def folder(name: str) -> Path:
        assert name in MODELS, f"{name} is new in a recipe; say above what it is"
        if name not in made:
            made[name] = root / name.replace("/", "--")
            write_checkpoint(name, made[name], tiny_tokenizer)
        return made[name]

    return folder


def write_checkpoint(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    kind, fields, padding = MODELS[name]
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(len(name))
    config = kind(**(SIZES | fields | ends), vocab_size=len(tokenizer) + padding, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind is Qwen3NextConfig:
        add_mtp(folder / "model.safetensors", config)


def add_mtp(file: Path, config: Any) -> None:
    """An MTP module as the published checkpoint has it, which `transformers` neither makes nor saves.

    Its layer is like the last, which attends fully.
    """
    weights, size = load_file(file), config.hidden_size
    last = f"model.layers.{config.num_hidden_layers - 1}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, "mtp.layers.0.")] = weights[name].clone()
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    weights["mtp.fc.weight"] = (0.1 * torch.randn(size, 2 * size)).bfloat16()
    save_file(weights, file, metadata={"format": "pt"})


def at_hand(name: str, published: Callable[[str], Path], folder: Path) -> Recipe:
    """A packaged recipe with nothing changed but what is out of reach and what is large."""
    recipe = load_recipe(name)
    chats, answer = folder / "chats.jsonl", {"role": "assistant", "content": "It is."}
    texts = ("Is it?", "And the stack?", "def add(", "Why", "a", "b")
    rows = [{"messages": [{"role": "user", "content": text}, answer]} for text in texts]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = [f"data.prompts=[{chats}]", f"output={folder / 'run'}"]
    changes = [*SMALL, f"target.path={published(recipe.target.path)}", *where]
    changes += [f"drafter.path={published(recipe.drafter['path'])}"] if "path" in recipe.drafter else []
    changes += [f"drafter.mask_token_id={LAST_TOKEN}"] if "mask_token_id" in recipe.drafter else []
    changes += ["target.engine=null"] if recipe.target.engine else []  # the library holds the small one
    changes += ["drafter.draft_vocab_size=96"] if "draft_vocab_size" in recipe.drafter else []
    return load_recipe(name, changes)


@pytest.mark.parametrize("name", EMBEDDED)
def test_two_steps_of_a_packaged_recipe_give_a_drafter_that_drafts_losslessly(name, embedded, tmp_path):
    recipe = load_recipe(name, [*SMALL, "data.max_prompt_tokens=24", f"output={tmp_path}"])
    trains_and_drafts(recipe, embedded, embedded)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_for_a_published_model_is_planned_trained_and_drafts_losslessly(name, published, tmp_path):
    recipe = at_hand(name, published, tmp_path)
    planned = plan(recipe)
    whole = Target.load(recipe.target.path, dtype="float32", device="cpu")  # in bfloat16 two tokens may tie
    trains_and_drafts(recipe, None, whole)
    drafter = load_drafter(recipe.output_folder / "drafter", whole)
    assert planned.trained_parameters == sum(p.numel() for p in drafter.parameters())


def trains_and_drafts(recipe: Recipe, target: Target | None, whole: Target) -> None:
    """Trained for `target` (None: as the recipe loads it) and used by `whole`, the same one without rounding."""
    result = train(recipe, target)
    drafter = load_drafter(result.drafter_folder, whole)
    assert result.steps == 2
    assert drafter.name == recipe.drafter["type"]
    prompt = [whole.require_tokenizer().encode("def add(first, second):\n")]
    length = max(12, 1 + recipe.eval.depth)  # no round drafts more than the new tokens can use
    out = Decoder(whole, drafter).generate(prompt, length, plan=Plan(recipe.eval.depth), ignore_eos=True)
    assert out.tokens == Decoder(whole).generate(prompt, length, ignore_eos=True).tokens
    assert max(r.drafted for r in out.rounds[0]) == recipe.eval.depth, "it drafts as deep as it is measured"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("smollm2")])
def test_what_a_recipe_asks_of_the_trainer_is_what_it_gets(name, tmp_path):
    """A learning rate of "1e-4" as text, or warm-up in steps for a fraction, would go unnoticed for hours."""
    args = training_arguments(load_recipe(name, [f"output={tmp_path}"]))
    assert isinstance(args.learning_rate, float)
    assert 1e-5 <= args.learning_rate <= 1e-3
    assert args.bf16
    assert 0 < args.get_warmup_steps(1000) <= 100
    assert args.lr_scheduler_type == "cosine"
