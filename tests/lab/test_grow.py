"""A grown model computes what the model inside it computes, whatever grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.common import BadInputError, IncompatibleError
from outrider.lab.grow import ALIASES, SHAPES, Growth, Sizes, grow, grown_bytes, grown_config, shape_config, shape_for
from outrider.targets import Target, config_only_target
from outrider.targets.loading import meta_causal_lm, split_shape

from ..closeness import assert_same, both_precisions
from ..targets.small_models import SIZES

BASE = SIZES | {"intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8, "eos_token_id": 5, "bos_token_id": None}
EVERYTHING = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True}
SHAPES_TRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "four times as wide": ("llama", {"hidden_size": 128}),
    "twice as wide": ("llama", {"hidden_size": 64}),
    "eight times as wide": ("llama", {"hidden_size": 256}),
    "three times as wide": ("llama", {"hidden_size": 96}),
    "deeper": ("llama", {"num_hidden_layers": 7}),
    "more query heads": ("llama", {"num_attention_heads": 8}),
    "more heads of all kinds": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "larger heads": ("llama", {"head_dim": 16}),
    "more units": ("llama", {"intermediate_size": 50}),
    "more tokens": ("llama", {"vocab_size": 100, "hidden_size": 128}),
    "more tokens, tied": ("llama", {"vocab_size": 100, "hidden_size": 128, "tie_word_embeddings": True}),
    "everything": ("llama", EVERYTHING),
    "qwen3": ("qwen3", EVERYTHING),
    "qwen3_moe": ("qwen3_moe", EVERYTHING | EXPERTS | {"moe_intermediate_size": 64, "num_experts": 4}),
    "mixtral": ("mixtral", EVERYTHING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, with biases": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
# Norms have an epsilon of 1e-6. Those of grown heads have the grown stream's, and a channel for more tokens adds to it.
EPSILON = 5e-6
TOKENS = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(1))


def config(model_type: str, values: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **BASE | values)


def source(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model none of whose weights is zero or one, so that a part in the wrong place shows."""
    kind, values = SOURCES[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(kind, values), dtype=torch.float32)
    for weight in model.parameters():
        weight.data = (weight + 0.1 * torch.randn(weight.shape)).to(dtype)
    return model.eval().requires_grad_(False)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@both_precisions
@pytest.mark.parametrize("shape", SHAPES_TRIED)
def test_logits_are_those_of_the_source_and_new_tokens_far_below(shape):
    model = source()
    grown = grow(model, config(*SHAPES_TRIED[shape]))
    before, after = logits(model), logits(grown)
    assert_same(after[..., :64], before, apart=EPSILON)
    assert (after[..., 64:] < before.min() - 100).all()


@both_precisions
@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_source_grows(name):
    model = source(name)
    kind = "qwen3" if name == "qwen3" else "llama"
    assert_same(logits(grow(model, config(kind, EVERYTHING)))[..., :64], logits(model), apart=EPSILON)


@both_precisions
def test_embeddings_are_tied_where_both_models_tie_them():
    shape = config(*SHAPES_TRIED["more tokens, tied"])
    tied, apart = grow(source("llama, tied"), shape), grow(source(), shape)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight
    # An old channel stands twice there, and a tied output would read it twice.
    twice = grow(source("llama, tied"), config("llama", {"hidden_size": 256, "tie_word_embeddings": True}))
    assert twice.lm_head.weight is not twice.model.embed_tokens.weight
    assert_same(logits(tied)[..., :64], logits(source("llama, tied")), apart=EPSILON)
    assert (logits(tied)[..., 64:] < -100).all()


@pytest.mark.parametrize("shape", ["four times as wide", "eight times as wide", "deeper", "more heads of all kinds"])
def test_bfloat16_computes_the_same_bits_where_roots_are_exact(shape):
    model = source(dtype=torch.bfloat16)
    assert torch.equal(logits(grow(model, config(*SHAPES_TRIED[shape]))), logits(model))


def test_each_token_meets_experts_of_its_own():
    grown = grow(source(), config(*SHAPES_TRIED["mixtral"]))
    routed = []
    grown.model.layers[1].mlp.gate.register_forward_hook(lambda *seen: routed.append(seen[-1]))
    logits(grown)
    chosen = routed[0][-1]  # [tokens, experts of each]
    assert len(chosen.unique(dim=0)) > 2


@both_precisions
def test_a_grown_folder_is_an_ordinary_model(tmp_path, tiny_tokenizer):
    model = source()
    grown = grow(model, config(*SHAPES_TRIED["qwen3_moe"]))
    grown.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = Target.load(tmp_path, device="cpu")
    assert loaded.eos_ids == (5,)
    assert_same(logits(loaded.model)[..., :64], logits(model), apart=EPSILON)


def test_greedy_text_with_a_cache_is_the_sources():
    model = source()
    grown = grow(model, config(*SHAPES_TRIED["everything"]))
    for one in (model, grown):
        one.generation_config.pad_token_id = 0
    settings = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(grown.generate(TOKENS, **settings), model.generate(TOKENS, **settings))


@both_precisions
def test_hidden_states_stand_where_taps_are_moved_to():
    model = source()
    grown = grow(model, config("llama", EVERYTHING))
    growth = Growth(Sizes.of(model.config), Sizes.of(grown.config))
    assert [growth.tap(tap) for tap in range(4)] == [0, 1, 3, 5]
    with torch.no_grad():
        before = model(TOKENS, output_hidden_states=True).hidden_states
        after = grown(TOKENS, output_hidden_states=True).hidden_states
    for tap in range(4):
        assert_same(after[growth.tap(tap)][..., :32], before[tap], apart=EPSILON)


@pytest.mark.parametrize(
    ("name", "kind", "values", "words"),
    [
        ("llama", "llama", {"num_hidden_layers": 2}, "layers: 3 do not fit into 2"),
        ("llama", "llama", {"head_dim": 12}, "12 is no multiple of 8"),
        ("llama", "llama", {"vocab_size": 65}, "a larger hidden size"),
        ("llama", "llama", {"vocab_size": 60, "hidden_size": 64}, "64 tokens do not fit into 60"),
        ("llama", "qwen3", {"hidden_size": 64}, "heads of at least 16, not 8"),
        ("qwen3", "llama", EVERYTHING, "have no place"),
        ("qwen2", "mixtral", EVERYTHING, "biases have no place"),
        ("llama", "gemma2", EVERYTHING, "into type gemma2"),
    ],
)
def test_what_cannot_be_grown_is_refused_with_the_reason(name, kind, values, words):
    with pytest.raises(IncompatibleError, match=words):
        grow(source(name), config(kind, values))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e308])
def test_norms_of_another_epsilon_are_refused(epsilon):
    old = source().config
    old.rms_norm_eps = epsilon
    with pytest.raises(IncompatibleError, match="epsilon"):
        grown_config(old, config("llama", EVERYTHING))


def test_every_named_shape_takes_the_embedded_target():
    embedded = Target.load("embedded", device="cpu").config
    for name in [*SHAPES, *ALIASES]:
        assert grown_config(embedded, shape_config(name)).rope_parameters == embedded.rope_parameters
    assert shape_config("8b", num_hidden_layers=9).num_hidden_layers == 9
    with pytest.raises(BadInputError, match=r"llama-3\.1-8b"):
        shape_config("9b")
    with pytest.raises(BadInputError, match="num_hidden_layers"):
        shape_config("8b", num_layers=3)
    with pytest.raises(BadInputError, match="attention heads"):
        shape_config("8b", num_attention_heads=31)
    with pytest.raises(BadInputError, match="a multiple of num_key_value_heads"):
        shape_config("8b", num_key_value_heads=5)  # the library makes such a model, whose passes fail
    for sizes in ({"num_hidden_layers": 10**9}, {"hidden_size": 10**11}, {"head_dim": 0}, {"num_key_value_heads": 0}):
        with pytest.raises(BadInputError, match="a size from 1 to"):
            shape_config("8b", **sizes)


def test_a_short_name_is_of_a_deeper_shape_where_a_model_has_more_layers():
    """SmolLM2-135M has 30 layers, and Llama 3.2 1B 16."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    smollm2 = AutoConfig.for_model("llama", num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True, **sizes)
    assert grown_config(smollm2, shape_for(smollm2, "1b")).num_hidden_layers == 54
    assert grown_config(smollm2, shape_for(smollm2, "8b")).num_hidden_layers == 32
    assert shape_for(Target.load("embedded", device="cpu").config, "1b").num_hidden_layers == 16
    with pytest.raises(IncompatibleError, match="30 do not fit into 24"):
        grown_config(smollm2, shape_for(smollm2, "0.4b"))


def test_bytes_are_counted_without_memory():
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert grown_bytes(source(), shape_config("70b", vocab_size=2**24)) > 10**12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    shape = config("llama", EVERYTHING)
    needed = grown_bytes(source(), shape)
    assert needed == sum(weight.nbytes for weight in grow(source(), shape).parameters())
    monkeypatch.setattr("outrider.lab.grow.free_bytes", lambda _: needed - 1)
    with pytest.raises(BadInputError, match="take a smaller shape"):
        grow(source(), shape)


@both_precisions
def test_a_target_may_be_named_with_its_shape(monkeypatch):
    small_shape = "embedded@small"
    monkeypatch.setitem(SHAPES, "small", ("llama", 512, 13, 8, 4, 64, 768, 5000, 4096, {}))
    grown, source = (Target.load(path, device="cpu", dtype="float32") for path in (small_shape, "embedded"))
    assert (grown.hidden_size, grown.num_layers, grown.vocab_size) == (512, 13, 5000)
    assert grown.source["path"] == small_shape
    assert grown.eos_ids == source.eos_ids
    tokens = torch.tensor([source.require_tokenizer()("def add(first, second):")["input_ids"]])
    assert_same(grown.forward(tokens).logits[..., :4096], source.forward(tokens).logits, apart=EPSILON)
    alone = config_only_target(small_shape, dtype="float32")
    assert alone.fingerprint() == grown.fingerprint() != source.fingerprint()


@pytest.mark.parametrize(
    ("shape", "weights"),
    [("qwen3-8b", 8_190_735_360), ("qwen3-30b-a3b", 30_532_122_624), ("mixtral-8x7b", 46_702_792_704)],
)
def test_a_named_shape_has_as_many_weights_as_the_published_model(shape, weights):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape))
    assert sum(weight.numel() for weight in model.parameters()) == weights


def test_a_grown_target_is_planned_with_without_contents(tmp_path):
    model = meta_causal_lm("embedded@8b")
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248
    assert model.dtype == torch.bfloat16
    assert split_shape("org/name@main") == ("org/name@main", None)
    config("gemma2", {}).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match="cannot be grown: type gemma2"):
        meta_causal_lm(f"{tmp_path}@8b")
