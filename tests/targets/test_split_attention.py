"""Split attention is attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import Eagle3, Eagle3Config
from outrider.targets import Target, load_causal_lm, split_attention
from outrider.targets.cache_and_masks import float_mask

from ..closeness import assert_same, both_precisions, precisions
from ..conftest import few
from .small_models import NO_IDS, small_model

SIZE, ROUNDINGS = 16, 3  # of heads; to half precision: of scores, of their weights and of what they mix
PROMPTS = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9, 3)]
PLANS = [Plan(3), Plan(tree=Tree((-1, -1, 0, 0, 1, 2)))]


@pytest.fixture
def many_parts(monkeypatch):
    monkeypatch.setattr(split_attention, "_LEAST_PART", 16)


def library(query, keys, values, mask=None):
    repeated = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).to(query.dtype) for t in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(query, *repeated, mask).transpose(1, 2)


@both_precisions
@pytest.mark.parametrize(
    ("rows", "group", "shared", "queries", "length"), list(product((1, 3), (1, 4), (1, 2), (1, 5), (64, 128)))
)
def test_split_attention_equals_the_librarys(many_parts, rows, group, shared, queries, length):
    """Over a part of a longer store, with masks that leave whole parts, and the end, unseen."""
    torch.manual_seed(rows)
    keys, values = torch.randn(2, rows, shared, length + 40, SIZE)[:, :, :, :length]
    query = torch.randn(rows, group * shared, queries, SIZE)
    seen = (torch.rand(rows, 1, queries, length) < 0.3) & (torch.arange(length) < length // 2)
    seen[..., 3] = True
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    assert split_attention.num_parts(rows * shared, length) == length // 16
    found, _ = split_attention.split_attention(torch.nn.Module(), query, keys, values, mask)
    assert_same(found, library(query, keys, values, mask), SIZE + length)


@precisions(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize(("rows", "group", "queries"), list(product((1, 3), (1, 4), (1, 5))))
def test_attention_of_folded_heads_equals_the_librarys(rows, group, queries, precision):
    """With masks that differ by row and query; one query also without."""
    torch.manual_seed(rows)
    keys, values = torch.randn(2, rows, 2, 70, SIZE, dtype=precision)[:, :, :, :37]
    query = torch.randn(rows, group * 2, queries, SIZE, dtype=precision)
    seen = torch.rand(rows, 1, queries, 37) < 0.3
    seen[..., 3] = True
    for mask in (float_mask(seen[:, 0], precision), None):
        if mask is None and queries > 1:
            continue
        found, _ = split_attention.folded_attention(torch.nn.Module(), query, keys, values, mask)
        expected = library(query.double(), keys, values, None if mask is None else mask.double())
        assert_same(found, expected, SIZE + 37, roundings=ROUNDINGS)


@pytest.mark.parametrize(
    ("blocks", "length", "parts"),
    [(8, 1024, 8), (8, 8192, 32), (64, 1024, 4), (256, 8192, 1), (8, 384, 2), (1, 100, 1), (8, 1040, 1), (8, 1056, 2)],
)
def test_parts_are_equal_and_aligned_and_not_too_small(blocks, length, parts):
    assert split_attention.num_parts(blocks, length) == parts


def efficient_kernel(query, key, value, mask, scale):
    """What CUDA's memory-efficient kernel computes: in base 2, in which the mask may overflow; nothing seen gives 0."""
    assert mask.stride(-2) % 8 == 0, "its rows begin at multiples of 16 bytes"
    to_base_2 = 1.4426950408889634
    scores = ((query.float() @ key.float().transpose(-1, -2)) * scale + mask) * to_base_2
    most = scores.amax(-1, keepdim=True)
    weights = torch.where(most.isinf(), 0.0, (scores - most).exp2())
    total = weights.sum(-1)
    sums = torch.where(total == 0, 0.0, total.log() + most[..., 0] / to_base_2)
    return (weights @ value.float() / total.clamp(min=1e-30)[..., None]).to(value.dtype), sums


@pytest.mark.parametrize("seen", [1, 20, 1000])
@precisions(torch.float64, torch.float32, torch.bfloat16)
def test_parts_in_which_nothing_is_seen_weigh_nothing_on_a_gpu(monkeypatch, seen, precision):
    """With low scores, beside which a part that counts as e⁰ would be most of the sum."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 1536, SIZE, dtype=precision)
    query = -4 * keys[:, :, :1].repeat_interleave(4, 1)
    mask = float_mask((torch.arange(1536) < seen)[None, None], precision)
    monkeypatch.setattr(split_attention, "attend", efficient_kernel)
    found, _ = split_attention.split_attention(torch.nn.Module(), query, keys, values, mask)
    expected = library(query.double(), keys[:, :, :seen], values[:, :, :seen])
    assert_same(found, expected, SIZE + 1536, roundings=ROUNDINGS)


def test_whoever_leaves_last_puts_the_choice_of_kernels_back():
    """Threads that decode at once leave in any order."""
    first, second = split_attention.steady_kernels(), split_attention.steady_kernels()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_decoding_never_attends_by_cudnn_and_leaves_the_choice_as_it_was(tiny_llama, monkeypatch):
    target, chosen = Target(tiny_llama(layers=2)), []
    forward = target.forward

    def noted(*given, **named):
        chosen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(*given, **named)

    monkeypatch.setattr(target, "forward", noted)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for _ in Decoder(target).stream(PROMPTS[0], 5):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert chosen == [False] * 5


def make(kind: str, tiny_llama) -> Target:
    if kind == "llama":
        return Target(tiny_llama(layers=4))
    sizes = {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2, "max_position_embeddings": 512}
    return Target(small_model("gemma3_text", "sdpa", **sizes, **NO_IDS))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_target_with_split_attention_writes_the_same_text(tiny_llama, many_parts, kind, plan):
    target = make(kind, tiny_llama)
    torch.manual_seed(0)
    head = Eagle3.build(Eagle3Config(taps=(1, 2, 3)), target)
    samplings = (Sampling(), few())
    usual = [Decoder(target, head).generate(PROMPTS, 30, sampling, plan) for sampling in samplings]
    assert usual[1].stats.tau > 1.05
    target.use_split_attention()
    for static, (sampling, expected) in product((False, True), zip(samplings, usual, strict=True)):
        found = Decoder(target, head, static=static).generate(PROMPTS, 30, sampling, plan)
        assert found.tokens == expected.tokens
        assert found.rounds == expected.rounds


def test_a_model_that_does_not_attend_by_sdpa_is_refused(tiny_llama):
    target = Target(tiny_llama(layers=4, attn_implementation="eager"))
    with pytest.raises(IncompatibleError, match="replaces sdpa"):
        target.use_split_attention()


def test_split_attention_can_be_asked_for_by_name(tiny_llama, tmp_path):
    tiny_llama(layers=4).save_pretrained(tmp_path)
    split_attention.register()
    assert load_causal_lm(str(tmp_path), attention=split_attention.NAME).config._attn_implementation == "outrider"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu")
@pytest.mark.parametrize("length", [1023, 1024])
@pytest.mark.parametrize("seen", [1, 20, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_attention_on_a_gpu(dtype, seen, length):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 8, 1200, 128, device="cuda", dtype=dtype)[:, :, :, :length]
    query = torch.randn(2, 32, 5, 128, device="cuda", dtype=dtype)
    mask = float_mask((torch.arange(length, device="cuda") < seen).expand(2, 5, -1), dtype)
    module = torch.nn.Module()
    module.num_key_value_groups = 4  # the library repeats keys by it, where they cannot be cut
    found, _ = split_attention.split_attention(module, query, keys, values, mask)
    expected = library(query.double(), keys, values, mask.double())
    assert_same(found, expected, 128 + length, roundings=ROUNDINGS)
    of_heads = split_attention.fold_heads(query, keys, values, mask > mask.min()).transpose(1, 2)
    assert_same(of_heads, expected, 128 + length, roundings=ROUNDINGS)
