"""Prompts with images: text with drafts is the text without, which is that of the library's own `generate`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import Drafter, drafter_config
from outrider.targets import Target

from ..conftest import make_llama

pytest.importorskip("PIL")
from ..targets.image_models import FAMILIES, by_library, png, prompt_of, target_for

NEW = 24
PLANS = {
    "chain": Plan(4),
    "dynamic tree": Plan(3, width=3),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2))),
}


@cache
def target(family: str) -> Target:
    return target_for(family)


@cache
def library(family: str, count: int) -> tuple[list[int], list[int]]:
    """Return the library's tokens of a prompt with so many images, and its text, which does not end early."""
    images = [png(seed=seed, width=120 + 60 * seed) for seed in range(count)]
    return by_library(target(family), images, NEW, min_new_tokens=NEW)


def asked(family: str, count: int) -> tuple[list[int], Any]:
    tokens, images = prompt_of(target(family), [png(seed=seed, width=120 + 60 * seed) for seed in range(count)])
    return tokens, target(family).image_inputs(tokens, images)


def drafter(family: str, name: str, **settings: Any) -> Drafter[Any]:
    torch.manual_seed(3)
    kind, config = drafter_config({"type": name, **settings})
    return kind.build(config, target(family)).eval()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_drafts_is_that_of_generate(family: str, count: int) -> None:
    tokens, inputs = asked(family, count)
    expected, text = library(family, count)
    assert tokens == expected
    out = Decoder(target(family)).generate([tokens], NEW, plan=Plan(0), images=[inputs], ignore_eos=True)
    assert out.tokens[0] == text


@pytest.mark.parametrize("name", ["ngram", "suffix", "eagle1", "eagle3", "medusa"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_with_drafts_is_the_text_without(family: str, plan: str, name: str) -> None:
    tokens, inputs = asked(family, 2)
    own = drafter(family, name)
    shape = PLANS[plan] if own.abilities.reads_nodes else PLANS[plan].chain
    out = Decoder(target(family), own).generate(
        [tokens], NEW, plan=shape.up_to(own.max_depth), images=[inputs], ignore_eos=True
    )
    assert out.tokens[0] == library(family, 2)[1]
    if name != "ngram":
        assert sum(r.drafted for r in out.rounds[0])
