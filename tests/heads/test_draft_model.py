"""The draft model's cached proposals are its plain forward pass, its loss is the divergence at supervised tokens."""

from __future__ import annotations

import copy
import itertools
from itertools import product

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Tree
from outrider.heads import DraftModel, DraftModelConfig, load_drafter
from outrider.heads.divergences import DIVERGENCES
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from .conftest import VOCAB, assert_rounds_have, batch, check_metrics, sequences

LAYERS = 4  # of the target


@pytest.fixture
def drafter(tiny_llama) -> DraftModel:
    return DraftModel(tiny_llama(layers=2, seed=1))


@both_precisions
@pytest.mark.parametrize(
    "starts",
    [[[1, 2, 6, 7], [5, 6, 7, 9], [2, 6, 9, 10]], [[4, 7, 8, 12]], [[1, 2, 3, 4]]],
    ids=["ragged", "alone", "one token"],
)
def test_proposals_are_the_plain_forward_pass(target, drafter, starts):
    """Under teacher forcing, over rounds that accept everything, something and nothing."""
    depth, tokens = 3, sequences(len(starts), 20)
    plain = drafter.model(tokens).logits
    rounds = drafter, target, tokens, starts, depth
    assert_rounds_have(lambda number, row, step: plain[row, starts[row][number] + step], *rounds)


@both_precisions
@pytest.mark.parametrize("loss", DIVERGENCES)
def test_the_loss_sums_over_supervised_tokens(target, drafter, loss):
    drafter.config.loss = loss
    tokens = sequences(2, 8)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, 3:7] = supervised[1, 5:] = True
    supervised[1, 0] = True  # the first token has no prediction
    result = drafter.loss(batch(target, drafter, tokens, supervised))
    p, q = target.model(tokens).logits, drafter.model(tokens).logits
    places = [(r, t) for r, t in product(range(2), range(1, 8)) if supervised[r, t]]
    p_log, q_log = p.log_softmax(-1), q.log_softmax(-1)
    expected = sum(DIVERGENCES[loss](p_log[r, t - 1], q_log[r, t - 1]).item() for r, t in places)
    assert_same(result.total, expected)
    assert result.count.item() == len(places) == 7
    alphas = {(r, t): torch.minimum(p[r, t - 1].softmax(-1), q[r, t - 1].softmax(-1)).sum().item() for r, t in places}
    chains = {(r, t, d): alphas[r, t + d] for (r, t), d in product(places, range(4)) if (r, t + d) in alphas}
    check_metrics(result.metrics, chains, 4)


@both_precisions
def test_an_equal_draft_model_has_no_loss_and_the_highest_tau(target):
    drafter = DraftModel(target.model, DraftModelConfig(depths=3))
    result = drafter.loss(batch(target, drafter, sequences()))
    assert_same(result.mean, 0.0, scale=1.0)
    total, count = result.metrics["tau"]
    assert_same(total / count, 4.0)


def test_a_new_draft_model_is_the_targets_config_with_changes(tiny_llama):
    target = Target(tiny_llama(layers=4, head_dim=8))
    model = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    drafter = DraftModel.build(DraftModelConfig(model=model), target)
    config = drafter.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads, config.head_dim) == (1, 16, 2, 8)
    assert config.vocab_size == VOCAB
    drafter.check(target)


def test_what_cannot_be_built_is_refused(target, tiny_llama):
    with pytest.raises(BadInputError, match="unknown key 'num_layers'; did you mean 'num"):
        DraftModel.build(DraftModelConfig(model={"num_layers": 1}), target)
    with pytest.raises(BadInputError, match=r"drafter.model: .*hidden size \(30\)"):
        DraftModel.build(DraftModelConfig(model={"hidden_size": 30}), target)
    with pytest.raises(IncompatibleError, match="vocabulary has 32 entries, the target's 64"):
        DraftModel(tiny_llama(layers=1, vocab=32)).check(target)


def test_init_says_where_the_first_weights_come_from(target, tmp_path):
    """`pretrained` is what a path means, `random` what nothing means; the words may be left out or said."""
    DraftModel(target.model).save(tmp_path)
    tokens = sequences()
    for config in (DraftModelConfig(path=str(tmp_path)), DraftModelConfig(init="pretrained", path=str(tmp_path))):
        assert config.init == "pretrained"
        assert torch.equal(DraftModel.build(config, target).model(tokens).logits, target.model(tokens).logits)
    for config in (DraftModelConfig(), DraftModelConfig(init="random")):
        assert config.init == "random"
        assert not torch.equal(DraftModel.build(config, target).model(tokens).logits, target.model(tokens).logits)


# Of target and draft model; their tokenizer's ids end at 319 or below.
PADDINGS = {"narrower": (352, 336), "wider": (336, 352)}


@pytest.fixture(params=PADDINGS)
def padded(request, tiny_llama, tiny_tokenizer) -> tuple[Target, DraftModel]:
    ours, theirs = PADDINGS[request.param]
    target = Target(tiny_llama(layers=3, vocab=ours), tiny_tokenizer)
    return target, DraftModel(tiny_llama(layers=1, vocab=theirs, seed=1))


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, width=3, nodes=6), Plan(tree=Tree((-1, -1, 0, 0, 1)))], ids=str)
def test_padding_that_differs_leaves_the_text_the_targets(padded, plan):
    """A random target writes ids that only it has: more often than any trained one would."""
    target, drafter = padded
    shared = min(target.vocab_size, drafter.runner.vocab_size)
    prompts = [sequences(1, n)[0].tolist() for n in (5, 1, 9)]
    prompts[2][4] = target.vocab_size - 1
    expected = Decoder(target).generate(prompts, 40, ignore_eos=True).tokens
    assert Decoder(target, drafter).generate(prompts, 40, plan=plan, ignore_eos=True).tokens == expected
    written = {token for text in expected for token in text}
    assert drafter.runner.vocab_size > shared or max(written) >= shared, "padding was written"


def test_a_padded_draft_model_drafts_as_one_of_the_targets_size(padded):
    """Cut to the ids that both have, the target's own weights are kept whenever the target says one of those."""
    target, drafter = padded
    own = copy.deepcopy(target.model)
    own.resize_token_embeddings(drafter.runner.vocab_size, mean_resizing=False)
    if drafter.runner.vocab_size > target.vocab_size:
        weight = own.get_output_embeddings().weight
        weight[target.vocab_size :] = 100 * weight[:1]  # large, and never to be drafted
    out = Decoder(target, DraftModel(own)).generate([sequences(1, 5)[0].tolist()], 40, plan=Plan(3), ignore_eos=True)
    known = [token < drafter.runner.vocab_size for token in out.tokens[0]]
    begun = itertools.accumulate([1, *(1 + r.accepted for r in out.rounds[0])])
    for start, found in zip(begun, out.rounds[0], strict=False):
        agreed = list(itertools.takewhile(bool, known[start : start + found.drafted]))
        assert found.accepted >= len(agreed) or not all(known[:start]), "after unknown ids drafts are poor"


@both_precisions
def test_the_loss_of_a_padded_draft_model_is_on_the_ids_that_both_have(padded):
    target, drafter = padded
    shared = min(target.vocab_size, drafter.runner.vocab_size)
    tokens = sequences(2, 8)
    tokens[1, 3] = target.vocab_size - 1
    result = drafter.loss(batch(target, drafter, tokens))
    p = target.model(tokens).logits[:, :-1, :shared].log_softmax(-1)
    q = drafter.model(tokens.clamp(max=drafter.runner.vocab_size - 1)).logits[:, :-1, :shared].log_softmax(-1)
    assert_same(result.total, DIVERGENCES["forward_kl"](p, q).sum())
    whole, q = target.model(tokens).logits[:, :-1].softmax(-1)[..., :shared], q.exp()
    total, count = result.metrics["alpha_d1"]  # mass beyond counts as refused
    assert_same(total / count, torch.minimum(whole, q).sum(-1).mean())


def test_a_draft_model_is_loaded_without_ids_that_the_target_lacks(padded, tmp_path):
    """So that it is trained, written from and exported in the target's size."""
    target, drafter = padded
    drafter.save(tmp_path)
    loaded = load_drafter(tmp_path, target)
    built = DraftModel.build(DraftModelConfig(path=str(tmp_path)), target)
    assert loaded.runner.vocab_size == built.runner.vocab_size == min(target.vocab_size, drafter.runner.vocab_size)
    tokens, shared = sequences(1, 6), loaded.runner.vocab_size
    assert torch.equal(loaded.runner.forward(tokens).logits, drafter.model(tokens).logits[..., :shared])


def test_a_vocabulary_that_ends_before_the_tokenizers_is_refused(tiny_llama, tiny_tokenizer):
    target, highest = Target(tiny_llama(vocab=352), tiny_tokenizer), max(tiny_tokenizer.get_vocab().values())
    DraftModel(tiny_llama(layers=1, vocab=highest + 1)).check(target)
    message = f"has {highest} entries, the target's 352, and their tokenizer has ids up to {highest}"
    with pytest.raises(IncompatibleError, match=message):
        DraftModel(tiny_llama(layers=1, vocab=highest)).check(target)
