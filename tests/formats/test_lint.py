"""Lint names what is wrong in a drafter's files, from the files alone, and finds nothing where nothing is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.common import IncompatibleError
from outrider.formats import export_drafter, import_drafter
from outrider.formats.lint import lint

from .faults import FAULTS, edit_config, edit_tensors, renamed

# Faults that only the record of the export shows: nothing in the files themselves is unusual.
BY_RECORD = {
    "taps' columns in another order": "changed",
    "norm before the residual flipped": "config-changed",
    "rope interleaved": "changed",
    "gate and up swapped": "swapped",
    "norms of the first layer swapped": "swapped",
    "output rows shuffled": "changed",
}
BY_FILES = {
    "taps one too low": "taps-off-by-one",
    "taps one too high": "taps-off-by-one",
    "taps missing": "taps-missing",
    "norm of the taps flipped": "norm-flag",
    "norm of the output flipped": "norm-flag",
    "norm before the residual missing": "norm-flag-missing",
    "d2t as ids": "d2t-ids",
    "d2t rolled by one": "d2t",
    "rope base": "rope-base",
    "depth off by one": "depth",
    "o_proj transposed": "shape",
    "stale embeddings": "embeddings",
    "final norm lost": "initial",
    "untrained weights": "initial",
}


@pytest.fixture
def export(deep, make_drafter, tmp_path) -> Callable[..., Path]:
    """`export(engine, record=False)`: a head whose taps are the usual ones, written for it."""

    def make(to: str, record: bool = False) -> Path:
        settings = {"taps": [2, 4, 5], "norm_taps": True, "norm_output": True, "num_attention_heads": 2}
        folder = tmp_path / to
        export_drafter(make_drafter("eagle3", on=deep, draft_vocab_size=20, **settings), deep, to, folder, 3)
        (folder / "launch.json").write_text(json.dumps({"settings": {"num_speculative_tokens": 3}}))
        (folder / "served.json").write_text(json.dumps({"depth": 3}))
        if not record:
            (folder / "written.json").unlink()
        return folder

    return make


@pytest.mark.parametrize("to", ["vllm", "speculators", "sglang"])
def test_nothing_is_found_in_what_was_just_exported(export, to):
    assert lint(export(to, record=True)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(export, fault):
    folder = export("vllm", record=True)
    FAULTS[fault](folder)
    assert (BY_FILES | BY_RECORD)[fault] in {finding.check for finding in lint(folder)}
    (folder / "written.json").unlink()
    alone = {finding.check for finding in lint(folder)}
    assert (BY_FILES[fault] in alone) if fault in BY_FILES else not alone


@pytest.mark.parametrize(("start", "stands_for"), [("layers.0.", "midlayer."), ("model.", "")])
def test_names_that_only_some_engines_read_are_no_fault(export, start, stands_for):
    """ModelOpt writes `layers.0.` for `midlayer.`, others put `model.` before everything; it is said who reads that."""
    folder = export("sglang")
    renamed(lambda n: f"{start}{n.removeprefix(stands_for)}" if n.startswith(stands_for) else n)(folder)
    (found,) = lint(folder)
    assert (found.check, found.is_fault) == ("names", False)
    assert "vLLM" in found.engine
    assert "SGLang" in found.engine


def test_a_target_that_was_not_fetched_is_a_target_that_is_not_here(export, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert lint(export("vllm"), "smollm2") == []


def test_a_tensor_that_is_missing_is_missed_under_any_name(export):
    folder = export("sglang")
    renamed(lambda name: name.replace("midlayer.", "layers.0."))(folder)
    edit_tensors(lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"))(folder)
    assert [f.found for f in lint(folder) if f.is_fault] == ["midlayer.mlp.up_proj.weight is missing."]


@pytest.mark.parametrize("eagle_config", [None, {}, {"eagle_aux_hidden_state_layer_ids": []}])
def test_a_flat_config_without_taps_is_unusual_and_no_fault(export, eagle_config):
    """As the method's own repository has it: its heads read what engines tap by default."""
    folder = export("sglang")
    edit_config(lambda config: config.update(eagle_config=eagle_config))(folder)
    assert [(f.check, f.is_fault) for f in lint(folder)] == [("taps-missing", False)]


@pytest.mark.parametrize(("to", "first"), [("speculators", "layers.0."), ("sglang", "midlayer.")])
def test_layers_of_qwen3_are_no_fault(export, to, first):
    """They are Llama's with norms of queries and keys; one that is missing is missed."""
    folder = export(to)
    config = json.loads((folder / "config.json").read_text())
    size = config.get("transformer_layer_config", config)["head_dim"]
    edit_config(lambda config: config.get("transformer_layer_config", config).update(model_type="qwen3"))(folder)
    norms = {f"{first}self_attn.{part}_norm.weight": 1 + torch.rand(size) for part in "qk"}
    edit_tensors(lambda tensors: tensors | norms)(folder)
    assert lint(folder) == []
    edit_tensors(lambda tensors: {n: t for n, t in tensors.items() if n != max(norms)})(folder)
    assert [f.check for f in lint(folder)] == ["missing"]


def test_layers_that_outrider_does_not_have_are_no_fault_of_the_files(export):
    folder = export("speculators")
    edit_config(lambda config: config["transformer_layer_config"].update(hidden_act="gelu"))(folder)
    (found,) = lint(folder)
    assert (found.check, found.is_fault) == ("config", False)
    assert "gelu" in found.found


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_a_drafter_that_ends_before_its_target_is_unusual(export, to):
    folder = export(to)
    shorter = {"max_position_embeddings": 64}
    edit_config(lambda config: config.get("transformer_layer_config", config).update(shorter))(folder)
    (found,) = lint(folder)
    assert (found.check, found.is_fault) == ("context", False)
    assert "is 64, the target's" in found.found


OTHER_TYPES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int8",
    "uint8",
    "bool",
    "complex64",
)


@pytest.mark.parametrize("kind", [kind for kind in OTHER_TYPES if hasattr(torch, kind)])
@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight", "d2t"])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_tensor_of_a_type_that_no_head_has_is_named_and_refused(export, deep, name, kind):
    """It would be taken for a damaged config, or read as plain numbers without its scales."""
    folder, dtype = export("speculators"), getattr(torch, kind)
    if name == "d2t" and kind in ("int8", "uint8", "bool"):
        pytest.skip("whole numbers are what it holds")

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.uint8).view(dtype) if kind.startswith("float4") else tensor.to(dtype)

    edit_tensors(lambda tensors: tensors | {name: changed(tensors[name])})(folder)
    (found,) = [finding.found for finding in lint(folder) if finding.check == "dtype"]
    assert found.startswith(f"{name} is torch.{kind}, and ")
    with pytest.raises(IncompatibleError, match=f"{name} is torch.{kind}, and "):
        import_drafter(folder, deep)
