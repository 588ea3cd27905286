"""Heads that feed on their own output: what is trained is what is decoded, and each is what its paper says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan
from outrider.heads import Eagle1, Eagle3, Eagle3Config, load_drafter
from outrider.heads.divergences import DIVERGENCES
from outrider.heads.eagle import FeatureDrafter
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..decode.conftest import random_model, random_prompts
from .conftest import (
    VOCAB,
    assert_reads_up_to,
    assert_rounds_have,
    batch,
    check_metrics,
    decoded_logits,
    features,
    made,
    sequences,
)

LENGTH = 18
PROMPTS = random_prompts(5, 1, 9, 3)


def eagle3(target: Target, **changes) -> FeatureDrafter:
    return made(Eagle3, target, **{"steps": 4} | changes)


def eagle1(target: Target, **changes) -> FeatureDrafter:
    return made(Eagle1, target, **{"steps": 4} | changes)


Maker = Callable[..., FeatureDrafter]
NORMED, NORMED_TOGETHER = {"norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}
BOTH: dict[str, Maker] = {"eagle1": eagle1, "eagle3": eagle3}
VARIANTS: dict[str, tuple[Maker, dict]] = {
    "eagle3": (eagle3, {}),
    "eagle3, one key head": (eagle3, {"num_key_value_heads": 1}),
    "eagle3, as many key heads": (eagle3, {"num_key_value_heads": 4}),
    "eagle3, other heads": (eagle3, {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}),
    "eagle3, pruned vocabulary": (eagle3, {"draft_vocab_size": 20}),
    "eagle3, normed taps": (eagle3, {"norm_taps": True}),
    "eagle3, normed output": (eagle3, {"norm_output": True}),
    "eagle3, all taps normed together": (eagle3, {"norm_before_fc": True}),
    "eagle3, normed residual": (eagle3, {"norm_before_residual": True}),
    "eagle3.1": (eagle3, {"norm_taps": True, "norm_output": True, "draft_vocab_size": 20, "taps": (0, 3, 6)}),
    "eagle3, two layers": (eagle3, {"num_layers": 2}),
    "eagle3, two layers, normed taps": (eagle3, {"num_layers": 2, "norm_taps": True}),
    "eagle3, two layers, pruned": (eagle3, {"num_layers": 2, "norm_output": True, "draft_vocab_size": 20}),
    "eagle3.1, three layers": (eagle3, {"num_layers": 3, "num_key_value_heads": 1, "norm_taps": True, **NORMED}),
    "eagle3, two layers, all norms": (eagle3, {"num_layers": 2, **NORMED_TOGETHER, **NORMED}),
    "eagle1": (eagle1, {}),
    "eagle1, normed first layer": (eagle1, {"norm_first": True, "num_key_value_heads": 1}),
    "eagle1, scaled inputs": (eagle1, {"embedding_scale": 9.0, "feature_scale": 0.3}),
    "eagle1, bias": (eagle1, {"fc_bias": True}),
    "eagle1, two layers": (eagle1, {"num_layers": 2}),
    "eagle1, within 6 places": (eagle1, {"sliding_window": 6}),
    "eagle3, two layers, within 7 places": (eagle3, {"num_layers": 2, "sliding_window": 7}),
    "eagle1, three layers, all norms": (eagle1, {"num_layers": 3, "norm_first": True}),
}


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> FeatureDrafter:
    make, changes = VARIANTS[request.param]
    return make(target, **changes)


@both_precisions
def test_unrolled_training_logits_are_the_decoders(target, drafter):
    """fp32, ragged rows, several rounds: logits of step i at t = logits at depth i of a round that begins there."""
    steps, tokens = 4, sequences()
    outputs = drafter.unroll(target, tokens, features(target, drafter, tokens))
    trained = [drafter.logits(output, target) for output in outputs]
    starts = [[1, 3, 4, 9, 10], [5, 6, 9, 12, 13], [2, 3, 6, 7, 11]]
    rounds = drafter, target, tokens, starts, steps
    assert_rounds_have(lambda number, row, step: trained[step][row, starts[row][number] - 1], *rounds)


@both_precisions
def test_a_head_whose_weights_have_changed_decodes_with_the_new_ones(target, drafter):
    """Weights are put together once for all requests, until one of them changes."""
    tokens = sequences()
    hidden = features(target, drafter, tokens)
    drafter.open(target, 3, LENGTH + 4)
    for name in [name for name, _ in drafter.named_parameters()]:
        with torch.no_grad():
            drafter.get_parameter(name).mul_(1.1)
        first = drafter.logits(drafter.unroll(target, tokens, hidden)[0], target)
        expected = first[torch.arange(3), torch.tensor([3, 6, 1])]
        decoded = decoded_logits(drafter, target, tokens, [[4], [7], [2]], 1)[0][0]
        assert_same(decoded, expected, msg=name)


@pytest.mark.parametrize("name", BOTH)
def test_a_draft_within_a_window_attends_to_no_place_before_it(target, name):
    """One layer; later steps read the first one's output, which knows as much."""
    drafter, tokens = BOTH[name](target, sliding_window=6), sequences(1)
    hidden = features(target, drafter, tokens).requires_grad_()
    outputs = drafter.unroll(target, tokens, hidden)
    for output in outputs:
        gradient = torch.autograd.grad(output[0, 15].sum(), hidden, retain_graph=True)[0].abs().sum((0, 2, 3))
        assert (gradient > 0).nonzero().flatten().tolist() == list(range(10, 16))
    with pytest.raises(BadInputError, match="shorter than 4 unrolled steps"):
        BOTH[name](target, sliding_window=5)


def test_every_step_changes_the_logits(target, drafter):
    """The comparison above is empty if feedback, tokens or taps have no effect."""
    tokens = sequences()
    outputs = drafter.unroll(target, tokens, features(target, drafter, tokens))
    assert len(outputs) == 4
    assert all((a - b).abs().mean() > 0.01 for a, b in product(outputs, outputs) if a is not b)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("name", BOTH)
def test_step_i_reads_tokens_up_to_t_plus_1_plus_i_and_features_up_to_t(target, name, step, layers):
    drafter, tokens = BOTH[name](target, num_layers=layers), sequences(1)
    hidden = features(target, drafter, tokens)
    assert_reads_up_to(lambda x, h: drafter.unroll(target, x, h)[step], tokens, hidden, step + 1, whole=True)


def llama(drafter: FeatureDrafter, prefixes: list[str]) -> LlamaModel:
    """transformers' own model of a head's layers with these prefixes, its final norm without weights."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same = (*sizes, "rms_norm_eps", "max_position_embeddings", "rope_parameters")
    values = {name: getattr(drafter.config, name) for name in same}
    model = LlamaModel(LlamaConfig(**values, num_hidden_layers=len(prefixes)))
    theirs = model.state_dict()
    for index, prefix in enumerate(prefixes):
        own = {name: weight for name, weight in drafter.state_dict().items() if name.startswith(prefix)}
        theirs |= {f"layers.{index}.{name.removeprefix(prefix)}": weight for name, weight in own.items()}
    model.load_state_dict(theirs)
    return model.eval()


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


@both_precisions
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_of_normed_layers_step_0_is_transformers_own_causal_model(target, layers):
    drafter, tokens = eagle1(target, num_layers=layers, norm_first=True), sequences()
    hidden = features(target, drafter, tokens)
    joined = drafter.fc(torch.cat([target.embed(tokens.roll(-1, 1)), hidden[:, :, 0]], -1))
    model = llama(drafter, [f"layers.{i}." for i in range(layers)])
    with torch.no_grad():
        expected = model(inputs_embeds=joined).last_hidden_state
    assert_same(normed(drafter.unroll(target, tokens, hidden)[0]), expected)


@pytest.mark.parametrize("name", BOTH)
def test_heads_of_attention_need_not_divide_the_hidden_size(name):
    """A target may have 6 of size 8 on a hidden size of 32."""
    target = Target(random_model("qwen3", {"num_attention_heads": 6, "head_dim": 8}))
    drafter = BOTH[name](target, steps=2)
    assert drafter.config.num_attention_heads == 6
    drafter.requires_grad_(True).loss(batch(target, drafter, sequences())).mean.backward()
    prompts = [row[:n].tolist() for row, n in zip(sequences(2), (5, 9), strict=True)]
    expected = Decoder(target).generate(prompts, 8).tokens
    assert Decoder(target, drafter.eval()).generate(prompts, 8, plan=Plan(3)).tokens == expected


@both_precisions
def test_the_true_feature_is_what_the_targets_output_embedding_reads(target):
    """A head that drafts the true next feature has the target's own distribution, and loses nothing."""
    drafter, tokens = made(Eagle1, target), sequences(2, 9)
    assert drafter.taps == (6,)
    out = target.forward(tokens, taps=drafter.taps)
    assert_same(drafter.logits(out.hidden[:, :, 0], target), target.model(tokens).logits)
    assert not drafter.feature_loss(out.last[:1], out.last[0]).any()


@both_precisions
@pytest.mark.parametrize(("tokens_weight", "features_weight"), [(0.1, 1.0), (0.5, 0.0), (0.2, 3.0)])
def test_the_loss_is_the_weighted_sum_of_features_and_tokens(target, tokens_weight, features_weight):
    """Σ_i decay^i Σ_{supervised x_{t+2+i}} (w_f · SmoothL1(f_{t+1+i}, f̂) + w_t · CE(p, q)), written as loops."""
    weights = {"loss": {"soft_ce": tokens_weight}, "feature_loss": features_weight}
    drafter = made(Eagle1, target, steps=2, decay=0.5, **weights)
    tokens = sequences(2, 12)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, 5:] = True
    supervised[1, 1:8] = True
    data = batch(target, drafter, tokens, supervised)
    result, outputs = drafter.loss(data), drafter.unroll(target, tokens, data.hidden)
    logits = target.model(tokens).logits
    total, lost = 0.0, [0.0, 0.0]
    for step, row, t in product(range(2), range(2), range(12)):
        if t + 2 + step >= 12 or not supervised[row, t + 2 + step]:
            continue
        true, drafted = data.last[row, t + 1 + step], outputs[step][row, t]
        scale = true.square().mean().sqrt()
        d = ((drafted - true) / scale).abs()
        feature = torch.where(d < 1, d * d / 2, d - 0.5).mean().item()
        p, log_q = logits[row, t + 1 + step].softmax(-1), target.lm_head(drafted).log_softmax(-1)
        total += 0.5**step * (features_weight * feature - tokens_weight * (p * log_q).sum().item())
        lost[step] += feature
    assert_same(result.total, total)
    if features_weight:
        assert_same([result.metrics[f"feature_d{i}"][0].item() for i in (1, 2)], lost)
    else:
        assert "feature_d1" not in result.metrics


@both_precisions
def test_with_a_loss_on_features_the_norm_before_the_output_begins_as_the_targets(target):
    torch.nn.init.uniform_(norm := target.model.model.norm.weight, 0.5, 1.5)
    settings = {"feature_loss": 1.0}, {}, {"feature_loss": 1.0, "init_from_target": False}
    begun, *others = (Eagle3.build(Eagle3Config(**changes), target).norm.weight for changes in settings)
    assert_same(begun, norm / (1 + target.config.rms_norm_eps) ** 0.5)
    assert all(torch.equal(other, torch.ones(32)) for other in others)


def test_settings_without_effect_leave_the_digest_of_a_head(target):
    assert made(Eagle3, target).identity_settings().keys().isdisjoint({"sliding_window", "feature_loss"})
    assert made(Eagle3, target, sliding_window=9).identity_settings()["sliding_window"] == 9


def test_the_papers_settings_are_the_default(target):
    config = made(Eagle1, target).config
    assert (config.loss, config.feature_loss, config.noise) == ({"soft_ce": 0.1}, 1.0, 0.1)
    assert (config.steps, config.num_layers) == (1, 1)
    assert not any((config.norm_first, config.fc_bias))


@both_precisions
def test_scales_of_inputs_are_fcs_columns_and_by_default_none(target):
    plain, tokens = made(Eagle1, target), sequences()
    scaled = made(Eagle1, target, embedding_scale=4.0, feature_scale=0.5)
    scaled.load_state_dict(plain.state_dict())
    scaled.fc.weight.data /= torch.tensor([4.0, 0.5]).repeat_interleave(32)
    hidden = features(target, plain, tokens)
    assert_same(scaled.unroll(target, tokens, hidden), plain.unroll(target, tokens, hidden))
    assert made(Eagle1, target).identity_settings().keys().isdisjoint({"embedding_scale", "feature_scale"})


def test_scales_of_0_are_powers_of_two_that_bring_embeddings_and_features_near_a_root_mean_square_of_a_half(target):
    torch.nn.init.uniform_(target.model.model.norm.weight, 2, 4)
    config = made(Eagle1, target, embedding_scale=0, feature_scale=0).config
    inputs = target.embed(torch.arange(target.vocab_size)), target.forward(sequences(9, 20), taps=(6,)).hidden
    for scale, values in zip((config.embedding_scale, config.feature_scale), inputs, strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert 0.5 / 2**0.51 < scale * values.square().mean().sqrt() < 0.5 * 2**0.51


def test_noise_is_uniform_and_in_training_only(target):
    """Within ± `noise` times the feature's root mean square, its mean zero; none when a head is measured or decodes."""
    drafter, hidden = made(Eagle1, target, noise=0.1), target.forward(sequences(8, 50), taps=(6,)).hidden
    assert torch.equal(drafter.fuse(hidden), hidden[:, :, 0])
    torch.manual_seed(0)
    true = hidden[:, :, 0]
    added = (drafter.train().disturb(drafter.fuse(hidden)) - true) / true.square().mean(-1, keepdim=True).sqrt()
    assert added.abs().max() == pytest.approx(0.1, abs=1e-4)
    assert added.mean() == pytest.approx(0, abs=0.002)
    assert added.std() == pytest.approx(0.1 / 3**0.5, abs=0.001)
    assert torch.equal(made(Eagle1, target, noise=0.0).train().disturb(true), true)


@both_precisions
@pytest.mark.parametrize("factor", [0.01, 20.0])
def test_noise_and_feature_loss_do_not_depend_on_the_scale_of_a_targets_features(target, factor):
    drafter, hidden = made(Eagle1, target, noise=0.1).train(), target.forward(sequences(2, 9), taps=(6,)).hidden
    torch.manual_seed(0)
    once = drafter.disturb(drafter.fuse(hidden))
    torch.manual_seed(0)
    assert_same(drafter.disturb(drafter.fuse(factor * hidden)), factor * once)
    drafted, true = torch.randn(3, 5, 32), torch.randn(5, 32)
    scaled = drafter.feature_loss(factor * drafted, factor * true)
    assert_same(scaled, drafter.feature_loss(drafted, true))


LAYER = [f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"]
LAYER += [f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]


def test_the_weights_have_the_published_names(target):
    """The paper's form: no norm before the first layer's attention, none after the last, no embeddings of its own."""
    head = made(Eagle1, target)
    assert set(head.state_dict()) == {"fc.weight", *LAYER, "layers.0.post_attention_layernorm.weight", "token_ids"}
    assert head.fc.weight.shape == (32, 64)


@both_precisions
@pytest.mark.parametrize("pruned", [0, 20])
@pytest.mark.parametrize(("loss", "prompt"), [("soft_ce", 0), ("soft_ce", 6), ("tv", 6)])
def test_the_loss_is_a_decayed_sum_over_supervised_positions(target, loss, prompt, pruned):
    """Σ_i decay^i Σ_{supervised x_{t+2+i}} D(p(· | x ≤ t+1+i), q_i(· | t)), written as loops."""
    drafter = made(Eagle3, target, steps=3, decay=0.5, loss=loss, draft_vocab_size=pruned)
    tokens = sequences(2, 9 + prompt)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, prompt + 4 :] = True
    supervised[1, prompt + 1 : prompt + 6] = True
    data = batch(target, drafter, tokens, supervised)
    result = drafter.loss(data)
    kept = drafter.token_ids
    total = 0.0
    alphas = {}
    target_logits = target.model(tokens).logits
    outputs = drafter.unroll(target, tokens, data.hidden)
    for step, row, t in product(range(3), range(2), range(9 + prompt)):
        predicted = t + 2 + step
        if predicted < 9 + prompt and supervised[row, predicted]:
            p, q = target_logits[row, predicted - 1], drafter.logits(outputs[step][row, t], target)
            total += 0.5**step * DIVERGENCES[loss](p[kept].log_softmax(-1), q.log_softmax(-1)).item()
            alphas[row, t, step] = torch.minimum(p.softmax(-1)[kept], q.softmax(-1)).sum().item()
    assert_same(result.total, total)
    count = 5 + (5 if prompt else 4)  # the token at place 1 has no pair (f, x) before it
    assert result.count.item() == count
    assert_same(result.mean, total / count)
    assert result.metrics["loss_d1"][1].item() == count
    check_metrics(result.metrics, alphas, 3)


def test_default_taps_are_eagle_3s_and_differ_in_targets_of_few_layers(tiny_llama):
    with pytest.raises(BadInputError, match="3 layers has no default taps"):
        Eagle3.build(Eagle3Config(), Target(tiny_llama(layers=3)))
    for layers, taps in ((4, (1, 2, 3)), (6, (1, 3, 5)), (7, (2, 3, 4)), (12, (2, 6, 9)), (32, (2, 16, 29))):
        model = tiny_llama(layers=layers, hidden=8, num_attention_heads=1, num_key_value_heads=1)
        assert Eagle3.build(Eagle3Config(), Target(model)).taps == taps


def test_the_draft_vocabulary_is_the_most_frequent_tokens(target):
    counts = torch.zeros(VOCAB, dtype=torch.long)
    counts[[40, 3, 17]] = torch.tensor([5, 9, 7])
    drafter = Eagle3.build(Eagle3Config(draft_vocab_size=4), target, counts)
    assert drafter.token_ids.tolist() == [0, 3, 17, 40]  # the first of the unseen ones fills up
    assert torch.equal(drafter.lm_head.weight, target.model.lm_head.weight[[0, 3, 17, 40]])


def test_a_head_saved_before_there_were_more_layers_loads(target, tmp_path):
    """Its config does not say how many it has, and its weights' names are those of one layer."""
    made(Eagle3, target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("num_layers") == 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_drafter(tmp_path, target)
    norms = (f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    others = ("fc.weight", "norm.weight", "lm_head.weight", "token_ids")
    assert set(loaded.state_dict()) == {*LAYER, *norms, *others}


def test_a_head_is_as_wide_as_the_widest_layer_of_its_target(target):
    """Gemma 3n has a size of the MLP for each layer."""
    vars(target.config)["intermediate_size"] = [48, 64, 48, 48, 48, 48]
    assert made(Eagle3, target).config.intermediate_size == 64


def test_a_head_that_drafted_by_plain_weights_is_packed_with_its_target(target):
    """Its decoding layers are kept, and belong to the weights as they were multiplied."""
    drafter = made(Eagle1, target).eval()
    plain = drafter.decoding_layers(8)
    target.pack()
    packed = drafter.packed_as(target).decoding_layers(8)
    products = [product for layer in packed.layers for product in (layer.qkv, layer.gate_up)]
    assert all(product.packed or product.whole is not None for product in products)
    assert drafter.decoding_layers(8) is plain
    assert not plain.layers[0].qkv.packed
