"""A model of fewer layers has the target's first, last and some between, and everything around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.heads import DraftModel, DraftModelConfig, pruning
from outrider.heads.pruning import chosen_layers, pruned
from outrider.targets import Target

from ..decode.conftest import random_model

LAYERS = 4  # of the target
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def make(kind: str, layers: int = 4, **changes: Any) -> Target:
    return Target(random_model(kind, SIZES | {"num_hidden_layers": layers} | changes))


@pytest.mark.parametrize(
    ("of", "count", "expected"),
    [(12, 1, [11]), (12, 2, [0, 11]), (12, 3, [0, 6, 11]), (4, 4, [0, 1, 2, 3]), (1, 1, [0])],
)
def test_layers_are_spread_from_the_first_to_the_last(of, count, expected):
    assert chosen_layers(of, count) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_fewer_layers_has_the_targets_layers_embeddings_and_norm(tiny_llama, tied):
    target = Target(tiny_llama(layers=4, tie_word_embeddings=tied))
    drafter = DraftModel.build(DraftModelConfig(init="prune", model={"num_hidden_layers": 2}), target)
    theirs, own = target.model.state_dict(), drafter.model.state_dict()
    assert own.keys() < theirs.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name.replace("layers.1.", "layers.3.")]), name
    own["model.norm.weight"].add_(1)
    assert not torch.equal(own["model.norm.weight"], theirs["model.norm.weight"]), "it is a copy"


def test_layers_keep_their_kind_of_attention():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    small = pruned(make("gemma2", head_dim=8, layer_types=kinds), {"num_hidden_layers": 3})
    assert small.config.layer_types == [kinds[0], kinds[2], kinds[3]]


def test_layers_keep_head_sizes_of_their_own_and_what_the_config_says_of_each():
    qwen = make("qwen3", head_dim=16)
    assert pruned(qwen, {"num_hidden_layers": 2}).config.head_dim == 16
    assert DraftModel.build(DraftModelConfig(model={"num_hidden_layers": 2}), qwen).model.config.head_dim == 16
    rope = [1, 1, 1, 0, 1, 1, 1, 0]
    smol = pruned(make("smollm3", 8, no_rope_layers=rope), {"num_hidden_layers": 3})
    assert smol.config.no_rope_layers == [rope[i] for i in (0, 4, 7)]


def test_layers_are_taken_of_any_architecture():
    """Whose config names its sizes otherwise, too."""
    target = make("gpt2")
    small = pruned(target, {"num_hidden_layers": 2})
    assert (small.config.n_layer, len(small.transformer.h)) == (2, 2)
    assert torch.equal(small.transformer.h[1].mlp.c_fc.weight, target.model.transformer.h[3].mlp.c_fc.weight)


def test_a_target_with_an_adapter_that_is_not_merged_is_refused(target):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(target.model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(IncompatibleError, match=r"(?i)merge the target's adapter first"):
        pruned(Target(model), {"num_hidden_layers": 2})


def test_without_the_lab_layers_are_kept_whole(target, monkeypatch):
    monkeypatch.setattr(pruning, "plugin", lambda *_: None)
    with pytest.raises(BadInputError, match="keeps whole layers here"):
        pruned(target, {"hidden_size": 16})
    with pytest.raises(BadInputError, match="between 1 and the target's 4, found 9"):
        pruned(target, {"num_hidden_layers": 9})
