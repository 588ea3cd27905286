"""Lint names what is wrong in a drafter's files, from the files alone, and finds nothing where nothing is wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.formats import export_drafter
from outrider.formats.lint import lint
from outrider.heads import Drafter
from outrider.targets import Target


def _faults() -> ModuleType:
    """Load faults.py, which stands beside this file and is shared with the tests of served engines."""
    spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = _faults().FAULTS
# What only the record of the export tells: nothing in the files themselves is unusual.
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
def export(deep: Target, make_drafter: Callable[..., Drafter], tmp_path: Path) -> Callable[[str], Path]:
    """`export(engine)`: a head whose taps are the usual ones, written for it."""

    def make(to: str) -> Path:
        settings = {"taps": [2, 4, 5], "norm_taps": True, "norm_output": True, "num_attention_heads": 2}
        folder = tmp_path / to
        drafter = make_drafter("eagle3", on=deep, draft_vocab_size=20, **settings)
        export_drafter(drafter, deep, to, folder, 3)
        launch = {"settings": {"num_speculative_tokens": 3}}
        (folder / "launch.json").write_text(json.dumps(launch))
        (folder / "served.json").write_text(json.dumps({"depth": 3}))
        return folder

    return make


@pytest.mark.parametrize("to", ["vllm", "speculators", "sglang"])
def test_nothing_is_found_in_what_was_just_exported(export: Callable[[str], Path], to: str) -> None:
    assert lint(export(to)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(export: Callable[[str], Path], fault: str) -> None:
    folder = export("vllm")
    FAULTS[fault](folder)
    named = {finding.check for finding in lint(folder)}
    assert (BY_FILES | BY_RECORD)[fault] in named
    (folder / "written.json").unlink()
    alone = {finding.check for finding in lint(folder)}
    assert (BY_FILES[fault] in alone) if fault in BY_FILES else not alone


# ------------------------------------------------------------ other programs' habits


@pytest.mark.parametrize(("start", "stands_for"), [("layers.0.", "midlayer."), ("model.", "")])
def test_names_that_only_some_engines_read_are_no_fault(
    export: Callable[[str], Path], start: str, stands_for: str
) -> None:
    """ModelOpt writes `layers.0.` for `midlayer.`, others put `model.` before everything; it is said who reads that."""
    folder = export("sglang")
    (folder / "written.json").unlink()
    renamed = {
        f"{start}{name.removeprefix(stands_for)}" if name.startswith(stands_for) else name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (found,) = lint(folder)
    assert (found.check, found.is_fault) == ("names", False)
    assert "vLLM" in found.engine
    assert "SGLang" in found.engine


def test_a_tensor_that_is_missing_is_missed_under_any_name(export: Callable[[str], Path]) -> None:
    folder = export("sglang")
    (folder / "written.json").unlink()
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(folder / "model.safetensors").items()}
    del renamed["layers.0.mlp.up_proj.weight"]
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert [f.found for f in lint(folder) if f.is_fault] == ["midlayer.mlp.up_proj.weight is missing."]


@pytest.mark.parametrize("eagle_config", [None, {}, {"eagle_aux_hidden_state_layer_ids": []}])
def test_a_flat_config_without_taps_is_unusual_and_no_fault(
    export: Callable[[str], Path], eagle_config: dict[str, list[int]] | None
) -> None:
    """As the method's own repository has it: its heads read what engines tap by default."""
    folder = export("sglang")
    (folder / "written.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"eagle_config": eagle_config}
    (folder / "config.json").write_text(json.dumps(config))
    assert [(f.check, f.is_fault) for f in lint(folder)] == [("taps-missing", False)]


@pytest.mark.parametrize("to", ["speculators", "sglang"])
def test_layers_of_qwen3_are_no_fault(export: Callable[[str], Path], to: str) -> None:
    """They are Llama's with norms of queries and keys; one that is missing is missed."""
    folder = export(to)
    (folder / "written.json").unlink()
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer = config.get("transformer_layer_config", config)
    layer["model_type"] = "qwen3"
    first = "layers.0." if to == "speculators" else "midlayer."
    norms = {f"{first}self_attn.{part}_norm.weight": 1 + torch.rand(layer["head_dim"]) for part in "qk"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | norms, folder / "model.safetensors", metadata={"format": "pt"})
    assert lint(folder) == []
    norms.popitem()
    save_file(tensors | norms, folder / "model.safetensors", metadata={"format": "pt"})
    assert [f.check for f in lint(folder)] == ["missing"]


def test_layers_that_outrider_does_not_have_are_no_fault_of_the_files(export: Callable[[str], Path]) -> None:
    folder = export("speculators")
    (folder / "written.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["hidden_act"] = "gelu"
    (folder / "config.json").write_text(json.dumps(config))
    (found,) = lint(folder)
    assert (found.check, found.is_fault) == ("config", False)
    assert "gelu" in found.found
