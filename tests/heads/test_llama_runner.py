"""Draft models of Llama's kind are read by few operations: the library's logits, and only where that is certain."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from outrider.decode import Decoder, Plan, Tree
from outrider.heads import DraftModel
from outrider.heads.draft_model import DraftModelSession
from outrider.targets import RowLengths, Target, fused_layers
from outrider.targets.fused_layers import runs

from ..closeness import assert_same, both_precisions
from ..decode.conftest import COMMON, random_model
from .conftest import VOCAB

LAYERS = 4  # of the target
SIZES = {"intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 256}
MIXED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4}
MIXED |= {"use_sliding_window": True}
ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


def varied(model: Any) -> Any:
    """With norms and biases that are not all alike, as trained ones are."""
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(weight.shape, generator=noise))
    return model.eval().requires_grad_(False)


@pytest.fixture
def models(tiny_llama) -> dict[str, Any]:
    """Functions that make a model each."""

    def model(name: str) -> Any:
        changes = MODELS[name]
        if name.startswith("llama"):
            return tiny_llama(layers=2, **changes)
        return random_model(name.partition(",")[0], SIZES | changes)

    return {name: partial(model, name) for name in MODELS}


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, no heads that share keys": {"num_key_value_heads": 4},
    "llama, one head for all keys": {"num_key_value_heads": 1},
    "llama, wide heads": {"head_dim": 16},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    **{
        f"llama, {kind}": {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **rope}}
        for kind, rope in ROPES.items()
    },
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 5},
    "qwen2": {},
    "qwen2, windows": MIXED,
    "qwen3": {"head_dim": 16},
    "qwen3, windows": {"head_dim": 8, **MIXED},
}


def tokens(rows: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def both(drafter: DraftModel, target: Target, rows: int) -> tuple[DraftModelSession, DraftModelSession]:
    """Two states, of which the second leaves all passes to the library."""
    fused, plain = (drafter.open(target, rows, 60, 8) for _ in range(2))
    assert fused.fused is not None
    plain.fused = None
    return fused, plain


def agree(states: tuple[DraftModelSession, DraftModelSession], call: Any) -> None:
    """What `call` gives is the same in both states; whatever the weights, norms are of the test's precision."""
    found, expected = (call(state).to(torch.get_default_dtype()) for state in states)
    assert_same(found, expected)


def everything(drafter: DraftModel, target: Target, lengths: list[int], window: int | None = None) -> None:
    """Rounds of every kind after ragged prompts: chains, trees, chains that are read in one pass, another's drafts."""
    rows = len(lengths)
    states = both(drafter, target, rows)

    def absorb(count: int, width: int, seed: int, path: Tensor | None = None) -> None:
        counts = [1 + (count + row) % width for row in range(rows)]
        for state in states:
            state.update(tokens(rows, width, seed), None, RowLengths.of(counts, "cpu"), path)

    for state in states:
        state.update(tokens(rows, max(lengths), 1), None, RowLengths.of(lengths, "cpu"))
        state.cache.window = window
    for number in range(3):  # chains, of which some, all, and none are kept
        agree(states, lambda s: s.prefill(tokens(rows, 1, 2)[:, 0]))
        for step in range(3):
            agree(states, lambda s, step=step: s.decode(tokens(rows, 1, 3 + step)))
        absorb(3 - number, 4, 4)
    agree(states, lambda s: s.prefill(tokens(rows, 1, 5)[:, 0]))
    agree(states, lambda s: s.decode(tokens(rows, 3, 6), torch.full((rows, 3), -1)))
    agree(states, lambda s: s.decode(tokens(rows, 2, 7), torch.tensor([[2, 0]]).expand(rows, -1)))
    agree(states, lambda s: s.decode(tokens(rows, 1, 8), torch.tensor([[3]]).expand(rows, -1)))
    absorb(1, 4, 9, torch.tensor([[2, 3, 5]]).expand(rows, -1))
    agree(states, lambda s: s.begin(tokens(rows, 4, 10)))
    for state in states:
        state.written = 0  # another's drafts follow
    absorb(2, 3, 12)
    agree(states, lambda s: s.prefill(tokens(rows, 1, 13)[:, 0]))


@both_precisions
@pytest.mark.parametrize("lengths", [[9], [7, 1, 12]], ids=["alone", "ragged"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_the_librarys(target, models, name, lengths):
    drafter = DraftModel(varied(models[name]()))
    everything(drafter, target, lengths)
    everything(drafter, target, lengths, window=48)


@both_precisions
@torch.no_grad()
def test_large_products_are_not_put_together(target, models, monkeypatch):
    """They are read as they are: nothing is gained by a copy of them."""
    monkeypatch.setattr(fused_layers, "_SMALL", 0)
    for name in ("llama, biases", "qwen3"):
        drafter = DraftModel(varied(models[name]()))
        everything(drafter, target, [7, 1, 12])
        assert drafter._kept is not None
        assert [layer.gate_up for layer in drafter._kept.layers] == [None] * len(drafter.model.model.layers)


@torch.no_grad()
def test_in_half_precision_it_is_as_exact_as_the_library(target, models):
    """Measured against the same weights in fp32."""
    for name in ("llama", "llama, no heads that share keys", "qwen3, windows"):
        model = varied(models[name]()).to(torch.bfloat16)
        exact, half = DraftModel(copy.deepcopy(model).float()), DraftModel(model)
        off = []
        for state in both(half, target, 2):
            reference = exact.open(target, 2, 60)
            for own in (reference, state):
                own.update(tokens(2, 30, 1), None, RowLengths.of([30, 22], "cpu"))
            found = [state.prefill(tokens(2, 1, 2)[:, 0]), state.decode(tokens(2, 1, 3))[:, 0]]
            expected = [reference.prefill(tokens(2, 1, 2)[:, 0]), reference.decode(tokens(2, 1, 3))[:, 0]]
            off.append((torch.stack(found).float() - torch.stack(expected)).square().mean().sqrt().item())
        assert 0 < off[0] < 1.3 * off[1], name


def test_other_models_are_left_to_the_library(target, models, tiny_llama):
    """Other architectures, other angles, and models that are not as they were made; they draft all the same."""

    def hooked(register: str) -> Any:
        model = tiny_llama(layers=2)
        getattr(model.model.layers[1].mlp, register)(lambda *call: None)
        return model

    def changed(change: Any) -> Any:
        model = tiny_llama(layers=2)
        change(model)
        return model

    def replaced(model: Any) -> None:
        norm = model.model.norm
        norm.forward = lambda x: type(norm).forward(norm, x)

    class Subclass(nn.Linear):
        pass

    def quantised(model: Any) -> None:
        old = model.model.layers[0].mlp.down_proj
        model.model.layers[0].mlp.down_proj = Subclass(old.in_features, old.out_features, bias=False)

    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    longrope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    others = {
        "gpt2": random_model("gpt2", {"num_hidden_layers": 2}),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**COMMON | {"num_hidden_layers": 2, "head_dim": 8})),
        "dynamic": tiny_llama(layers=2, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "longrope": tiny_llama(layers=2, rope_parameters=longrope),
        "gelu": tiny_llama(layers=2, hidden_act="gelu"),
        "eager": tiny_llama(layers=2, attn_implementation="eager"),
        "adapter": get_peft_model(tiny_llama(layers=2), LoraConfig(target_modules=["q_proj"])),
        "adapter inside": get_peft_model(tiny_llama(layers=2), LoraConfig(target_modules=["q_proj"])).base_model.model,
        "hook": hooked("register_forward_hook"),
        "pre-hook": hooked("register_forward_pre_hook"),
        "replaced forward": changed(replaced),
        "quantised": changed(quantised),
        "subclass": type("Changed", (LlamaForCausalLM,), {})(tiny_llama(layers=2).config),
    }
    greedy = Decoder(target).generate([[5, 9, 3], [4]], 12).tokens
    for name, model in others.items():
        drafter = DraftModel(model.eval())
        assert not runs(model), name
        assert drafter.open(target, 1, 20).fused is None, name
        assert drafter.state_bytes(target, 1, 20) == drafter.runner.cache_bytes(1, 20), name
        assert Decoder(target, drafter).generate([[5, 9, 3], [4]], 12, plan=Plan(3)).tokens == greedy, name
    assert not runs(changed(lambda model: setattr(model.config, "per_layer_config", {1: {"intermediate_size": 48}})))
    assert not runs(tiny_llama(layers=2, attention_dropout=0.1).train())
    assert runs(tiny_llama(layers=2, attention_dropout=0.1))
    assert all(runs(make()) for make in models.values())


def test_a_model_that_is_changed_later_is_left_to_the_library_from_then_on(target, tiny_llama):
    drafter = DraftModel(tiny_llama(layers=2))
    assert drafter.open(target, 1, 20).fused is not None
    handle = drafter.model.model.layers[0].register_forward_hook(lambda *call: None)
    assert drafter.open(target, 1, 20).fused is None
    handle.remove()
    assert drafter.open(target, 1, 20).fused is not None


@torch.no_grad()
def test_every_weight_that_changes_is_noticed(target, models):
    """One after the other, written to in place, or replaced."""
    drafter = DraftModel(varied(models["qwen3"]()))
    for _, weight in drafter.model.named_parameters():
        weight.mul_(0.8)
        short(drafter, target)
    drafter.cast(torch.float64)
    short(drafter, target)
    changed = drafter.model.model.layers[1].mlp.up_proj
    changed.weight = nn.Parameter(torch.randn_like(changed.weight))
    short(drafter, target)
    drafter.model.model.layers[0] = copy.deepcopy(drafter.model.model.layers[1])
    drafter.model.model.layers[0].self_attn.layer_idx = 0
    short(drafter, target)
    for part in (drafter.model.get_input_embeddings(), drafter.model.get_output_embeddings()):
        part.weight = nn.Parameter(torch.randn_like(part.weight))
        short(drafter, target)
    drafter.model.resize_token_embeddings(VOCAB - 8, mean_resizing=False)
    short(drafter, target)


def short(drafter: DraftModel, target: Target) -> None:
    states = both(drafter, target, 1)
    for state in states:
        state.update(tokens(1, 5, 1) % 50, None, RowLengths.of([5], "cpu"))
    agree(states, lambda s: s.prefill(tokens(1, 1, 2)[:, 0] % 50))


def test_copies_last_from_request_to_request_until_weights_change_or_texts_are_longer(target, tiny_llama):
    drafter = DraftModel(tiny_llama(layers=2))
    first = drafter.open(target, 1, 40).fused
    assert drafter.open(target, 3, 20).fused is first
    assert (longer := drafter.open(target, 1, 41).fused) is not first
    drafter.model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert drafter.open(target, 1, 41).fused is longer, "it is not copied"
    drafter.model.model.layers[0].mlp.gate_proj.weight.mul_(2)
    assert drafter.open(target, 1, 41).fused is not longer


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen2, windows", "qwen3"])
def test_a_model_drafts_for_itself_without_a_refusal(models, name, static):
    """In chains and trees, after ragged prompts: were anything read in the wrong place, some draft would be refused."""
    model = varied(models[name]())
    target, drafter = Target(model), DraftModel(copy.deepcopy(model))
    prompts = [tokens(1, n, n)[0].tolist() for n in (5, 1, 9)]
    for plan in (Plan(3), Plan(3, width=2), Plan(tree=Tree((-1, -1, 0, 1, 2)))):
        out = Decoder(target, drafter, static=static).generate(prompts, 24, plan=plan, ignore_eos=True)
        assert out.tokens == Decoder(target).generate(prompts, 24, ignore_eos=True).tokens
        assert all(r.accepted == r.reach for rounds in out.rounds for r in rounds[:-1]), plan
