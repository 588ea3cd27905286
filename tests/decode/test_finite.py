"""No number is no text: logits that are not finite end a generation, and the error names the layer they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.sampling import are_finite
from outrider.heads import Drafter, drafter_config
from outrider.targets import Target

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
NAN, INF = float("nan"), float("inf")
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "steps": 2, "draft_vocab_size": 32},
    "medusa": {"type": "medusa", "num_heads": 3},
    "draft_model": {"type": "draft_model", "model": {"num_hidden_layers": 1}},
}
SHAPES = {
    "chain": Plan(depth=3),
    "static": Plan(tree=Tree((-1, 0, 0, 1))),
    "dynamic": Plan(depth=2, width=2, nodes=4),
}


def made(kind: str, target: Target) -> Drafter:
    head, config = drafter_config(DRAFTERS[kind])
    torch.manual_seed(1)
    return head.build(config, target, torch.ones(target.vocab_size))


@contextmanager
def broken(weight: nn.Parameter, value: float) -> Iterator[None]:
    """Let one number of a weight be `value` inside."""
    kept = weight.data.flatten()[7].clone()
    weight.data.view(-1)[7] = value
    try:
        yield
    finally:
        weight.data.view(-1)[7] = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("places", [1, 2, 7, 8, 9, 16, 17, 33])
def test_one_number_that_is_none_is_noticed_at_any_place_and_large_ones_are_numbers(dtype, places):
    largest = torch.finfo(dtype).max
    for place in range(places):
        for bad in (NAN, INF, -INF):
            rows = torch.full((3, places), largest, dtype=dtype)
            rows[2] *= -1
            rows[1, place] = bad
            assert are_finite([rows[:, :1], rows[:, 1:]]).tolist() == [True, False, True]
            assert are_finite([rows]).tolist() == [True, False, True]


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., LlamaForCausalLM]) -> Target:
    return Target(tiny_llama(layers=4))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_targets_broken_weight_is_named(target, value, temperature, static):
    layer = target.model.model.layers[2].mlp.down_proj
    with broken(layer.weight, value), pytest.raises(BadInputError) as raised:
        Decoder(target, static=static).generate(PROMPTS, 8, Sampling(temperature=temperature))
    assert "prompt 0, after 0 new tokens: the logits are not finite" in str(raised.value)
    assert "the target's model.layers.2.mlp.down_proj, 1 of whose weights are not finite" in str(raised.value)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafters_broken_weight_is_named(target, kind, shape, temperature, static):
    """All rules that such proposals have; a drafter that grows no trees drafts a chain."""
    drafter = made(kind, target)
    plan = SHAPES[shape] if drafter.abilities.reads_nodes else SHAPES["chain"].up_to(drafter.max_depth)
    weight = next(p for p in drafter.parameters() if p.ndim > 1 and p.is_floating_point())
    for rule in ("auto", *(("coupled",) if temperature else ())):
        decoder = Decoder(target, drafter, static)
        with broken(weight, NAN), pytest.raises(BadInputError, match=r"[Tt]he drafter") as raised:
            decoder.generate(PROMPTS, 8, Sampling(temperature=temperature), replace(plan, verify=rule))
        assert "the logits are not finite" in str(raised.value)


def test_a_number_that_breaks_in_the_middle_is_noticed_there(target):
    """An overflow depends on the text: the place in it is said. What was written until then was streamed."""
    whole = Decoder(target).generate(PROMPTS[:1], 12).tokens[0]
    last = max(whole[:-1], key=whole.index)
    assert last not in PROMPTS[0]
    row = target.model.get_input_embeddings().weight
    kept = row.data[last].clone()
    try:
        row.data[last] = INF
        stream, events = Decoder(target).stream(PROMPTS[0], 12), []
        with pytest.raises(BadInputError, match=f"prompt 0, after {whole.index(last) + 1} new tokens?"):
            events.extend(event.tokens[0] for event in stream)
    finally:
        row.data[last] = kept
    assert events == whole[: whole.index(last) + 1]


def test_only_what_was_asked_for_is_looked_at(target):
    """Masked logits are minus infinity in many models, and processors make some: neither is a fault."""
    head = target.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _m, _i, out: out.index_fill(-1, torch.tensor([60, 61, 62]), -INF))
    try:
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, suppress=(1, 2, 3), top_k=5, min_p=0.1)
            drafter = made("eagle3", target)
            assert len(Decoder(target, drafter).generate(PROMPTS, 8, sampling, Plan(depth=2)).tokens[0]) == 8
    finally:
        hook.remove()
