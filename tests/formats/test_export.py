"""Drafters leave for engines and come back: what an engine reads is what was measured, and comes in bit for bit."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.common import BadInputError, IncompatibleError
from outrider.common.digests import save_whole
from outrider.formats import LAYOUTS, export_drafter, import_drafter, launch
from outrider.formats.engine_logits import outputs_in_float32, passage_of, session_logits
from outrider.formats.lint import lint
from outrider.heads import load_drafter
from outrider.targets import Target

from ..conftest import installed
from .faults import edit_config, edit_tensors

LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "eagle3": [
        {},
        {"norm_taps": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"norm_taps": True, "num_layers": 2, "draft_vocab_size": 0},
        {"taps": [1, 4], "norm_output": True, "num_attention_heads": 2, "head_dim": 16},
        {"rope_parameters": LINEAR_ROPE},
        {"num_layers": 2, "sliding_window": 7},
    ],
    "eagle1": [
        {},
        {"num_layers": 2, "sliding_window": 7},
        {"fc_bias": True, "embedding_scale": 16.0, "feature_scale": 0.5},
        {"num_layers": 2},
        {"norm_first": True},
        {"draft_vocab_size": 100},
    ],
    "medusa": [
        {},
        {"bias": True, "num_layers": 2, "num_heads": 2},
        {"share_lm_head": True},
        {"draft_vocab_size": 100},
        {"draft_vocab_size": 100, "share_lm_head": True},
    ],
    "peagle": [{}, {"norm_taps": True}, {"norm_before_fc": True, "num_layers": 1}, {"draft_vocab_size": 0}],
    "dflash": [
        {},
        {"draft_vocab_size": 0, "rope_parameters": LINEAR_ROPE},
        {"sliding_window": 6, "window_from": "anchor", "causal": True},
        {"sliding_window": 6, "window_from": "anchor"},
        {"sliding_window": 6},
        {"causal": True},
        {"draft_vocab_size": 0, "causal": True},
        {"draft_vocab_size": 0, "taps": [1, 2, 4, 5], "num_layers": 1},
    ],
    "dflash2": [
        {},
        {"causal": True, "conv_kernel_size": 3, "selector_top_k": 5},
        {"sliding_window": 6, "window_from": "anchor", "causal": True, "conv_group_size": 32},
        {"draft_vocab_size": 100},
        {"from_anchor": True, "block_size": 3},
    ],
    "lilicorr": [
        {},
        {"lilicorr_hidden_size": 0, "lilicorr_candidate_topk": 16, "lilicorr_factor_dim": 5, "causal": True},
        {"conv_kernel_size": 2, "conv_group_size": 4, "lilicorr_num_layers": 1, "lilicorr_candidate_topk": 1},
        {"lilicorr_candidate_topk": 12},
        {"draft_vocab_size": 100},
        {"from_anchor": True, "block_size": 3},
    ],
    "dspark": [{}, {"markov_head": "gated"}, {"markov_head": "rnn"}, {"from_anchor": False, "block_size": 4}]
    + [{"draft_vocab_size": 0, "markov_head": head} for head in ("vanilla", "gated", "rnn")]
    + [{"draft_vocab_size": 0, "confidence": False}, {"draft_vocab_size": 0, "taps": [0, 3]}],
    "draft_model": [{}],
    "uno": [{}, {"rank": 4, "alpha": 4.0}, {"mask_token_id": 300}],
    "self_speculative": [{"exit_layer": 2, "num_blocks": 0}, {"exit_layer": 2}],
}


CASES = [
    pytest.param(to, kind, settings, id=f"{to}-{kind}-{settings or 'plain'}")
    for to, layouts in LAYOUTS.items()
    for kind in layouts
    for settings in VARIANTS.get(kind, [])  # mtp needs a target of another family: tests/heads/test_mtp.py
    if layouts[kind].keeps_window or "sliding_window" not in settings
]


@pytest.mark.parametrize(("to", "kind", "settings"), CASES)
def test_what_leaves_is_read_as_it_was_measured_and_comes_back_bit_for_bit(
    target, make_drafter, tmp_path, to, kind, settings
):
    """It can be saved as one of ours. Where an engine lacks a setting, nothing is written, and the message says what
    it would serve.
    """
    drafter, out = make_drafter(kind, **settings), tmp_path / "out"
    if LAYOUTS[to][kind].lacks(drafter.config, target.num_layers):
        with pytest.raises(IncompatibleError, match="nearest that can be served"):
            export_drafter(drafter, target, to, out, 3)
        assert not out.exists()
        return
    assert export_drafter(drafter, target, to, out, 3).difference < 1e-4
    back, passage = import_drafter(out, target), passage_of(target, drafter.max_depth)
    assert type(back) is type(drafter)
    save_whole(back, tmp_path / "kept")
    for other in (back, load_drafter(tmp_path / "kept", target)):
        assert torch.equal(session_logits(other, target, passage), session_logits(drafter, target, passage))


@pytest.mark.parametrize(("to", "kind"), [("sglang", "eagle1"), ("sglang", "eagle3"), ("eagle", "eagle1")])
def test_a_window_that_an_engine_has_not_is_told_of(target, make_drafter, tmp_path, to, kind, caplog):
    """Up to its length drafts are the same."""
    export_drafter(make_drafter(kind, sliding_window=300), target, to, tmp_path / "out", 3)
    assert f"{to} has no sliding window for this drafter: beyond 300 tokens its drafts are others" in caplog.text
    assert import_drafter(tmp_path / "out", target).config.sliding_window == 0


@pytest.mark.parametrize("scale", [0.3, 0.25])
def test_scales_that_bfloat16_would_round_leave_in_float32(target, make_drafter, tmp_path, scale):
    """Rounded before an engine loads them, they would be read as another head's."""
    drafter = make_drafter("eagle1", embedding_scale=1 / scale, feature_scale=scale).cast(torch.bfloat16)
    assert export_drafter(drafter, target, "vllm", tmp_path / "vllm", 3).difference < 1e-4
    kept = load_file(tmp_path / "vllm" / "model.safetensors")["fc.weight"].dtype
    assert kept == (torch.float32 if scale == 0.3 else torch.bfloat16)


def test_a_target_in_half_precision_rounds_no_comparison(target, make_drafter, tmp_path):
    """Of a trained DFlash in bfloat16 the two sides differed by 0.009 of their spread, and it could go nowhere."""
    half = Target(copy.deepcopy(target.model).bfloat16(), target.tokenizer)
    states, head = torch.randn(5, half.hidden_size), half.model.get_output_embeddings()
    with outputs_in_float32(half):
        assert torch.equal(half.lm_head(states), states @ head.weight.float().T)
    assert head.weight.dtype == half.lm_head(states).dtype == torch.bfloat16
    drafter = make_drafter("dflash", draft_vocab_size=0)
    assert export_drafter(drafter, half, "gguf", tmp_path / "out", drafter.max_depth).difference < 1e-4


@pytest.mark.parametrize(("taps", "nearest"), [([4, 2, 1], [1, 2, 4]), ([1, 3, 6], [1, 3, 5])], ids=str)
def test_taps_that_an_engine_would_take_otherwise_are_refused(export, tmp_path, taps, nearest):
    said = f"{re.escape(f'taps: {taps}')}.*{re.escape(f'nearest that can be served: taps: {nearest}')}"
    with pytest.raises(IncompatibleError, match=said):
        export("eagle3", taps=taps)
    assert not (tmp_path / "vllm").exists()


def test_a_block_that_engines_would_read_otherwise_is_refused(export):
    """Fewer drafts are a shorter block there, which says something else unless it is causal; masks are tokens."""
    with pytest.raises(IncompatibleError, match="trained for 3 drafts, 2 were asked for; export it with depth 3"):
        export("dflash", depth=2)
    causal = {"causal": True, "sliding_window": 6, "window_from": "anchor"}
    assert export("dflash", "speculators", 2, **causal).difference < 1e-4
    with pytest.raises(IncompatibleError, match=r"vLLM moves the window.*that can be served: sliding_window: 0"):
        export("dflash", depth=2, **causal)
    with pytest.raises(IncompatibleError, match="learned its mask"):
        export("dflash", mask_token_id=None)


def test_pruned_heads_have_output_embeddings_of_the_whole_vocabulary_for_vllm(target, export):
    """Its Medusa makes room for all of it; tokens that are not the heads' own are never the most probable ones."""
    folder = export("medusa", draft_vocab_size=20).folder
    tensors = load_file(folder / "model.safetensors")
    assert tensors["lm_heads.0.weight"].shape == (target.vocab_size, target.hidden_size)
    hidden = torch.randn(2000, target.hidden_size, generator=torch.Generator().manual_seed(1))
    drafts = (hidden @ tensors["lm_heads.0.weight"].T).argmax(-1)
    assert torch.isin(drafts, tensors["token_map"]).all()
    assert lint(folder) == []
    edit_tensors(lambda t: t | {n: t[n][t["token_map"]] for n in t if n.startswith("lm_heads")})(folder)
    edit_config(lambda config: config.update(truncated_vocab_size=20))(folder)
    (folder / "written.json").unlink()
    assert {f.check for f in lint(folder) if f.is_fault} == {"shape"}, "vLLM fails to load fewer rows"


def test_a_folder_that_holds_something_is_left_alone(target, make_drafter, tmp_path):
    (tmp_path / "precious").write_text("kept")
    with pytest.raises(BadInputError, match="not empty"):
        export_drafter(make_drafter("eagle3"), target, "vllm", tmp_path, 3)
    assert (tmp_path / "precious").read_text() == "kept"


def test_an_unknown_engine_and_an_unserved_drafter_are_refused_with_what_is_known(export):
    with pytest.raises(BadInputError, match="unknown format or engine 'vlm'; did you mean 'vllm'"):
        export("eagle3", "vlm")
    with pytest.raises(IncompatibleError, match="without weights is a setting of the engine"):
        export("ngram")
    with pytest.raises(IncompatibleError, match=r"sglang serves no medusa drafter.*can go to: vllm, medusa"):
        export("medusa", "sglang")


def test_engines_that_run_as_another_user_can_read_the_weights(export):
    modes = {file.name: file.stat().st_mode for file in export("eagle3").folder.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_taps_are_written_in_each_engines_own_counting(export):
    folders = [export("eagle3", to).folder for to in ("vllm", "sglang")]
    vllm, sglang = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("to", "drafter", "asked"),
    [
        ("vllm", "eagle3", {"draft_sample_method": "probabilistic"}),
        ("vllm", "draft_model", {"draft_sample_method": "probabilistic"}),
        ("llama.cpp", "draft_model", {"spec-draft-sampling": "probabilistic", "spec-draft-p-min": 0.0}),
    ],
)
def test_a_launch_asks_for_drawn_drafts_where_the_engine_would_pick_them(to, drafter, asked):
    """Picked drafts cost a third of what drafting gains above temperature 0."""
    started = launch(to, drafter, "target", "folder", 4)
    assert started.settings.items() >= asked.items()
    assert all(str(value) in started.command for value in asked.values())


def test_a_launch_can_be_told_how_many_drafts_to_keep():
    rates = [0.75, 0.5]
    told = launch("vllm", "eagle3", "target", "folder", 2, rates=rates).settings
    assert (told["rejection_sample_method"], told["synthetic_acceptance_rates"]) == ("synthetic", rates)
    assert (
        launch("llama.cpp", "draft_model", "target", "folder", 2, rates=rates).settings["spec-synth-rates"]
        == "0.75,0.5"
    )
    with pytest.raises(IncompatibleError, match="sglang cannot be told"):
        launch("sglang", "eagle3", "target", "folder", 2, rates=rates)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", installed(dict.fromkeys(("eagle1", "dflash", "dflash2", "dspark", "lilicorr"))))
def test_logits_that_a_target_scales_are_scaled_by_the_engine_or_refused(
    tiny_llama, make_drafter, tmp_path, monkeypatch, to, kind
):
    """Granite divides them; vLLM takes a factor of the drafter's own config, of DFlash and EAGLE alone."""
    target = Target(tiny_llama(layers=6))
    monkeypatch.setattr(target.model.config, "logits_scaling", 16.0, raising=False)
    assert target.logit_scale == 1 / 16
    settings = {"mask_token_id": 63} if kind != "eagle1" else {}
    drafter, out = make_drafter(kind, on=target, draft_vocab_size=0, **settings), tmp_path / "out"
    if to == "sglang" or kind not in ("eagle1", "dflash"):
        with pytest.raises(IncompatibleError, match=r"multiplies its logits by 0\.0625, which the engine does not"):
            export_drafter(drafter, target, to, out, 3)
        return
    assert export_drafter(drafter, target, to, out, 3).difference < 1e-4
    written = json.loads((out / "config.json").read_text())
    assert (written.get("transformer_layer_config") or written)["logit_scale"] == 1 / 16
    import_drafter(out, target)


def test_temperatures_of_confidences_stay_behind_with_a_warning(export, caplog):
    export("dspark", temperatures=[1.5, 1.2, 1.1])
    assert "no place for the temperatures of confidences" in caplog.text
    export("dspark", to="speculators")
    assert caplog.text.count("no place for the temperatures") == 1


@pytest.mark.parametrize("table", ["embed_tokens.weight", "lm_head.weight"])
def test_a_block_drafter_with_the_tables_of_another_target_is_refused(target, export, tmp_path, table):
    """Pruned, its rows are those of its own tokens."""
    out = export("dspark").folder
    rows = target.model.get_input_embeddings().weight.detach().clone()
    if table == "lm_head.weight":
        rows = load_file(out / "model.safetensors")[table]
    edit_tensors(lambda tensors: tensors | {table: rows})(out)
    import_drafter(out, target)
    edit_tensors(lambda tensors: tensors | {table: rows + 0.1})(out)
    with pytest.raises(IncompatibleError, match=r"embed|lm_head"):
        import_drafter(out, target)
