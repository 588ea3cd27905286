"""EAGLE-3 is what the paper says. (That what is trained is what is decoded: test_eagle.py.)"""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from outrider.common import BadInputError
from outrider.heads import Eagle3, Eagle3Config, load_drafter
from outrider.heads.divergences import DIVERGENCES
from outrider.targets import Target

from .conftest import batch

VOCAB = 64


def head(target: Target, **changes) -> Eagle3:
    torch.manual_seed(7)
    return (
        Eagle3.build(Eagle3Config(**changes), target, torch.randint(0, 1000, (target.vocab_size,)))
        .eval()
        .requires_grad_(False)
    )


@pytest.mark.parametrize("pruned", [0, 20])
@pytest.mark.parametrize(("loss", "prompt"), [("soft_ce", 0), ("soft_ce", 6), ("tv", 6)])
def test_the_loss_is_a_decayed_sum_over_supervised_positions(target, loss, prompt, pruned):
    """Σ_i decay^i Σ_{supervised x_{t+2+i}} D(p(· | x ≤ t+1+i), q_i(· | t)), written as loops.

    Counts are those of supervised tokens.
    """
    drafter = head(target, steps=3, decay=0.5, loss=loss, draft_vocab_size=pruned)
    tokens = torch.randint(0, VOCAB, (2, 9 + prompt), generator=torch.Generator().manual_seed(1))
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, prompt + 4 :] = True
    supervised[1, prompt + 1 : prompt + 6] = True
    data = batch(target, drafter, tokens, supervised)
    result = drafter.loss(data)
    kept = drafter.token_ids
    target_logits, total, alphas = target.model(tokens).logits, 0.0, {}
    outputs = drafter.unroll(target, tokens, data.hidden)
    for step, row, t in product(range(3), range(2), range(9 + prompt)):
        predicted = t + 2 + step
        if predicted < 9 + prompt and supervised[row, predicted]:
            p, q = target_logits[row, predicted - 1], drafter.logits(outputs[step][row, t], target)
            total += 0.5**step * DIVERGENCES[loss](p[kept].log_softmax(-1), q.log_softmax(-1)).item()
            alphas[row, t, step] = torch.minimum(p.softmax(-1)[kept], q.softmax(-1)).sum().item()
    assert result.total.item() == pytest.approx(total, rel=1e-4)
    count = 5 + (5 if prompt else 4)  # the token at place 1 has no pair (f, x) before it
    assert result.count.item() == count
    assert result.mean.item() == pytest.approx(total / count, rel=1e-4)
    sums = {name: (s.item(), c.item()) for name, (s, c) in result.metrics.items()}
    assert sums["loss_d1"][1] == count
    first = [a for (_, _, step), a in alphas.items() if step == 0]
    assert sums["alpha_d1"] == pytest.approx((sum(first), len(first)), rel=1e-4)
    chains = [
        [alphas[row, t, s] for s in range(3)]
        for row, t in {(r, t) for r, t, _ in alphas}
        if all((row, t, s) in alphas for s in range(3))
    ]
    taus = [1 + a + a * b + a * b * c for a, b, c in chains]
    assert sums["tau"] == pytest.approx((sum(taus), len(taus)), rel=1e-4)


# ------------------------------------------------------------ making


def test_default_taps_are_eagle_3s_and_differ_in_targets_of_few_layers(tiny_llama):
    for layers, taps in ((4, (1, 2, 3)), (6, (1, 3, 5)), (7, (2, 3, 4)), (12, (2, 6, 9)), (32, (2, 16, 29))):
        model = tiny_llama(layers=layers, hidden=8, num_attention_heads=1, num_key_value_heads=1)
        assert Eagle3.build(Eagle3Config(), Target(model)).taps == taps


def test_taps_are_normed_one_by_one_or_together():
    with pytest.raises(BadInputError, match="norm_taps and norm_before_fc are two ways"):
        Eagle3Config(norm_taps=True, norm_before_fc=True)


def test_the_draft_vocabulary_is_the_most_frequent_tokens(target):
    counts = torch.zeros(VOCAB, dtype=torch.long)
    counts[[40, 3, 17]] = torch.tensor([5, 9, 7])
    drafter = Eagle3.build(Eagle3Config(draft_vocab_size=4), target, counts)
    assert drafter.token_ids.tolist() == [0, 3, 17, 40]  # the first of the unseen ones fills up
    assert torch.equal(drafter.lm_head.weight, target.model.lm_head.weight[[0, 3, 17, 40]])


def test_a_head_saved_before_there_were_more_layers_loads(target, tmp_path):
    """Its config does not say how many it has, and its weights' names are those of one layer."""
    head(target).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("num_layers") == 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_drafter(tmp_path, target)
    attention, mlp = (
        (f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"),
        (f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    )
    norms = (f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    assert set(loaded.state_dict()) == {
        "fc.weight",
        *attention,
        *mlp,
        *norms,
        "norm.weight",
        "lm_head.weight",
        "token_ids",
    }


def test_what_cannot_be_built_is_refused(target, tiny_llama):
    for changes, message in (
        ({"draft_vocab_size": 20}, "needs token counts"),
        ({"draft_vocab_size": 65}, "65 exceeds the target's vocabulary of 64"),
        ({"hidden_size": 16}, "hidden_size 16 differs from the target's 32"),
    ):
        with pytest.raises(BadInputError, match=message):
            Eagle3.build(Eagle3Config(**changes), target)
    with pytest.raises(BadInputError, match="3 layers has no default taps"):
        Eagle3.build(Eagle3Config(), Target(tiny_llama(layers=3)))


def test_a_head_is_as_wide_as_the_widest_layer_of_its_target(target):
    """Gemma 3n has a size of the MLP for each layer."""
    vars(target.config)["intermediate_size"] = [48, 64, 48, 48, 48, 48]
    assert head(target).config.intermediate_size == 64
