"""A target whose weights stay on the disk says of itself what the loaded one says, and holds two weights at most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError, OutriderError, Refusal
from outrider.targets import Target, config_only_target, load_causal_lm

from . import small_models
from .conftest import GONE, edit

SIZES: dict[str, Any] = small_models.SIZES | {"num_hidden_layers": 2}
SIZES |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
# What is stored is not what is computed with: experts are put together, embeddings tied, buffers and types kept apart.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
    "gpt2": {},
    "gemma2": {"head_dim": 8},
    "mamba": {"state_size": 8},
}

Save = Callable[..., Path]


def answers(target: Target) -> dict[str, Any]:
    """Everything that distilling asks of a target that makes no passes."""
    return {
        "fingerprint": target.fingerprint(),
        "ends": target.eos_ids,
        "size": target.vocab_size,
        "context": target.max_context,
        "source": target.source,
        "vocabulary": target.require_tokenizer().get_vocab(),
    }


def require_same(path: str | Path, absent: bool = True, **values: Any) -> None:
    light, whole = config_only_target(path, **values), Target.load(path, device="cpu", **values)
    assert (light.device.type == "meta") == absent
    assert answers(light) == answers(whole)


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Save:
    def make(kind: str = "llama", **changes: Any) -> Path:
        values = {"vocab_size": len(tiny_tokenizer), **KINDS.get(kind, {}), **changes}
        small_models.small_model(kind, sizes=SIZES, **values).save_pretrained(tmp_path / kind, max_shard_size="30KB")
        tiny_tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_loaded_target_in_every_type(save, kind):
    folder = save(kind)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        require_same(folder, dtype=dtype)


def test_it_is_the_loaded_target_that_ships_with_outrider():
    require_same("embedded")
    require_same("embedded", dtype="bfloat16")


def test_a_stored_type_that_the_config_does_not_name_is_found(save):
    folder = save()
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    edit(folder / "config.json", dtype=GONE, torch_dtype=GONE)
    require_same(folder)
    assert config_only_target(folder).fingerprint().dtype == "float16"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_tied_embeddings_that_are_both_stored_count_as_they_are_loaded(save, factor):
    """Equal ones are tied; where others are, the config is wrong: engines would read one of them, the library both."""
    folder = save(tie_word_embeddings=False)
    edit(folder / "config.json", tie_word_embeddings=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    source = folder / index["model.embed_tokens.weight"]
    tied = folder / index["lm_head.weight"]
    embedding = load_file(source)["model.embed_tokens.weight"]
    save_file(load_file(tied) | {"lm_head.weight": embedding * factor}, tied, metadata={"format": "pt"})
    if factor == 1:
        require_same(folder)
    else:
        with pytest.raises(IncompatibleError, match="Set tie_word_embeddings to false"):
            Target.load(folder)
        edit(folder / "config.json", tie_word_embeddings=False)
        require_same(folder)


def test_weights_of_a_model_without_an_output_embedding_get_their_prefix(save):
    folder = save()
    whole = AutoModelForCausalLM.from_pretrained(folder)
    for file in folder.glob("model*"):
        file.unlink()
    whole.model.save_pretrained(folder)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    require_same(folder)


def test_a_text_model_inside_another_is_itself(tmp_path, tiny_tokenizer):
    text = SIZES | {"head_dim": 8, "vocab_size": len(tiny_tokenizer)}
    config = Gemma3Config(text_config=text, vision_config=small_models.VISION, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    require_same(tmp_path)


def test_end_tokens_are_those_of_the_generation_config(save):
    folder = save()
    edit(folder / "generation_config.json", eos_token_id=[3, 7])
    assert config_only_target(folder).eos_ids == (3, 7)
    require_same(folder)
    (folder / "generation_config.json").unlink()
    require_same(folder)


def test_what_cannot_be_known_from_the_files_alone_is_loaded_whole(save, tmp_path):
    folder = save()
    base = LlamaForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(str(tmp_path / "adapter"))
    require_same(folder, absent=False, adapter=str(tmp_path / "adapter"))


def test_a_model_that_computes_with_its_weights_on_loading_is_loaded_whole_for_its_fingerprint(
    save, monkeypatch, caplog
):
    tie = LlamaForCausalLM.tie_weights

    def computing(self: LlamaForCausalLM, missing_keys: Any = None, recompute_mapping: bool = True) -> None:
        tie(self, missing_keys, recompute_mapping)
        if missing_keys is not None:  # it is being loaded
            assert self.model.norm.weight.sum().item() > 0

    monkeypatch.setattr(LlamaForCausalLM, "tie_weights", computing)
    require_same(save())
    assert "the target is loaded whole: its weights cannot be read one at a time" in caplog.text


def test_other_threads_make_modules_meanwhile_as_ever(save, monkeypatch):
    made: list[nn.Module] = []
    target = config_only_target(save())

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return load(*arguments, **named)

    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", meanwhile)
    target.fingerprint()
    assert next(made[0].parameters()).device.type == "cpu"
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


MEASURED = """
import sys, threading, time
from pathlib import Path
from outrider.common.runtime import keep_large_blocks
from outrider.targets import config_only_target

def own_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

def watch():
    while True:
        seen.append(own_memory())
        time.sleep(0.004)

keep_large_blocks()  # as the command line does
config_only_target(sys.argv[1], dtype="float32").fingerprint()  # what the libraries keep
target = config_only_target(sys.argv[2], dtype="float32")
seen, before = [], own_memory()
threading.Thread(target=watch, daemon=True).start()
target.fingerprint()
print(max(seen) - before)
"""
LARGE = {
    "llama": {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 4096},
    "mixtral": {"num_hidden_layers": 16, "hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 4},
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells a process' own memory")
@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_memory_holds_a_few_weights_at_a_time(save, tmp_path, tiny_tokenizer, kind):
    """The largest has 16 MiB in fp32, and the models 200 and 400. Experts are read before they are put together."""
    sizes = SIZES | LARGE[kind] | {"vocab_size": len(tiny_tokenizer)}
    config = AutoConfig.for_model(kind, **sizes, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [weight.numel() * 4 / 2**20 for weight in model.parameters()]
    assert sum(sizes) > 12 * max(sizes) == 12 * 16
    model.to_empty(device="cpu").save_pretrained(tmp_path / "large")
    tiny_tokenizer.save_pretrained(tmp_path / "large")
    folders = [str(save("gpt2")), str(tmp_path / "large")]
    told = subprocess.run([sys.executable, "-c", MEASURED, *folders], capture_output=True, text=True, check=True)
    kept_by_malloc, at_once = 64, 3 if kind == "llama" else 5
    assert float(told.stdout) < kept_by_malloc + at_once * max(sizes)


def test_weights_that_cannot_be_had_are_refused_at_once(save):
    folder = save()
    edit(folder / "config.json", intermediate_size=10**9)
    with pytest.raises(IncompatibleError, match="do not fit its config"):
        config_only_target(folder)
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(BadInputError, match="is a pickle"):
        config_only_target(folder)
    with pytest.raises(BadInputError, match="does not exist"):
        config_only_target(folder / "missing")


def test_a_missing_weight_is_refused_and_never_random(save):
    folder = save(tie_word_embeddings=False)
    file = next(f for f in folder.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    wide = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.another.weight": wide}, file, metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"missing model\.norm\.weight"):
        config_only_target(folder).fingerprint()


def test_code_beside_a_model_never_runs(save, tmp_path):
    folder = save()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.E"})
    with pytest.raises(OutriderError):
        config_only_target(folder)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_file_is_refused(save):
    folder = save()
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Refusal, match="damaged"):
        config_only_target(folder)
    with pytest.raises(OutriderError):
        load_causal_lm(str(folder))
