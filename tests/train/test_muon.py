"""Muon and AdamW as one optimizer: each parameter moves as under its own, and a training resumes to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from outrider.heads import DraftModel, Eagle3
from outrider.train import muon, train
from outrider.train.muon import MuonAdamW, orthogonalised, split_parameters

from .conftest import EAGLE3, built, halved, weights

TIED = {"type": "draft_model", "model": {"num_hidden_layers": 1, "tie_word_embeddings": True}}


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    known = {id(p): n for n, p in model.named_parameters()}
    return {known[id(p)] for p in parameters}


def test_the_matrices_are_those_inside_of_the_network(target):
    head = built(target, type="eagle3", norm_taps=True)
    assert isinstance(head, Eagle3)
    matrices, others = (names(head, p) for p in split_parameters(head))
    layer = [*(f"self_attn.{x}" for x in "qkvo"), "mlp.gate", "mlp.up", "mlp.down"]
    assert matrices == {"fc.weight"} | {f"layers.0.{part}_proj.weight" for part in layer}
    assert {"lm_head.weight", "norm.weight", "tap_norms.0.weight"} <= others
    assert matrices | others == {n for n, _ in head.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_a_draft_model_are_not_matrices(target, tied):
    model = built(target, type="draft_model", model={"num_hidden_layers": 1, "tie_word_embeddings": tied})
    assert isinstance(model, DraftModel)
    matrices, others = (names(model, p) for p in split_parameters(model))
    assert matrices == {n for n, _ in model.named_parameters() if "_proj" in n}
    ends = {"model.model.embed_tokens.weight"} | (set() if tied else {"model.lm_head.weight"})
    assert {n for n in others if "norm" not in n} == ends


def test_what_is_frozen_is_not_moved(target):
    head = built(target, type="eagle3")
    head.fc.requires_grad_(False)
    assert not any(p is head.fc.weight for part in split_parameters(head) for p in part)


def test_directions_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((6, 24), (24, 6), (9, 9)):
        matrix = torch.randn(shape, dtype=torch.float64)
        moved = orthogonalised(matrix, (3.4445, -4.775, 2.0315), 5)
        values = torch.linalg.svdvals(moved)
        assert values.min() > 0.6
        assert values.max() < 1.3
        library = torch.optim._muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
        assert (moved - library).norm() < 0.05 * moved.norm()  # bfloat16, five iterations


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_each_part_moves_as_under_its_own_optimizer_and_a_schedule_reaches_both(monkeypatch, has_bfloat16):
    monkeypatch.setattr(muon, "cpu_multiplies_bfloat16", lambda: has_bfloat16)
    if not has_bfloat16:
        monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", orthogonalised)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    apart = copy.deepcopy(model)
    matrices, others = split_parameters(model)
    both = MuonAdamW(matrices, others, lr=0.1, weight_decay=0.01)
    matrices, others = split_parameters(apart)
    alone = [
        torch.optim.Muon(matrices, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.1, weight_decay=0.0),  # all of these are biases, which do not decay
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (both, *alone)]
    for _ in range(4):
        x = torch.randn(16, 6)
        for module, optimizers in ((model, [both]), (apart, alone)):
            module(x).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    for own, other in zip(model.parameters(), apart.parameters(), strict=True):
        assert torch.equal(own, other)
    assert [group["lr"] for group in both.param_groups] == pytest.approx([0.1 / 5] * 2)


def test_its_state_is_saved_and_restored():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 8), torch.randn(16, 6)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

    optimizer = MuonAdamW(*split_parameters(model), lr=0.1)
    steps(model, optimizer)
    copied = copy.deepcopy(model)
    restored = MuonAdamW(*split_parameters(copied), lr=0.5)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(optimizer.state_dict()["state"]) == 2
    steps(model, optimizer)
    steps(copied, restored)
    assert torch.equal(model.weight, copied.weight)
    assert torch.equal(model.bias, copied.bias)


@pytest.mark.parametrize("drafter", [EAGLE3, TIED], ids=["eagle3", "draft_model"])
def test_a_training_with_muon_resumes_bit_for_bit(recipe, target, drafter):
    whole = train(recipe("whole", drafter, optim="muon"), target)
    halved(whole)
    assert weights(train(recipe("half", drafter, optim="muon"), target)) == weights(whole)
    assert weights(train(recipe("adam", drafter), target)) != weights(whole)
