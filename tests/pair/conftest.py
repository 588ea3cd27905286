"""Small pairs of each kind, made from a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.decode import Plan
from outrider.distill.prompt_table import Prompt
from outrider.eval.measure import Contestant, measure
from outrider.eval.reports.render import write_report
from outrider.eval.suites import make_suite
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.pair import Pair, new_pair
from outrider.recipes import Recipe
from outrider.targets import Target

MakePair = Callable[..., Pair]

TEXTS = [
    "def add(first, second):",
    "for name in sorted(names):\n",
    "The target verifies",
    "class Stack:\n    def",
    "print(len(name))",
    "return first + second",
]


@pytest.fixture(scope="session")
def make_target(tiny_llama, tiny_tokenizer) -> Callable[..., Target]:
    """`make_target(noise=0.0, source=None, **config)`: the same tiny target each time, its weights moved by `noise`."""

    def make(noise: float = 0.0, source: dict[str, Any] | None = None, **config: Any) -> Target:
        model = tiny_llama(
            vocab=len(tiny_tokenizer),
            eos_token_id=tiny_tokenizer.eos_token_id,
            pad_token_id=tiny_tokenizer.pad_token_id,
            **config,
        )
        generator = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
        return Target(model, tiny_tokenizer, source or {})

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


def measured_at(recipe: Recipe, **values: Any) -> Recipe:
    """Return the recipe with these values in its `eval`."""
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update=values)})


@pytest.fixture(scope="session")
def prompts(tiny_tokenizer) -> list[Prompt]:
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
def make_pair(tmp_path, make_target, make_drafter, recipe, prompts) -> MakePair:
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


@pytest.fixture
def report_folder(tmp_path, make_target, make_drafter, recipe, prompts) -> Path:
    """A report of an n-gram drafter at depth 2, on two prompts each of two suites, greedy and sampled."""
    target = make_target()
    contestant = Contestant("ngram", make_drafter("ngram", target), Plan(2))
    suites = [make_suite("a", prompts[:2]), make_suite("b", prompts[3:5])]
    settings = measured_at(recipe, temperatures=[0.0, 1.0]).eval
    return write_report(
        measure(target, [contestant], suites, settings, generate_baseline=False), tmp_path / "reports of mine"
    )


@pytest.fixture
def lora(tmp_path) -> Callable[..., Path]:
    """`lora(**config)`: a folder that looks like a PEFT adapter's."""

    def make(**config: Any) -> Path:
        (tmp_path / "lora").mkdir()
        (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"weights")
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
        return tmp_path / "lora"

    return make


@pytest.fixture(scope="session")
def swapped_tokenizer(tiny_tokenizer) -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with the tokens 300 and 310 in each other's place."""
    state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    first, second = (next(token for token, i in vocabulary.items() if i == wanted) for wanted in (300, 310))
    vocabulary[first], vocabulary[second] = 310, 300
    swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    swapped.chat_template = tiny_tokenizer.chat_template
    return swapped
