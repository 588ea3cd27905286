"""EAGLE is what the paper says. (That what is trained is what is decoded: test_eagle.py.)"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.heads import Eagle1, Eagle1Config, TargetBatch
from outrider.targets import Target

VOCAB = 64


def head(target: Target, **changes) -> Eagle1:
    torch.manual_seed(7)
    return Eagle1.build(Eagle1Config(**changes), target).eval().requires_grad_(False)


def batch(target: Target, tokens: Tensor, supervised: Tensor) -> TargetBatch:
    out = target.forward(tokens, taps=(6,))
    return TargetBatch(target, tokens, supervised, out.hidden, out.last)


def sequences(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def test_the_true_feature_is_what_the_targets_output_embedding_reads(target):
    """A head that drafts the true next feature has the target's own distribution, and loses nothing."""
    drafter, tokens = head(target), sequences(2, 9)
    assert drafter.taps == (6,)
    out = target.forward(tokens, taps=drafter.taps)
    torch.testing.assert_close(drafter.logits(out.hidden[:, :, 0], target), target.model(tokens).logits)
    assert not drafter.feature_loss(out.last[:1], out.last[0]).any()


@pytest.mark.parametrize(("tokens_weight", "features_weight"), [(0.1, 1.0), (0.5, 0.0), (0.2, 3.0)])
def test_the_loss_is_the_weighted_sum_of_features_and_tokens(target, tokens_weight, features_weight):
    """Σ_i decay^i Σ_{supervised x_{t+2+i}} (w_f · SmoothL1(f_{t+1+i}, f̂) + w_t · CE(p, q)), written as loops.

    Features are in units of their own scale.
    """
    drafter = head(target, steps=2, decay=0.5, loss={"soft_ce": tokens_weight}, feature_loss=features_weight)
    tokens = sequences(2, 12)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, 5:] = True
    supervised[1, 1:8] = True
    data = batch(target, tokens, supervised)
    result, outputs, logits = (
        drafter.loss(data),
        drafter.unroll(target, tokens, data.hidden),
        target.model(tokens).logits,
    )
    total, lost = 0.0, [0.0, 0.0]
    for step, row, t in product(range(2), range(2), range(12)):
        if t + 2 + step >= 12 or not supervised[row, t + 2 + step]:
            continue
        true, drafted = data.last[row, t + 1 + step], outputs[step][row, t]
        scale = true.square().mean().sqrt()
        d = ((drafted - true) / scale).abs()
        feature = torch.where(d < 1, d * d / 2, d - 0.5).mean().item() * features_weight
        p, log_q = logits[row, t + 1 + step].softmax(-1), target.lm_head(drafted).log_softmax(-1)
        total += 0.5**step * (feature - tokens_weight * (p * log_q).sum().item())
        lost[step] += feature
    assert result.total.item() == pytest.approx(total, rel=1e-4)
    if features_weight:
        assert [result.metrics[f"feature_d{i}"][0].item() for i in (1, 2)] == pytest.approx(lost, rel=1e-4)
    else:
        assert "feature_d1" not in result.metrics


def test_the_papers_settings_are_the_default(target):
    config = head(target).config
    assert (config.loss, config.feature_loss, config.noise, config.steps, config.num_layers) == (
        {"soft_ce": 0.1},
        1.0,
        0.1,
        1,
        1,
    )
    assert not any((config.norm_inputs, config.norm_first, config.fc_bias))


def test_noise_is_uniform_and_in_training_only(target):
    """Within ± `noise` times the feature's root mean square, its mean zero; none when a head is measured or decodes."""
    drafter, hidden = head(target, noise=0.1), target.forward(sequences(8, 50), taps=(6,)).hidden
    assert torch.equal(drafter.fuse(hidden), hidden[:, :, 0])
    torch.manual_seed(0)
    true = hidden[:, :, 0]
    added = (drafter.train().disturb(drafter.fuse(hidden)) - true) / true.square().mean(-1, keepdim=True).sqrt()
    assert added.abs().max() == pytest.approx(0.1, abs=1e-4)
    assert added.mean() == pytest.approx(0, abs=0.002)
    assert added.std() == pytest.approx(0.1 / 3**0.5, abs=0.001)
    assert torch.equal(head(target, noise=0.0).train().disturb(true), true)


@pytest.mark.parametrize("factor", [0.01, 20.0])
def test_noise_and_feature_loss_do_not_depend_on_the_scale_of_a_targets_features(target, factor):
    drafter, hidden = head(target, noise=0.1).train(), target.forward(sequences(2, 9), taps=(6,)).hidden
    torch.manual_seed(0)
    once = drafter.disturb(drafter.fuse(hidden))
    torch.manual_seed(0)
    torch.testing.assert_close(drafter.disturb(drafter.fuse(factor * hidden)), factor * once)
    drafted, true = torch.randn(3, 5, 32), torch.randn(5, 32)
    torch.testing.assert_close(
        drafter.feature_loss(factor * drafted, factor * true), drafter.feature_loss(drafted, true)
    )


def test_the_weights_have_the_published_names(target):
    """The paper's form: no norm before the first layer's attention, none after the last, no embeddings of its own."""
    attention, mlp = (
        (f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"),
        (f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    )
    assert set(head(target).state_dict()) == {"fc.weight", *attention, *mlp, "layers.0.post_attention_layernorm.weight"}
    assert head(target).fc.weight.shape == (32, 64)


def test_what_cannot_be_built_is_refused(target):
    for changes, message in (
        ({"hidden_size": 16}, "hidden_size 16 differs from the target's 32"),
        ({"target_layers": 4}, "target_layers 4 differs from the target's 6"),
    ):
        with pytest.raises(BadInputError, match=message):
            Eagle1.build(Eagle1Config(**changes), target)
    for changes, message in (
        ({"noise": -0.1}, "noise must be at least 0, got -0.1"),
        ({"feature_loss": -1.0}, "feature_loss must be at least 0, got -1.0"),
    ):
        with pytest.raises(BadInputError, match=message):
            Eagle1Config(**changes)
