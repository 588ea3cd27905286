"""On a GPU the compiled kernels give what sums in float64 give, and captured rounds write the library's text."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import ATTENTION, attention_error, heads_error, product_error
from outrider.decode import Decoder, Plan
from outrider.heads import DraftModel
from outrider.targets import Target
from outrider.targets.fast import matmuls, use_fast_pass

from .test_fast_pass import PLANS, PROMPTS, build, drafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 0.008}


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case):
    for dtype, limit in LIMITS.items():
        for parts in (None, 1):
            assert attention_error(case, dtype, CUDA, parts) < limit


@pytest.mark.parametrize("kind", ["normed", "gated", "added"])
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 65])
def test_every_way_of_a_product(tokens, kind):
    for way in matmuls.candidates(tokens):
        assert product_error(way, tokens, kind, torch.bfloat16, CUDA, width=4096) < 1.5 * LIMITS[torch.bfloat16], way


@pytest.mark.parametrize("normed", [False, True])
def test_heads(normed):
    for dtype, limit in LIMITS.items():
        assert heads_error(normed, 128, dtype, CUDA) < limit


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("plan", PLANS)
def test_captured_rounds_write_the_librarys_text(kind, plan):
    target = build(kind)
    target.model.to(CUDA)
    made = drafter(target, "draft_model")
    assert isinstance(made, DraftModel)
    own = Decoder(target, fast=False).generate(PROMPTS, 40, plan=Plan(0)).tokens
    use_fast_pass(target)
    assert Decoder(target).generate(PROMPTS, 40, plan=Plan(0)).tokens == own
    assert Decoder(target, made).generate(PROMPTS, 40, plan=PLANS[plan]).tokens == own


def test_a_decoder_takes_it_by_itself_in_bfloat16():
    target = build("llama", torch.bfloat16)
    target.model.to(CUDA)
    Decoder(target, fast=False)
    assert target.fast is None
    Decoder(target)
    assert target.fast is not None, "the reason is logged"
    again = Target(target.model)
    again.use_split_attention()
    Decoder(again)
    assert again.fast is None, "whoever asks for another way keeps it"
