"""Making, loading and opening pairs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from outrider.common import IncompatibleError, Refusal
from outrider.common.atomic import working_name
from outrider.decode import Decoder, Plan
from outrider.heads.registry import with_defaults
from outrider.pair import Pair, StaleError, verify
from outrider.pair import new as making
from outrider.targets import Target

from ..eval.conftest import refusal
from .conftest import measured_at

KINDS = ("ngram", "draft_model", "eagle3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_opens_as_what_was_saved_and_generates_what_the_target_says(kind, make_pair, make_target, prompts):
    made = make_pair(kind)
    pair = Pair.load(made.folder)
    assert pair.manifest == made.manifest
    target, drafter, plan = pair.open(make_target())
    assert (drafter.name, plan) == (kind, Plan(3))
    tokens = [p.tokens for p in prompts]
    drafted = Decoder(target, drafter).generate(tokens, 12, plan=plan)
    assert drafted.tokens == Decoder(target).generate(tokens, 12).tokens


def test_the_recorded_source_is_loaded_in_the_recorded_dtype(make_pair, make_target, tmp_path):
    saved = make_target()
    saved.model.save_pretrained(tmp_path / "target")
    saved.tokenizer.save_pretrained(tmp_path / "target")
    half = Target.load(tmp_path / "target", dtype=torch.bfloat16)
    pair = make_pair("ngram", target=half)
    assert pair.manifest.target.source.path == str(tmp_path / "target")
    target, _, _ = pair.open()
    assert target.dtype == torch.bfloat16
    assert target.fingerprint() == pair.fingerprint()


@pytest.mark.parametrize(
    ("base", "kept"),
    [("org/base", "org/base"), ("/models/base", None), ("~/base", None), ("models", None), (None, None)],
)
def test_the_kept_adapter_names_no_folder_of_the_machine_it_came_from(make_pair, make_target, lora, base, kept):
    adapter = lora(base_model_name_or_path=base, r=4)
    pair = make_pair("ngram", target=make_target(source={"path": "org/base", "adapter": str(adapter)}))
    copied = pair.folder / "adapter"
    assert json.loads((copied / "adapter_config.json").read_text()) == {"base_model_name_or_path": kept, "r": 4}
    assert (copied / "adapter_model.safetensors").read_bytes() == b"weights"
    assert verify(pair.folder) == []


def test_the_identity_depends_on_target_drafter_and_plan_alone(make_pair, make_target, recipe, tmp_path, monkeypatch):
    here = make_pair("ngram", tmp_path / "here")
    others = [
        make_pair("ngram", tmp_path / "target", target=make_target(noise=0.01)),
        make_pair("eagle3", tmp_path / "drafter"),
        make_pair("ngram", tmp_path / "plan", recipe=measured_at(recipe, depth=5)),
    ]
    assert len({here.digest, *(p.digest for p in others)}) == 4
    monkeypatch.setattr(making, "_today", lambda: "2031-01-01")
    for kind, made in (("ngram", here), ("eagle3", others[1])):
        there = make_pair(kind, tmp_path / "deep" / "er" / kind)
        assert there.digest == made.digest
        assert there.manifest.created == "2031-01-01" != made.manifest.created


def test_a_changed_target_is_stale_unless_asked_for(make_pair, make_target):
    pair, changed = make_pair("eagle3"), make_target(noise=0.01)
    differences = pair.fingerprint().differences(changed.fingerprint())
    assert "weights" in differences[0]
    with pytest.raises(StaleError) as caught:
        pair.open(changed)
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"this target is not the one tiny version 1 was made for: {', '.join(differences)} differ. "
        "The output would still be exact, "
        f"but how fast is unknown: run `outrider probe {pair.folder} --target …`, or refresh the pair."
    )
    assert pair.open(changed, check=False)[0] is changed


def test_another_vocabulary_is_incompatible_and_the_first_differing_token_is_named(
    make_pair, make_target, swapped_tokenizer
):
    pair, target = make_pair("ngram"), Target(make_target().model, swapped_tokenizer)
    with pytest.raises(IncompatibleError, match=r"id 300 is '.*' in the pair 'tiny' and '.*' in the target") as caught:
        pair.open(target, check=False)
    assert caught.value.exit_code == 3
    with pytest.raises(IncompatibleError, match=r"hidden_states\[3\]"):  # a target without the taps
        make_pair("eagle3").open(make_target(layers=2), check=False)


def test_a_failure_leaves_nothing_behind(make_pair, tmp_path, monkeypatch):
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "write_calibration", full_disk)
    with pytest.raises(OSError, match="No space"):
        make_pair("ngram")
    assert list(tmp_path.iterdir()) == []


def test_a_pair_is_known_by_what_its_manifest_says(make_pair, monkeypatch, tmp_path):
    made = make_pair("ngram", tmp_path / "home" / "pair")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pair = Pair.load("~/pair")
    assert pair == made
    assert (pair.name, pair.version, pair.digest, pair.dtype) == ("tiny", 1, made.manifest.digest, "float32")
    places = (made.folder, made.folder / "drafter", made.folder / "recipe.yaml")
    assert (pair.folder, pair.drafter_folder, pair.recipe_file) == places
    assert verify("~/pair") == []
    monkeypatch.chdir(pair.folder)
    assert verify(".") == []
    assert Pair.load(".").digest == pair.digest


def test_recipe_tokenizer_and_prompts_come_back_as_they_were(make_pair, recipe, prompts, tiny_tokenizer):
    text = "two\u2028lines"
    chat = dataclasses.replace(prompts[0], text=text, messages=({"role": "user", "content": text},))
    pair = make_pair("ngram", calibration=[chat, *prompts[1:]])
    assert pair.calibration() == [chat, *prompts[1:]]
    assert pair.recipe() == recipe.model_copy(update={"drafter": with_defaults(recipe.drafter)})
    assert pair.tokenizer().get_vocab() == tiny_tokenizer.get_vocab()


def test_a_target_without_a_tokenizer_makes_a_pair_and_vocabularies_are_not_compared(make_pair, make_target, tmp_path):
    named, bare = make_target(), Target(make_target().model)
    without = make_pair("ngram", tmp_path / "without", target=bare, calibration=[])
    assert without.tokenizer() is None
    assert verify(without.folder, bare) == []
    assert make_pair("ngram", tmp_path / "with").drafter_for(bare).name == "ngram"
    assert without.drafter_for(named).name == without.drafter_for(bare).name == "ngram"


def test_a_recorded_target_that_cannot_be_loaded_is_named_with_the_pair(make_pair, make_target, tmp_path):
    pair = make_pair("ngram", tmp_path / "in memory")
    said = "this pair's target was given in memory, so it cannot be loaded again; name the target."
    assert refusal(pair.load_target) == refusal(pair.open) == f"{pair.folder}: {said}"
    pair = make_pair("ngram", target=make_target(source={"path": str(tmp_path / "gone")}))
    said = refusal(pair.load_target)
    assert said.startswith(f"the target recorded in {pair.folder} cannot be loaded; name one that can. ")
    assert "gone" in said


@pytest.mark.parametrize("named", [True, False])
def test_how_a_target_is_loaded(make_pair, make_target, monkeypatch, named):
    """The one that is named, or the recorded one with revision and adapter; in the pair's dtype if none is asked."""
    source, asked = {"path": "org/base", "revision": "main", "adapter": "org/lora"}, []
    pair = make_pair("ngram", target=make_target(source=source))
    monkeypatch.setattr(Target, "load", lambda *arguments, **options: asked.append((arguments, options)))
    for options in ({"device": "cpu"}, {"dtype": "bfloat16"}):
        pair.load_target("org/other" if named else None, **options)
    where = ("org/other",) if named else ("org/base", "main", "org/lora")
    assert asked == [(where, {"dtype": "float32", "device": "cpu"}), (where, {"dtype": "bfloat16"})]


def test_a_kept_adapter_is_loaded_from_the_pair(make_pair, make_target, lora, monkeypatch):
    pair, asked = make_pair("ngram", target=make_target(source={"path": "org/base", "adapter": str(lora())})), []
    monkeypatch.setattr(Target, "load", lambda *arguments, **options: asked.append(arguments))
    pair.load_target()
    assert asked == [("org/base", None, str(pair.folder / "adapter"))]


def test_verify_says_what_differs_and_how(make_pair, make_target):
    pair, changed = make_pair("eagle3"), make_target(noise=0.1)
    config, weights = pair.drafter_folder / "config.json", pair.drafter_folder / "model.safetensors"
    size = config.stat().st_size
    config.write_text("{}")
    weights.unlink()
    found = verify(pair.folder, changed)
    assert found[0] == f"drafter/config.json: content differs (2 bytes, recorded {size})"
    assert found[1] == "drafter/model.safetensors: missing"
    assert found[2:] == [f"target: differs in {line}" for line in pair.fingerprint().differences(changed.fingerprint())]
    assert "weights" in found[2]
    weights.symlink_to("nowhere")
    assert verify(pair.folder) == ["drafter/model.safetensors: a link; a pair holds regular files only"]


def test_a_pair_whose_files_were_altered_is_neither_loaded_nor_opened(make_pair, make_target):
    target = make_target()
    pair = make_pair("eagle3", target=target)
    for name in sorted(pair.manifest.files()):
        file = pair.folder / name
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(Refusal, match=rf"{re.escape(name)}: content differs .* Take a good copy of the pair"):
            Pair.load(pair.folder)
        with pytest.raises(Refusal, match=re.escape(name)):
            pair.open(target)
        assert Pair.load(pair.folder, check=False).digest == pair.digest
        file.write_bytes(good)
    (pair.folder / "more.txt").touch()
    with pytest.raises(Refusal, match=r"more\.txt: not listed in pair\.json"):
        Pair.load(pair.folder)


def test_what_a_file_manager_git_or_a_killed_writer_left_alters_nothing_and_goes_nowhere(make_pair):
    pair = make_pair("ngram")
    working_name(pair.folder / "pair.json", "tmp").touch()
    for name in (".DS_Store", "drafter/Thumbs.db", "reports/.nfs0000000000b80003", ".gitattributes"):
        (pair.folder / name).parent.mkdir(exist_ok=True)
        (pair.folder / name).write_text("left here")
    assert verify(pair.folder) == []
    assert Pair.load(pair.folder).digest == pair.digest
    (pair.folder / ".DS_Storage").touch()
    assert verify(pair.folder) == [".DS_Storage: not listed in pair.json"]


def test_the_recipe_names_the_kept_suites_by_their_files_and_the_others_as_they_are(make_pair, recipe, tmp_path):
    """A pair measures on what it was made for, wherever it lies."""
    mine = tmp_path / "mine" / "prompts.txt"
    mine.parent.mkdir()
    mine.write_text("One.\n\nTwo.")
    pair = make_pair("ngram", recipe=measured_at(recipe, suites=[str(mine), "code", "suites/elsewhere.txt"]))
    kept = pair.folder / "suites" / "mine" / "prompts.txt"
    assert kept.read_text() == "One.\n\nTwo."
    assert Pair.load(pair.folder).recipe().eval.suites == [str(kept.resolve()), "code", "suites/elsewhere.txt"]
