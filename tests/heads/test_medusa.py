"""Medusa and Hydra: new heads are the target's output, and what is trained and decoded is what the papers say."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.common import IncompatibleError
from outrider.decode import Control, Costs, Decoder, Plan, Tree
from outrider.heads import HEADS, Medusa, MedusaConfig
from outrider.heads.losses import divergence
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..conftest import installed
from .conftest import VOCAB, batch, check_metrics, made, opened, sequences

LAYERS = 4  # of the target
KINDS: dict[str, Any] = {name: HEADS[name] for name in installed({"medusa": None, "hydra": None})}
VARIANTS = {
    "own outputs": {},
    "shared output": {"share_lm_head": True},
    "pruned": {"draft_vocab_size": 20, "num_layers": 2, "num_heads": 3},
}
CASES = list(product(KINDS, VARIANTS))
MORE = [(kind, "own outputs", {"norm_embeddings": True}) for kind in KINDS if kind == "hydra"]
HYDRAS = [*((kind, variant, {}) for kind, variant in CASES), *MORE]


def build(target: Target, kind: str, new: bool = False, **changes) -> Medusa:
    """Heads of that kind; with random weights, unless they shall be as new."""
    return made(KINDS[kind], target, {} if new else {"": 0.2}, **changes)


def drafted_logits(drafter: Medusa, target: Target, text: list[int], drafts: list[int]) -> list[Tensor]:
    """Logits `[V']` of each head in a round whose root is the last token of `text`, along the chain of `drafts`."""
    state = opened(drafter, target, [text[:-1]])
    found = [state.prefill(torch.tensor(text[-1:]))[0]]
    return found + [state.decode(torch.tensor([[token]]))[0, 0] for token in drafts]


def own_logits(target: Target, text: list[int], kept: Tensor | None = None) -> Tensor:
    """Return the target's after the token before the root, as a product of that shape rounds."""
    return target.lm_head(target.forward(torch.tensor([text[:-1]]), logits=False).last[:, -1], kept)[0]


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_new_heads_give_the_targets_own_logits_bit_for_bit(target, kind, variant):
    drafter, text = build(target, kind, new=True, **VARIANTS[variant]), sequences(1, 9)[0].tolist()
    own = own_logits(target, text, drafter.output_ids)
    for logits in drafted_logits(drafter, target, text, [5, 9, 2][: drafter.config.num_heads - 1]):
        assert torch.equal(logits, own)


@pytest.mark.parametrize(
    "changes", [{"logit_scale": 0.25}, {"logits_scaling": 3.0}, {"final_logit_softcapping": 2.0}], ids=str
)
def test_new_heads_have_the_targets_own_scaling(target, changes):
    for name, value in changes.items():
        setattr(target.model.config, name, value)
    drafter, text = build(target, "medusa", new=True), sequences(1, 9)[0].tolist()
    assert torch.equal(drafted_logits(drafter, target, text, [])[0], own_logits(target, text))


def test_shared_outputs_are_the_targets_and_are_neither_trained_nor_saved(target):
    own, shared = build(target, "medusa"), build(target, "medusa", share_lm_head=True)
    assert {name for name in own.state_dict() if "lm_head" in name} == {f"heads.{k}.lm_head.weight" for k in range(4)}
    assert not [name for name in shared.state_dict() if "lm_head" in name]


def by_definition(drafter: Medusa, target: Target, tokens: Tensor, row: int, t: int, k: int) -> Tensor:
    """Return `W2 (x + SiLU(W1 x…))` of head k (from 1) on h_t, and for Hydra on the embeddings of x_{t+1} … x_{t+k}."""
    x = target.forward(tokens[row : row + 1]).last[0, t]
    given = [target.embed(tokens[row, t + i]) for i in range(1, k + 1)] if drafter.name == "hydra" else []
    if getattr(drafter.config, "norm_embeddings", False):
        given = [e / (e.square().mean() + 1e-6).sqrt() for e in given]
    head = drafter.heads[k - 1]
    for number, block in enumerate([head.first, *head.others]):
        z = block.linear.weight @ torch.cat([x, *(given if number == 0 else [])])
        x = x + z * z.sigmoid()
    if head.lm_head is not None:
        return head.lm_head.weight @ x
    return target.model.lm_head.weight[drafter.token_ids] @ x


@both_precisions
@pytest.mark.parametrize(("kind", "variant", "more"), HYDRAS)
def test_training_logits_are_the_decoders_and_the_papers(target, kind, variant, more):
    """Head k at t is in the loss, for x_{t+1+k}, in a round with the root x_{t+1}, and by hand the same, in fp32."""
    drafter, tokens = build(target, kind, **VARIANTS[variant], **more), sequences()
    rows, places = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([6, 12, 17, 9, 5])
    outputs, here = drafter.outputs(batch(target, drafter, tokens), rows, places)
    assert here.all()
    predicted = list(enumerate(zip(rows.tolist(), places.tolist(), strict=True)))
    for k, (i, (row, place)) in product(range(drafter.config.num_heads), predicted):
        t = place - 2 - k
        trained = drafter.lm_head(k, target)(outputs[k, i])
        decoded = drafted_logits(drafter, target, tokens[row, : t + 2].tolist(), tokens[row, t + 2 : place].tolist())[k]
        assert_same(trained, decoded)
        assert_same(trained, by_definition(drafter, target, tokens, row, t, k + 1))


def test_hydra_reads_the_root_and_the_drafts_and_medusa_does_not(target):
    text, other = sequences(1, 9)[0].tolist(), [*sequences(1, 9)[0].tolist()[:-1], 3]
    for kind in KINDS:
        differs = kind == "hydra"
        drafter = build(target, kind)
        plain = drafted_logits(drafter, target, text, [5, 9, 2])
        cases = [(0, text, [6, 9, 2]), (1, text, [5, 8, 2]), (2, text, [5, 9, 1]), (-1, other, [5, 9, 2])]
        for place, root, drafts in cases:
            found = drafted_logits(drafter, target, root, drafts)
            moved = [not torch.equal(a, b) for a, b in zip(plain, found, strict=True)]
            assert moved == [differs and k > place for k in range(4)]


@both_precisions
@pytest.mark.parametrize("name", ["hard_ce", "forward_kl"])
@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_the_loss_is_a_decayed_sum_over_supervised_positions(target, kind, variant, name):
    """Σ_k decay^(k−1) Σ_{supervised x_{t+1+k}} loss_k, written as loops; counts are those of supervised tokens."""
    drafter, tokens = build(target, kind, decay=0.5, loss=name, **VARIANTS[variant]), sequences(2, 11)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[0, 4:] = True
    supervised[1, 1:6] = True
    result = drafter.loss(batch(target, drafter, tokens, supervised))
    kept = drafter.token_ids
    total = 0.0
    target_logits = target.model(tokens).logits
    losses = []
    alphas = {}
    for k, row, t in product(range(1, drafter.config.num_heads + 1), range(2), range(11)):
        predicted = t + 1 + k
        if predicted < 11 and supervised[row, predicted]:
            p = target_logits[row, predicted - 1]
            log_q = by_definition(drafter, target, tokens, row, t, k).log_softmax(-1)
            value = (p[kept].softmax(-1) * (p[kept].log_softmax(-1) - log_q)).sum().item()
            if name == "hard_ce":
                value = -log_q[kept == tokens[row, predicted]].sum().item()  # 0 for a token that is not kept
            total += 0.5 ** (k - 1) * value
            losses += [value] if k == 1 else []
            alphas[row, t, k - 1] = torch.minimum(p.softmax(-1)[kept], log_q.exp()).sum().item()
    assert_same(result.total, total)
    assert result.count.item() == 7 + 4, "no head predicts the token at place 1"
    assert_same([x.item() for x in result.metrics["loss_d1"]], [sum(losses), len(losses)])
    check_metrics(result.metrics, alphas, drafter.config.num_heads)


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_gradients_reach_every_weight_of_new_heads_and_not_the_target(target, kind, variant):
    drafter = build(target, kind, new=True, **VARIANTS[variant]).requires_grad_(True)
    drafter.loss(batch(target, drafter, sequences())).mean.backward()
    assert [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    assert all(weight.grad is None for weight in target.model.parameters())


def test_a_head_learns_nothing_from_another_heads_loss(target):
    """With the first head's tokens alone supervised, only it moves: each head has an output and a place of its own."""
    drafter = build(target, "medusa").requires_grad_(True)
    tokens = sequences(2, 6)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[:, 2] = True
    drafter.loss(batch(target, drafter, tokens, supervised)).total.backward()
    learned = [name for name, weight in drafter.named_parameters() if weight.grad is not None and weight.grad.any()]
    assert {name.split(".")[1] for name in learned} == {"0"}


PROMPTS = [sequences(1, n)[0].tolist() for n in (5, 1, 9, 3)]
DEEP = {
    "chain": Plan(6),
    "dynamic tree": Plan(6, width=3, nodes=9),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 5, 6))),
    "control": Plan(6, control=Control(Costs(verify=((0, 1.0), (8, 1.1)), draft=(0.0, 0.1)), (0.9,) * 6)),
}


@pytest.mark.parametrize("plan", DEEP)
@pytest.mark.parametrize("kind", KINDS)
def test_a_deeper_plan_is_cut_to_the_number_of_heads(target, kind, plan):
    drafter = build(target, kind, num_heads=3)
    for static in (False, True):
        out = Decoder(target, drafter, static=static).generate(PROMPTS, 20, plan=DEEP[plan])
        assert out.tokens == Decoder(target).generate(PROMPTS, 20).tokens
        cut = Decoder(target, drafter).generate(PROMPTS, 20, plan=DEEP[plan].up_to(3))
        assert out.rounds == cut.rounds
        assert DEEP[plan].up_to(3).depth == 3
        assert max(r.accepted for rounds in out.rounds for r in rounds) <= 3


def test_heads_that_know_the_text_are_accepted_to_the_last(target):
    """Overfitted on one text, greedy rounds keep nearly everything: depth d is head d's, and not a neighbour's."""
    text = Decoder(target).generate(PROMPTS[:1], 40, ignore_eos=True).tokens[0]
    tokens = torch.tensor([PROMPTS[0] + text])
    for kind in KINDS:
        drafter = build(target, kind, new=True).requires_grad_(True)
        data, optimizer = batch(target, drafter, tokens), torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            drafter.loss(data).mean.backward()
            optimizer.step()
        out = Decoder(target, drafter).generate(PROMPTS[:1], 40, plan=Plan(4), ignore_eos=True)
        assert out.tokens[0] == text
        assert out.stats.tau > 4.5


def test_a_targets_output_with_a_bias_is_shared_or_refused(target):
    target.model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB), requires_grad=False)
    with pytest.raises(IncompatibleError, match="has a bias, which copies of it lack; set share_lm_head"):
        build(target, "medusa")
    drafter, text = build(target, "medusa", new=True, share_lm_head=True), PROMPTS[0]
    assert torch.equal(drafted_logits(drafter, target, text, [])[0], own_logits(target, text))


def test_the_default_loss_is_medusas():
    assert divergence(MedusaConfig().loss) == divergence("hard_ce")


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_trains_the_hidden_states_that_heads_read_and_not_those_they_are_compared_with(target, kind):
    """Head k predicts the token at 9 from place 7 − k; the target's own stands at place 8."""
    drafter, tokens = build(target, kind, loss="soft_ce", num_heads=3), sequences(1, 12)
    seen = batch(target, drafter, tokens, torch.arange(12).expand(1, -1) == 9)
    seen.last.requires_grad_(True)
    drafter.loss(seen).total.backward()
    assert seen.last.grad.abs().sum(-1)[0].nonzero()[:, 0].tolist() == [5, 6, 7]
