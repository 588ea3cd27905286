"""What a pass works with is counted tensor by tensor, and foretold from a few tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.targets import PeakBytes, RowLengths, Target, packed_weights, product_choice

from .small_models import SIZES, small_model

WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 32,
    },
    "gpt2": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def make(kind: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Target:
    return Target(small_model(kind, attention, WIDE, **KINDS[kind]).to(dtype))


@pytest.mark.parametrize("inference", [False, True])
def test_live_tensors_are_counted_once_and_until_the_last_view_is_gone(inference):
    before = torch.zeros(100)  # 400 bytes that were there already
    with torch.inference_mode(inference), PeakBytes() as count:
        first = before + 1
        view = first.view(10, 10)[2:]
        assert (count.live, count.peak) == (400, 400)
        second = view.double()  # 80 × 8
        assert (count.live, count.peak) == (1040, 1040)
        del first
        assert count.live == 1040
        del view
        assert (count.live, count.peak) == (640, 1040)
        second.add_(1)
        before.view(-1)
        assert (count.live, count.peak) == (640, 1040)
    del second
    assert count.live == 0


@pytest.mark.parametrize("way", list(product_choice.WAYS))
def test_weights_that_were_packed_before_change_no_footprint(way, monkeypatch):
    """Neither their copies, which the first pass makes, nor blocks of oneDNN's, whose storage nobody sees."""
    monkeypatch.setattr(packed_weights, "fastest", lambda *_: product_choice.WAYS[way])
    packed = make("llama")
    packed.pack()
    assert packed.footprint() == make("llama").footprint()


def test_a_weight_in_blocks_is_no_part_of_a_pass():
    blocks = product_choice.PACKED.copied(torch.randn(32, 16))
    with torch.inference_mode(), PeakBytes() as count:
        product_choice.PACKED.product(torch.randn(2, 16), blocks, None)
    assert count.peak == (2 * 16 + 2 * 32) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "attention"), [*((kind, "sdpa") for kind in KINDS), ("llama", "eager")])
def test_a_few_tokens_foretell_large_passes(kind, attention, dtype):
    """Prompts, ragged verification passes and single tokens, within 5%."""
    target = make(kind, attention, dtype)
    footprint = target.footprint()
    rows = 4
    length = 200
    cache, text = target.new_cache(rows, length + 6), torch.randint(0, 64, (rows, length))
    with torch.inference_mode():
        with PeakBytes() as prompt:
            target.forward(text, cache, logits=False)
        cache.advance(RowLengths.of([length, length - 7, length - 3, length - 1], "cpu"))
        for count in (1, 6):
            with PeakBytes() as verification:
                target.forward(text[:, :count], cache, logits=False)
            assert footprint.of_round(rows, count, length + count) == pytest.approx(verification.peak, rel=0.05), count
        hidden = torch.zeros(rows, 6, 64, dtype=dtype)
        with PeakBytes() as head:
            logits = target.lm_head(hidden)
    assert footprint.of_prompt(rows, length) == pytest.approx(prompt.peak, rel=0.05)
    assert footprint.per_logit * logits.numel() == head.peak
    assert footprint.kept == logits.element_size()


def test_a_logit_counts_with_what_it_is_scaled_with():
    """Gemma 2 caps its logits: three tensors at a time."""
    target = Target(small_model("gemma2", "eager", WIDE, head_dim=8, final_logit_softcapping=3.0))
    assert (target.footprint().per_logit, target.footprint().kept) == (12, 4)


def test_another_attention_is_measured_anew():
    target = make("llama")
    before = target.footprint()
    target.model.set_attn_implementation("eager")
    assert target.footprint().per_score > before.per_score == 0


def test_tensors_without_memory_of_one_piece_are_left_out():
    weights = torch.eye(3).to_sparse()
    with torch.no_grad(), PeakBytes() as count:
        (weights @ torch.ones(3, 2)).sum()
    assert (count.live, count.peak >= 48) == (0, True)  # ones, and the product
