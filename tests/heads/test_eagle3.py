"""EAGLE-3: what is trained is what is decoded, and both are what the paper says."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outrider.heads import Eagle3, Eagle3Config, TargetBatch
from outrider.heads.losses import DIVERGENCES
from outrider.target import BadInputError, Counts, Target

VOCAB, LENGTH = 64, 18


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=6))


def head(target: Target, **changes) -> Eagle3:
    """An untrained head, its norms not at 1, so that a norm in the wrong place shows."""
    torch.manual_seed(7)
    counts = torch.randint(0, 1000, (target.vocab_size,))
    drafter = Eagle3.build(Eagle3Config(**changes), target, counts).eval()
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return drafter.requires_grad_(False)


def sequences(rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def batch(target: Target, drafter: Eagle3, tokens: Tensor, supervised: Tensor | None = None) -> TargetBatch:
    out = target.forward(tokens, taps=drafter.taps)
    return TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool) if supervised is None else supervised, out.hidden, out.last)


VARIANTS = {
    "plain": {},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "other heads": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12},
    "pruned vocabulary": {"draft_vocab_size": 20},
    "normed taps": {"norm_taps": True},
    "normed output": {"norm_output": True},
    "3.1": {"norm_taps": True, "norm_output": True, "draft_vocab_size": 20, "taps": (0, 3, 6)},
}


# ------------------------------------------------------------ training is decoding


def decoded_logits(drafter: Eagle3, target: Target, tokens: Tensor, hidden: Tensor, starts: list[list[int]], steps: int) -> list[list[Tensor]]:
    """Logits `[B, V']` per round and depth under teacher forcing: row b's rounds begin behind `starts[b][round]` absorbed tokens."""
    rows = torch.arange(len(tokens))
    state, found = drafter.open(target, len(tokens), LENGTH + steps), []
    committed = torch.zeros(len(tokens), dtype=torch.long)
    for reached in torch.tensor(starts).T:
        counts = reached - committed
        # As in the decoder: rows are padded with drafts that were thrown away, here with another place's tokens.
        width = int(counts.max()) + 1
        where = (committed[:, None] + torch.arange(width)).clamp(max=tokens.shape[1] - 1)
        drafter.absorb(state, tokens[rows[:, None], where], hidden[rows[:, None], where], Counts.of(counts.tolist(), "cpu"))
        logits: list[Tensor] = []

        def choose(draft_logits: Tensor, token_ids: Tensor | None, reached: Tensor = reached, logits: list[Tensor] = logits) -> Tensor:
            logits.append(draft_logits)
            return tokens[rows, reached + len(logits)]

        drafter.propose(state, tokens[rows, reached], steps, choose)
        found.append(logits)
        committed = reached
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_unrolled_training_logits_are_the_decoders(target, variant):
    """fp32, ragged rows, several rounds: logits of step i at t = logits at depth i of a round that begins there."""
    steps = 4
    drafter, tokens = head(target, steps=steps, **VARIANTS[variant]), sequences()
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    trained = [drafter.logits(output) for output in drafter.unroll(target, tokens, hidden)]
    starts = [[1, 3, 4, 9, 10], [5, 6, 9, 12, 13], [2, 3, 6, 7, 11]]
    decoded = decoded_logits(drafter, target, tokens, hidden, starts, steps)
    for number, logits in enumerate(decoded):
        for row, step in product(range(3), range(steps)):
            expected = trained[step][row, starts[row][number] - 1]
            difference = (logits[step][row] - expected).abs().max()
            assert difference < 1e-5, f"round {number}, row {row}, step {step}: {difference:.1e}"


def test_every_step_changes_the_logits(target):
    """The comparison above is empty if feedback, tokens or taps have no effect."""
    drafter, tokens = head(target), sequences()
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    outputs = drafter.unroll(target, tokens, hidden)
    assert len(outputs) == 4
    assert all((a - b).abs().mean() > 0.01 for a, b in product(outputs, outputs) if a is not b)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_step_i_reads_tokens_up_to_t_plus_1_plus_i_and_features_up_to_t(target, step):
    drafter, tokens = head(target), sequences(1)
    hidden = target.forward(tokens, taps=drafter.taps).hidden
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


# ------------------------------------------------------------ attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_the_unrolled_steps_by_definition(target, kv_heads):
    """Written as loops: step 0 is causal attention; step i sees step 0's keys up to t and one key at t of each later step."""
    attention = head(target, num_key_value_heads=kv_heads).layer.self_attn
    length, own, naive_keys, naive_values = 6, [], [], []
    visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    for step in range(3):
        x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(step))
        angles = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(10 + step)).repeat(1, 1, 2)
        rotary = (angles.cos(), angles.sin())
        q, k, v = (layer(x).view(2, length, -1, 8).transpose(1, 2) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        if step:
            own.append(attention.entry(x, rotary))
        else:
            first = attention.entry(x, rotary)
        result = attention.attend(attention.query(x, rotary), first, visible, own)
        naive_keys.append(k.repeat_interleave(4 // kv_heads, 1))
        naive_values.append(v.repeat_interleave(4 // kv_heads, 1))
        mixed = torch.zeros_like(q)
        for t in range(length):
            keys = torch.cat([naive_keys[0][:, :, : t + 1], *(k[:, :, t : t + 1] for k in naive_keys[1:])], 2)
            values = torch.cat([naive_values[0][:, :, : t + 1], *(v[:, :, t : t + 1] for v in naive_values[1:])], 2)
            weights = ((q[:, :, t : t + 1] @ keys.transpose(-1, -2)) * 8**-0.5).softmax(-1)
            mixed[:, :, t : t + 1] = weights @ values
        torch.testing.assert_close(result, attention.o_proj(mixed.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)


def test_what_is_not_learned_is_only_attended_to(target):
    """Rows that begin at different places give what they give when unrolled whole."""
    drafter, tokens = head(target), sequences(3)
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    begin = torch.tensor([2, 0, 5])
    late = torch.tensor([4, 3, 5])
    whole = drafter.unroll(target, tokens, hidden)
    for begins in (begin, late):
        for step, output in enumerate(drafter.unroll(target, tokens, hidden, begins)):
            assert output.shape[1] == LENGTH - int(begins.min())
            for row, b in enumerate(begins.tolist()):
                here = LENGTH - b - 1 - step
                torch.testing.assert_close(output[row, :here], whole[step][row, b : b + here], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------ loss


@pytest.mark.parametrize("pruned", [0, 20])
@pytest.mark.parametrize(("loss", "prompt"), [("soft_ce", 0), ("soft_ce", 6), ("tv", 6)])
def test_the_loss_is_a_decayed_sum_over_supervised_positions(target, loss, prompt, pruned):
    """Σ_i decay^i Σ_{supervised x_{t+2+i}} D(p(· | x ≤ t+1+i), q_i(· | t)), written as loops; counts are those of supervised tokens."""
    drafter, tokens = head(target, steps=3, decay=0.5, loss=loss, draft_vocab_size=pruned), sequences(2, 9 + prompt)
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
            p, q = target_logits[row, predicted - 1], drafter.logits(outputs[step][row, t])
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
    chains = [[alphas[row, t, s] for s in range(3)] for row, t in {(r, t) for r, t, _ in alphas} if all((row, t, s) in alphas for s in range(3))]
    taus = [1 + a + a * b + a * b * c for a, b, c in chains]
    assert sums["tau"] == pytest.approx((sum(taus), len(taus)), rel=1e-4)


def test_padding_on_the_right_changes_nothing(target):
    drafter, tokens = head(target), sequences(2, 10)
    supervised = torch.arange(10).expand(2, -1) >= 4
    alone = drafter.loss(batch(target, drafter, tokens, supervised))
    padded = torch.nn.functional.pad(tokens, (0, 5))
    wide = drafter.loss(batch(target, drafter, padded, torch.nn.functional.pad(supervised, (0, 5))))
    torch.testing.assert_close(wide.total, alone.total)
    assert wide.count == alone.count
    for name, pair in alone.metrics.items():
        torch.testing.assert_close(wide.metrics[name], pair, msg=name)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_sequences_shorter_than_the_unrolled_steps_are_fine(target, length):
    drafter = head(target, steps=4)
    drafter.requires_grad_(True)
    result = drafter.loss(batch(target, drafter, sequences(2, length)))
    assert result.count.item() == 2 * max(0, length - 2)
    result.mean.backward()


def test_gradients_reach_every_weight_and_not_the_target(target):
    drafter = head(target, norm_taps=True, norm_output=True, draft_vocab_size=20).requires_grad_(True)
    drafter.loss(batch(target, drafter, sequences())).mean.backward()
    assert [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    assert all(weight.grad is None for weight in target.model.parameters())


def test_a_few_steps_of_training_lower_the_loss(target):
    drafter = head(target, steps=2).requires_grad_(True).train()
    data = batch(target, drafter, sequences(4))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = drafter(data).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# ------------------------------------------------------------ making


def test_default_taps_are_eagle_3s(tiny_llama):
    for layers, taps in ((4, (2, 2, 1)), (6, (2, 3, 3)), (12, (2, 6, 9)), (32, (2, 16, 29))):
        model = tiny_llama(layers=layers, hidden=8, num_attention_heads=1, num_key_value_heads=1)
        assert Eagle3.build(Eagle3Config(), Target(model)).taps == taps


def test_the_draft_vocabulary_is_the_most_frequent_tokens(target):
    counts = torch.zeros(VOCAB, dtype=torch.long)
    counts[[40, 3, 17]] = torch.tensor([5, 9, 7])
    drafter = Eagle3.build(Eagle3Config(draft_vocab_size=4), target, counts)
    assert drafter.token_ids.tolist() == [0, 3, 17, 40]  # the first of the unseen ones fills up
    assert torch.equal(drafter.lm_head.weight, target.model.lm_head.weight[[0, 3, 17, 40]])


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
    with pytest.raises(BadInputError, match="steps must be at least 1, got 0"):
        Eagle3Config(steps=0)
    with pytest.raises(BadInputError, match="unknown key 'step'; did you mean 'steps'"):
        Eagle3Config.from_dict({"step": 3})
