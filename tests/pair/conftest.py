"""Small pairs of each kind, made from a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.distill.prompts import Prompt
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.pair import Pair, new_pair
from outrider.recipes import Recipe
from outrider.targets import Target

TEXTS = [
    "def add(first, second):",
    "for name in sorted(names):\n",
    "The target verifies",
    "class Stack:\n    def",
    "print(len(name))",
    "return first + second",
]


@pytest.fixture(scope="session")
def make_target(
    tiny_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Target]:
    """`make_target(noise=0.0, **config)`: the same tiny target each time, its weights moved by `noise`."""

    def make(noise: float = 0.0, **config: Any) -> Target:
        model = tiny_llama(
            vocab=len(tiny_tokenizer),
            eos_token_id=tiny_tokenizer.eos_token_id,
            pad_token_id=tiny_tokenizer.pad_token_id,
            **config,
        )
        generator = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
        return Target(model, tiny_tokenizer)

    return make


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    values = {
        "name": "tiny",
        "target": {"path": "in-memory"},
        "drafter": {"type": "eagle3"},
        "data": {"prompts": ["prompts.jsonl"]},
        "eval": {"depth": 3, "max_new_tokens": 16, "repeats": 1, "temperatures": [0.0]},
    }
    return Recipe.from_dict(values)


@pytest.fixture(scope="session")
def prompts(tiny_tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    """Three prompts each of the suites `a` and `b`."""
    return [
        Prompt(f"{s}/{i}", s, tuple(tiny_tokenizer(TEXTS[i])["input_ids"]), TEXTS[i])
        for s, rows in (("a", (0, 1, 2)), ("b", (3, 4, 5)))
        for i in rows
    ]


@pytest.fixture(scope="session")
def make_drafter() -> Callable[[str, Target], Drafter]:
    """`make_drafter(type, target)`; the draft model is the target itself, which accepts everything."""

    def make(kind: str, target: Target) -> Drafter:
        torch.manual_seed(0)
        builders: dict[str, Callable[[], Drafter]] = {
            "ngram": Ngram,
            "draft_model": lambda: DraftModel(target.model),
            "eagle3": lambda: Eagle3.build(Eagle3Config(steps=3), target),
        }
        return builders[kind]()

    return make


@pytest.fixture
def make_pair(
    tmp_path: Path,
    make_target: Callable[..., Target],
    make_drafter: Callable[[str, Target], Drafter],
    recipe: Recipe,
    prompts: list[Prompt],
) -> Callable[..., Pair]:
    """`make_pair(type, folder=tmp_path/type, **arguments of new_pair)`."""

    def make(kind: str, folder: Path | None = None, **changes: Any) -> Pair:
        target = changes.pop("target", None) or make_target()
        arguments = {
            "target": target,
            "drafter": make_drafter(kind, target),
            "recipe": recipe,
            "calibration": prompts,
        } | changes
        return new_pair(folder or tmp_path / kind, **arguments)

    return make


@pytest.fixture(scope="session")
def swapped_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with the tokens 300 and 310 in each other's place."""
    state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    first, second = (next(token for token, i in vocabulary.items() if i == wanted) for wanted in (300, 310))
    vocabulary[first], vocabulary[second] = 310, 300
    swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    swapped.chat_template = tiny_tokenizer.chat_template
    return swapped
