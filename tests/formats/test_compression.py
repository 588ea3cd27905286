"""Quantised drafters for vLLM: compressed-tensors rounds and packs, and our own arithmetic reads the same numbers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.common import BadInputError, IncompatibleError
from outrider.formats import LAYOUTS, compression, export_drafter, import_drafter
from outrider.formats.compression import PRECISIONS
from outrider.formats.engine_logits import passage_of, session_logits
from outrider.formats.lint import lint

quantization = pytest.importorskip("compressed_tensors.quantization")
BYTES = {"fp8": 1, "w8a16": 1, "w4a16": 0.5}
LINEAR = "layers.0.mlp.up_proj"


def stored(folder):
    return load_file(folder / "model.safetensors")


def settings_of(folder):
    """Return the quantization_config where vLLM looks for it."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("transformer_layer_config", config)["quantization_config"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("eagle3", {}), ("eagle3", {"norm_taps": True, "num_layers": 2}), ("eagle1", {}), ("dflash", {})],
    ids=str,
)
@torch.no_grad()
def test_a_quantised_drafter_is_read_back_to_the_last_bit(target, make_drafter, tmp_path, kind, settings, precision):
    """Its logits are those of the drafter with rounded matrices, which lint and import read, too."""
    drafter = make_drafter(kind, **settings)
    made = export_drafter(drafter, target, "vllm", tmp_path / "out", 3, precision)
    assert made.difference < 1e-4 < made.rounding
    assert [one for one in lint(tmp_path / "out") if one.is_fault] == []
    read = import_drafter(tmp_path / "out", target)
    moved = session_logits(read, target, passage_of(target, drafter.max_depth))
    own = session_logits(drafter, target, passage_of(target, drafter.max_depth))
    assert not torch.equal(moved, own)
    matrices = {name for name in drafter.state_dict() if compression._MATRIX.fullmatch(name)}
    matrices |= {"lm_head.weight"} if kind == "eagle3" else set()
    assert {f"{LINEAR}.weight", "fc.weight"} <= matrices
    for name, weight in drafter.state_dict().items():
        assert (name in matrices) != torch.equal(read.state_dict()[name], weight), name


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_numbers_in_a_file_are_the_nearest_to_the_weight(export, target, make_drafter, tmp_path, precision):
    """Unpacked one by one here: each is off by half a step of its scale at most, or by FP8's half a bit."""
    drafter = make_drafter("eagle3")
    export_drafter(drafter, target, "vllm", tmp_path / "out", 3, precision)
    parts, weight = stored(tmp_path / "out"), drafter.get_parameter(f"{LINEAR}.weight")
    scale = parts[f"{LINEAR}.weight_scale"].repeat_interleave(
        weight.shape[1] // parts[f"{LINEAR}.weight_scale"].shape[1], 1
    )
    if precision == "fp8":
        numbers = parts[f"{LINEAR}.weight"].float()
        assert bool(((numbers * scale - weight).abs() <= weight.abs() / 15 + scale * 2**-9).all())
        return
    bits = 8 if precision == "w8a16" else 4
    words, half = parts[f"{LINEAR}.weight_packed"].tolist(), 2 ** (bits - 1)
    each = [[(word >> shift) % 2**bits - half for word in row for shift in range(0, 32, bits)] for row in words]
    numbers = torch.tensor(each, dtype=torch.float32)
    assert parts[f"{LINEAR}.weight_shape"].tolist() == list(weight.shape) == list(numbers.shape)
    off = (numbers * scale - weight).abs() / scale
    assert float(off.max()) < 0.51
    assert float(numbers.abs().max()) >= half - 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_engines_package_understands_the_settings(target, make_drafter, tmp_path, precision):
    """They stand in the part of config.json that vLLM keeps, name layers by kind, and leave inputs alone."""
    export_drafter(make_drafter("eagle3"), target, "vllm", tmp_path / "out", 3, precision)
    found = quantization.QuantizationConfig.model_validate(settings_of(tmp_path / "out"))
    (group,) = found.config_groups.values()
    assert (group.targets, group.input_activations) == (["Linear", "re:.*lm_head"], None)
    assert found.ignore == ["embed_tokens"]
    assert (group.weights.symmetric, group.weights.num_bits) == (True, 8 * BYTES[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_a_quantised_draft_model_is_one_that_transformers_loads(target, make_drafter, tmp_path, precision):
    """As a target that came quantised is: every weight is compared with what the files mean."""
    for dtype in (torch.bfloat16, torch.float32):
        made = export_drafter(
            make_drafter("draft_model").cast(dtype), target, "vllm", tmp_path / str(dtype), 3, precision
        )
        assert made.difference < 1e-4 < made.rounding
    read = import_drafter(made.folder, target)
    held = session_logits(read, target, passage_of(target))
    for to in ("hf", "sglang"):
        with pytest.raises(IncompatibleError, match="in their own precision alone"):
            export_drafter(make_drafter("draft_model"), target, to, tmp_path / to, 3, precision)
    assert not torch.equal(held, session_logits(make_drafter("draft_model"), target, passage_of(target)))
    assert stored(made.folder)["lm_head.weight"].dtype == torch.float32


def test_matrices_shrink_as_their_bits_do(target, make_drafter, tmp_path):
    sizes = {}
    for precision in ("", *PRECISIONS):
        export_drafter(make_drafter("eagle3"), target, "vllm", tmp_path / (precision or "own"), 3, precision)
        with safe_open(tmp_path / (precision or "own") / "model.safetensors", framework="pt") as file:
            names = [n for n in file.keys() if n.startswith(f"{LINEAR}.weight") and not n.endswith("_shape")]  # noqa: SIM118
            sizes[precision] = {n: file.get_tensor(n).nbytes for n in names}
    whole = sizes[""][f"{LINEAR}.weight"]
    for precision in PRECISIONS:
        scales = sizes[precision].pop(f"{LINEAR}.weight_scale")
        assert sum(sizes[precision].values()) == whole / 4 * BYTES[precision]
        assert scales <= whole / 8


def test_scales_of_a_bfloat16_head_are_rounded_before_its_numbers(target, make_drafter, tmp_path):
    """An engine multiplies by the scale that is kept, so numbers are those of this one."""
    drafter = make_drafter("eagle3").cast(torch.bfloat16)
    made = export_drafter(drafter, target, "vllm", tmp_path / "out", 3, "w4a16")
    assert made.difference < 1e-4
    parts, weight = stored(tmp_path / "out"), drafter.get_parameter(f"{LINEAR}.weight")
    assert parts[f"{LINEAR}.weight_scale"].dtype == torch.bfloat16
    read = import_drafter(tmp_path / "out", target).state_dict()[f"{LINEAR}.weight"]
    scale = parts[f"{LINEAR}.weight_scale"].float().repeat_interleave(32, 1)
    assert (
        float(((read - weight.detach().float()).abs() / scale).max()) < 0.5 + 16 * 2**-8
    )  # two roundings to eight bits


def test_what_an_engine_takes_in_its_own_precision_alone_is_refused_by_name(target, make_drafter, tmp_path):
    cases = [("medusa", "vllm"), ("mtp", "vllm"), ("dspark", "vllm"), ("eagle3", "sglang"), ("eagle1", "eagle")]
    for kind, to in cases:
        with pytest.raises(IncompatibleError, match=f"{to} takes {kind} drafters .* in their own precision alone"):
            export_drafter(make_drafter(kind), target, to, tmp_path / "out", 3, "w4a16")
        assert LAYOUTS[to][kind].precisions == ()
    with pytest.raises(BadInputError, match=r"speculators has no precision 'q8_0'; it has: fp8, w8a16, w4a16"):
        export_drafter(make_drafter("eagle3"), target, "vllm", tmp_path / "out", 3, "q8_0")
    assert not (tmp_path / "out").exists()


def test_widths_without_whole_groups_are_refused(target, make_drafter, tmp_path):
    drafter = make_drafter("eagle3", intermediate_size=40)
    with pytest.raises(IncompatibleError, match=r"down_proj\.weight has 40"):
        export_drafter(drafter, target, "vllm", tmp_path / "out", 3, "w4a16")
    export_drafter(drafter, target, "vllm", tmp_path / "out", 3, "w8a16")


def test_without_the_package_it_is_named(target, make_drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(compression.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'outrider\[quantised\]'"):
        export_drafter(make_drafter("eagle3"), target, "vllm", tmp_path / "out", 3, "fp8")


@pytest.fixture
def altered(target, make_drafter, tmp_path):
    """`altered(tensors=…, settings=…)`: a W4A16 head whose files were changed by these functions, read in again."""

    def read(tensors=lambda held: None, settings=lambda held: None):
        folder = tmp_path / "out"
        export_drafter(make_drafter("eagle3"), target, "vllm", folder, 3, "w4a16")
        held = stored(folder)
        tensors(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        settings(config["transformer_layer_config"]["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
        return import_drafter(folder, target)

    return read


def test_parts_that_do_not_fit_are_refused(altered):
    with pytest.raises(IncompatibleError, match=r"up_proj\.weight has other parts than its quantization_config"):
        altered(tensors=lambda held: held.update({f"{LINEAR}.weight_scale": torch.ones(3, 1)}))


def test_quantised_inputs_and_other_methods_are_refused(altered):
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    with pytest.raises(IncompatibleError, match=r"W4A8.*with inputs as they are"):
        altered(settings=lambda held: held["config_groups"]["group_0"].update(input_activations=inputs))


def test_another_method_is_refused(altered):
    with pytest.raises(IncompatibleError, match="came quantised as gptq"):
        altered(settings=lambda held: held.update(quant_method="gptq"))


@pytest.mark.parametrize("nonsense", ["int4", ["w4a16"], {"quant_method": "compressed-tensors"}])
def test_settings_that_make_no_sense_are_refused(export, target, tmp_path, nonsense):
    export("eagle3")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    config["transformer_layer_config"]["quantization_config"] = nonsense
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(config))
    for read in (lint, lambda folder: import_drafter(folder, target)):
        with pytest.raises((BadInputError, IncompatibleError), match=r"config\.json|quantised"):
            read(tmp_path / "vllm")


def test_a_changed_number_is_a_finding_of_lint(altered, tmp_path):
    def change(held):
        held[f"{LINEAR}.weight_packed"][0, 0] += 1

    altered(tensors=change)
    assert any(LINEAR in one.found and one.is_fault for one in lint(tmp_path / "out"))
