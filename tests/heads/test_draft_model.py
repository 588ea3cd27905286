"""The draft model: its cached proposals are its plain forward pass, and its loss is the divergence at supervised tokens."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.heads import DraftModel, DraftModelConfig, TargetBatch
from outrider.heads.draft_model import chosen_layers
from outrider.heads.losses import DIVERGENCES
from outrider.target import BadInputError, Counts, IncompatibleError, Target

VOCAB = 64


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=4))


@pytest.fixture
def drafter(tiny_llama) -> DraftModel:
    return DraftModel(tiny_llama(layers=2, seed=1))


def sequences(rows: int = 3, length: int = 20) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("starts", [[[1, 2, 6, 7], [5, 6, 7, 9], [2, 6, 9, 10]], [[4, 7, 8, 12]], [[1, 2, 3, 4]]], ids=["ragged", "alone", "one token"])
def test_proposals_are_the_plain_forward_pass(target, drafter, starts):
    """Under teacher forcing, over rounds that accept everything, something and nothing."""
    depth, tokens = 3, sequences(len(starts))
    rows, plain = torch.arange(len(starts)), drafter.model(tokens).logits
    state, committed = drafter.open(target, len(starts), 40), torch.zeros(len(starts), dtype=torch.long)
    for number, reached in enumerate(torch.tensor(starts).T):
        counts = reached - committed
        width = depth + 1 if number else int(counts.max())
        where = (committed[:, None] + torch.arange(width)).clamp(max=19)
        drafter.absorb(state, tokens[rows[:, None], where], None, Counts.of(counts.tolist(), "cpu"))
        logits: list[Tensor] = []

        def choose(draft_logits: Tensor, token_ids: None, reached: Tensor = reached, logits: list[Tensor] = logits) -> Tensor:
            logits.append(draft_logits)
            return tokens[rows, reached + len(logits)]

        proposal = drafter.propose(state, tokens[rows, reached], depth, choose)
        assert proposal.parents is None
        for row, step in product(range(len(starts)), range(depth)):
            torch.testing.assert_close(logits[step][row], plain[row, reached[row] + step], rtol=1e-4, atol=1e-4)
        committed = reached


@pytest.mark.parametrize("loss", DIVERGENCES)
def test_the_loss_sums_over_supervised_tokens(target, drafter, loss):
    drafter.config.loss = loss
    tokens = sequences(2, 8)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, 3:7] = supervised[1, 5:] = True
    supervised[1, 0] = True  # the first token has no prediction
    result = drafter.loss(TargetBatch(target, tokens, supervised, None, target.forward(tokens).last))
    p, q = target.model(tokens).logits, drafter.model(tokens).logits
    places = [(r, t) for r, t in product(range(2), range(1, 8)) if supervised[r, t]]
    expected = sum(DIVERGENCES[loss](p[r, t - 1].log_softmax(-1), q[r, t - 1].log_softmax(-1)).item() for r, t in places)
    assert result.total.item() == pytest.approx(expected, rel=1e-4)
    assert result.count.item() == len(places) == 7
    alphas = {(r, t): torch.minimum(p[r, t - 1].softmax(-1), q[r, t - 1].softmax(-1)).sum().item() for r, t in places}
    total, count = result.metrics["alpha_d1"]
    assert (total.item(), count.item()) == (pytest.approx(sum(alphas.values()), rel=1e-4), 7)
    whole = [[alphas[r, t + d] for d in range(4)] for r, t in places if all((r, t + d) in alphas for d in range(4))]
    total, count = result.metrics["tau"]
    assert (total.item(), count.item()) == (pytest.approx(sum(1 + a + a * b + a * b * c + a * b * c * d for a, b, c, d in whole), rel=1e-4), len(whole))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_sequences_are_fine(target, drafter, length):
    drafter.requires_grad_(True)
    tokens = sequences(2, length)
    result = drafter.loss(TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), None, target.forward(tokens).last))
    assert result.count.item() == 2 * (length - 1)
    result.mean.backward()


def test_an_equal_draft_model_has_no_loss_and_the_highest_tau(target):
    drafter, tokens = DraftModel(target.model, DraftModelConfig(depths=3)), sequences()
    result = drafter.loss(TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), None, target.forward(tokens).last))
    assert result.mean.item() == pytest.approx(0, abs=1e-6)
    total, count = result.metrics["tau"]
    assert (total / count).item() == pytest.approx(4)


def test_a_new_draft_model_is_the_targets_config_with_changes(tiny_llama):
    target = Target(tiny_llama(layers=4, head_dim=8))
    drafter = DraftModel.build(DraftModelConfig(model={"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}), target)
    config = drafter.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads, config.head_dim) == (1, 16, 2, 8)
    assert config.vocab_size == VOCAB
    drafter.check(target)


def test_what_cannot_be_built_is_refused(target, tiny_llama):
    with pytest.raises(BadInputError, match="unknown key 'num_layers'; did you mean 'num"):
        DraftModel.build(DraftModelConfig(model={"num_layers": 1}), target)
    with pytest.raises(BadInputError, match="unknown loss 'kl'"):
        DraftModelConfig(loss="kl")
    with pytest.raises(IncompatibleError, match="vocabulary has 32 entries, the target's 64"):
        DraftModel(tiny_llama(layers=1, vocab=32)).check(target)


# ------------------------------------------------------------ pruned from the target


@pytest.mark.parametrize(("of", "count", "expected"), [(12, 1, [11]), (12, 2, [0, 11]), (12, 3, [0, 6, 11]), (4, 4, [0, 1, 2, 3]), (1, 1, [0])])
def test_pruned_layers_are_spread_from_the_first_to_the_last(of, count, expected):
    assert chosen_layers(of, count) == expected


def test_pruned_to_all_of_its_layers_it_is_the_target(target):
    drafter = DraftModel.build(DraftModelConfig(prune=True, model={"num_hidden_layers": 4}), target)
    tokens = sequences()
    torch.testing.assert_close(drafter.model(tokens).logits, target.model(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_a_pruned_model_has_the_targets_layers_embeddings_and_norm(tiny_llama, tied):
    target = Target(tiny_llama(layers=4, tie_word_embeddings=tied))
    drafter = DraftModel.build(DraftModelConfig(prune=True, model={"num_hidden_layers": 2}), target)
    theirs, own = target.model.state_dict(), drafter.model.state_dict()
    assert own.keys() < theirs.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name.replace("layers.1.", "layers.3.")]), name
    own["model.norm.weight"].add_(1)
    assert not torch.equal(own["model.norm.weight"], theirs["model.norm.weight"]), "it is a copy"


def test_pruned_layers_keep_their_kind_of_attention():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64, layer_types=kinds
    )
    drafter = DraftModel.build(DraftModelConfig(prune=True, model={"num_hidden_layers": 3}), Target(Gemma2ForCausalLM(config).eval()))
    assert drafter.model.config.layer_types == [kinds[0], kinds[2], kinds[3]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": {"hidden_size": 16}}, "give it model.num_hidden_layers and nothing else"),
        ({"path": "somewhere"}, "give it model.num_hidden_layers and nothing else"),
        ({"model": {"num_hidden_layers": 9}}, "between 1 and the target's 4, found 9"),
        ({}, "between 1 and the target's 4, found None"),
    ],
)
def test_what_cannot_be_pruned_is_refused(target, config, message):
    with pytest.raises(BadInputError, match=message):
        DraftModel.build(DraftModelConfig(prune=True, **config), target)


def test_a_target_with_an_adapter_that_is_not_merged_is_refused(target):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(target.model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(IncompatibleError, match="Merge the target's adapter first"):
        DraftModel.build(DraftModelConfig(prune=True, model={"num_hidden_layers": 2}), Target(model))


def test_a_pruned_model_keeps_head_sizes_of_its_own_and_what_the_config_says_per_layer():
    from transformers import Qwen3Config, Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    qwen = Target(Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=4, head_dim=16)).eval())
    assert DraftModel.build(DraftModelConfig(prune=True, model={"num_hidden_layers": 2}), qwen).model.config.head_dim == 16
    assert DraftModel.build(DraftModelConfig(model={"num_hidden_layers": 2}), qwen).model.config.head_dim == 16
    rope = [1, 1, 1, 0, 1, 1, 1, 0]
    smol = Target(SmolLM3ForCausalLM(SmolLM3Config(**sizes, num_hidden_layers=8, no_rope_layers=rope)).eval())
    pruned = DraftModel.build(DraftModelConfig(prune=True, model={"num_hidden_layers": 3}), smol)
    assert pruned.model.config.no_rope_layers == [rope[i] for i in (0, 4, 7)]
