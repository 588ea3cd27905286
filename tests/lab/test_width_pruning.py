"""A model cut out of the target is the target with some of its parts gone: those that matter least."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.heads import DraftModel, DraftModelConfig, load_drafter
from outrider.heads.pruning import pruned
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..heads.conftest import sequences
from ..heads.test_pruning import SIZES, make

LAYERS = 4  # of the target


LLAMA_LIKE = {
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3 tied": {"head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
}


@pytest.fixture(params=["llama", "llama biased", *LLAMA_LIKE])
def anything(request, tiny_llama) -> Target:
    """Targets of 4 layers, 4 heads in 2 groups, 32 dimensions and 48 neurons (llama: 64), all weights changed.

    Their norms' epsilon, which is no share of a mean over fewer dimensions, is too small to be seen.
    """
    if request.param.startswith("llama"):
        biased = request.param.endswith("biased")
        model: Any = tiny_llama(layers=4, attention_bias=biased, mlp_bias=biased, rms_norm_eps=1e-20)
    else:
        model = make(request.param.split()[0], rms_norm_eps=1e-20, **LLAMA_LIKE[request.param]).model
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif "bias" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
        elif "embed" in name:
            parameter.data.normal_(0, 1.0, generator=generator)
    return Target(model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(sequences(3, 20)).logits


def require_logits(small: Any, target: Target) -> None:
    """Both models' logits are the same."""
    assert_same(logits(small), logits(target.model))


def zero(parameter: Tensor, rows: slice | list[int]) -> None:
    parameter.data[rows] = 0


def whole(target: Target, **changes: int) -> dict[str, int]:
    config = target.config
    return {name: getattr(config, name) for name in ("num_hidden_layers", *SIZES)} | changes


def test_with_nothing_pruned_the_logits_are_the_targets_bit_for_bit(anything):
    assert torch.equal(logits(pruned(anything, whole(anything))), logits(anything.model))


@both_precisions
def test_a_neuron_that_says_nothing_can_go(anything):
    """In each layer others: one whose gate or value is closed, and one that nobody listens to."""
    for number, layer in enumerate(anything.model.model.layers):
        zero(layer.mlp.gate_proj.weight, [number])
        zero(layer.mlp.up_proj.weight, [20 + number])
        for projection, index in ((layer.mlp.gate_proj, number), (layer.mlp.up_proj, 20 + number)):
            if projection.bias is not None:
                zero(projection.bias, [index])
        layer.mlp.down_proj.weight.data[:, 40 - number] = 0
    neurons = anything.config.intermediate_size - 3
    small = pruned(anything, {"intermediate_size": neurons})
    assert small.model.layers[1].mlp.up_proj.weight.shape == (neurons, 32)
    require_logits(small, anything)
    fewer = pruned(anything, {"intermediate_size": neurons - 1})
    assert (logits(fewer) - logits(anything.model)).abs().max() > 1e-4, "one more is missed"


@both_precisions
@pytest.mark.parametrize(
    "model",
    [{"num_attention_heads": 2}, {"num_key_value_heads": 1}, {"num_attention_heads": 2, "num_key_value_heads": 1}],
    ids=str,
)
def test_a_group_of_heads_that_says_nothing_can_go(anything, model):
    """A group that shares keys and values: in even layers the first, in odd ones the second."""
    for number, layer in enumerate(anything.model.model.layers):
        width = layer.self_attn.o_proj.weight.shape[1] // 2
        layer.self_attn.o_proj.weight.data[:, (number % 2) * width :][:, :width] = 0
    small = pruned(anything, model)
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (2, 1)
    require_logits(small, anything)


@both_precisions
def test_hidden_dimensions_that_hold_nothing_can_go(anything):
    """Embeddings, o_proj, down_proj and their biases are zero there; norms then divide by a mean over fewer."""
    silent = [3, 8, 17, 30]
    body = anything.model.model
    body.embed_tokens.weight.data[:, silent] = 0
    for layer in body.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            zero(projection.weight, silent)
            if projection.bias is not None:
                zero(projection.bias, silent)
    small = pruned(anything, {"hidden_size": 28})
    assert small.model.embed_tokens.weight.shape == (64, 28)
    require_logits(small, anything)


def test_everything_at_once_gives_a_model_that_saves_and_loads(anything, tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}
    drafter = DraftModel.build(DraftModelConfig(init="prune", model=sizes), anything)
    config = drafter.model.config
    assert [getattr(config, name) for name in sizes] == list(sizes.values())
    assert config.head_dim == (getattr(anything.config, "head_dim", None) or 8)
    drafter.save(tmp_path)
    again = load_drafter(tmp_path, anything)
    assert torch.equal(logits(again.model), logits(drafter.model.eval()))


def test_what_is_kept_matters_more_than_what_goes(target):
    """Neurons with large weights stay, in each layer its own, in their order; the same text is written every time."""
    loud = [[5 + i, 33, 60 - i] for i in range(4)]
    for layer, places in zip(target.model.model.layers, loud, strict=True):
        layer.mlp.down_proj.weight.data[:, places] *= 100
    small = pruned(target, {"intermediate_size": 3, "num_hidden_layers": 2}, torch.ones(64))
    for layer, index in zip(small.model.layers, (0, 3), strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, target.model.model.layers[index].mlp.up_proj.weight[loud[index]])
    again = pruned(target, {"intermediate_size": 3, "num_hidden_layers": 2}, torch.ones(64))
    assert torch.equal(logits(small), logits(again))


def test_the_target_stays_as_it_was(target):
    before = target.fingerprint().digest
    pruned(target, {"hidden_size": 16})
    assert target.fingerprint().digest == before
    hooks = [m for m in target.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_hidden_layers": 9}, "model.num_hidden_layers between 1 and the target's 4, found 9"),
        ({"hidden_size": 0}, "model.hidden_size between 1 and the target's 32, found 0"),
        ({"intermediate_size": True}, "found True"),
        ({"num_attention_heads": 3}, "whole groups of the 2 attention heads .* found 3 and none"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, "found 4 and 1"),
        ({"hidden_size": 30}, r"LlamaConfig cannot have .*: The hidden size \(30\) is not a multiple"),
    ],
)
def test_sizes_that_cannot_be_kept_are_refused(target, sizes, message):
    with pytest.raises(BadInputError, match=message):
        pruned(target, sizes)


OTHERS = {
    "fused projections": lambda: make("phi3", 2),
    "norms that count from one": lambda: make("gemma", 2, head_dim=8),
    "more norms": lambda: make("gemma2", 2, head_dim=8),
    "norms over all heads": lambda: make("olmo2", 2),
    "norms that subtract": lambda: make("stablelm", 2),
    "another family": lambda: make("gpt2", 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_pruned_by_whole_layers_only(name):
    target, message = OTHERS[name](), r"pruned by whole layers only: its .* Give model.num_hidden_layers alone"
    with pytest.raises(IncompatibleError, match=message) as raised:
        pruned(target, {"hidden_size": 16})
    assert raised.value.exit_code == 3
    pruned(target, {"num_hidden_layers": 1})


def test_a_target_with_an_adapter_that_is_not_merged_is_refused(target):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(target.model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(IncompatibleError, match="merge the target's adapter first"):
        pruned(Target(model), {"hidden_size": 16})
