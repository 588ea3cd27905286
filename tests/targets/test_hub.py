"""Models of the Hub are looked at like folders before any library opens them: here in its cache, as it lays it out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError, OutriderError, Refusal
from outrider.heads import DraftModel, DraftModelConfig
from outrider.targets import Target, load_causal_lm
from outrider.targets.loading import load_tokenizer_of

COMMIT = "c" * 40
NAME = "someone/model"


def keep_in_cache(folder: Path, hub: Path, name: str = NAME, commit: str = COMMIT) -> Path:
    """Lay `folder` out as the Hub's cache does, with links to its blobs, and return the snapshot."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / f"{commit[0]}{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{commit[0]}{number}")
    return snapshot


@pytest.fixture
def model(tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    tiny_llama(vocab=len(tiny_tokenizer)).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hf" / "hub"


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_model_of_the_hub_is_the_one_that_its_folder_holds(model: Path, hub: Path) -> None:
    keep_in_cache(model, hub)
    ours, theirs = Target.load(model, device="cpu"), Target.load(NAME, device="cpu")
    assert theirs.fingerprint() == ours.fingerprint()
    assert theirs.source["path"] == NAME
    assert theirs.model.config.name_or_path == NAME, "where the cache is, nobody needs to know"


def test_a_revision_is_the_one_that_was_asked_for(model: Path, hub: Path) -> None:
    keep_in_cache(model, hub, commit="a" * 40)
    edit(model / "config.json", rms_norm_eps=1e-3)
    keep_in_cache(model, hub)
    older, newer = (load_causal_lm(NAME, revision=revision) for revision in ("a" * 40, None))
    assert older.config.rms_norm_eps != newer.config.rms_norm_eps == 1e-3


def test_weights_in_several_files_are_found_by_their_index(model: Path, hub: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="20KB")
    assert (model / "model.safetensors.index.json").exists()
    keep_in_cache(model, hub)
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
def test_what_a_folder_is_refused_for_a_model_of_the_hub_is_refused_for(
    model: Path, hub: Path, tmp_path: Path, file: str, changes: dict[str, Any], said: str
) -> None:
    (model / "e.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass E: pass\n")
    (model / file).touch()
    (model / file).write_text(json.dumps(json.loads((model / file).read_text() or "{}") | changes))
    if file == "model.safetensors.index.json":
        (model / "model.safetensors").unlink()
    keep_in_cache(model, hub)
    for load in (Target.load, load_causal_lm):
        if load is Target.load or file != "tokenizer_config.json":
            with pytest.raises(OutriderError, match=said):
                load(NAME)
    assert not (tmp_path / "ran").exists()


def test_a_pipe_among_the_hubs_files_is_refused_and_never_waited_for(model: Path, hub: Path) -> None:
    os.mkfifo(keep_in_cache(model, hub) / "vocab.json")
    with pytest.raises(Refusal, match="a pipe"):
        Target.load(NAME)


@pytest.mark.parametrize("place", ["the Hub", "a folder"])
def test_a_tokenizer_alone_is_looked_at_too(model: Path, hub: Path, place: str) -> None:
    """As the verbs read it that need no weights."""
    edit(model / "tokenizer_config.json", attn_implementation="evil/kernel")
    keep_in_cache(model, hub)
    with pytest.raises(Refusal, match="names code of the Hub"):
        load_tokenizer_of(NAME if place == "the Hub" else str(model), None, False)


def test_only_pickles_are_refused(model: Path, hub: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    keep_in_cache(model, hub)
    with pytest.raises(BadInputError, match="is a pickle"):
        Target.load(NAME)


def test_a_shape_without_contents_needs_no_weights_and_is_looked_at(model: Path, hub: Path) -> None:
    (model / "model.safetensors").unlink()
    snapshot = keep_in_cache(model, hub)
    with torch.device("meta"):
        assert load_causal_lm(NAME).config.hidden_size > 0
        (snapshot / "config.json").unlink()
        edit(model / "config.json", num_hidden_layers=10**7)
        shutil.copyfile(model / "config.json", snapshot / "config.json")
        with pytest.raises(Refusal, match="at most 1000"):
            load_causal_lm(NAME)


def test_what_the_cache_does_not_hold_is_said(model: Path, hub: Path, tiny_target: Target) -> None:
    with pytest.raises(BadInputError, match=r"'someone/else' cannot be loaded: .* your access to it"):
        Target.load("someone/else")
    snapshot = keep_in_cache(model, hub)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=r"no \*\.safetensors file"):
        Target.load(NAME)


def test_a_partly_cached_model_that_has_what_is_needed_is_read(model: Path, hub: Path) -> None:
    """The Hub's own list says that a file is missing; no library asks for it."""
    snapshot = keep_in_cache(model, hub)
    trees = snapshot.parents[1] / "trees"
    trees.mkdir()
    names = [*os.listdir(snapshot), "results.json"]
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

    entry = TreeCacheEntry(size=1, blob_id="0" * 40, lfs_sha256=None, lfs_size=None, xet_hash=None)
    write_tree_cache(str(snapshot.parents[1]), COMMIT, dict.fromkeys(names, entry))
    assert Target.load(NAME, device="cpu").num_layers > 0


def test_a_draft_model_of_the_hub_comes_with_its_tokenizer(
    model: Path, hub: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    keep_in_cache(model, hub)
    target = Target.load(model, device="cpu")
    drafter = DraftModel.build(DraftModelConfig(path=NAME), target)
    assert drafter.model.config.vocab_size == target.vocab_size
    other = Target(target.model, PreTrainedTokenizerFast.from_pretrained(model))
    other.require_tokenizer().add_tokens(["new"])
    with pytest.raises(IncompatibleError, match="different vocabularies"):
        DraftModel.build(DraftModelConfig(path=NAME), other)


def test_the_command_reads_the_cache_that_the_environment_names(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    keep_in_cache(model, home / "hub")
    prompt = tmp_path / "recipe.yaml"
    prompt.write_text("")
    script = "import sys; from outrider.targets import Target; print(Target.load(sys.argv[1], device='cpu').num_layers)"
    ran = subprocess.run(
        [sys.executable, "-c", script, NAME],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 0
