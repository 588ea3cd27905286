"""Self-speculative drafting: drafts are the target's own early exit, in the target's cache, which stays right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.common import IncompatibleError
from outrider.decode import Control, Costs, Decoder, Plan, Sampling, Tree, memory
from outrider.decode import round as stage
from outrider.decode.memory import Load, budget
from outrider.heads import Fusion, Ngram, SelfSpeculative, SelfSpeculativeConfig
from outrider.heads.losses import divergence
from outrider.targets import PeakBytes, RaggedCache, RowLengths, Target

from ..closeness import assert_same, both_precisions
from ..decode.conftest import library_texts, random_prompts, scaled
from ..decode.test_greedy_identity import make, with_adapter
from .conftest import VOCAB, batch, made, sequences

LAYERS = 4  # of the target
NEW = 14
PROMPTS = random_prompts(5, 1, 9, 13, 2)
PLANS = {
    "chain": Plan(3),
    "one draft": Plan(1),
    "confidence": Plan(4, confidence=0.3),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 2, 5))),
    "dynamic tree": Plan(4, width=3, nodes=9),
    "control": Plan(3, control=Control(Costs(verify=((0, 1.0), (8, 1.1)), draft=(0.0, 0.4)), (0.5, 0.5, 0.5))),
}
# The library's bodies differ in where they hold the layers, how they call the norm after them, and in their masks.
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox"]


def build(target: Target, new: bool = False, **changes: Any) -> SelfSpeculative:
    """With random weights, unless it shall be as new."""
    return made(SelfSpeculative, target, {} if new else {"": 0.1}, **changes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_layers_are_a_model_of_their_own_and_the_target_stays_as_it_is(architecture):
    """They give what the whole model's layer gave, normed; nothing is copied, and the model still runs all layers."""
    model = make(architecture)
    target, tokens = Target(model), sequences(3, 12)
    before, held = model(tokens).logits, {id(p) for p in model.parameters()}
    for count in range(1, 5):
        early, out = target.shallow(count), target.forward(tokens, taps=(count,))
        assert early.num_layers == count
        assert {id(p) for p in early.body.parameters()} <= held
        normed = out.hidden[:, :, 0] if count == 4 else target.final_norm(out.hidden[:, :, 0])
        assert torch.equal(early.forward(tokens, logits=False).last, normed)
    assert torch.equal(model(tokens).logits, before)
    assert model.config.get_text_config().num_hidden_layers == target.num_layers == 4


def test_a_body_whose_forward_was_replaced_is_refused(target):
    """The replacement would run all layers, whatever the copy holds."""
    target.body.forward = target.body.forward
    with pytest.raises(IncompatibleError, match="forward of LlamaModel was replaced"):
        Decoder(target, build(target)).generate(PROMPTS, 4)


def test_a_target_without_a_norm_after_its_layers_is_refused(target):
    def doubled(module: Any, args: Any, output: Any) -> None:
        output.last_hidden_state = 2 * output.last_hidden_state

    target.body.norm.register_forward_hook(lambda module, args, output: output + args[0])
    target.body.register_forward_hook(doubled)
    drafter = build(target, exit_layer=2)
    with pytest.raises(IncompatibleError, match="LlamaForCausalLM has no single norm after its last layer"):
        drafter.loss(batch(target, drafter, sequences(3, 12)))


@pytest.mark.parametrize(
    "changes",
    [{}, {"share_lm_head": False}, {"draft_vocab_size": 20}, {"draft_vocab_size": 20, "share_lm_head": False}],
    ids=str,
)
def test_a_new_exit_gives_the_targets_own_early_logits(target, changes):
    """`lm_head(norm(h_E))`: to the bit where the output embedding is the target's."""
    drafter, tokens = build(target, new=True, exit_layer=2, **changes), sequences(3, 12)
    expected = target.lm_head(target.final_norm(target.forward(tokens, taps=(2,)).hidden[:, :, 0]), drafter.output_ids)
    found = drafter.output(drafter.exit(drafter._early(batch(target, drafter, tokens))), target)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "changes", [{"logit_scale": 0.25}, {"logits_scaling": 3.0}, {"final_logit_softcapping": 2.0}], ids=str
)
def test_a_copied_output_embedding_has_the_targets_own_scaling(target, changes):
    for name, value in changes.items():
        setattr(target.model.config, name, value)
    shared, own = (build(target, new=True, share_lm_head=s) for s in (True, False))
    hidden = torch.randn(3, 32)
    assert torch.equal(own.output(hidden, target), shared.output(hidden, target))


@both_precisions
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_training_logits_are_the_decoders(architecture):
    """With random weights, E = 1 … 4: what the loss sees at a place is what a chain with true drafts gives there."""
    target, tokens = Target(make(architecture)), sequences(3, 12)
    for count in range(1, 5):
        drafter = build(target, exit_layer=count, share_lm_head=False, num_blocks=2)
        trained = drafter.output(drafter.exit(drafter._early(batch(target, drafter, tokens))), target)
        cache = target.new_cache(3, 20)
        target.forward(tokens[:, :6], cache)
        cache.advance(RowLengths.of([6] * 3, "cpu"))
        state = drafter.open(target, 3, 20, cache=cache)
        found = [state.prefill(tokens[:, 6])] + [state.decode(tokens[:, [i]])[:, 0] for i in range(7, 12)]
        assert_same(torch.stack(found, 1), trained[:, 6:])


@both_precisions
def test_without_a_lent_cache_it_keeps_one_of_its_own_and_drafts_the_same(target):
    drafter = build(target)
    tokens = sequences(3, 12)
    roots = torch.tensor([5, 6, 7])
    counts = RowLengths.of([12, 7, 1], "cpu")
    cache = target.new_cache(3, 20)
    target.forward(tokens, cache)
    cache.advance(counts)
    lent, alone = drafter.open(target, 3, 20, cache=cache), drafter.open(target, 3, 20)
    for state in (lent, alone):
        state.update(tokens, None, counts)
    drafts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for read in (lambda s: s.prefill(roots), lambda s: s.decode(drafts, torch.tensor([[-1, -1]] * 3))):
        assert_same(read(lent), read(alone))
    assert (lent.caches(), len(alone.caches())) == ([], 1)


@both_precisions
@pytest.mark.parametrize("pruned", [0, 20])
def test_the_loss_is_the_divergence_at_supervised_tokens(target, pruned):
    drafter, tokens = build(target, exit_layer=2, loss="forward_kl", draft_vocab_size=pruned), sequences(2, 8)
    whole = batch(target, drafter, tokens)
    whole.supervised[0, :3] = whole.supervised[1, :5] = False
    result = drafter.loss(whole)
    kept = slice(None) if not pruned else drafter.token_ids
    p = target.model(tokens).logits[..., kept]
    q = drafter.output(drafter.exit(target.final_norm(whole.hidden[:, :, 0])), target)
    places = [(r, t) for r in range(2) for t in range(1, 8) if whole.supervised[r, t]]
    rule = divergence("forward_kl").parts[0][1]
    expected = sum(rule(p[r, t - 1].log_softmax(-1), q[r, t - 1].log_softmax(-1)).item() for r, t in places)
    assert_same(result.total, expected)
    assert result.count.item() == len(places) == 8
    if not pruned:
        alphas = sum(torch.minimum(p[r, t - 1].softmax(-1), q[r, t - 1].softmax(-1)).sum().item() for r, t in places)
        assert_same(result.metrics["alpha_d1"][0], alphas)


def test_no_layer_of_the_target_is_trained_and_all_of_the_exit_is(target):
    drafter = build(target, exit_layer=2, share_lm_head=False).requires_grad_(True).train()
    seen = batch(target, drafter, sequences(3, 12))
    target.model.requires_grad_(True)
    drafter.loss(seen).mean.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    # The exit's loss reaches what stands after the layer; training freezes the target.
    assert [name for name, p in target.model.named_parameters() if p.grad is not None] == ["model.norm.weight"]


def test_the_loss_trains_the_hidden_states_that_the_exit_reads_and_not_those_it_is_compared_with(target):
    drafter = build(target, exit_layer=2)
    seen = batch(target, drafter, sequences(1, 12))
    seen.supervised = torch.arange(12).expand(1, -1) == 9
    seen.hidden.requires_grad_(True)
    seen.last.requires_grad_(True)
    drafter.loss(seen).total.backward()
    assert seen.hidden.grad.abs().sum((0, 2, 3)).nonzero()[:, 0].tolist() == [8]
    assert seen.last.grad is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "coupled", "block"])
def test_all_layers_of_the_target_have_tau_k_plus_1(temperature, rule):
    """E = N: p = q, so every draft is accepted, in chains of any depth, alone and ragged."""
    for architecture in ("llama", "gemma2", "gpt2"):
        target = Target(make(architecture))
        decoder = Decoder(target, build(target, new=True, exit_layer=4))
        for depth in (1, 4):
            for prompts in (PROMPTS, [[7]], [[7], [9]]):
                plan = Plan(depth, verify=rule if temperature else "auto")
                out = decoder.generate(prompts, 1 + 3 * (depth + 1), Sampling(temperature), plan, ignore_eos=True)
                assert out.stats.tau == depth + 1
                assert out.stats.histogram() == [0] * depth + [3 * len(prompts)]


SHAPES = ["chain", "static tree", "dynamic tree"]


@pytest.mark.parametrize(
    ("architecture", "static"), [*((name, False) for name in ARCHITECTURES), ("llama", True), ("gemma3", True)]
)
def test_greedy_text_is_the_librarys(architecture, static):
    """A new exit agrees now and then: rounds that keep all, some and none, in every shape, ragged and alone."""
    model = make(architecture)
    target, texts = Target(model), library_texts(model, PROMPTS, NEW)
    decoder = Decoder(target, build(target, new=True, exit_layer=3), static=static)
    accepted = 0
    for name in PLANS if architecture == "llama" else SHAPES:
        out = decoder.generate(PROMPTS, NEW, plan=PLANS[name], ignore_eos=True)
        accepted += sum(r.accepted for rounds in out.rounds for r in rounds)
        assert out.tokens == texts, name
    assert accepted
    assert decoder.generate(PROMPTS[:1], NEW, plan=PLANS["dynamic tree"], ignore_eos=True).tokens == texts[:1]


@pytest.mark.parametrize("static", [False, True])
def test_coupled_text_is_the_plain_targets_at_any_temperature(target, static):
    """It depends on seed and target alone, also where rows finish at different times and some want no drafts."""
    drafter, wanted = build(target, exit_layer=3, draft_vocab_size=40), [True, False, True, True, True]
    target.model.generation_config.eos_token_id = list(range(0, VOCAB, 16))
    for seed in range(3):
        sampled = Sampling(1.0, top_p=0.9, seed=seed)
        plain = Decoder(target).generate(PROMPTS, 24, sampled, Plan(0, verify="coupled")).tokens
        assert len(set(map(len, plain))) > 1
        for shape in ({"depth": 3}, {"tree": Tree((-1, -1, 0, 0, 1, 2))}, {"depth": 3, "width": 2}):
            decoder, plan = Decoder(target, drafter, static=static), Plan(**shape, verify="coupled")
            assert decoder.generate(PROMPTS, 24, sampled, plan, speculate=wanted).tokens == plain


@pytest.mark.parametrize("static", [False, True])
def test_sampled_rounds_are_the_same_in_one_cache_and_in_two(target, static, monkeypatch):
    """What is drafted, how probable, and what is accepted: as if the drafter read the text in a cache of its own."""
    drafter = build(target, exit_layer=3)
    requests = [(Sampling(1.0, seed=3), plan) for plan in PLANS.values()]
    found = [Decoder(target, drafter, static=static).generate(PROMPTS, 24, *request) for request in requests]
    honest = SelfSpeculative.open
    monkeypatch.setattr(SelfSpeculative, "open", lambda self, *sizes: honest(self, *sizes[:4]))
    for request, lent in zip(requests, found, strict=True):
        alone = Decoder(target, drafter).generate(PROMPTS, 24, *request)
        assert (lent.tokens, lent.rounds) == (alone.tokens, alone.rounds)
    assert any(r.accepted for out in found for rounds in out.rounds for r in rounds)


@pytest.mark.parametrize("merged", [False, True])
def test_greedy_text_is_the_librarys_with_a_peft_adapter(merged):
    """The adapter's layers draft too; those of an exit made before drafted with the target as it was."""
    for architecture in ("llama", "gemma3"):
        model = with_adapter(make(architecture), merged)
        target, texts = Target(model), library_texts(model, PROMPTS, NEW)
        early, all_layers = (Decoder(target, build(target, new=True, exit_layer=count)) for count in (3, 4))
        for name in SHAPES:
            assert early.generate(PROMPTS, NEW, plan=PLANS[name], ignore_eos=True).tokens == texts
        whole = all_layers.generate(PROMPTS, 9, plan=Plan(3), ignore_eos=True)
        assert whole.stats.tau == 4, "the drafting layers have the adapter"


@pytest.mark.parametrize("plan", SHAPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_what_drafting_writes_is_what_the_verification_writes(target, plan, rows, monkeypatch):
    """Keys and values of the layers that draft, at the root and at every node that was read."""
    drafter, compared = build(target, new=True, exit_layer=3), []
    honest, noted = stage.judge, {}

    def written(cache: RaggedCache) -> list[Tensor]:
        return [part[: cache.batch_size].clone() for layer in cache._stores[:3] for part in (layer.keys, layer.values)]

    drafts = stage.draft

    def draft(setup: Any, state: Any, depth: int, *rest: Any) -> Any:
        found = drafts(setup, state, depth, *rest)
        noted["drafted"] = written(state.cache)
        return found

    def verify(setup: Any, state: Any, found: Any, *rest: Any) -> Any:
        proposal = found.proposal
        if proposal.depth:
            read = proposal.read
            if read is None:
                read = torch.arange(proposal.depth - 1).expand(len(proposal.tokens), -1)
            compared.append(agree(state.cache, noted["drafted"], written(state.cache), read))
        return honest(setup, state, found, *rest)

    monkeypatch.setattr(stage, "draft", draft)
    monkeypatch.setattr(stage, "judge", verify)
    Decoder(target, drafter).generate(PROMPTS[:rows], NEW, plan=PLANS[plan], ignore_eos=True)
    assert len(compared) > 3
    assert min(compared) >= rows, "at least each root"


def agree(cache: RaggedCache, drafted: list[Tensor], verified: list[Tensor], read: Tensor) -> int:
    """How many equal entries there are of nodes that stand at 1 + i, and were drafted at 1 + `read` `[B, N]`."""
    count = 0
    for row, length in enumerate(cache.lengths.tolist()):
        nodes = [(i, r) for i, r in enumerate(read[row].tolist()) if r >= 0]
        pairs = [(length, length), *((length + 1 + i, length + 1 + r) for i, r in nodes)]
        for before, after in zip(drafted, verified, strict=True):
            for place, origin in pairs:
                assert_same(after[row, :, place], before[row, :, origin])
        count += len(pairs)
    return count


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["self", "fusion"])
def test_there_is_one_cache(target, caches, static, kind):
    target.cache_layout()  # read off a cache of its own, once
    drafter = build(target) if kind == "self" else Fusion(Ngram(), build(target))
    caches.clear()
    for plan in PLANS.values():
        Decoder(target, drafter, static=static).generate(PROMPTS, NEW, plan=plan)
    assert len(caches) == len(PLANS)


def test_the_state_takes_no_memory_and_the_budget_is_what_a_generation_allocates(target, monkeypatch):
    monkeypatch.setattr("outrider.targets.prompts._LEAST_SHARED", 10**6)  # alike prompts would be read once
    drafter = build(target)
    with torch.inference_mode(), PeakBytes() as opened:
        state = drafter.open(target, 3, 40, 7)
    assert opened.live == drafter.state_bytes(target, 3, 40, 7) == 0
    del state
    for plan in (Plan(4), PLANS["dynamic tree"]):
        load = Load(4, 100, 20, plan.depth, plan, Sampling())
        announced = budget(target, drafter, load)
        assert announced.drafter == 0
        with PeakBytes() as count:
            Decoder(target, drafter).generate([list(range(50)) * 2] * 4, 20, plan=plan, ignore_eos=True)
        assert announced.total == pytest.approx(count.peak, rel=0.05)
    assert memory._measured[drafter][target.dtype].per_token < 1, "nothing of the prompt is read again"


def test_a_refused_draft_that_stayed_would_be_noticed(target, monkeypatch):
    """The mutation: the verification leaves the drafts' entries, which a drafter of other weights has written."""
    texts = library_texts(target.model, PROMPTS, NEW)
    wrong, honest = Target(scaled(target.model, 1.05)), SelfSpeculative.open
    monkeypatch.setattr(SelfSpeculative, "open", lambda self, _, *sizes: honest(self, wrong, *sizes))
    decoder = Decoder(target, build(target, new=True, exit_layer=3))
    found = decoder.generate(PROMPTS, NEW, plan=Plan(3), ignore_eos=True).tokens
    assert found == texts, "wrong entries of drafts are overwritten"
    kind = type(target.new_cache(1, 1)._stores[0])
    update = kind.update

    def lazy(store: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if keys.shape[2] != 4 or not store.keys[:, :, store.cache.longest].any():  # 4 tokens: a verification
            return update(store, keys, values, *more, **named)
        return store.keys[:, :, : store.cache.used], store.values[:, :, : store.cache.used]

    monkeypatch.setattr(kind, "update", lazy)
    assert decoder.generate(PROMPTS, NEW, plan=Plan(3), ignore_eos=True).tokens != texts


def test_an_output_embedding_with_a_bias_can_only_be_shared(target):
    target.model.lm_head.bias = torch.nn.Parameter(torch.ones(VOCAB), requires_grad=False)
    with pytest.raises(IncompatibleError, match=r"has a bias.*set share_lm_head"):
        build(target, share_lm_head=False)
    build(target, share_lm_head=True)


def test_a_recurrent_target_is_refused():
    with pytest.raises(IncompatibleError, match=r"Lfm2ForCausalLM has recurrent layers.*take another drafter"):
        SelfSpeculative.build(SelfSpeculativeConfig(), Target(make("lfm2")))
