"""Folders of strangers, and models in the Hub's cache: no code runs, and no size takes memory."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError, OutriderError, Refusal
from outrider.heads import DraftModel, DraftModelConfig, Eagle3, Eagle3Config, load_drafter
from outrider.targets import Target, config_only_target, load_causal_lm, load_tokenizer
from outrider.targets.config_only import target_without_layers
from outrider.targets.loading import load_tokenizer_of
from outrider.targets.model_folder import check_files
from outrider.targets.weights import stored_tensors

from .conftest import COMMIT, NAME, edit, keep_in_cache

ROOT = Path(__file__).parents[2]
LOADS = ("from_pretrained", "from_config")
# Whose `from_pretrained` opens a config or weights only, and knows no code.
WITHOUT_CODE = ("PeftModel", "made")


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    base = LlamaForCausalLM.from_pretrained(saved)
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_every_loading_call_says_whether_code_may_run():
    silent = []
    rooms = [p for p in ROOT.iterdir() if (p / "py.typed").is_file()]
    for file in sorted(f for room in rooms for f in room.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOADS):
                continue
            said = any(word.arg == "trust_remote_code" for word in call.keywords)
            if not said and ast.unparse(call.func.value) not in WITHOUT_CODE:
                silent.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert silent == []


@pytest.mark.parametrize("stdin", ["y\nyes\n1\n", "", None])
def test_code_beside_a_tokenizer_never_runs_whatever_stdin_holds(saved, tmp_path, stdin, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
    (saved / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    edit(saved / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    load_tokenizer(saved)
    edit(saved / "tokenizer_config.json", tokenizer_class="Evil")
    for load in (load_tokenizer, Target.load):
        with pytest.raises(BadInputError, match="custom code"):
            load(saved)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_loads_two_others_asks_nobody_and_is_refused(saved, tmp_path, tiny_tokenizer, monkeypatch):
    """The library's own call for them says nothing about code: it would ask on stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    folder = tmp_path / "tokenizer"
    tiny_tokenizer.save_pretrained(folder)
    evil = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["e.E", "e.E"]}}
    for part in ("question_encoder_tokenizer", "generator_tokenizer"):
        tiny_tokenizer.save_pretrained(folder / part)
        edit(folder / part / "tokenizer_config.json", **evil)
        for place in (folder, folder / part):
            (place / "e.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass E: pass\n")
    edit(folder / "tokenizer_config.json", tokenizer_class="RagTokenizer")
    parts = {"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}}
    edit(folder / "config.json", model_type="rag", **parts)
    with pytest.raises(OutriderError):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intermediate_size": 10**9}, "do not fit its config.json"),
        ({"hidden_size": 2**20}, "do not fit its config.json"),
        ({"vocab_size": 10**9}, "do not fit its config.json"),
        ({"vocab_size": 100}, r"embed_tokens\.weight is \(\d+, \d+\), expected \(100, "),
        ({"eos_token_id": "one"}, "eos_token_id': TypeError: .* expected int"),
        ({"num_hidden_layers": 999}, "asks for a network of more than"),
        ({"num_hidden_layers": 10**7}, "at most 1000"),
        ({"num_hidden_layers": 10**12}, "at most 1000"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"_attn_implementation": "evil/kernel"}, "names code of the Hub"),
    ],
)
def test_a_config_that_asks_for_more_than_its_weights_is_refused_at_once(saved, changes, said):
    edit(saved / "config.json", **changes)
    began = time.process_time()
    with pytest.raises(OutriderError, match=said):
        Target.load(saved)
    assert time.process_time() - began < 5


def test_weights_that_the_config_has_no_place_for_are_named(saved, caplog):
    """A config of another model of the same sizes, with fewer layers: its text would be another one, without a word."""
    edit(saved / "config.json", num_hidden_layers=1)
    Target.load(saved)
    assert "tensors that its config.json has no place for, model.layers.1.input_layernorm.weight" in caplog.text


def test_weights_relabelled_as_integers_are_refused(saved):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(IncompatibleError, match="is I32, expected floating-point numbers"):
        Target.load(saved)


@pytest.mark.parametrize(
    "changes", [{"num_layers": 10**7}, {"intermediate_size": 10**9}, {"draft_vocab_size": 2**31 - 1}]
)
def test_a_drafters_sizes_are_compared_with_its_file_before_memory_is_taken(tiny_target, tmp_path, changes):
    Eagle3.build(Eagle3Config(steps=2), tiny_target).save(tmp_path / "drafter")
    config = tmp_path / "drafter" / "config.json"
    if not changes.keys() <= json.loads(config.read_text()).keys():
        pytest.skip("no such size")
    edit(config, **changes)
    with pytest.raises((IncompatibleError, BadInputError)):
        load_drafter(tmp_path / "drafter", tiny_target)


def test_a_drafters_integers_in_the_place_of_weights_are_refused(tiny_target, tmp_path):
    Eagle3.build(Eagle3Config(steps=2), tiny_target).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(n for n, w in weights.items() if w.dtype == torch.float32)
    save_file(weights | {name: weights[name].view(torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(IncompatibleError, match=r"is I32, expected torch\.float32"):
        load_drafter(tmp_path, tiny_target)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**33, 2**64 - 1])
def test_a_header_of_another_length_is_refused(saved, length):
    file = saved / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(Refusal, match="damaged or not a safetensors file"):
        stored_tensors(file)


def test_an_index_that_leads_out_of_its_folder_is_refused(saved):
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").rename(saved / "one.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "../model/one.safetensors")}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refusal, match="no plain weight_map"):
        Target.load(saved)


@pytest.mark.parametrize("place", ["the Hub", "a folder"])
def test_a_pipe_among_a_models_files_is_refused_and_never_waited_for(saved, hub, place):
    os.mkfifo(keep_in_cache(saved, hub) / "vocab.json" if place == "the Hub" else saved / "generation_config.json.pipe")
    with pytest.raises(Refusal, match="a pipe"):
        Target.load(NAME if place == "the Hub" else saved)


def test_an_adapter_in_a_models_folder_is_not_applied_without_a_word(saved, adapter):
    (saved / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(Refusal, match="Give the adapter as such"):
        Target.load(saved)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "one of LORA"),
        ({"peft_type": ["LORA"]}, "one of LORA"),
        ({"megatron_config": {"x": 1}, "megatron_core": "evil"}, "megatron_config is"),
        ({"layer_replication": [[0, 6]] * 100_000}, "layer_replication is"),
        ({"corda_config": {"cache_file": "evil.pt"}, "init_lora_weights": "corda"}, "corda_config is"),
        ({"init_lora_weights": "pissa"}, "changes the target's own weights"),
        ({"r": 10**9}, "at most 1048576"),
        ({"r": 2**20}, "does not fit"),
        ({"r": 8}, "does not fit"),
        ({"rank_pattern": {"q_proj": 2**20}}, "does not fit"),
        ({"target_modules": []}, "adapter"),
    ],
)
def test_an_adapter_that_asks_for_more_than_merging_is_refused_at_once(saved, adapter, changes, said):
    edit(adapter / "adapter_config.json", **changes)
    began = time.process_time()
    with pytest.raises(OutriderError, match=said):
        Target.load(saved, adapter=adapter)
    assert time.process_time() - began < 10


PATTERNS = [
    r".*\.(q|v)_proj",
    r"^model\.layers\.\d+\.self_attn\.(q_proj|v_proj)$",
    r".*[qv]_proj$",
    ["q_proj", "v_proj"],
]


@pytest.mark.parametrize("modules", PATTERNS)
def test_patterns_that_people_write_are_read(saved, adapter, modules):
    edit(adapter / "adapter_config.json", target_modules=modules)
    Target.load(saved, adapter=adapter)


def test_an_adapter_without_some_of_its_weights_is_refused(saved, adapter):
    weights = load_file(adapter / "adapter_model.safetensors")
    dropped, _ = weights.popitem()
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(IncompatibleError, match=f"missing {dropped}"):
        Target.load(saved, adapter=adapter)


def test_what_real_models_configs_hold_is_read(tmp_path):
    """Gemma 3n's vocabulary per layer is no number of layers, and Mamba's configs hold an Infinity."""
    text = '{"vocab_size_per_layer_input": 262144, "num_hidden_layers": 30, "time_step_limit": [0.0, Infinity]}'
    (tmp_path / "config.json").write_text(text)
    check_files(tmp_path, trust_remote_code=False)


def test_a_list_that_somebody_made_by_sha256sum_is_none_of_ours(saved):
    (saved / "SHA256SUMS").write_text("0" * 64 + "  model.safetensors\n")
    assert Target.load(saved, device="cpu").num_layers > 0


def test_a_model_of_the_hub_is_the_one_that_its_folder_holds(saved, hub):
    keep_in_cache(saved, hub)
    ours, theirs = Target.load(saved, device="cpu"), Target.load(NAME, device="cpu")
    assert theirs.fingerprint() == ours.fingerprint()
    assert theirs.source["path"] == NAME
    assert theirs.model.config.name_or_path == NAME, "where the cache is, nobody needs to know"


def test_a_revision_is_the_one_that_was_asked_for(saved, hub):
    keep_in_cache(saved, hub, commit="a" * 40)
    edit(saved / "config.json", rms_norm_eps=1e-3)
    keep_in_cache(saved, hub)
    older, newer = (load_causal_lm(NAME, revision=revision) for revision in ("a" * 40, None))
    assert older.config.rms_norm_eps != newer.config.rms_norm_eps == 1e-3


@pytest.mark.parametrize("load", [partial(Target.load, device="cpu"), config_only_target, target_without_layers])
def test_a_target_of_the_hub_knows_its_commit_also_where_none_was_asked_for(saved, hub, load):
    keep_in_cache(saved, hub, commit="a" * 40)
    assert load(NAME).source["revision"] == load(NAME, "a" * 40).source["revision"] == "a" * 40
    assert load(saved).source["revision"] is None


def test_weights_in_several_files_are_found_by_their_index(saved, hub):
    whole = LlamaForCausalLM.from_pretrained(saved)
    (saved / "model.safetensors").unlink()
    whole.save_pretrained(saved, max_shard_size="20KB")
    assert (saved / "model.safetensors.index.json").exists()
    keep_in_cache(saved, hub)
    found = load_causal_lm(NAME)
    assert all(torch.equal(found.state_dict()[name], weight) for name, weight in whole.state_dict().items())


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("config.json", {"_attn_implementation": "evil/kernel"}, "names code of the Hub"),
        ("config.json", {"num_hidden_layers": 10**7}, "at most 1000"),
        ("config.json", {"intermediate_size": 10**9}, "do not fit its config.json"),
        ("tokenizer_config.json", {"attn_implementation": "evil/kernel"}, "names code of the Hub"),
        ("adapter_config.json", {}, "Give the adapter as such"),
        ("config.json", {"auto_map": {"AutoConfig": "e.E"}, "model_type": "evil"}, "code"),
        ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": "../x.safetensors"}}, "no plain weight_map"),
    ],
)
def test_what_a_folder_is_refused_for_a_model_of_the_hub_is_refused_for(saved, hub, tmp_path, file, changes, said):
    (saved / "e.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass E: pass\n")
    edit(saved / file, **changes)
    if file == "model.safetensors.index.json":
        (saved / "model.safetensors").unlink()
    keep_in_cache(saved, hub)
    for load in (Target.load, load_causal_lm):
        if load is Target.load or file != "tokenizer_config.json":
            with pytest.raises(OutriderError, match=said):
                load(NAME)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["the Hub", "a folder"])
def test_a_tokenizer_alone_is_looked_at_too(saved, hub, place):
    """As the verbs read it that need no weights."""
    edit(saved / "tokenizer_config.json", attn_implementation="evil/kernel")
    keep_in_cache(saved, hub)
    with pytest.raises(Refusal, match="names code of the Hub"):
        load_tokenizer_of(NAME if place == "the Hub" else str(saved), None, False)


def test_only_pickles_are_refused(saved, hub):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    keep_in_cache(saved, hub)
    with pytest.raises(BadInputError, match="is a pickle"):
        Target.load(NAME)


def test_a_shape_without_contents_needs_no_weights_and_is_looked_at(saved, hub):
    (saved / "model.safetensors").unlink()
    snapshot = keep_in_cache(saved, hub)
    with torch.device("meta"):
        assert load_causal_lm(NAME).config.hidden_size > 0
        (snapshot / "config.json").unlink()
        edit(saved / "config.json", num_hidden_layers=10**7)
        shutil.copyfile(saved / "config.json", snapshot / "config.json")
        with pytest.raises(Refusal, match="at most 1000"):
            load_causal_lm(NAME)


@pytest.mark.parametrize("name", ["http:/host.example", "org/na me", "org/--", "org/" + "x" * 100])
def test_a_name_with_a_slash_that_is_no_hub_id_is_refused(name):
    with pytest.raises(BadInputError, match="no such folder is here, and read as a Hub id"):
        load_causal_lm(name)


def test_what_the_cache_does_not_hold_is_said(saved, hub, tiny_target, caplog):
    """A mistyped folder looks like a Hub id: that is said before the Hub is asked, which may take a minute."""
    caplog.set_level("INFO", logger="outrider")
    with pytest.raises(BadInputError, match=r"'someone/else' cannot be loaded: no such folder is .* your access to it"):
        Target.load("someone/else")
    assert caplog.messages == ["no folder someone/else here; read as a Hub id"]
    caplog.clear()
    snapshot = keep_in_cache(saved, hub)
    load_tokenizer_of(NAME, None, False)
    assert caplog.messages == []
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"no \*\.safetensors file"):
        Target.load(NAME)


def test_a_partly_cached_model_that_has_what_is_needed_is_read(saved, hub):
    """The Hub's own list says that a file is missing; no library asks for it."""
    snapshot = keep_in_cache(saved, hub)
    (snapshot.parents[1] / "trees").mkdir()
    names = [*os.listdir(snapshot), "results.json"]
    entry = TreeCacheEntry(size=1, blob_id="0" * 40, lfs_sha256=None, lfs_size=None, xet_hash=None)
    write_tree_cache(str(snapshot.parents[1]), COMMIT, dict.fromkeys(names, entry))
    assert Target.load(NAME, device="cpu").num_layers > 0


def test_a_draft_model_of_the_hub_comes_with_its_tokenizer(saved, hub, tiny_tokenizer):
    keep_in_cache(saved, hub)
    target = Target.load(saved, device="cpu")
    drafter = DraftModel.build(DraftModelConfig(path=NAME), target)
    assert drafter.model.config.vocab_size == target.vocab_size
    other = Target(target.model, PreTrainedTokenizerFast.from_pretrained(saved))
    other.require_tokenizer().add_tokens(["new"])
    with pytest.raises(IncompatibleError, match="different vocabularies"):
        DraftModel.build(DraftModelConfig(path=NAME), other)


def test_the_command_reads_the_cache_that_the_environment_names(saved, tmp_path):
    keep_in_cache(saved, tmp_path / "home" / "hub")
    script = "import sys; from outrider.targets import Target; print(Target.load(sys.argv[1], device='cpu').num_layers)"
    cached = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", script, NAME], env=cached, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 0
