"""Prompts with images: text with drafts is the text without, which is that of the library's own `generate`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.static_batch import StaticBatches
from outrider.heads import Drafter, drafter_config
from outrider.targets import Target

from ..conftest import make_llama
from .conftest import Scripted

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
    """Return the library's tokens of a prompt with so many images, and its text."""
    images = [png(seed=seed, width=120 + 60 * seed) for seed in range(count)]
    return by_library(target(family), images, NEW)


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


@pytest.mark.parametrize("name", ["ngram", "suffix", "eagle1", "eagle3", "medusa", "self_speculative"])
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


FEW = (33, 50, 70)  # of so few tokens random drafters are often right


@pytest.mark.parametrize("name", ["ngram", "eagle1", "eagle3"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_drafts_leave_the_text_as_it_is(family: str, plan: str, name: str) -> None:
    tokens, inputs = asked(family, 2)
    sampling = Sampling(suppress=tuple(t for t in range(target(family).vocab_size) if t not in FEW))
    plain = Decoder(target(family)).generate([tokens], 40, sampling, Plan(0), images=[inputs])
    own = drafter(family, name)
    shape = PLANS[plan] if own.abilities.reads_nodes else PLANS[plan].chain
    out = Decoder(target(family), own).generate([tokens], 40, sampling, shape, images=[inputs])
    assert out.tokens == plain.tokens
    assert sum(r.accepted for r in out.rounds[0]) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_that_are_right_at_times_leave_the_text_as_it_is(family: str) -> None:
    """The drafts are those of the library's text, of which each third round has a wrong one in its middle."""
    (tokens, inputs), (_, text) = asked(family, 2), library(family, 2)

    def drafts(row: int, known: int, number: int, depth: int) -> list[int]:
        begin = known - len(tokens) + 1  # the root follows what is known
        right = [*text, *[9] * depth][begin : begin + depth]
        return [token if number % 3 or place != 2 else 9 for place, token in enumerate(right)]

    out = Decoder(target(family), Scripted(drafts)).generate(
        [tokens], NEW, plan=Plan(4), images=[inputs], ignore_eos=True
    )
    assert out.tokens[0] == text
    accepted = [r.accepted for r in out.rounds[0]]
    assert {2, 4} <= set(accepted)


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_sampled_text_of_a_seed_is_the_same_with_drafts_under_the_coupled_rule(family: str, name: str) -> None:
    tokens, inputs = asked(family, 1)
    sampling = Sampling(temperature=0.7, top_k=3, seed=4)
    texts = [
        Decoder(target(family), own).generate(
            [tokens], 40, sampling, Plan(4, verify="coupled"), images=[inputs], ignore_eos=True
        )
        for own in (None, drafter(family, name), drafter(family, name))
    ]
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens
    other = Decoder(target(family)).generate([tokens], 40, Sampling(0.7, top_k=3, seed=5), Plan(0), images=[inputs])
    assert other.tokens != texts[0].tokens


def test_a_drafter_never_drafts_an_image_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that copies, nor a head to which it is the most probable one; nor is the text another."""
    (tokens, inputs), (_, text) = asked("qwen2_5_vl", 1), library("qwen2_5_vl", 1)
    image = target("qwen2_5_vl").image_token
    assert image in tokens
    decoder = Decoder(target("qwen2_5_vl"), Scripted(lambda *_: [text[1], image, text[3], text[4]]))
    out = decoder.generate([tokens], NEW, plan=Plan(4), images=[inputs], ignore_eos=True)
    assert {r.drafted for r in out.rounds[0]} == {1}
    assert out.tokens[0] == text

    head, drafted = drafter("qwen2_5_vl", "eagle3"), list[int]()
    own = type(head).embed_output

    def tempted(self: Any, finished: torch.Tensor, target: Target) -> torch.Tensor:
        logits = own(self, finished, target)
        return logits + 99 * (torch.arange(logits.shape[-1]) == image)

    forward = Target.forward

    def noted(self: Target, tokens: torch.Tensor, cache: Any = None, **more: Any) -> Any:
        if more.get("images") is None:
            drafted.extend(tokens[0, 1:].tolist())
        return forward(self, tokens, cache, **more)

    monkeypatch.setattr(type(head), "embed_output", tempted)
    monkeypatch.setattr(Target, "forward", noted)
    for plan in PLANS.values():
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
            Decoder(target("qwen2_5_vl"), head).generate([tokens], NEW, sampling, plan, images=[inputs])
    assert len(drafted) > 100
    assert image not in drafted


def test_text_alone_is_read_as_before_after_images() -> None:
    """The library's model keeps the shift of positions of its last prompt with images; a text has none."""
    tokens, inputs = asked("qwen3_vl", 2)
    fresh, prompt = target_for("qwen3_vl"), [30, 31, 40, 20, 10]
    expected = Decoder(fresh).generate([prompt], 12, plan=Plan(0), ignore_eos=True).tokens
    own = target("qwen3_vl")
    library("qwen3_vl", 2)
    Decoder(own).generate([tokens], 4, plan=Plan(0), images=[inputs])
    assert Decoder(own).generate([prompt], 12, plan=Plan(0), ignore_eos=True).tokens == expected
    both = [own.forward(torch.tensor([prompt])).logits, fresh.forward(torch.tensor([prompt])).logits]
    assert torch.equal(*both)


def test_what_does_not_work_with_images_is_refused_before_any_pass() -> None:
    tokens, inputs = asked("qwen2_5_vl", 1)
    decoder = Decoder(target("qwen2_5_vl"))
    with pytest.raises(BadInputError, match="prompts with images are decoded one at a time, not 2 together"):
        decoder.generate([tokens, tokens], 4, images=[inputs, inputs])
    with pytest.raises(BadInputError, match="a prompt holds image tokens \\(5\\), and no image is given with it"):
        decoder.generate([tokens], 4)
    with pytest.raises(BadInputError, match="images: rounds of fixed shapes read none; leave out static=True"):
        Decoder(target("qwen2_5_vl"), static=True).generate([tokens], 4, images=[inputs])
    with pytest.raises(IncompatibleError, match=r"LlamaForCausalLM sees no images. Take prompts without images"):
        Decoder(Target(make_llama())).generate([[1, 2]], 4, images=[inputs])


def test_images_are_read_without_fixed_shapes_where_these_are_the_default() -> None:
    """As on a GPU, where a decoder that was not asked for them has them for text."""
    (tokens, inputs), (_, text) = asked("llava", 1), library("llava", 1)
    decoder = Decoder(target("llava"), drafter("llava", "eagle3"))
    decoder.static_batches = StaticBatches(target("llava"), True)
    out = decoder.generate([tokens], NEW, plan=Plan(3), images=[inputs], ignore_eos=True)
    assert out.tokens[0] == text
    assert not decoder.static_batches.kept


def test_a_draft_model_is_not_made_of_a_text_part_that_is_none() -> None:
    with pytest.raises(IncompatibleError, match="no language model of a Qwen2_5_VLTextConfig alone; name one with"):
        drafter("qwen2_5_vl", "draft_model", model={"num_hidden_layers": 1})


def test_one_event_stream_reads_images_too() -> None:
    tokens, inputs = asked("llava", 1)
    events = Decoder(target("llava"), drafter("llava", "eagle1")).stream(
        tokens, NEW, plan=Plan(3), ignore_eos=True, images=inputs
    )
    assert [token for event in events for token in event.tokens] == library("llava", 1)[1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_head_has_plain_positions(family: str) -> None:
    """As engines serve it; its config says nothing of the target's three dimensions."""
    assert drafter(family, "eagle3").config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
