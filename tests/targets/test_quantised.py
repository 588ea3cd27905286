"""A quantised target says nearly the same, with its own identity; what another library quantised needs that one."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from outrider.common import BadInputError
from outrider.targets import Target

from .conftest import edit

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


LIBRARIES = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "gptqmodel": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_whose_library_is_missing_is_refused_with_another_way(saved, library):
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    edit(saved / "config.json", quantization_config=LIBRARIES[library])
    with pytest.raises(BadInputError, match=r"cannot be loaded: .*Install what it asks for; .* target\.quantize: int8"):
        Target.load(saved, device="cpu")
