"""Lint names what goes wrong with block drafters between those who write them and those who read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.common import IncompatibleError, OutriderError
from outrider.formats import export_drafter, import_drafter
from outrider.formats.lint import lint
from outrider.targets import Target

from .faults import edit_config, edit_tensors, renamed

Config = dict[str, Any]


@pytest.fixture
def export(deep, make_drafter, tmp_path) -> Callable[[str, str], Path]:
    """`export(layout, type)`: a drafter with the usual taps."""

    def make(to: str, kind: str) -> Path:
        settings = {"taps": [2, 4, 6], "draft_vocab_size": 0}
        settings |= {} if kind == "eagle3" else {"num_layers": 2, "mask_token_id": 63}
        export_drafter(make_drafter(kind, on=deep, **settings), deep, to, tmp_path / to, 3)
        return tmp_path / to

    return make


def found_in(folder: Path, target: Target) -> set[str]:
    return {finding.check for finding in lint(folder, target.source["path"])}


WRITTEN = [("speculators", "dflash"), ("speculators", "dspark"), ("z-lab", "dflash"), ("deepspec", "dspark")]
WRITTEN += [("speculators", "dflash2"), ("z-lab", "dflash2")]


@pytest.mark.parametrize(("to", "kind"), WRITTEN)
def test_nothing_is_found_in_what_was_just_exported(deep, export, to, kind):
    assert found_in(export(to, kind), deep) == set()


def shifted(name: str, by: int) -> Callable[[Config], Any]:
    def change(config: Config) -> None:
        holder = config if name in config else config["dflash_config"]
        holder[name] = [tap + by for tap in holder[name]]

    return change


def put(part: str = "", **values: Any) -> Callable[[Config], Any]:
    """Return the change of fields, at the top of config.json or in one part of it."""
    return lambda config: (config[part] if part else config).update(values)


def fewer_drafts(config: Config) -> None:
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2


def silent_windows(config: Config) -> None:
    config[LAYER] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
    del config["sliding_window_non_causal"]


OURS = "aux_hidden_state_layer_ids"
THEIRS = "target_layer_ids"
OWN = "dflash_config"
LAYER = "transformer_layer_config"
MIXED = ["sliding_attention", "full_attention"]
FAULTS: list[tuple[str, str, str, Callable[[Config], Any], str]] = [
    ("taps as outputs of layers", "speculators", "dflash", shifted(OURS, -1), "taps-off-by-one"),
    ("taps as hidden states", "z-lab", "dflash", shifted(THEIRS, 1), "taps-off-by-one"),
    ("taps as hidden states in DSpark", "deepspec", "dspark", shifted(THEIRS, 1), "taps-off-by-one"),
    ("taps out of range", "z-lab", "dflash", shifted(THEIRS, 3), "taps-range"),
    ("taps missing", "z-lab", "dflash", lambda c: c[OWN].pop(THEIRS), "taps-missing"),
    ("taps out of order", "speculators", "dspark", lambda c: c.update({OURS: [6, 4, 2]}), "taps-order"),
    ("the last layer tapped", "deepspec", "dspark", lambda c: c.update({THEIRS: [1, 3, 7]}), "taps-last"),
    ("another target's depth", "z-lab", "dflash", put(num_target_layers=36), "target-layers"),
    ("mask missing", "speculators", "dflash", lambda c: c.pop("mask_token_id"), "mask-missing"),
    ("mask out of range", "deepspec", "dspark", put(mask_token_id=64), "mask"),
    ("layout missing", "speculators", "dspark", lambda c: c.pop("sample_from_anchor"), "layout-missing"),
    ("layout of DSpark", "speculators", "dflash", put(sample_from_anchor=True), "layout"),
    ("layout of Domino", "z-lab", "dflash", put(OWN, shift_label=True), "layout"),
    ("causal missing", "z-lab", "dflash", lambda c: c[OWN].pop("causal"), "causal-missing"),
    ("causal in one place", "z-lab", "dflash", put(OWN, causal=True), "causal"),
    ("two sizes", "z-lab", "dflash", put(OWN, block_size=9), "block-size"),
    ("no size", "z-lab", "dflash", lambda c: c.pop("block_size"), "block-size-missing"),
    ("causal without a window", "speculators", "dflash", put(sliding_window_non_causal=False), "causal"),
    ("windows and no word", "speculators", "dflash2", silent_windows, "causal-missing"),
    ("a window", "z-lab", "dflash", put(OWN, use_swa=True), "window"),
    ("one layer with a window", "speculators", "dflash", put(LAYER, layer_types=MIXED), "mixed-layers"),
    ("fewer drafts than a block", "speculators", "dflash", fewer_drafts, "block-depth"),
    ("layout of DFlash2", "speculators", "dflash2", put(sample_from_anchor=True), "layout"),
    ("causal missing in DFlash2", "z-lab", "dflash2", lambda c: c[OWN].pop("causal"), "causal-missing"),
    ("DFlash2's class in DFlash", "speculators", "dflash", put(architectures=["DFlash2DraftModel"]), "architecture"),
    ("DSpark as DFlash", "z-lab", "dflash", put(OWN, projector_type="dspark"), "projector"),
    ("vLLM's other class", "deepspec", "dspark", put(architectures=["DSparkDraftModel"]), "architecture"),
    ("the config's class", "speculators", "dspark", put(architectures=["DSparkSpeculator"]), "architecture"),
    ("a head that is not named", "deepspec", "dspark", put(enable_confidence_head=False), "head-flag"),
    ("a kind that vLLM lacks", "speculators", "dspark", put(markov_head_type="gated"), "markov-kind"),
    ("positions of a part of each head", "z-lab", "dflash", put(partial_rotary_factor=0.5), "rope"),
]


@pytest.mark.parametrize(("to", "kind", "plant", "check"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS])
def test_planted_faults_are_named_by_the_files_alone(deep, export, to, kind, plant, check):
    folder = export(to, kind)
    (folder / "written.json").unlink(missing_ok=True)
    edit_config(plant)(folder)
    found = found_in(folder, deep)
    assert check in found
    assert check != "causal-missing" or "config" not in found, "names and shapes are still compared"


def test_flat_names_of_heads_are_named(deep, export):
    folder = export("deepspec", "dspark")
    renamed(lambda n: n.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"))(folder)
    assert {"head-names", "head-flag", "missing"} <= found_in(folder, deep)


def test_other_names_of_the_same_tensors_are_read(deep, make_drafter, tmp_path):
    """As SGLang reads them: below `model.`, and the fused context's as an encoder's."""
    drafter = make_drafter("dflash", on=deep, draft_vocab_size=0, mask_token_id=63)
    export_drafter(drafter, deep, "z-lab", tmp_path / "out", 3)
    other = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    renamed(lambda name: other.get(name, f"model.{name}"))(tmp_path / "out")
    back = import_drafter(tmp_path / "out", deep)
    assert all(torch.equal(t, back.state_dict()[n]) for n, t in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (put(OWN, projector_type="dspark"), "no plain DFlash drafter"),
        (put(architectures=["DFlash2DraftModel"]), "conv_kernel_size is missing"),
        (put(OWN, use_swa=True), "see a sliding window"),
        (put(partial_rotary_factor=0.5), "a part of each head"),
        (put("rope_parameters", partial_rotary_factor=0.5), "a part of each head"),
        (put(is_neox_style=False), "is_neox_style: false, so that neighbours turn in pairs"),
        (lambda c: c[OWN].pop("mask_token_id"), "mask_token_id is missing"),
    ],
)
def test_what_would_have_to_be_guessed_is_refused(deep, export, plant, said):
    folder = export("z-lab", "dflash")
    edit_config(plant)(folder)
    with pytest.raises(OutriderError, match=said):
        import_drafter(folder, deep)


AUX = "eagle_aux_hidden_state_layer_ids"
LAST = [("z-lab", "dflash", THEIRS, 7), ("z-lab", "dflash2", THEIRS, 7)]
LAST += [("deepspec", "dspark", THEIRS, 7), ("sglang", "eagle3", AUX, 7), ("speculators", "eagle3", AUX, 8)]
LAST += [("speculators", kind, OURS, 8) for kind in ("dflash", "dflash2", "dspark")] + [
    ("speculators", "peagle", AUX, 8)
]


@pytest.mark.parametrize(("to", "kind", "name", "last"), LAST)
def test_a_file_that_taps_the_last_layer_is_refused(deep, export, to, kind, name, last):
    """Engines hand on its state before the final norm, libraries the one after it; no file says by which it learned."""
    folder = export(to, kind)

    def tap_it(config: Config) -> None:
        holder = next(part for part in (config, config.get(OWN), config.get("eagle_config")) if part and name in part)
        holder[name][-1] = last

    edit_config(tap_it)(folder)
    with pytest.raises(IncompatibleError, match="tap 8, the target's last state before its final norm in engines"):
        import_drafter(folder, deep)
    assert "taps-last" in found_in(folder, deep)


@pytest.mark.parametrize(("to", "kind"), [("z-lab", "dflash"), ("speculators", "dspark")])
def test_a_base_of_rotary_positions_that_readers_guess_is_asked_for(deep, export, to, kind):
    """vLLM takes 1,000,000 for a block drafter, others 10,000."""
    folder = export(to, kind)
    (folder / "written.json").unlink()

    def without(config: Config) -> None:
        layer = config.get(LAYER, config)
        del layer["rope_theta"], layer["rope_parameters"]["rope_theta"]

    edit_config(without)(folder)
    with pytest.raises(OutriderError, match="rope_theta is missing"):
        import_drafter(folder, deep)
    assert found_in(folder, deep) == {"rope", "config"}


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_another_targets_embeddings_are_refused(deep, export, name):
    folder = export("deepspec", "dspark")
    edit_tensors(lambda tensors: tensors | {name: tensors[name].roll(1, 0)})(folder)
    with pytest.raises(IncompatibleError, match="made for another target"):
        import_drafter(folder, deep)


def test_config_and_names_are_those_of_published_files(export):
    """Held against the lists in public code, not only against our own reading."""
    z_lab, deepspec = export("z-lab", "dflash"), export("deepspec", "dspark")
    config = json.loads((z_lab / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 63, "target_layer_ids": [1, 3, 5], "causal": False}
    assert config["is_causal"] is False, "SGLang reads it here, and nowhere else"
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert {"block_size", "num_target_layers", "head_dim", "rope_theta", "layer_types"} <= config.keys()
    layer = [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"layers.{i}.{n}" for i in range(2) for n in layer} | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert load_file(z_lab / "model.safetensors").keys() == names
    config = json.loads((deepspec / "config.json").read_text())
    assert config["target_layer_ids"] == [1, 3, 5]
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert {"mask_token_id", "block_size", "num_anchors", "markov_rank", "markov_head_type"} <= config.keys()
    heads = {f"markov_head.markov_{n}.weight" for n in ("w1", "w2")}
    heads |= {f"confidence_head.proj.{n}" for n in ("weight", "bias")} | {"embed_tokens.weight", "lm_head.weight"}
    assert load_file(deepspec / "model.safetensors").keys() == names | heads
