"""Memory is budgeted before any of it is allocated: exactly for caches, closely for the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling, Tree, memory
from outrider.decode.memory import Load, MemoryNeed, budget
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram, drafter_config
from outrider.targets import PeakBytes, Target

from ..conftest import make_llama

TREE = Plan(4, width=3, nodes=8)
STATIC = Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 5)))
WARM = Sampling(temperature=1.0)


def llama(layers: int = 3, hidden: int = 64, vocab: int = 500, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a model whose texts repeat themselves, so that n-grams are found."""
    sizes = {"intermediate_size": 3 * hidden, "max_position_embeddings": 4096}
    return make_llama(layers, hidden, vocab, initializer_range=0.02, **sizes).to(dtype)


def make(name: str, target: Target) -> Drafter | None:
    torch.manual_seed(1)
    if name == "eagle3":
        return Eagle3.build(Eagle3Config(taps=(0, 1, 2), norm_taps=True), target).to(target.dtype)
    if name == "medusa":
        head, config = drafter_config({"type": name})
        return head.build(config, target)
    model = DraftModel(llama(1, 32, target.vocab_size, target.dtype))
    return {"none": None, "ngram": Ngram(), "draft_model": model}[name]


def prompts(rows: int, length: int) -> list[list[int]]:
    """Return prompts that repeat themselves, so that n-grams are found, and are alike, so that rows end at once."""
    return [[i % 7 for i in range(length)] for _ in range(rows)]


# What is largest differs: the prompts' pass, caches and rounds after long texts, logits.
SIZES = {"prompts": (500, 4, 200, 4), "texts": (500, 16, 10, 50), "logits": (6000, 4, 20, 8)}
RUNS: list[tuple[str, str, Plan, Sampling]] = [
    ("none", "prompts", Plan(), Sampling()),
    ("none", "texts", Plan(), Sampling()),
    ("none", "logits", Plan(), WARM),
    ("ngram", "texts", Plan(5), Sampling()),
    ("draft_model", "prompts", Plan(5), Sampling()),
    ("draft_model", "texts", Plan(5), Sampling()),
    ("draft_model", "texts", TREE, Sampling()),
    ("draft_model", "logits", Plan(5), Sampling()),
    ("draft_model", "logits", Plan(5), WARM),
    ("draft_model", "logits", Plan(5, verify="block"), WARM),
    ("draft_model", "logits", Plan(5, verify="coupled"), WARM),
    ("draft_model", "logits", Plan(5), Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2)),
    ("draft_model", "logits", Plan(5), Sampling(temperature=0.7, top_p=0.9)),
    ("draft_model", "logits", Plan(5), Sampling(temperature=1.0, min_p=0.1)),
    ("draft_model", "logits", Plan(5), Sampling(bad_words=((3, 4),))),
    ("draft_model", "logits", TREE, WARM),
    ("draft_model", "logits", STATIC, WARM),
    ("eagle3", "prompts", Plan(5), Sampling()),
    ("eagle3", "texts", Plan(5), Sampling()),
    ("eagle3", "logits", TREE, Sampling()),
    ("medusa", "prompts", Plan(3), Sampling()),
    ("medusa", "logits", Plan(3), Sampling()),
    ("medusa", "texts", Plan(3), Sampling()),
]


OTHERWISE = [(torch.bfloat16, False), (torch.float32, True)]
CASES = [(*run, torch.float32, False) for run in RUNS]
CASES += [(*RUNS[i], *how) for i in (0, 4, 8, 14, 19) for how in OTHERWISE]


@pytest.mark.parametrize(("name", "size", "plan", "sampling", "dtype", "fixed"), CASES)
def test_the_budget_is_what_a_generation_allocates(name, size, plan, sampling, dtype, fixed, monkeypatch):
    """All tensors of a generation that live at one time are what the budget says, within 5%."""
    monkeypatch.setattr("outrider.targets.prompts._LEAST_SHARED", 10**6)  # alike prompts would be read once
    vocab, rows, length, new = SIZES[size]
    target = Target(llama(vocab=vocab, dtype=dtype))
    drafter = make(name, target)
    depth, is_fixed = 0 if drafter is None else plan.depth, drafter is None or drafter.abilities.reads_nodes
    load = Load(rows, length, new, depth, plan, sampling, fixed and is_fixed)
    announced = budget(target, drafter, load)
    with PeakBytes() as count:
        Decoder(target, drafter, static=fixed).generate(prompts(rows, length), new, sampling, plan, ignore_eos=True)
    assert announced.total == pytest.approx(count.peak, rel=0.05), announced


@pytest.mark.parametrize("least_shared", [16, 10**6])
@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_prompts_of_different_lengths_stay_within_the_budget(name, least_shared, monkeypatch):
    """The second part has more tokens than the first; and where a beginning is read once, states are there twice."""
    monkeypatch.setattr("outrider.targets.prompts._LEAST_SHARED", least_shared)
    loads: list[Load] = []
    monkeypatch.setattr(
        "outrider.decode.engine.require_memory", lambda _target, _drafter, load, _held: loads.append(load)
    )
    target = Target(llama(vocab=500))
    drafter = make(name, target)
    asked = [prompts(1, length)[0] for length in (300, 256, 256)]
    with PeakBytes() as count:
        Decoder(target, drafter, static=False).generate(asked, 4, Sampling(0.0), Plan(3), ignore_eos=True)
    assert (loads[0].part, loads[0].shares) == (512, least_shared == 16)
    assert count.peak <= 1.05 * budget(target, drafter, loads[0]).total


def test_a_cache_of_the_engine_is_as_large_as_the_budget_says(monkeypatch):
    """Of target and drafter, and each allocated before the target reads anything."""
    target = Target(llama())
    drafter = make("draft_model", target)
    order: list[tuple[str, int]] = []
    new_cache = Target.new_cache

    def noted(self: Target, *sizes: int) -> Any:
        order.append(("cache", self.cache_bytes(*sizes)))
        return new_cache(self, *sizes)

    monkeypatch.setattr(Target, "new_cache", noted)
    announced = budget(target, drafter, Load(2, 9, 6, 5, Plan(5), Sampling()))
    order.clear()
    target.body.register_forward_pre_hook(lambda *_: order.append(("pass", 0)))
    Decoder(target, drafter).generate(prompts(2, 9), 6, plan=Plan(5))
    assert order[:3] == [("cache", announced.target), ("cache", announced.drafter), ("pass", 0)]


@pytest.fixture
def free(monkeypatch) -> dict[str, int]:
    """How much memory seems to be free; checked however small a request is."""
    found = {"bytes": 0}
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: found["bytes"])
    return found


@pytest.mark.parametrize("static", [False, True])
def test_too_little_memory_is_one_error_before_anything_is_allocated(free, static):
    """It names what is needed, for what, what is free, and a batch and a length that fit, and fit only just."""
    target = Target(llama())
    drafter = make("draft_model", target)
    decoder, load = Decoder(target, drafter, static), Load(8, 30, 900, 5, Plan(5), Sampling(), static)
    needed = budget(target, drafter, load)
    free["bytes"] = needed.total // 2
    with PeakBytes() as count, pytest.raises(BadInputError) as caught:
        decoder.generate(prompts(8, 30), 900, plan=Plan(5))
    assert count.peak < needed.total / 1000
    numbers = (
        r"needs ([\d.]+) GiB \(target cache ([\d.]+), drafter ([\d.]+), working memory ([\d.]+)\) "
        r"for 8 sequences of up to 930 tokens, ([\d.]+) GiB are free; "
        r"lower the batch to about (\d+), or max_new_tokens to about (\d+)\.$"
    )
    match = re.search(numbers, str(caught.value))
    assert match is not None, str(caught.value)
    sizes = [needed.total, needed.target, needed.drafter, needed.working, free["bytes"]]
    assert [float(found) for found in match.groups()[:5]] == [round(size / 2**30, 3) for size in sizes]
    rows, new = int(match[6]), int(match[7])
    for count_, words, fits in ((rows, 900, True), (rows + 1, 900, False), (8, new, True), (8, new + 1, False)):
        smaller = Load(count_, 30, words, 5, Plan(5), Sampling(), static)
        assert (budget(target, drafter, smaller).total <= free["bytes"]) == fits
    assert caught.value.exit_code == 2
    free["bytes"] = needed.total
    assert len(decoder.generate(prompts(8, 30), 900, plan=Plan(5), stop=lambda tokens: True).tokens) == 8


def test_one_sequence_is_told_to_be_shorter(free):
    target = Target(llama())
    free["bytes"] = budget(target, None, Load(1, 30, 400, 0, Plan(), Sampling())).total
    with pytest.raises(BadInputError, match=r"free; lower max_new_tokens to about 400\.$"):
        Decoder(target).generate(prompts(1, 30), 900)


def test_what_cannot_fit_is_told_so(free):
    message = r"not even one such sequence fits: shorten the prompts, or take a smaller dtype or model\.$"
    with pytest.raises(BadInputError, match=message):
        Decoder(Target(llama())).generate(prompts(4, 30), 20)


@pytest.mark.parametrize(
    ("small", "free_bytes"),
    [(memory.SMALL, lambda device: pytest.fail("asked")), (0, lambda device: None)],
    ids=["a short request", "what is free is not known"],
)
def test_nothing_is_asked_or_refused_for(small, free_bytes, monkeypatch):
    monkeypatch.setattr(memory, "SMALL", small)
    monkeypatch.setattr(memory, "free_bytes", free_bytes)
    assert len(Decoder(Target(llama())).generate(prompts(2, 30), 5, ignore_eos=True).tokens[0]) == 5


def test_memory_that_lasts_from_request_to_request_is_not_asked_for_twice(free):
    """A second request needs its working memory only, and a larger one gets what the first gives back."""
    target = Target(llama())
    decoder = Decoder(target, static=True)
    load = Load(2, 30, 200, 0, Plan(), Sampling(), True)
    needed = budget(target, None, load)
    free["bytes"] = needed.total
    decoder.generate(prompts(2, 30), 200)
    free["bytes"] = needed.working
    decoder.generate(prompts(2, 30), 200)
    larger = budget(target, None, Load(2, 30, 400, 0, Plan(), Sampling(), True))
    assert larger.target > needed.target
    free["bytes"] = larger.total - needed.target - 1
    with pytest.raises(BadInputError, match="needs"):
        decoder.generate(prompts(2, 30), 400)
    free["bytes"] += 1
    decoder.generate(prompts(2, 30), 400)


def test_a_budget_adds_up():
    assert MemoryNeed(1, 2, 4).total == 7
