"""Passes, taps and logits equal the library's; what cannot be loaded is refused with what to do about it."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from outrider.common import BadInputError, IncompatibleError, refuse_unknown_keys
from outrider.targets import Backbone, Fingerprint, RowLengths, Target, load_causal_lm
from outrider.targets.cache_and_masks import attention_masks

from ..closeness import assert_same, both_precisions
from .conftest import keep_in_cache
from .small_models import NO_IDS, SIZES, VISION, small_model, tokens

# Each has something of its own between hidden states and logits, or in how its embeddings enter the layers.
KINDS = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": {"logits_scaling": 0.25},
    "gpt2": {},
    "phi": {},
}


def make(kind: str) -> Target:
    return Target(small_model(kind, "eager", initializer_range=0.2, **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_librarys_hidden_states(kind):
    """By HF index: 0 is what enters the first layer, N//2 the middle, N comes after the final norm."""
    target = make(kind)
    expected = target.model(tokens(), output_hidden_states=True).hidden_states
    for taps in ((0, 2, 4), (4,), (3, 1), (2, 2, 1)):
        hidden = target.forward(tokens(), taps=taps).hidden
        assert hidden.shape == (2, 7, len(taps), 32)
        for i, tap in enumerate(taps):
            assert torch.equal(hidden[:, :, i], expected[tap]), tap


@both_precisions
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_librarys(kind):
    target = make(kind)
    expected = target.model(tokens()).logits
    out = target.forward(tokens())
    assert_same(out.logits, expected)
    assert_same(target.lm_head(out.last), expected)
    some = torch.tensor([5, 0, 40])
    assert_same(target.lm_head(out.last, some), expected[..., some])
    at = torch.tensor([[1], [6]])
    assert_same(target.forward(tokens(), at=at).logits[:, 0], expected[[0, 1], [1, 6]])
    assert target.forward(tokens(), logits=False).logits is None
    assert target.forward(tokens()).hidden is None


def test_logits_of_an_unknown_scale_are_refused_though_the_padding_has_none():
    """The padding's embedding is nothing, and so are its logits: they say nothing of a scale."""
    model = small_model("llama", pad_token_id=0)
    assert not model.get_input_embeddings().weight[0].any()

    def halve(_model, _inputs, out):
        out.logits = out.logits / 2

    model.register_forward_hook(halve)
    with pytest.raises(IncompatibleError, match="does not make its logits of its last hidden state"):
        Target(model).new_cache(1, 8)


def test_the_first_mask_is_one_whatever_kinds_of_layers_there_are(tiny_target):
    """Some models take the first mask that there is; a set would give them another one with every process."""
    kinds = ["linear_attention", "hybrid", "conv", "sliding_attention", "full_attention", "mlp"]
    for some in (kinds, ["full_attention"], ["hybrid"], ["mlp", "full_attention"], ["conv", "sliding_attention"]):
        config = copy.deepcopy(tiny_target.config)
        config.layer_types, config.sliding_window = some, 4
        cache = tiny_target.new_cache(2, 12)
        cache.advance(RowLengths.of([5, 3], "cpu"))
        cache.place(2)
        masks = attention_masks(config, cache, torch.float32)
        assert set(some) <= set(masks)
        assert next(iter(masks.values())) is not None
        assert (masks.get("hybrid"), masks.get("linear_attention")) == (None, None)
        assert ("linear_attention" in masks) == bool({"hybrid", "linear_attention"} & set(some))


def test_taps_of_layers_that_hand_on_several_streams_are_refused():
    """Gemma 3n carries four; its last hidden states are one."""
    small = {"num_hidden_layers": 2, "head_dim": 8, "laurel_rank": 4, "num_kv_shared_layers": 1}
    model = small_model("gemma3n_text", **small, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
    target = Target(model)
    assert target.forward(tokens(), taps=(2,)).hidden.shape == (2, 7, 1, 32)
    said = r"shape \[4, 2, 7, 32\], and a drafter reads \[2, 7, 32\]; take a drafter"
    with pytest.raises(IncompatibleError, match=said):
        target.forward(tokens(), taps=(1, 2))


@both_precisions
def test_taps_with_a_cache_are_those_of_the_whole_text(tiny_target):
    text = tokens(2, 9)
    whole = tiny_target.forward(text, taps=(0, 3, 6)).hidden
    cache = tiny_target.new_cache(2, 12)
    first = tiny_target.forward(text[:, :5], cache, taps=(0, 3, 6)).hidden
    cache.advance(RowLengths.of([5, 5], "cpu"))
    second = tiny_target.forward(text[:, 5:], cache, taps=(0, 3, 6)).hidden
    assert_same(torch.cat([first, second], 1), whole)


def test_taps_of_a_pass_are_not_left_over_from_another(tiny_target):
    """The library may run the same model in between, with the hooks in place."""
    expected = tiny_target.forward(tokens(), taps=(1, 3)).hidden
    tiny_target.model(tokens(3, 4))
    tiny_target.forward(tokens(1, 2), taps=(2,))
    assert torch.equal(tiny_target.forward(tokens(), taps=(1, 3)).hidden, expected)


@both_precisions
def test_a_backbone_can_read_embeddings_where_a_model_has_none_of_its_own(tiny_llama):
    """A drafter's layers run on a cache of their own, and give what they give in one piece."""
    body = tiny_llama(layers=3).model
    embedded = body.embed_tokens(tokens(2, 9)).detach()
    expected = body(inputs_embeds=embedded).last_hidden_state
    body.set_input_embeddings(None)
    backbone = Backbone(body, reads_embeddings=True)
    cache = backbone.new_cache(2, 12)
    assert cache.num_bytes() == backbone.cache_bytes(2, 12) > 0
    first, _ = backbone.run(embedded[:, :5], cache)
    cache.advance(RowLengths.of([5, 5], "cpu"))
    second, hidden = backbone.run(embedded[:, 5:], cache, taps=(3,))
    assert_same(torch.cat([first, second], 1), expected)
    assert torch.equal(hidden[:, :, 0], second)


@pytest.mark.parametrize("tap", [-1, 7])
def test_a_tap_outside_the_model_is_refused(tiny_target, tap):
    said = rf"hidden_states\[{tap}\], but this target has 6 layers \(valid taps: 0 to 6\)"
    with pytest.raises(IncompatibleError, match=said):
        tiny_target.check_taps((2, tap))


def test_a_config_whose_first_pass_fails_is_refused():
    sizes = {"num_experts": 4, "num_experts_per_tok": 9, "moe_intermediate_size": 32}
    with pytest.raises(IncompatibleError, match=r"index k out of range\. Check its config\.json"):
        Target(small_model("qwen3_moe", **sizes)).cache_layout()


@both_precisions
def test_a_peft_wrapper_is_looked_through():
    plain = make("llama")
    model = get_peft_model(plain.model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    target = Target(model.eval())
    out = target.forward(tokens(), taps=(0, 4))
    expected = model(tokens(), output_hidden_states=True)
    assert_same(out.logits, expected.logits)
    assert_same(out.hidden[:, :, 1], expected.hidden_states[4])
    assert (target.vocab_size, target.num_layers, target.hidden_size) == (64, 4, 32)


def test_end_tokens_come_from_the_generation_config_first(tiny_target):
    assert tiny_target.eos_ids == (1,)
    tiny_target.model.generation_config.eos_token_id = [5, 6]
    assert tiny_target.eos_ids == (5, 6)
    tiny_target.model.generation_config.eos_token_id = tiny_target.model.config.eos_token_id = None
    assert tiny_target.eos_ids == (tiny_target.tokenizer.eos_token_id,)
    assert Target(make("llama").model).max_context == AutoConfig.for_model("llama").max_position_embeddings


@pytest.mark.parametrize("ids", [[[1]], 10**39, ["a"]])
def test_ends_that_are_no_token_ids_are_refused(tiny_target: Target, ids: object) -> None:
    tiny_target.model.generation_config.eos_token_id = ids
    with pytest.raises(BadInputError, match="eos_token_id: expected token ids, found"):
        _ = tiny_target.eos_ids


def test_a_target_without_a_tokenizer_says_so(tiny_llama):
    with pytest.raises(BadInputError, match=r"no tokenizer; pass one: Target\(model, tokenizer\)"):
        Target(tiny_llama(layers=1)).require_tokenizer()


def test_a_loaded_target_is_the_saved_one(tiny_target, saved):
    again = Target.load(saved, device="cpu")
    assert torch.equal(again.forward(tokens()).logits, tiny_target.forward(tokens()).logits)
    assert again.fingerprint() == tiny_target.fingerprint()
    assert again.source == {"path": str(saved), "revision": None, "adapter": None}
    assert not any(weight.requires_grad for weight in again.model.parameters())
    assert Target.load(saved, dtype="bfloat16", device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_rounded_once(tiny_target, saved, tmp_path, dtype):
    """Each weight is what the exact sum of its products rounds to: a digest must not depend on how a library sums."""
    config = LoraConfig(r=24, lora_alpha=17, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(saved), config)
    lora = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for parameter in lora.values():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    merged = Target.load(saved, adapter=tmp_path / "adapter", device="cpu", dtype=dtype).model.state_dict()
    plain = Target.load(saved, device="cpu", dtype=dtype).model.state_dict()
    changed = 0
    for name, weight in plain.items():
        start, exact = f"base_model.model.{name.removesuffix('.weight')}.lora_", weight
        if f"{start}A.default.weight" in lora:
            a, b = (lora[f"{start}{side}.default.weight"].double() for side in "AB")
            exact = weight.double() + b @ a * (17 / 24)
            changed += 1
        assert torch.equal(merged[name], exact.to(weight.dtype)), name
    assert changed == 2 * tiny_target.num_layers


def with_adapter(target: Target):
    model, config = copy.deepcopy(target.model), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


@pytest.fixture
def adapter(tiny_target, tmp_path):
    """The folder of a LoRA."""
    torch.manual_seed(0)
    with_adapter(tiny_target).save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


@both_precisions
def test_an_adapter_is_merged_on_loading(tiny_target, saved, adapter):
    torch.manual_seed(0)
    expected = with_adapter(tiny_target)(tokens()).logits
    loaded = Target.load(saved, adapter=adapter, device="cpu")
    assert_same(loaded.forward(tokens()).logits, expected)
    assert loaded.fingerprint().digest != tiny_target.fingerprint().digest
    assert any("weights" in line for line in loaded.fingerprint().differences(tiny_target.fingerprint()))
    with pytest.raises(BadInputError, match=r"no adapter at '.*nothing': the folder does not exist"):
        Target.load(saved, adapter=saved / "nothing", device="cpu")
    with pytest.raises(BadInputError, match=r"'runs/adapter' cannot be loaded \(no such folder is here"):
        Target.load(saved, adapter="runs/adapter", device="cpu")


def test_an_adapter_made_for_another_base_is_one_line(adapter, tmp_path, tiny_llama, tiny_tokenizer):
    """torch would list every layer, in four kilobytes."""
    wider = tmp_path / "wider"
    tiny_llama(hidden=64, vocab=len(tiny_tokenizer)).save_pretrained(wider)
    tiny_tokenizer.save_pretrained(wider)
    with pytest.raises(IncompatibleError, match=r"does not fit this target: .* and \d+ more\. .* made for") as raised:
        Target.load(wider, adapter=adapter, device="cpu")
    assert len(str(raised.value)) < 1000
    assert "\n" not in str(raised.value)


@pytest.fixture
def cached(adapter, hub):
    """The same LoRA as someone/lora in a cache of the Hub's, without a connection: the folder that it lies in."""
    return keep_in_cache(adapter, hub, "someone/lora")


def test_an_adapter_of_the_hub_is_read_from_its_cache(adapter, cached, saved):
    ours, theirs = (Target.load(saved, adapter=a, device="cpu") for a in (adapter, "someone/lora"))
    assert ours.fingerprint() == theirs.fingerprint()
    assert theirs.source["adapter"] == "someone/lora"
    with pytest.raises(BadInputError, match="adapter at 'someone/else' cannot be loaded"):
        Target.load(saved, adapter="someone/else", device="cpu")


def test_a_pickled_adapter_is_refused_and_never_opened(adapter, cached, saved, tmp_path, monkeypatch):
    """In a folder and on the Hub, where peft would take it, with a safetensors file of another name beside it."""

    def never(*_, **__):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", never)
    for folder, name in ((adapter, adapter), (cached, "someone/lora")):
        (folder / "adapter_model.safetensors").rename(folder / "other.safetensors")
        (folder / "adapter_model.bin").write_bytes(b"")
        with pytest.raises(BadInputError, match=r"has no adapter_model\.safetensors: Outrider reads safetensors only"):
            Target.load(saved, adapter=name, device="cpu")


def test_a_home_folder_may_be_written_as_a_tilde(adapter, saved, monkeypatch):
    monkeypatch.setenv("HOME", str(saved.parent))
    loaded = Target.load(f"~/{saved.name}", adapter="~/lora", device="cpu")
    assert loaded.source == {"path": str(saved), "revision": None, "adapter": str(adapter)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "./nowhere",
            "the folder does not exist. Give a folder, a .gguf file, a Hub id like 'org/name'",
        ),
        ("nowhere", "the folder does not exist"),
        ("nobody/nothing", "'nobody/nothing' cannot be loaded.*Check the path, or the Hub id"),
    ],
)
def test_a_target_that_is_not_there_is_refused(name, message):
    with pytest.raises(BadInputError, match=message):
        Target.load(name)


def test_a_damaged_file_is_refused(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BadInputError, match=r"damaged or not a safetensors file.*Copy it again"):
        Target.load(saved)


def test_a_folder_without_config_or_weights_is_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"no \*\.safetensors file"):
        Target.load(saved)
    (saved / "config.json").unlink()
    with pytest.raises(BadInputError, match=r"has no config\.json"):
        Target.load(saved)


def test_a_pickle_is_refused_and_never_opened(saved):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (saved / "exploded",))

    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(BadInputError, match=r"pytorch_model\.bin is a pickle"):
        Target.load(saved)
    assert not (saved / "exploded").exists()


def test_weights_that_do_not_fit_the_config_are_refused(tiny_target, saved):
    name, file = "model.layers.1.mlp.up_proj.weight", saved / "model.safetensors"
    weights = load_file(file)
    save_file({n: weight for n, weight in weights.items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=f"missing {name}"):
        Target.load(saved)
    save_file(weights | {"extra": torch.ones(1)}, file, metadata={"format": "pt"})
    load_causal_lm(str(saved))
    with pytest.raises(IncompatibleError, match="unexpected extra"):
        load_causal_lm(str(saved), strict=True)


def test_unknown_keys_get_a_suggestion_or_the_list():
    with pytest.raises(BadInputError, match="recipe: unknown key 'stpes'; did you mean 'steps'"):
        refuse_unknown_keys(["steps", "stpes"], ["steps", "taps"], "recipe")
    with pytest.raises(BadInputError, match="unknown key 'xyz'; known keys: steps, taps"):
        refuse_unknown_keys(["xyz"], ["taps", "steps"], "recipe")


def test_a_fingerprint_is_a_function_of_content(tiny_target, tiny_llama):
    def print_of(**changes) -> str:
        return Target(tiny_llama(layers=2, **changes)).fingerprint().digest

    assert print_of() == print_of()
    assert len({print_of(), print_of(seed=1), print_of(rms_norm_eps=1e-4), print_of(vocab=65)}) == 4
    moved = Target(tiny_llama(layers=2), source={"path": "elsewhere"})
    moved.model.config._name_or_path = "elsewhere"
    assert moved.fingerprint().digest == print_of()


def test_no_more_weights_differ_than_there_are(tiny_llama):
    """A deeper target shares some names, has more, and lacks none: each of these is counted by itself."""
    shallow, deep = (Target(tiny_llama(layers=layers, seed=layers)).fingerprint() for layers in (1, 2))
    per_layer = len(deep.tensors) - len(shallow.tensors)
    changed, new = shallow.differences(deep)[-2:]
    all_but_norms = len(shallow.tensors) - 3
    assert changed.startswith(f"{all_but_norms} of {len(shallow.tensors)} weights (first: lm_head.weight, ")
    assert new == f"{per_layer} additional weights (first: model.layers.1.input_layernorm.weight)"
    assert f"{per_layer} missing weights (first: model.layers.1.input_layernorm.weight)" in deep.differences(shallow)


def test_the_same_weights_in_other_shards_are_the_same_target(tiny_target, tmp_path):
    tiny_target.model.save_pretrained(tmp_path / "one")
    tiny_target.model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    for folder in ("one", "many"):
        tiny_target.tokenizer.save_pretrained(tmp_path / folder)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (Target.load(tmp_path / folder).fingerprint() for folder in ("one", "many"))
    assert one.differences(many) == []
    assert one.digest == many.digest == tiny_target.fingerprint().digest


def test_one_changed_weight_template_or_token_is_seen(tiny_target, tiny_tokenizer):
    before = tiny_target.fingerprint()
    weight = tiny_target.model.model.layers[3].mlp.up_proj.weight
    weight[5, 6] = torch.nextafter(weight[5, 6], torch.tensor(9.0))
    assert before.differences(tiny_target.fingerprint()) == [
        f"1 of {len(before.tensors)} weights (first: model.layers.3.mlp.up_proj.weight)"
    ]
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template += " "
    assert before.differences(Target(tiny_target.model, tokenizer).fingerprint())[:1] == ["chat_template"]
    tokenizer.add_tokens(["brand new"])
    assert before.differences(Target(tiny_target.model, tokenizer).fingerprint())[:2] == ["tokenizer", "chat_template"]


def test_a_fingerprint_survives_json(tiny_target):
    found = tiny_target.fingerprint()
    assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_taps_are_the_text_models_where_a_vision_tower_is_as_deep():
    config = Gemma3Config(text_config=SIZES | {"head_dim": 8} | NO_IDS, vision_config=VISION, mm_tokens_per_image=4)
    target = Target(Gemma3ForConditionalGeneration(config).eval())
    out = target.forward(torch.tensor([[1, 2, 3]]), taps=(0, 2, 4))
    assert out.hidden.shape == (1, 3, 3, 32)
    assert out.hidden[:, :, 1].std() > 0
