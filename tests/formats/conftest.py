"""A tiny target, and drafters of every kind that other engines read, with random weights everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.formats import Exported, export_drafter
from outrider.heads import Drafter, DraftModel, drafter_config
from outrider.targets import Target


@pytest.fixture(scope="session")
def target(tiny_llama, tiny_tokenizer) -> Target:
    return Target(tiny_llama(layers=6, vocab=len(tiny_tokenizer)), tiny_tokenizer)


@pytest.fixture(scope="module")
def deep(tiny_llama, tmp_path_factory) -> Target:
    """A target with enough layers for the usual taps to be three different ones."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama(layers=8)
    model.save_pretrained(folder)
    return Target(model, None, {"path": str(folder)})


@pytest.fixture(scope="session")
def make_drafter(target, tiny_llama) -> Callable[..., Drafter]:
    """`make_drafter(type, on=target, **settings)`: weights are random, norms included, and the same each time."""

    def make(kind: str, on: Target | None = None, **settings: Any) -> Drafter:
        torch.manual_seed(0)
        if kind == "draft_model":
            return DraftModel(tiny_llama(layers=2, vocab=target.vocab_size, seed=1))
        defaults: dict[str, Any] = {}
        if kind in ("eagle3", "peagle", "dflash", "dflash2", "dspark", "lilicorr"):
            defaults = {"taps": [1, 3, 5], "draft_vocab_size": 100}
        if kind in ("peagle", "dflash", "dflash2", "dspark", "lilicorr"):
            defaults |= {"num_layers": 2, "mask_token_id": target.vocab_size - 1}
        own = {"peagle": {"steps": 3}, "dflash": {"block_size": 4}, "dspark": {"block_size": 3, "markov_rank": 8}}
        own["dflash2"] = own["dflash"] | {"draft_vocab_size": 0, "conv_group_size": 4, "selector_rank": 8}
        own["lilicorr"] = own["dflash"] | {"draft_vocab_size": 0, "lilicorr_hidden_size": 16}
        head, config = drafter_config({"type": kind} | defaults | own.get(kind, {}) | settings)
        drafter = head.build(config, on or target, torch.randperm((on or target).vocab_size))
        for parameter in drafter.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        return drafter.eval()

    return make


@pytest.fixture
def export(target, make_drafter, tmp_path) -> Callable[..., Exported]:
    """`export(type, to="vllm", depth=3, **settings)`: a drafter that is written into `tmp_path / to`."""

    def made(kind: str, to: str = "vllm", depth: int = 3, **settings: Any) -> Exported:
        return export_drafter(make_drafter(kind, **settings), target, to, tmp_path / to, depth)

    return made
