"""Heads that feed on their own output: what is trained is what is decoded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import Eagle1, Eagle1Config, Eagle3, Eagle3Config, decoder_layer
from outrider.heads.decoder_layer import FusedLayer
from outrider.heads.eagle import FeatureDrafter
from outrider.heads.unrolled_attention import attend
from outrider.targets import Target

from .conftest import batch

VOCAB, LENGTH = 64, 18
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9, 3)]


def rough(drafter: FeatureDrafter) -> FeatureDrafter:
    """Its norms not at 1, so that a norm in the wrong place shows."""
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return drafter.eval().requires_grad_(False)


def eagle3(target: Target, **changes) -> FeatureDrafter:
    torch.manual_seed(7)
    return rough(
        Eagle3.build(Eagle3Config(**{"steps": 4} | changes), target, torch.randint(0, 1000, (target.vocab_size,)))
    )


def eagle1(target: Target, **changes) -> FeatureDrafter:
    torch.manual_seed(7)
    return rough(Eagle1.build(Eagle1Config(**{"steps": 4} | changes), target))


Maker = Callable[..., FeatureDrafter]
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
    "eagle3, two layers, normed output, pruned vocabulary": (
        eagle3,
        {"num_layers": 2, "norm_output": True, "draft_vocab_size": 20},
    ),
    "eagle3.1, three layers, one key head": (
        eagle3,
        {"num_layers": 3, "norm_taps": True, "norm_output": True, "num_key_value_heads": 1},
    ),
    "eagle3, two layers, all of its norms": (
        eagle3,
        {"num_layers": 2, "norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    ),
    "eagle1": (eagle1, {}),
    "eagle1, normed inputs": (eagle1, {"norm_inputs": True}),
    "eagle1, normed first layer": (eagle1, {"norm_first": True, "num_key_value_heads": 1}),
    "eagle1, bias": (eagle1, {"fc_bias": True}),
    "eagle1, two layers": (eagle1, {"num_layers": 2}),
    "eagle1, three layers, all norms": (eagle1, {"num_layers": 3, "norm_inputs": True, "norm_first": True}),
}


@pytest.fixture(params=VARIANTS)
def drafter(request, target) -> FeatureDrafter:
    make, changes = VARIANTS[request.param]
    return make(target, **changes)


def sequences(rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def features(target: Target, drafter: FeatureDrafter, tokens: Tensor) -> Tensor:
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    assert hidden is not None
    return hidden


# ------------------------------------------------------------ training is decoding


def test_unrolled_training_logits_are_the_decoders(target, drafter, decoded_logits):
    """fp32, ragged rows, several rounds: logits of step i at t = logits at depth i of a round that begins there."""
    steps, tokens = 4, sequences()
    trained = [
        drafter.logits(output, target) for output in drafter.unroll(target, tokens, features(target, drafter, tokens))
    ]
    starts = [[1, 3, 4, 9, 10], [5, 6, 9, 12, 13], [2, 3, 6, 7, 11]]
    for number, logits in enumerate(decoded_logits(drafter, target, tokens, starts, steps)):
        for row, step in product(range(3), range(steps)):
            expected = trained[step][row, starts[row][number] - 1]
            difference = (logits[step][row] - expected).abs().max()
            assert difference < 1e-5, f"round {number}, row {row}, step {step}: {difference:.1e}"


def test_a_head_whose_weights_have_changed_decodes_with_the_new_ones(target, drafter, decoded_logits):
    """Weights are put together once for all requests, until one of them changes."""
    tokens = sequences()
    hidden = features(target, drafter, tokens)
    drafter.open(target, 3, LENGTH + 4)
    for name in [name for name, _ in drafter.named_parameters()]:
        with torch.no_grad():
            drafter.get_parameter(name).mul_(1.1)
        first = drafter.logits(drafter.unroll(target, tokens, hidden)[0], target)
        decoded = decoded_logits(drafter, target, tokens, [[4], [7], [2]], 1)[0][0]
        torch.testing.assert_close(
            decoded, first[torch.arange(3), torch.tensor([3, 6, 1])], rtol=1e-4, atol=1e-4, msg=name
        )


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
    before, at = drafter.unroll(target, tokens, hidden)[step], 9
    other = tokens.clone()
    other[0, at] = (other[0, at] + 1) % VOCAB
    changed = (drafter.unroll(target, other, hidden)[step] - before).abs().amax(-1)[0] > 0
    # Tokens x_1 … x_{t+1} are at step 0's entries; step j adds x_{t+1+j}. Index t sees place 9 from t + 1 + step on.
    assert changed.tolist()[: LENGTH - 1 - step] == [t + 1 + step >= at for t in range(LENGTH - 1 - step)]
    hidden = hidden.clone()
    hidden[0, at] += 1
    changed = (drafter.unroll(target, tokens, hidden)[step] - before).abs().amax(-1)[0] > 0
    assert changed.tolist() == [t >= at for t in range(LENGTH)]


def test_what_is_not_learned_is_only_attended_to(target, drafter):
    """Rows that begin at different places give what they give when unrolled whole."""
    tokens = sequences(3)
    hidden = features(target, drafter, tokens)
    whole = drafter.unroll(target, tokens, hidden)
    for begins in (torch.tensor([2, 0, 5]), torch.tensor([4, 3, 5])):
        for step, output in enumerate(drafter.unroll(target, tokens, hidden, begins)):
            assert output.shape[1] == LENGTH - int(begins.min())
            for row, b in enumerate(begins.tolist()):
                here = LENGTH - b - 1 - step
                torch.testing.assert_close(output[row, :here], whole[step][row, b : b + here], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", BOTH)
def test_chains_and_trees_write_the_targets_text_in_rounds_of_fixed_shapes_too(target, name, layers):
    """Ragged, one request after the other in the same memory."""
    drafter, greedy = BOTH[name](target, num_layers=layers), Decoder(target).generate(PROMPTS, 16).tokens
    usual, fixed = (Decoder(target, drafter, static=static) for static in (False, True))
    for plan in (Plan(3), Plan(3, width=2), Plan(tree=Tree((-1, -1, 0, 0, 1)))):
        for sampling in (Sampling(), Sampling(1.0, seed=3)):
            expected, found = (decoder.generate(PROMPTS, 16, sampling, plan) for decoder in (usual, fixed))
            assert found.tokens == expected.tokens
            assert found.rounds == expected.rounds
            assert sampling.temperature or found.tokens == greedy


def test_memory_is_what_is_allocated(target, drafter):
    """Caches of all layers, and what decoding copies, once for all requests."""
    told = drafter.state_bytes(target, 3, 50, 2)
    session = drafter.open(target, 3, 50, 2)
    assert told == session.cache.num_bytes() + sum(t.untyped_storage().nbytes() for t in session.layers.tensors())
    assert drafter.state_bytes(target, 3, 50, 2) == session.cache.num_bytes()


# ------------------------------------------------------------ layers


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_the_unrolled_steps_by_definition(target, kv_heads):
    """Written as loops: step 0 is causal; step i sees step 0's keys up to t and one key at t of each later step."""
    drafter = eagle3(target, num_key_value_heads=kv_heads)
    attention, layer = drafter.layers[0].self_attn, FusedLayer(drafter.layers[0], drafter.config)
    length, own, naive_keys, naive_values = 6, [], [], []
    for step in range(3):
        x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(step))
        angles = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(10 + step)).repeat(1, 1, 2)
        rotary = (angles.cos(), angles.sin())
        q, k, v = (
            part(x).view(2, length, -1, 8).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        projected = torch.cat([part(x) for part in (attention.q_proj, attention.k_proj, attention.v_proj)], -1)
        query, *pair = layer.split(projected, decoder_layer.angles(lambda *_, rotary=rotary: rotary, x, None))
        entry = tuple(repeat_kv(part, 4 // kv_heads) for part in pair)
        if step:
            own.append(entry)
        else:
            first = entry
        result = attention.o_proj(attend(query, first, [0, 0], own).transpose(1, 2).flatten(2))
        naive_keys.append(k.repeat_interleave(4 // kv_heads, 1))
        naive_values.append(v.repeat_interleave(4 // kv_heads, 1))
        mixed = torch.zeros_like(q)
        for t in range(length):
            keys = torch.cat([naive_keys[0][:, :, : t + 1], *(k[:, :, t : t + 1] for k in naive_keys[1:])], 2)
            values = torch.cat([naive_values[0][:, :, : t + 1], *(v[:, :, t : t + 1] for v in naive_values[1:])], 2)
            weights = ((q[:, :, t : t + 1] @ keys.transpose(-1, -2)) * 8**-0.5).softmax(-1)
            mixed[:, :, t : t + 1] = weights @ values
        torch.testing.assert_close(result, attention.o_proj(mixed.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)


def llama(drafter: FeatureDrafter, prefixes: list[str]) -> LlamaModel:
    """transformers' own model of a head's layers with these prefixes, its final norm without weights."""
    config = drafter.config
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    model = LlamaModel(
        LlamaConfig(
            **{s: getattr(config, s) for s in sizes},
            rope_parameters=config.rope_parameters,
            num_hidden_layers=len(prefixes),
        )
    )
    own, theirs = drafter.state_dict(), model.state_dict()
    for index, prefix in enumerate(prefixes):
        theirs |= {
            f"layers.{index}.{name.removeprefix(prefix)}": weight
            for name, weight in own.items()
            if name.startswith(prefix)
        }
    model.load_state_dict(theirs)
    return model.eval()


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_of_normed_layers_step_0_is_transformers_own_causal_model(target, layers):
    drafter, tokens = eagle1(target, num_layers=layers, norm_first=True), sequences()
    hidden = features(target, drafter, tokens)
    joined = drafter.fc(torch.cat([target.embed(tokens.roll(-1, 1)), hidden[:, :, 0]], -1))
    model = llama(drafter, [f"layers.{i}." for i in range(layers)])
    with torch.no_grad():
        expected = model(inputs_embeds=joined).last_hidden_state
    torch.testing.assert_close(normed(drafter.unroll(target, tokens, hidden)[0]), expected, rtol=1e-4, atol=1e-5)


def test_of_eagle_3s_layers_only_the_first_reads_embeddings(target):
    """Step 0 of two layers = transformers' own layer behind a head of the first alone."""
    both, tokens = eagle3(target, num_layers=2), sequences()
    alone = eagle3(target)
    alone.load_state_dict(
        {name: weight for name, weight in both.state_dict().items() if not name.startswith("layers.1.")}
    )
    hidden = features(target, both, tokens)
    with torch.no_grad():
        expected = llama(both, ["layers.1."])(inputs_embeds=alone.unroll(target, tokens, hidden)[0]).last_hidden_state
    torch.testing.assert_close(normed(both.unroll(target, tokens, hidden)[0]), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------ loss


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", BOTH)
def test_padding_on_the_right_changes_nothing(target, name, layers):
    drafter, tokens = BOTH[name](target, num_layers=layers), sequences(2, 10)
    supervised = torch.arange(10).expand(2, -1) >= 4
    alone = drafter.loss(batch(target, drafter, tokens, supervised))
    padded = torch.nn.functional.pad(tokens, (0, 5))
    wide = drafter.loss(batch(target, drafter, padded, torch.nn.functional.pad(supervised, (0, 5))))
    torch.testing.assert_close(wide.total, alone.total)
    assert wide.count == alone.count
    for metric, pair in alone.metrics.items():
        torch.testing.assert_close(wide.metrics[metric], pair, msg=metric)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", BOTH)
def test_sequences_shorter_than_the_unrolled_steps_are_fine(target, name, length):
    drafter = BOTH[name](target, steps=4)
    drafter.requires_grad_(True)
    result = drafter.loss(batch(target, drafter, sequences(2, length)))
    assert result.count.item() == 2 * max(0, length - 2)
    result.mean.backward()


def test_gradients_reach_every_weight_and_not_the_target(target, drafter):
    drafter.requires_grad_(True).train()
    drafter.loss(batch(target, drafter, sequences())).mean.backward()
    assert [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    assert all(weight.grad is None for weight in target.model.parameters())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", BOTH)
def test_a_few_steps_of_training_lower_the_loss(target, name, layers):
    drafter = BOTH[name](target, steps=2, num_layers=layers).requires_grad_(True).train()
    data = batch(target, drafter, sequences(4))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(24):
        loss = drafter(data).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", BOTH)
def test_heads_of_attention_need_not_divide_the_hidden_size(name):
    """A target may have 6 of size 8 on a hidden size of 32."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    target = Target(
        Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, initializer_range=0.2, **sizes)).eval().requires_grad_(False)
    )
    drafter = BOTH[name](target, steps=2)
    assert drafter.config.num_attention_heads == 6
    drafter.requires_grad_(True).loss(batch(target, drafter, sequences())).mean.backward()
    prompts = [row[:n].tolist() for row, n in zip(sequences(2), (5, 9), strict=True)]
    assert (
        Decoder(target, drafter.eval()).generate(prompts, 8, plan=Plan(3)).tokens
        == Decoder(target).generate(prompts, 8).tokens
    )


@pytest.mark.parametrize("config", [Eagle1Config, Eagle3Config])
def test_settings_that_make_no_sense_are_refused(config):
    with pytest.raises(BadInputError, match=r"head_dim must be even, .* got 5"):
        config(head_dim=5)
    with pytest.raises(
        BadInputError, match="num_attention_heads must be a multiple of num_key_value_heads, got 6 and 4"
    ):
        config(num_attention_heads=6, num_key_value_heads=4)
    for name in ("steps", "num_layers"):
        with pytest.raises(BadInputError, match=f"{name} must be at least 1, got 0"):
            config(**{name: 0})
    with pytest.raises(BadInputError, match="unknown key 'step'; did you mean 'steps'"):
        config.from_dict({"step": 3})
