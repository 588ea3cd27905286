"""A drafter that was grown with its target drafts as before."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.heads import HEADS, Drafter
from outrider.heads.registry import drafter_config
from outrider.lab.grow import grow
from outrider.lab.grow_drafter import grow_drafter
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..conftest import make_llama
from ..heads.conftest import batch, decoded_logits

# Norms have an epsilon of 1e-6. Those of grown heads have the grown stream's, and a channel for more tokens adds to it.
EPSILON = 5e-6
# Selectors score candidates by states that two more norms have read.
EPSILONS = {"dflash2": 4 * EPSILON, "lilicorr": 4 * EPSILON}
SIZES = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 9,
    "head_dim": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256},  # eight times as wide: old entries are written twice, and not four times as often
    "llama, tied": {"hidden_size": 256, "tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle1": {"num_layers": 2},
    "eagle1, pruned": {"draft_vocab_size": 40},
    "eagle1, scaled inputs": {"embedding_scale": 9.0, "feature_scale": 0.3, "fc_bias": True},
    "eagle1, normed first": {"norm_first": True},
    "eagle3": {},
    "eagle3, pruned": {"num_layers": 2, "draft_vocab_size": 20},
    "eagle3, normed taps": {"norm_taps": True},
    "eagle3, all taps normed together": {"norm_before_fc": True},
    "eagle3, normed output": {"norm_output": True, "norm_taps": True},
    "eagle3, normed output, pruned": {"norm_output": True, "draft_vocab_size": 20},
    "eagle3, normed residual": {"norm_before_residual": True},
    "peagle": {},
    "medusa": {},
    "medusa, pruned": {"draft_vocab_size": 20, "num_layers": 2, "bias": True},
    "hydra": {},
    "hydra, shared output": {"share_lm_head": True, "num_layers": 2},
    "mtp": {},
    "mtp, two modules": {"recursive": False, "depth": 2},
    "mtp, hidden first": {"hidden_first": True},
    "dflash": {},
    "dflash, pruned": {"draft_vocab_size": 20},
    "dflash2": {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 64},
    "dspark": {},
    "lilicorr": {"lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 64},
    "lilicorr, as wide as its target": {"lilicorr_candidate_topk": 64, "lilicorr_num_heads": 4},
    "dspark, gated": {"markov_head": "gated"},
    "dspark, rnn": {"markov_head": "rnn"},
    "self_speculative": {},
    "self_speculative, own output": {"share_lm_head": False},
    "draft_model": {},
    "pard": {"mask_token_id": 3},
}
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(2))


def made(name: str, target: Target) -> Drafter[Any]:
    """A drafter none of whose weights is zero."""
    kind, config = drafter_config({"type": name.split(",")[0]} | DRAFTERS[name])
    torch.manual_seed(1)
    drafter = kind.build(config, target, torch.randperm(64))
    for weight in drafter.parameters():
        weight.data += 0.05 * torch.randn(weight.shape)
    return drafter.eval().requires_grad_(False)


@cache
def grown_target(shape: str, precision: torch.dtype) -> tuple[Target, Target]:
    sizes = SIZES | SHAPES[shape]
    old = make_llama(layers=6, tie_word_embeddings=sizes.get("tie_word_embeddings", False))
    return Target(old), Target(grow(old, AutoConfig.for_model(shape.partition(",")[0], **sizes)))


@pytest.fixture(params=SHAPES)
def grown(request, precision) -> tuple[Target, Target]:
    return grown_target(request.param, precision)


@both_precisions
@pytest.mark.parametrize("name", DRAFTERS)
def test_draft_logits_are_those_of_the_old_drafter(grown, name):
    source, target = grown
    drafter = made(name, source)
    steps = min(3, drafter.max_depth or 3)
    starts = [[2, 5, 6], [1, 4, 8]]
    before = decoded_logits(drafter, source, TOKENS, starts, steps)
    like = AutoConfig.for_model("llama", **SIZES | {"hidden_size": target.hidden_size})
    larger = grow_drafter(drafter, source, target, like=like)
    after = decoded_logits(larger, target, TOKENS, starts, steps)
    for old, new in zip(chain.from_iterable(before), chain.from_iterable(after), strict=True):
        width = old.shape[-1]
        assert_same(new[..., :width], old, apart=EPSILONS.get(drafter.name, EPSILON))
        assert (new[..., width:] < old.min() - 30).all()


@both_precisions
@pytest.mark.parametrize("name", ["eagle3", "medusa", "dflash", "mtp", "peagle", "hydra"])
def test_training_on_the_grown_target_has_the_same_losses(grown, name):
    source, target = grown
    drafter = made(name, source)
    larger = grow_drafter(drafter, source, target)
    torch.manual_seed(0)  # anchors are drawn
    before = drafter(batch(source, drafter, TOKENS))
    torch.manual_seed(0)
    after = larger(batch(target, larger, TOKENS))
    assert_same(after.mean, before.mean, apart=EPSILON)


@pytest.mark.parametrize("name", ["medusa", "self_speculative", "hydra"])
def test_texts_and_rounds_are_the_same(grown, name):
    source, target = grown
    drafter = made(name, source)
    prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()]
    pairs = [(source, drafter), (target, grow_drafter(drafter, source, target))]
    before, after = (Decoder(*pair).generate(prompts, 24, plan=Plan(depth=3)) for pair in pairs)
    assert after.tokens == before.tokens
    assert after.rounds == before.rounds
    assert before.stats.tau > 1


def test_a_saved_grown_drafter_is_read_again(grown, tmp_path):
    source, target = grown
    drafter = grow_drafter(made("eagle3, pruned", source), source, target)
    drafter.save(tmp_path)
    read = type(drafter).from_folder(tmp_path, drafter.config.to_dict(), target)
    assert read.digest() == drafter.digest()
    read.check(target)


def test_a_draft_vocabulary_may_grow_to_a_size_of_its_own(grown):
    source, target = grown
    drafter = grow_drafter(made("eagle3, pruned", source), source, target, draft_vocab_size=50)
    assert drafter.output_ids is not None
    assert len(drafter.output_ids.unique()) == 50
    assert drafter.output_ids[20:].tolist() == list(range(64, 94))


def test_what_cannot_be_grown_is_refused(grown):
    source, target = grown
    with pytest.raises(IncompatibleError, match="at most 156"):
        grow_drafter(made("eagle3, pruned", source), source, target, draft_vocab_size=157)
    fusion = HEADS["fusion"](HEADS["ngram"](), made("medusa", source))
    with pytest.raises(IncompatibleError, match="fusion: no drafter of this type"):
        grow_drafter(fusion, source, target)
