"""Uno: the target drafts a block itself. Only noise passes its LoRA, and nothing else of the target is changed."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.formats import export_drafter
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.heads.session import greedy_chain
from outrider.lab.uno import Uno, UnoConfig, linear_layers
from outrider.targets import RowLengths, Target
from outrider.targets.packed_weights import PackedWeight

from ..closeness import assert_same, both_precisions
from ..decode.test_greedy_identity import make
from ..heads.conftest import VOCAB, batch, decoded_logits, entries_of, made, opened, sequences

LAYERS = 4  # of the target
LENGTH, STEPS = 14, 4
# Windows, sinks, capped scores, one linear layer for several products, experts, and layers within layers.
ARCHITECTURES = ["llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "gpt_neox"]
PLANS = {
    "one draft": Plan(1),
    "chain": Plan(STEPS),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 2, 5))),
    "dynamic tree": Plan(3, width=3, nodes=9),
}


def build(target: Target, std: float = 0.1, **changes: Any) -> Uno:
    return made(Uno, target, {"lora_b": std} if std else {}, **{"steps": STEPS, "rank": 3, "alpha": 6.0} | changes)


def merged(drafter: Uno, target: Target) -> Any:
    """Return a copy of the model with the LoRA in its weights."""
    changed = Target(copy.deepcopy(target.model))
    with torch.no_grad():
        for linear, a, b in zip(linear_layers(changed).values(), drafter.lora_a, drafter.lora_b, strict=True):
            linear.weight += 2.0 * b @ a
    return changed.model


def expected(drafter: Uno, target: Target, text: list[int], steps: int = STEPS) -> Tensor:
    """By the library alone: the model's logits at a text's end, and the changed model's at the noise after it."""
    model, cache = target.model, None
    known = model(torch.tensor([text]), use_cache=True)
    cache, root = known.past_key_values, torch.tensor([[text[-1]]])
    noise = drafter.noise(root, len(text) - 1 + torch.arange(1, steps)[None])
    drafted = merged(drafter, target)(noise, past_key_values=cache, use_cache=True)
    return torch.cat([known.logits[0, -1:], drafted.logits[0]])


def hooks(target: Target) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())


@both_precisions
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_the_root_is_read_by_the_target_and_noise_by_the_changed_target(architecture):
    """As the library's two models say it; the target itself is left as it was."""
    target, texts = Target(make(architecture)), sequences(2, LENGTH).tolist()
    before = target.forward(torch.tensor(texts)).logits
    for changes in ({}, {"mask_token_id": 5}):
        drafter = build(target, **changes)
        for text in texts:
            session = opened(drafter, target, [text[:-1]])
            first = session.prefill(torch.tensor(text[-1:]))
            found = torch.stack([first[0], *session.drafts.logits[0, 1:]])
            assert_same(found, expected(drafter, target, text))
            own = target.forward(torch.tensor([text])).logits[0, -1]
            assert_same(first[0], own)
            assert float((found[1] - own).abs().max()) > 1e-2
    assert torch.equal(target.forward(torch.tensor(texts)).logits, before)
    assert hooks(target) == 0


@both_precisions
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_a_new_lora_changes_nothing_noise_says_what_the_target_says_there(architecture):
    target, text = Target(make(architecture)), sequences(1, LENGTH)
    drafter = build(target, std=0.0)
    session = opened(drafter, target, text[:, :-1].tolist())
    session.prefill(text[:, -1])
    noise = drafter.noise(text[:, -1:], LENGTH - 1 + torch.arange(1, STEPS)[None])
    own = target.forward(torch.cat([text, noise], 1)).logits[:, LENGTH - 1 :]
    assert_same(session.drafts.logits, own)


@both_precisions
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_training_says_what_the_decoder_says(architecture):
    """At every anchor and depth, in rows of one batch; the decoder's rounds begin at different places of the rows."""
    target, tokens = Target(make(architecture)), sequences(3, LENGTH)
    drafter, starts = build(target), [[1, 3, 4, 8], [5, 6, 8, 9], [2, 3, 6, 7]]
    rollouts = Rollouts.of([[(t, d) for t in range(LENGTH) for d in range(1, STEPS)]] * 3, 256, "cpu")
    data = batch(target, drafter, tokens)
    states = torch.cat([data.last, drafter.roll(data, rollouts)], 1)
    learned = torch.ones_like(tokens, dtype=torch.bool)
    entries = [{(t, d): e for t, d, e in entries_of(rollouts, learned, row)} for row in range(3)]
    for number, logits in enumerate(decoded_logits(drafter, target, tokens, starts, STEPS)):
        for row, depth in product(range(3), range(STEPS)):
            trained = target.lm_head(states[row, entries[row][starts[row][number], depth]])
            assert_same(logits[depth][row], trained)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_are_the_targets_alone_and_every_first_draft_is_kept(architecture, plan, static):
    target, prompts = Target(make(architecture)), [sequences(1, n)[0].tolist() for n in (7, 2, 11)]
    target.model.generation_config.eos_token_id = None
    plain = Decoder(target).generate(prompts, 12)
    drawn = Decoder(target, build(target), static=static).generate(prompts, 12, Sampling(), plan)
    assert drawn.tokens == plain.tokens
    assert all(one.accepted for rounds in drawn.rounds for one in rounds[:-1])
    assert hooks(target) == 0


def test_a_round_reads_no_more_than_it_asks_for(target, monkeypatch):
    """Fewer drafts are the first ones of more: noise attends to what stands before it."""
    drafter, text = build(target), sequences(1, 9)
    widths, run = list[int](), type(target).run
    monkeypatch.setattr(
        type(target), "run", lambda self, x, *more, **named: widths.append(x.shape[1]) or run(self, x, *more, **named)
    )
    session, drafts = opened(drafter, target, text.tolist()), []
    for depth in (1, 2, STEPS):
        widths.clear()
        drafts.append(greedy_chain(session, torch.tensor([3]), depth).tokens)
        assert widths == [depth]
    assert all(torch.equal(one, drafts[-1][:, : one.shape[1]]) for one in drafts)


def test_packed_weights_draft_the_same(target, monkeypatch):
    drafter, prompts = build(target), sequences(2, 7).tolist()
    usual = Decoder(target, drafter).generate(prompts, 16, plan=Plan(STEPS))
    target.pack()
    packed = Decoder(target, drafter).generate(prompts, 16, plan=Plan(STEPS))
    assert packed.tokens == usual.tokens
    assert packed.rounds == usual.rounds
    session, text = opened(drafter, target, prompts[:1]), torch.tensor(prompts[:1])
    products, made = list[Any](), PackedWeight.product
    monkeypatch.setattr(PackedWeight, "product", lambda self, *call: products.append(self) or made(self, *call))
    with torch.inference_mode():
        session.prefill(text[:, -1])
        assert len(products) == 4 * LAYERS + 1, "one for queries, keys and values, one for gate and up"
        found = expected(drafter, target, [*prompts[0], prompts[0][-1]])
    assert_same(session.drafts.logits[0], found)
    assert hooks(target) == 0


@torch.inference_mode()
def test_passes_of_other_threads_are_the_targets_own_while_one_drafts(target):
    drafter, tokens = build(target), sequences(2, 9)
    own = target.forward(tokens).logits
    with drafter.drafting(linear_layers(target), 2):
        assert float((target.forward(tokens).logits - own).abs().max()) > 0.1
        with ThreadPoolExecutor(1) as others:
            assert torch.equal(others.submit(target.model, tokens).result().logits, own)


def test_a_pass_that_fails_leaves_no_hooks(target):
    session = opened(build(target), target, [[1, 2, 3]])
    session.cache.max_length = 4
    with pytest.raises(ValueError, match="the cache holds 4 entries"):
        session.prefill(torch.tensor([5]))
    assert hooks(target) == 0


@both_precisions
def test_without_a_lent_cache_it_drafts_the_same(target):
    drafter = build(target)
    tokens = sequences(3, 12)
    roots = torch.tensor([5, 6, 7])
    counts = RowLengths.of([12, 7, 1], "cpu")
    lent = target.new_cache(3, 20)
    target.forward(tokens, lent)
    lent.advance(counts)
    own, on_loan = drafter.open(target, 3, 20), drafter.open(target, 3, 20, cache=lent)
    for session in (own, on_loan):
        session.update(tokens, None, counts)
        session.prefill(roots)
    assert_same(own.drafts.logits, on_loan.drafts.logits)
    assert on_loan.caches() == []


@both_precisions
def test_the_targets_own_draft_is_always_accepted_and_the_others_weigh_alike(target):
    drafter, tokens = build(target, loss="forward_kl"), sequences(2, LENGTH)
    supervised = torch.zeros(2, LENGTH, dtype=torch.bool)
    supervised[0, 3:10] = supervised[1, 6:] = True
    found = drafter.loss(batch(target, drafter, tokens, supervised))
    learned, total = nn.functional.pad(supervised, (0, 1))[:, 1:], 0.0
    some = Rollouts.drawn(learned, tokens, STEPS, 0.7, 0.2)
    with torch.inference_mode():
        logits = target.forward(tokens).logits
        for row in range(2):
            losses = []
            for anchor, depth, _ in entries_of(some, learned, row):
                if depth:
                    q = expected(drafter, target, tokens[row, : anchor + 1].tolist(), depth + 1)[-1].log_softmax(-1)
                    p = logits[row, anchor + depth].softmax(-1)
                    losses.append(float((p * (p.log() - q)).sum()))
            total += int(supervised[row].sum()) * sum(losses) / len(losses)
    assert_same(found.total, total)
    assert tuple(map(float, found.metrics["alpha_d1"])) == (15, 15)
    assert "loss_d1" not in found.metrics


def test_noise_is_spread_evenly_and_told_by_root_and_place(target):
    drafter = build(target)
    roots, places = torch.arange(VOCAB)[:, None], torch.arange(1000)[None]
    drawn = drafter.noise(roots, places)
    counts = torch.bincount(drawn.flatten(), minlength=VOCAB)
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < VOCAB + 4 * (2 * VOCAB) ** 0.5
    pairs = torch.bincount((drawn[:, :-1] * VOCAB + drawn[:, 1:]).flatten(), minlength=VOCAB**2)
    mean = 999 / VOCAB
    assert float(((pairs - mean) ** 2 / mean).sum()) < VOCAB**2 + 4 * (2 * VOCAB**2) ** 0.5
    assert torch.equal(drawn[7:9, 40:50], drafter.noise(torch.tensor([[7], [8]]), torch.arange(40, 50)[None]))
    assert bool((build(target, mask_token_id=9).noise(roots, places) == 9).all())


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("qwen3_next", "Qwen3NextForCausalLM has recurrent layers"),
        ("mpt", "MptForCausalLM takes no position ids"),
        ("gpt2", "GPT2LMHeadModel has no linear layers of torch's kind"),
    ],
)
def test_targets_that_it_cannot_take_are_refused(architecture, message):
    with pytest.raises(IncompatibleError, match=message):
        Uno.build(UnoConfig(), Target(make(architecture)))


@torch.inference_mode()
def test_peft_reads_a_lora_for_noise_as_it_drafts(target, tmp_path):
    """After a text that the target itself has read."""
    drafter = build(target, rank=4, alpha=4.0)
    text = torch.tensor([[5, 9, 31]])
    noise = torch.tensor([[4, 8, 15]])
    folder = export_drafter(drafter, target, "peft", tmp_path / "peft", 3).folder
    model = copy.deepcopy(target.model)
    known = model(text, use_cache=True).past_key_values
    changed = PeftModel.from_pretrained(model, str(folder))(noise, past_key_values=known).logits
    cache = target.new_cache(1, 6)
    target.forward(text, cache)
    with drafter.drafting(linear_layers(target), 1):
        own = target.forward(noise, cache, offset=3).logits
    assert_same(own, changed)
    assert float((own - target.forward(noise, cache, offset=3).logits).abs().max()) > 0.1
