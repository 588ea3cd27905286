"""Under the coupled rule the text is a function of seed, sequence id, prompt and target, whatever drafts.

What is expected is written down anew: a plain loop over the target's own forward pass, the library's logits processors,
and the noise of each place. Every number below draws another drafter, shape, depth control, batch and sampling.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.decode import Control, Costs, Decoder, Plan, Sampling, Tree, rules
from outrider.decode.sampling import probabilities, shared_gumbel
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.targets import Target

from .conftest import library_steps, random_prompts, scaled

VOCAB, NEW = 64, 16
PROMPTS = random_prompts(5, 1, 9, 3, 12, 2)
ENDS = (7, 29, 41)
SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=.6": Sampling(0.6),
    "T=1.5, top-k": Sampling(1.5, top_k=12),
    "top-p": Sampling(1.0, top_p=0.85),
    "min-p, penalty": Sampling(0.9, min_p=0.02, repetition_penalty=1.3),
    "words": Sampling(
        0.8,
        top_k=30,
        bad_words=tuple((a, b) for a in range(VOCAB) for b in range(a % 3, VOCAB, 3)),
        min_new_tokens=6,
        suppress=(11, 12),
    ),
}


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=4, eos_token_id=list(ENDS)))


@pytest.fixture(scope="module")
def drafters(tiny_llama, target) -> dict[str, Drafter | None]:
    torch.manual_seed(0)
    return {
        "none": None,
        "near": DraftModel(scaled(target.model, 0.95)),
        "itself": DraftModel(copy.deepcopy(target.model)),
        "other": DraftModel(tiny_llama(layers=2, seed=3)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(1, 2, 3)), target),
        "eagle3 pruned": Eagle3.build(Eagle3Config(taps=(0, 2, 4), draft_vocab_size=20), target, torch.arange(VOCAB)),
        "ngram": Ngram(),
    }


@cache
@torch.inference_mode()
def expected(model: LlamaForCausalLM, prompt: tuple[int, ...], sampling: Sampling, sequence: int) -> list[int]:
    """argmax of log p + noise, token by token; ends at an end token."""
    steps, text = library_steps(sampling, len(prompt), ENDS), list(prompt)
    while len(text) < len(prompt) + NEW and not set(text[len(prompt) :]) & set(ENDS):
        tokens = torch.tensor([text])
        log_probs = steps(tokens, model(tokens, use_cache=False).logits[:, -1].float()).double().log_softmax(-1)
        noise = shared_gumbel(sampling.seed, torch.tensor([sequence]), torch.tensor([len(text)]), VOCAB)
        text.append(int((log_probs + noise).argmax()))
    return text[len(prompt) :]


def random_tree(rng: random.Random) -> Tree:
    parents, level = [], [-1]
    for _ in range(rng.randint(1, 4)):
        below = sorted(rng.choices(level, k=rng.randint(1, 4)))
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return Tree(tuple(parents))


def random_control(rng: random.Random, depth: int) -> Control:
    costs = Costs(verify=((0, 1.0), (16, 1 + rng.random())), draft=(0.0, rng.choice((0.02, 0.3, 1.0))))
    return Control(costs, tuple(rng.random() for _ in range(depth)), weight=rng.choice((0.5, 4.0)))


def random_plan(rng: random.Random) -> Plan:
    shape = rng.choice(("chain", "chain", "static", "dynamic", "dynamic"))
    plan = Plan(rng.randint(1, 6), verify="coupled")
    if shape == "static":
        plan = Plan(tree=random_tree(rng), verify="coupled")
    elif shape == "dynamic":
        plan = replace(plan, width=rng.randint(2, 4), nodes=rng.choice((None, rng.randint(1, 12))))
    elif rng.random() < 0.5:
        plan = replace(plan, confidence=rng.choice((0.02, 0.1, 0.4)))
    return replace(plan, control=random_control(rng, plan.depth)) if rng.random() < 0.3 else plan


@pytest.mark.parametrize("number", range(40))
def test_the_text_depends_on_seed_prompt_and_target_alone(target, drafters, number):
    """Each row's text is the one that the target alone would write, to the end token.

    Drafter, depth, tree, control, batch and seed are random.
    """
    rng = random.Random(number)
    name, kind = rng.choice(sorted(drafters)), rng.choice(sorted(SAMPLINGS))
    sampling = replace(SAMPLINGS[kind], seed=rng.choice((0, 1, 2**40 + 3, 2**63 + 1)))
    rows = rng.sample(range(len(PROMPTS)), rng.randint(1, len(PROMPTS)))
    speculate = rng.choice((True, True, [rng.random() < 0.7 for _ in rows]))
    decoder = Decoder(target, drafters[name], static=rng.random() < 0.3)
    plan = random_plan(rng)
    out = decoder.generate([PROMPTS[i] for i in rows], NEW, sampling, plan, sequence_ids=rows, speculate=speculate)
    for row, text in zip(rows, out.tokens, strict=True):
        assert text == expected(target.model, tuple(PROMPTS[row]), sampling, row), (
            f"prompt {row}, {name}, {plan}, {kind}"
        )


def test_the_loop_above_draws_what_it_should(target, drafters):
    """Drafts that stay and drafts that do not, chains and both kinds of trees, texts of several lengths."""
    plans = [random_plan(random.Random(number)) for number in range(40)]
    assert {(p.is_tree, p.tree is None, p.confidence > 0, p.control is not None) for p in plans} >= {
        (False, True, False, False),
        (False, True, True, False),
        (True, False, False, False),
        (True, True, False, False),
        (True, True, False, True),
    }
    lengths, rates = set(), []
    for name in ("near", "eagle3"):
        out = Decoder(target, drafters[name]).generate(PROMPTS, NEW, Sampling(1.0), Plan(3, verify="coupled"))
        lengths |= set(map(len, out.tokens))
        rates.append(out.stats.acceptance_rate)
    assert len(lengths) > 2
    assert 0.2 < rates[0] < 0.95


PLANTED: dict[str, dict[str, Callable[..., Tensor]]] = {
    "none": {},
    "target temperature off by 2%": {
        "probabilities": lambda logits, s: probabilities(logits, replace(s, temperature=1.02 * s.temperature))
    },
    "noise by round": {
        "shared_gumbel": lambda seed, rows, places, vocab: shared_gumbel(seed, rows, places - places[:, :1], vocab)
    },
    "noise by node": {
        "shared_gumbel": lambda seed, rows, places, vocab: shared_gumbel(
            seed, rows, places[:, :1] + torch.arange(places.shape[1]), vocab
        )
    },
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(target, drafters, bug, monkeypatch):
    """Each planted bug shows in a few hundred tokens.

    2% of a temperature move one in a hundred; noise must belong to the place in the text and to nothing else.
    """
    for name, wrong in PLANTED[bug].items():
        monkeypatch.setattr(rules, name, wrong)
    prompts, rows = [PROMPTS[i % 6] for i in range(60)], list(range(60))
    plan = Plan(tree=Tree((-1, -1, 0, 0)), verify="coupled")
    out = Decoder(target, drafters["near"]).generate(prompts, NEW, Sampling(1.0), plan, sequence_ids=rows)
    wrong = [
        text != expected(target.model, tuple(prompt), Sampling(1.0), row)
        for prompt, text, row in zip(prompts, out.tokens, rows, strict=True)
    ]
    assert any(wrong) == (bug != "none")
