"""Bytes and operations are counted as they are: the weights that a step reads, and what torch counts in a real pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.costs.counting import pass_bytes, pass_flops
from outrider.targets import Target


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_but_an_untied_embedding_table(tiny_llama: Callable, tied: bool) -> None:
    model = tiny_llama(vocab=64, hidden=32, tie_word_embeddings=tied)
    everything = sum(p.numel() for p in model.parameters())
    assert pass_bytes(Target(model)) == 4 * (everything - (0 if tied else 64 * 32))
    assert pass_bytes(Target(model.bfloat16())) == 2 * (everything - (0 if tied else 64 * 32))


def test_a_step_reads_the_experts_that_one_token_meets() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("mixtral", **sizes | heads, num_local_experts=8, num_experts_per_tok=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    everything = sum(p.numel() for p in model.parameters())
    assert pass_bytes(Target(model)) == 4 * (everything - 64 * 32 - 2 * 6 * 3 * 32 * 48)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
        ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32}),
        ("gemma4_unified_text", {"head_dim": 32, "global_head_dim": 64, "num_key_value_heads": 4}),
    ],
)
def test_a_targets_pass_is_what_torch_counts(kind: str, changes: dict[str, Any]) -> None:
    """Experts count as often as tokens choose them."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes | heads | changes)
    model: Any = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    real = Target(model.eval())
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as seen:
        real.forward(torch.randint(0, 256, (2, 48)), logits=False)
    assert pass_flops(real, 2, 48) == pytest.approx(seen.get_total_flops(), rel=0.02)
