"""Prompts of different lengths are read in parts, and no text depends on that."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.decode import Decoder, Plan, Sampling
from outrider.heads import DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.targets import RowLengths, Target, prompts
from outrider.targets.prompts import prompt_parts, read_prompts

from ..closeness import assert_same
from ..decode.conftest import random_prompts
from .small_models import small_model

LENGTHS = [5, 1, 9, 3, 9, 2]


@pytest.fixture
def target() -> Target:
    return Target(small_model("llama").double())


def test_a_part_has_prompts_of_about_one_length(target, monkeypatch):
    monkeypatch.setattr(prompts, "_CPU_TOKENS", 10)
    assert prompt_parts(LENGTHS, target) == [[2], [4], [0, 3], [5, 1]]
    assert prompt_parts([4, 2], target) == [[0, 1]]  # all of them fit into one part, in their own order
    assert prompt_parts([1, 40], target) == [[1], [0]]


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_next", {}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "pad_token_id": 0}),
    ],
)
def test_all_prompts_are_read_at_once(kind, changes, monkeypatch):
    """By a target with states, and by one that rotates short prompts otherwise where a long one stands beside them."""
    monkeypatch.setattr(prompts, "_CPU_TOKENS", 10)
    target = Target(small_model(kind, **changes))
    assert prompt_parts(LENGTHS, target) == [list(range(6))]
    assert prompts.shared_tokens([torch.arange(60), torch.arange(40), torch.arange(30)], target) == 0


def test_what_all_begin_with_is_read_once_if_it_is_long(target):
    whole, other = torch.arange(60), torch.arange(40)
    other[20:] = 1
    assert prompts.shared_tokens([whole, other, whole[:30]], target) == 20
    assert prompts.shared_tokens([whole, other, whole[:20]], target) == 19  # each has a token left
    assert prompts.shared_tokens([whole, other, whole[:10]], target) == 0
    assert prompts.shared_tokens([whole], target) == 0
    assert prompts.shared_tokens([torch.arange(60_000), other, whole[:30]], target) == 0  # masks would be large


WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("gemma3_text", WINDOWED)])
def test_what_is_read_is_the_librarys(kind, changes, monkeypatch):
    """Logits after each prompt, states at the taps, and the cache: prompts that begin alike, in four parts."""
    monkeypatch.setattr(prompts, "_CPU_TOKENS", 30)
    target = Target(small_model(kind, **changes).double())
    same = random_prompts(20)[0]
    texts = [same + prompt for prompt in random_prompts(9, 8, 5, 1)]
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    counts = RowLengths.of(list(map(len, texts)), "cpu")
    cache = target.new_cache(4, 40)
    parts = [len(part) for part in prompt_parts(counts.values, target)]
    assert len(parts) == 4
    logits, hidden = read_prompts(target, tokens, counts, cache, (2,), parts, shared=20)
    after = target.forward(tokens[:, :1], cache).logits
    for row, text in enumerate(texts):
        whole = target.model(torch.tensor([[*text, int(tokens[row, 0])]]), output_hidden_states=True)
        assert_same(logits[row, 0], whole.logits[0, -2])
        assert_same(hidden[row, : len(text), 0], whole.hidden_states[2][0, :-1])
        assert_same(after[row, 0], whole.logits[0, -1])


@pytest.mark.parametrize("most", [10, 10**6])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["plain", "draft model", "eagle3", "ngram"])
def test_no_text_depends_on_the_parts(target, kind, temperature, static, most, monkeypatch):
    if kind == "draft model":
        drafter = DraftModel(copy.deepcopy(target.model))
    elif kind == "eagle3":
        drafter = Eagle3.build(Eagle3Config(), target, torch.arange(64)).double()
    else:
        drafter = Ngram() if kind == "ngram" else None

    same = random_prompts(20)[0]
    asked = [same + prompt for prompt in random_prompts(*LENGTHS)]

    def completed():
        decoder = Decoder(target, drafter, static=static)
        sampling, plan = Sampling(temperature=temperature, seed=3), Plan(0 if drafter is None else 3)
        flags = [True, True, False, True, True, False]
        out = decoder.generate(asked, 12, sampling, plan, sequence_ids=range(6), speculate=flags)
        return out.tokens, out.rounds

    monkeypatch.setattr(prompts, "_CPU_TOKENS", most)
    in_parts = completed()
    monkeypatch.setattr(prompts, "_CPU_TOKENS", 10**6)
    monkeypatch.setattr(prompts, "_LEAST_SHARED", 10**6)
    assert in_parts == completed()
