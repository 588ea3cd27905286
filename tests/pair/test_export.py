"""A pair leaves with what serving it needs: its target, too, where an adapter made that another model."""

from __future__ import annotations

import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from outrider.common import BadInputError, IncompatibleError
from outrider.common.locks import lock_file, locked
from outrider.formats.early_exit import save_target
from outrider.heads import Eagle3, Eagle3Config, Medusa, MedusaConfig
from outrider.heads.saved import read_config
from outrider.pair import export_pair, new_pair, probing
from outrider.pair.calibration import calibrate
from outrider.pair.export import by_position, export_depth, exported_drafter
from outrider.serving.diagnosis import TOLERANCE
from outrider.serving.engine_measurement import ServedSession, Start
from outrider.serving.reference_run import Trial
from outrider.targets import Target, embedded_path


@pytest.fixture
def adapted(tmp_path, tiny_llama, tiny_tokenizer) -> Target:
    """A target on disk with an adapter that changes it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_llama(vocab=len(tiny_tokenizer))
    model.save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(adapter)
    return Target.load(base, adapter=adapter, device="cpu")


def test_heads_that_were_trained_with_an_adapter_leave_with_the_target_that_has_it(adapted, recipe, tmp_path):
    drafter = Medusa.build(MedusaConfig(num_heads=2), adapted)
    pair = new_pair(tmp_path / "pair", adapted, drafter, recipe, calibration=[])
    made = export_pair(pair, "vllm", tmp_path / "out")
    served = Target.load(tmp_path / "out" / "target", device="cpu")
    assert served.fingerprint().digest == pair.fingerprint().digest
    assert str(tmp_path / "out" / "target") in str(made.launch.command)
    assert made.depth == 2  # as deep as the heads draft, though the plan says more
    assert made.launch.settings == {"method": "medusa", "model": str(tmp_path / "out"), "num_speculative_tokens": 2}


def test_an_adapter_leaves_as_a_lora_module_that_requests_ask_for(adapted, recipe, tmp_path):
    pair = new_pair(
        tmp_path / "pair", adapted, Medusa.build(MedusaConfig(num_heads=2), adapted), recipe, calibration=[]
    )
    made = export_pair(pair, "vllm", tmp_path / "out", lora=True)
    adapter = {"name": "tiny", "path": str(tmp_path / "out" / "adapter"), "rank": 2}
    assert json.loads((tmp_path / "out" / "launch.json").read_text())["adapter"] == adapter
    words = shlex.split(str(made.launch.command))
    assert words[2] == str(tmp_path / "base")
    assert words[-5:-1] == ["--enable-lora", "--max-lora-rank", "8", "--lora-modules"]
    assert json.loads(words[-1]) == {"name": "tiny", "path": adapter["path"]}
    assert "Ask for the model `tiny`" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "target").exists()
    served = Target.load(tmp_path / "base", adapter=tmp_path / "out" / "adapter", device="cpu")
    assert served.fingerprint().digest == pair.fingerprint().digest
    with pytest.raises(BadInputError, match="only vLLM"):
        export_pair(pair, "medusa", tmp_path / "medusa", lora=True)


def test_an_adapter_of_one_tied_embedding_leaves_merged_with_both_and_never_as_a_module(
    recipe, tmp_path, tiny_llama, tiny_tokenizer
):
    """vLLM has one module for tied embeddings, and believes the config."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_llama(vocab=len(tiny_tokenizer), tie_word_embeddings=True)
    model.save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    settings = {"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    get_peft_model(model, LoraConfig(**settings)).save_pretrained(adapter)
    target = Target.load(base, adapter=adapter, device="cpu")
    pair = new_pair(tmp_path / "pair", target, Medusa.build(MedusaConfig(num_heads=2), target), recipe, calibration=[])
    export_pair(pair, "vllm", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "target" / "config.json").read_text())["tie_word_embeddings"] is False
    stored = load_file(tmp_path / "out" / "target" / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert Target.load(tmp_path / "out" / "target", device="cpu").fingerprint() == pair.fingerprint()
    with pytest.raises(BadInputError, match="no plain LoRA"):
        export_pair(pair, "vllm", tmp_path / "lora", lora=True)


def test_a_targets_copy_that_is_another_model_is_refused(make_target, tmp_path):
    """The library rounds all weights that it reads to one type: a norm of another one changes on the way."""
    target = make_target()
    target.model.to(torch.bfloat16).model.norm.float().weight.data += 1e-4
    with pytest.raises(
        IncompatibleError, match=r"another model than the target: 1 of \d+ weights .*model\.norm\.weight"
    ):
        save_target(target, tmp_path / "copy")


def test_a_target_without_an_adapter_has_no_lora_module(make_pair, tmp_path):
    with pytest.raises(BadInputError, match="no plain LoRA"):
        export_pair(make_pair("eagle3"), "vllm", tmp_path / "out", lora=True)


def test_an_export_says_the_oldest_version_that_reads_it(make_target, recipe, tmp_path):
    """Older SGLang drops what it does not know, without a word."""
    target = make_target(source={"path": "org/name"})
    drafter = Eagle3.build(Eagle3Config(draft_vocab_size=0, norm_taps=True), target)
    pair = new_pair(tmp_path / "pair", target, drafter, recipe, calibration=[])
    made = export_pair(pair, "sglang", tmp_path / "out", target=target)
    assert str(made.launch.oldest).startswith("0.5.12: older copies drop fc_norm")
    assert "It needs sglang 0.5.12" in (tmp_path / "out" / "README.md").read_text()
    assert export_pair(pair, "vllm", tmp_path / "vllm", target=target).launch.oldest is None


def test_what_an_engine_is_told_is_found_from_any_folder(make_target, make_drafter, recipe, tmp_path, monkeypatch):
    """Relative folders, and the name of the target that ships with Outrider, mean nothing to another program."""
    monkeypatch.chdir(tmp_path)
    target = make_target()
    target.model.save_pretrained("base")
    target.source = {"path": "base"}
    pair = new_pair("pair", target, make_drafter("eagle3", target), recipe, calibration=[])
    made = export_pair(pair, "vllm", "out", target=target)
    assert made.launch.settings["model"] == str(tmp_path / "out")
    assert f" {tmp_path / 'base'} " in str(made.launch.command)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "base")
    places = {"embedded": str(embedded_path()), "org/name": "org/name", "embedded@1b": "", None: ""}
    assert {path: Target(target.model, source={"path": path}).place for path in places} == places


def test_an_export_that_cannot_be_is_refused_by_its_own_reason(make_target, make_drafter, recipe, tmp_path):
    """A folder inside the pair was called an alteration of it, and any depth was taken."""
    target = make_target(source={"path": "org/name"})
    pair = new_pair(tmp_path / "pair", target, make_drafter("eagle3", target), recipe, calibration=[])
    with pytest.raises(BadInputError, match="lies inside the pair"):
        export_pair(pair, "vllm", pair.folder / "out", target=target)
    with pytest.raises(BadInputError, match="leaves no room for a text"):
        export_pair(pair, "vllm", tmp_path / "out", 10**6, target)
    with pytest.raises(BadInputError, match=f"One lies in it: {pair.drafter_folder}"):
        read_config(pair.folder)


def test_what_an_engine_cannot_serve_is_refused_before_the_target_is_loaded(make_target, recipe, tmp_path):
    target = make_target(source={"path": str(tmp_path / "gone")})
    drafter = Eagle3.build(Eagle3Config(taps=(0, 1, 2), norm_output=True), target)
    pair = new_pair(tmp_path / "pair", target, drafter, recipe, calibration=[])
    with pytest.raises(IncompatibleError, match="norm_output: true"):
        export_pair(pair, "llama.cpp", tmp_path / "out")
    session = ServedSession(pair, Trial(depth=2))
    with pytest.raises(IncompatibleError, match="norm_output: true"):
        session.start(Start(tmp_path / "llama-server", engine="llama.cpp"), TOLERANCE)


def test_of_two_exports_into_one_folder_the_second_is_refused(adapted, recipe, tmp_path):
    drafter = Medusa.build(MedusaConfig(num_heads=2), adapted)
    pair = new_pair(tmp_path / "pair", adapted, drafter, recipe, calibration=[])
    out = tmp_path / "out"
    with ThreadPoolExecutor(1) as other, locked(out), pytest.raises(BadInputError, match="is being written by"):
        other.submit(export_pair, pair, "vllm", out, target=adapted).result()
    assert not out.exists()
    export_pair(pair, "vllm", out, target=adapted)
    lock_file(out).write_text("{}")  # of a process that was killed after its last step
    with pytest.raises(BadInputError, match="is not empty; nothing was written"):
        export_pair(pair, "vllm", out, target=adapted)
    assert not lock_file(out).exists()


def test_an_engine_drafts_as_deep_as_the_pair_says_and_never_deeper_than_the_drafter(make_pair):
    pair = make_pair("eagle3")
    assert export_depth(pair, None) == pair.plan.depth == 3
    assert export_depth(pair, 2) == 2


def test_a_target_that_is_only_in_memory_cannot_be_named_to_an_engine(make_pair, make_target, tmp_path):
    target = make_target()
    pair = make_pair("draft_model", target=target)
    with pytest.raises(BadInputError, match="given in memory"):
        export_pair(pair, "hf", tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "precision"), [("vllm", "w4a16"), ("llama.cpp", "q4_0")])
def test_what_quantising_costs_is_measured_before_anything_is_written(
    make_pair, make_target, recipe, prompts, tmp_path, to, precision
):
    """τ of the drafter that the export holds beside the pair's own, on its calibration prompts; and the bytes."""
    pytest.importorskip("compressed_tensors")
    target = make_target(source={"path": "org/name"})
    drafter = Eagle3.build(Eagle3Config(steps=2, taps=(0, 1, 2), norm_before_fc=True), target)
    pair = new_pair(tmp_path / "pair", target, drafter, recipe, calibration=prompts)
    written: list[bool] = []
    baseline = pair.manifest.measurements.baseline

    def watched(*args: Any, **options: Any) -> Any:
        written.append((tmp_path / "out").exists())
        return calibrate(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(probing, "calibrate", watched)
        made = export_pair(pair, to, tmp_path / "out", target=target, precision=precision)
    assert written == [False]
    change, rounded = made.cost.change, exported_drafter(pair, target, to, made.depth, precision)
    again = calibrate(target, rounded, prompts, baseline, pair.plan)
    for tau, some in ((change.tau, again), (change.tau_before, baseline.prompts)):
        assert tau.value == pytest.approx(1 + sum(m.accepted for m in some) / sum(m.rounds for m in some))
    assert change.num_prompts == len(prompts)
    assert not torch.equal(rounded.fc.weight, drafter.fc.weight)
    kept = json.loads((tmp_path / "out" / "served.json").read_text())
    assert (kept["precision"], kept["cost"]["change"]["ratio"]) == (precision, asdict(change.ratio))
    files = [file for file in (tmp_path / "out").iterdir() if file.suffix in (".safetensors", ".gguf")]
    assert kept["cost"]["num_bytes"] == sum(file.stat().st_size for file in files)
    assert f"was {change.tau_before.text()}" in (tmp_path / "out" / "README.md").read_text()


def test_without_a_baseline_the_cost_in_tau_is_said_to_be_unknown(make_target, recipe, tmp_path):
    pytest.importorskip("compressed_tensors")
    target = make_target(source={"path": "org/name"})
    drafter = Eagle3.build(Eagle3Config(steps=2, taps=(0, 1, 2)), target)
    pair = new_pair(tmp_path / "pair", target, drafter, recipe, calibration=[])
    made = export_pair(pair, "vllm", tmp_path / "out", target=target, precision="fp8")
    assert made.cost.change is None
    assert "not measured" in made.cost.lines[1]
    assert export_pair(pair, "vllm", tmp_path / "own", target=target).cost is None


def test_positions_are_counted_over_rounds():
    """Of three rounds that kept 2, 0 and 1 drafts, two kept a first one, and one a second."""
    assert by_position([[2, 0], [1]]) == [2, 1]
    assert by_position([[]]) == []
