"""A quantised target says nearly the same, with its own identity; what another library quantised needs that one."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.heads import Ngram
from outrider.targets import Target

from .conftest import edit
from .quantised_models import OTHERS, PRESETS, write_quantised
from .small_models import small_model

installed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def test_an_unknown_kind_is_refused_with_the_known_ones(saved):
    with pytest.raises(BadInputError, match="expected one of int8, int8-dynamic, found 'int3'"):
        Target.load(saved, quantize="int3")


def test_without_torchao_it_says_what_to_install(saved, monkeypatch):
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    said = r"quantised targets need torchao: pip install 'outrider\[quantised\]'\.$"
    with pytest.raises(BadInputError, match=said):
        Target.load(saved, quantize="int8")


@installed
@pytest.mark.parametrize("kind", ["int8", "int8-dynamic"])
def test_it_says_nearly_the_same(saved, kind):
    tokens = torch.randint(5, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    plain, quantised = (Target.load(saved, quantize=q).forward(tokens).logits for q in (None, kind))
    assert 0 < (plain - quantised).abs().mean() < 0.1 * plain.abs().mean()


@installed
def test_its_identity_is_its_own_and_stable(saved):
    kinds = (None, "int8", "int8-dynamic")
    first, again = ([Target.load(saved, quantize=kind).fingerprint() for kind in kinds] for _ in range(2))
    assert [f.digest for f in first] == [f.digest for f in again]
    assert len({f.digest for f in first}) == 3
    changed = first[0].differences(first[1])
    assert changed[0].startswith(f"{6 * 7} of ")
    quantised = Target.load(saved, quantize="int8")
    linear = quantised.model.model.layers[0].mlp.down_proj
    assert isinstance(linear, nn.Linear)
    linear.weight.qdata[0, 0] += 1
    assert quantised.fingerprint().digest != first[1].digest


@installed
def test_the_output_embedding_stays_as_it_is(saved):
    plain, quantised = (Target.load(saved, quantize=kind) for kind in (None, "int8"))
    heads = [target.model.get_output_embeddings().weight for target in (plain, quantised)]
    assert torch.equal(*heads)
    assert quantised.source["quantize"] == "int8"


OTHER_METHODS = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    "vptq": {"quant_method": "vptq"},
}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_what_cannot_be_read_is_refused_by_name_with_another_way(saved, method, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    edit(saved / "config.json", quantization_config=OTHER_METHODS[method])
    said = (
        "was quantised by {method}, whose loaded weights nothing here compares .*; expected one of compressed-tensors, "
    )
    if method == "bitsandbytes":
        said = r"needs its library: pip install 'outrider\[quantised\]'"
    with pytest.raises(
        (BadInputError, IncompatibleError), match=rf"{said.format(method=method)}.*target\.quantize: int8"
    ):
        Target.load(saved, device="cpu")


needs_libraries = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchao", "compressed_tensors", "bitsandbytes")),
    reason="needs outrider[quantised]",
)
TOKENS = torch.arange(5, 45)[None]


@pytest.fixture
def saved_wide(tiny_llama, tiny_tokenizer, tmp_path: Path) -> Path:
    """The folder of a model whose rows hold whole blocks of bitsandbytes, whose CPU code errs on narrower ones."""
    tiny_llama(layers=2, hidden=64, vocab=len(tiny_tokenizer)).save_pretrained(tmp_path / "wide")
    tiny_tokenizer.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.fixture
def form(saved_wide: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: write_quantised(name, saved_wide, tmp_path / "quantised")


@needs_libraries
@pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
def test_a_model_that_came_quantised_is_itself_and_says_its_precision(saved_wide, form, name):
    """Its logits are the library's own, near those before, and its identity does not move with its passes."""
    folder = form(name)
    target, plain = Target.load(folder, dtype="float32"), Target.load(saved_wide, dtype="float32")
    first = target.fingerprint()
    logits = target.forward(TOKENS).logits
    assert torch.equal(logits, target.model(TOKENS).logits)
    assert 0 < (logits - plain.forward(TOKENS).logits).norm() < logits.norm()
    assert target.fingerprint().digest == first.digest == Target.load(folder, dtype="float32").fingerprint().digest
    assert first.digest != plain.fingerprint().digest
    assert target.precision.startswith(name.split(",")[0].removesuffix(" with zero points").removesuffix(" by blocks"))
    with pytest.raises(BadInputError, match="expected a model that is not quantised"):
        Target.load(folder, quantize="int8")


@needs_libraries
@pytest.mark.parametrize("name", ["W4A16", OTHERS[1]])  # inputs as they are: no near ties
def test_decoding_with_drafts_writes_the_text_of_the_librarys_own_generate(form, name):
    target = Target.load(form(name), dtype="float32")
    prompt = TOKENS[0, :12].tolist()
    own = target.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    written = Decoder(target, Ngram()).generate([prompt], 40, plan=Plan(3), ignore_eos=True)
    assert written.tokens[0] == own[0, 12:].tolist()


@needs_libraries
def test_experts_are_compared_one_by_one(tiny_tokenizer, tmp_path):
    """`transformers` puts them together: the text is its own, and a scale that one lacks is named."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    small_model("qwen3_moe", vocab_size=len(tiny_tokenizer), **experts).save_pretrained(tmp_path / "plain")
    tiny_tokenizer.save_pretrained(tmp_path / "plain")
    folder = write_quantised(OTHERS[0], tmp_path / "plain", tmp_path / "quantised")
    target, prompt = Target.load(folder, dtype="float32"), TOKENS[0, :12].tolist()
    own = target.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    written = Decoder(target, Ngram()).generate([prompt], 40, plan=Plan(3), ignore_eos=True)
    assert written.tokens[0] == own[0, 12:].tolist()
    part = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    change(folder, lambda held: {key: value for key, value in held.items() if key != part})
    with pytest.raises(IncompatibleError, match=f"missing {re.escape(part)}"):
        Target.load(folder, dtype="float32")


LAYER = "model.layers.1.mlp.down_proj."


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Write other tensors into a model's file, under the metadata that it has."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(tensors(load_file(file)), file, metadata)


@needs_libraries
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("W4A16", "weight_scale"),
        ("W4A16", "weight_packed"),
        ("W4A16 with zero points", "weight_zero_point"),
        ("W8A8", "weight_scale"),
        ("FP8 W8A8", "input_scale"),
        (OTHERS[0], "weight_scale_inv"),
        (OTHERS[1], "weight.absmax"),
        (OTHERS[1], "weight.quant_state.bitsandbytes__nf4"),
        (OTHERS[2], "weight.nested_absmax"),
        (OTHERS[3], "_weight_scale"),
    ],
)
def test_a_missing_part_is_refused_by_name(form, name, part):
    folder = form(name)
    change(folder, lambda held: {key: value for key, value in held.items() if key != LAYER + part})
    with pytest.raises(IncompatibleError, match=re.escape(f"missing {LAYER}{part}")):
        Target.load(folder, dtype="float32")


@needs_libraries
def test_packed_tensors_that_nobody_knows_are_refused_by_name(form):
    folder = form("W4A16")
    change(folder, lambda held: {key.replace("weight_packed", "weight_nibbles"): held[key] for key in held})
    with pytest.raises(IncompatibleError, match=r"missing .*weight_packed; unexpected .*weight_nibbles"):
        Target.load(folder)


CONFIGS = {
    "weight_scale is \\(64, 4\\), expected \\(64, 8\\)": {"weights": {"group_size": 8}},
    "weight_packed is \\(64, 8\\), expected \\(64, 16\\)": {"weights": {"num_bits": 8}},
    "missing .*weight_zero_point": {"weights": {"symmetric": False}},
    "the format 'marlin-24', expected one of": {"format": "marlin-24"},
    "scaled by all tokens": {"input_activations": {"num_bits": 8, "dynamic": True, "strategy": "tensor"}},
    "it quantises outputs": {"output_activations": {"num_bits": 8}},
}


@needs_libraries
@pytest.mark.parametrize("said", CONFIGS)
def test_a_config_of_other_weights_is_refused_with_both_sizes(form, said):
    folder = form("W4A16")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = settings["config_groups"]["group_0"]
    for key, value in CONFIGS[said].items():
        group[key] = group[key] | value if isinstance(group.get(key), dict) else value
    edit(folder / "config.json", quantization_config=settings)
    with pytest.raises(IncompatibleError, match=said):
        Target.load(folder)


@needs_libraries
def test_a_layer_that_the_library_leaves_packed_is_found_by_comparing(form):
    """`targets` leaves out layers whose files are packed: the library loads their numbers without scales."""
    folder = form("W8A8")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    edit(folder / "config.json", quantization_config=settings)
    with pytest.raises(IncompatibleError, match=r"gate_proj.weight .* was loaded as another weight"):
        Target.load(folder)


@needs_libraries
def test_what_a_library_dequantises_wrongly_is_refused(saved, tmp_path):
    """On a CPU bitsandbytes 0.50.2 mixes up the scales of rows that are narrower than its blocks of 64."""
    folder = write_quantised(OTHERS[1], saved, tmp_path / "narrow")
    with pytest.raises(IncompatibleError, match=r"q_proj.weight .* was loaded as another weight than its files hold"):
        Target.load(folder, dtype="float32")


@needs_libraries
def test_int8_with_columns_set_apart_by_the_pass_is_refused(saved):
    edit(saved / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(IncompatibleError, match="columns apart in which any token of a pass is large"):
        Target.load(saved)


@needs_libraries
@pytest.mark.parametrize(
    ("name", "part"), [("W4A16", "weight_scale"), ("W8A8", "weight_scale"), ("FP8 W8A8", "input_scale")]
)
def test_a_changed_scale_changes_the_identity(form, name, part):
    folder = form(name)
    before = Target.load(folder).fingerprint()
    change(folder, lambda held: held | {LAYER + part: held[LAYER + part] * 1.01})
    after = Target.load(folder).fingerprint()
    assert before.digest != after.digest
    assert any("of " in words and LAYER[:-1] in words for words in before.differences(after))
