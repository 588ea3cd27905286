"""LiLiCorr's files: what engines read is what was measured, and lint names what goes wrong between them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.common import IncompatibleError, OutriderError
from outrider.formats import export_drafter, import_drafter, launch

from ..closeness import assert_same
from ..conftest import place_of
from ..formats.conftest import deep, make_drafter, target  # noqa: F401
from ..formats.faults import edit_config
from ..formats.test_block_lint import OWN, THEIRS, export, found_in, put  # noqa: F401

CONVOLUTIONS = "conv_kernel_size", "conv_group_size"


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_nothing_is_found_in_what_was_just_exported(deep, export, to):  # noqa: F811
    assert found_in(export(to, "lilicorr"), deep) == set()


@pytest.mark.parametrize(("name", "check"), [("causal", "causal-missing"), ("lilicorr_logit_scale", "config")])
def test_a_missing_field_is_named(deep, export, name, check):  # noqa: F811
    folder = export("vllm", "lilicorr")
    (folder / "written.json").unlink()
    edit_config(lambda config: config[OWN].pop(name))(folder)
    assert check in found_in(folder, deep)


def test_a_file_that_taps_the_last_layer_is_refused(deep, export):  # noqa: F811
    folder = export("vllm", "lilicorr")
    edit_config(lambda config: config[OWN][THEIRS].__setitem__(-1, 7))(folder)
    with pytest.raises(IncompatibleError, match="tap 8, the target's last state"):
        import_drafter(folder, deep)
    assert "taps-last" in found_in(folder, deep)


def test_its_blocks_are_read_whole_even_where_they_are_causal(target, make_drafter, tmp_path):  # noqa: F811
    """Its candidates are scored together."""
    with pytest.raises(IncompatibleError, match="export it with depth 3"):
        export_drafter(make_drafter("lilicorr", causal=True), target, "vllm", tmp_path / "out", 2)


def test_engines_start_it_as_a_dflash():
    assert launch("vllm", "lilicorr", "target", "folder", 3).settings["method"] == "dflash"
    started = launch("sglang", "lilicorr", "target", "folder", 3).settings
    assert started["speculative-algorithm"] == "DFLASH"
    assert "speculative-num-steps" not in started


def test_nvidias_files_of_lilicorr_are_read(deep, make_drafter, tmp_path):  # noqa: F811
    """Feed-forwards are numbered, as for SGLang; the projector is named; nothing is said of convolutions."""
    drafter, folder = make_drafter("lilicorr", on=deep, taps=[2, 4, 6], mask_token_id=63), tmp_path / "out"
    export_drafter(drafter, deep, "sglang", folder, 3)
    names = load_file(folder / "model.safetensors").keys()
    numbered = {"feature_mlp.0.bias", "feature_mlp.1.weight", "feature_mlp.3.bias", "layers.0.mlp.0.weight"}
    assert {f"lilicorr.{name}" for name in (*numbered, "layers.1.mlp.2.bias")} <= names
    assert "layers.1.mlp.up_proj.weight" in names
    for change in (put(OWN, projector_type="lilicorr"), *(lambda c, n=n: c[OWN].pop(n) for n in CONVOLUTIONS)):
        edit_config(change)(folder)
    back = import_drafter(folder, deep)
    assert all(torch.equal(t, back.state_dict()[n]) for n, t in drafter.state_dict().items())
    assert "projector" not in found_in(folder, deep)
    edit_config(lambda c: c[OWN].pop("lilicorr_logit_scale"))(folder)
    with pytest.raises(OutriderError, match="lilicorr_logit_scale is missing"):
        import_drafter(folder, deep)


@pytest.mark.served
@pytest.mark.parametrize(
    "settings",
    [{}, {"lilicorr_hidden_size": 0, "lilicorr_candidate_topk": 16, "lilicorr_factor_dim": 5}, {"block_size": 8}],
    ids=str,
)
@torch.no_grad()
def test_vllm_scores_the_candidates_of_an_exported_lilicorr_as_we_do(target, make_drafter, tmp_path, settings):  # noqa: F811
    """Its own head, loaded from the files: the same candidates, and the same scores of all pairs; fp32."""
    python = place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM")
    drafter = make_drafter("lilicorr", **settings)
    folder = export_drafter(drafter, target, "vllm", tmp_path / "vllm", drafter.max_depth).folder
    drawn = torch.Generator().manual_seed(1)
    states = torch.randn(3, drafter.max_depth, target.hidden_size, generator=drawn)
    anchors = torch.randn(3, target.hidden_size, generator=drawn)
    tables = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    given = dict(zip(("embedding", "output"), tables, strict=True)) | {"states": states, "anchors": anchors}
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, tmp_path / "inputs")
    script = Path(__file__).with_name("lilicorr_by_vllm.py")
    subprocess.run([python, script, folder, tmp_path / "inputs", tmp_path / "out"], check=True, cwd=tmp_path)
    theirs = load_file(tmp_path / "out")
    candidates, scores = drafter.lattice(target, states, target.lm_head(states), anchors)
    assert torch.equal(candidates, theirs["candidates"])
    assert scores.std() > 0.1
    assert_same(scores, theirs["scores"])
