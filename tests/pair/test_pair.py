"""Making, loading and opening pairs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outrider.decode import Decoder, Plan
from outrider.distill.prompts import Prompt
from outrider.eval.measure import Contestant, measure
from outrider.eval.reports.render import write_report
from outrider.eval.suites import make_suite
from outrider.ground import BadInputError, IncompatibleError
from outrider.heads import Drafter
from outrider.pair import Pair, StaleError, compatibility, new_pair, verify
from outrider.pair import new as making
from outrider.recipes import Recipe
from outrider.targets import Target

KINDS = ("ngram", "draft_model", "eagle3")


@pytest.fixture
def report_folder(
    tmp_path: Path,
    make_target: Callable[..., Target],
    make_drafter: Callable[[str, Target], Drafter],
    recipe: Recipe,
    prompts: list[Prompt],
):
    target = make_target()
    contestant = Contestant("ngram", make_drafter("ngram", target), Plan(2))
    suites = [make_suite("a", prompts[:3])]
    report = measure(target, [contestant], suites, recipe.eval, generate_baseline=False)
    return write_report(report, tmp_path / "report")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_opens_as_what_was_saved_and_generates_what_the_target_says(
    kind: str, make_pair: Callable[..., Pair], make_target: Callable[..., Target], prompts: list[Prompt]
) -> None:
    made = make_pair(kind)
    pair = Pair.load(made.folder)
    assert pair.manifest == made.manifest
    target, drafter, plan = pair.open(make_target())
    assert (drafter.name, plan) == (kind, Plan(3))
    tokens = [p.tokens for p in prompts]
    assert (
        Decoder(target, drafter).generate(tokens, 12, plan=plan).tokens == Decoder(target).generate(tokens, 12).tokens
    )


def test_the_recorded_source_is_loaded_in_the_recorded_dtype(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
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
def test_the_kept_adapter_names_no_folder_of_the_machine_it_came_from(
    make_pair: Callable[..., Pair],
    make_target: Callable[..., Target],
    tmp_path: Path,
    base: str | None,
    kept: str | None,
) -> None:
    made, adapter = make_target(), tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    pair = make_pair("ngram", target=Target(made.model, made.tokenizer, {"path": "org/base", "adapter": str(adapter)}))
    copied = pair.folder / "adapter"
    assert json.loads((copied / "adapter_config.json").read_text()) == {"base_model_name_or_path": kept, "r": 4}
    assert (copied / "adapter_model.safetensors").read_bytes() == b"weights"
    assert verify(pair.folder) == []


def test_a_target_from_memory_must_be_given_again(make_pair: Callable[..., Pair]) -> None:
    with pytest.raises(BadInputError, match="in memory"):
        make_pair("ngram").open()


def test_the_identity_depends_on_content_alone(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_pair("eagle3", tmp_path / "here")
    monkeypatch.setattr(making, "_today", lambda: "2031-01-01")
    there = make_pair("eagle3", tmp_path / "deep" / "er" / "there")
    assert there.digest == here.digest
    assert there.manifest.created == "2031-01-01" != here.manifest.created


def test_the_identity_depends_on_target_drafter_and_plan(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target], recipe: Recipe, tmp_path: Path
) -> None:
    deeper = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"depth": 5})})
    pairs = [
        make_pair("ngram", tmp_path / "1"),
        make_pair("ngram", tmp_path / "2", target=make_target(noise=0.01)),
        make_pair("eagle3", tmp_path / "3"),
        make_pair("ngram", tmp_path / "4", recipe=deeper),
    ]
    assert len({p.digest for p in pairs}) == 4


def test_a_changed_target_is_stale_unless_asked_for(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target]
) -> None:
    pair, changed = make_pair("eagle3"), make_target(noise=0.01)
    with pytest.raises(StaleError, match=r"weights.*outrider probe") as caught:
        pair.open(changed)
    assert caught.value.exit_code == 1
    assert pair.open(changed, check=False)[0] is changed
    assert compatibility(pair, changed).status == "changed"
    assert compatibility(pair, make_target()).status == "same"


def test_another_vocabulary_is_incompatible_and_the_first_differing_token_is_named(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target], swapped_tokenizer: PreTrainedTokenizerFast
) -> None:
    pair, target = make_pair("ngram"), Target(make_target().model, swapped_tokenizer)
    with pytest.raises(IncompatibleError, match=r"id 300 is '.*' in the pair 'tiny' and '.*' in the target") as caught:
        pair.open(target, check=False)
    assert caught.value.exit_code == 3
    assert compatibility(pair, target).status == "incompatible"


def test_a_target_without_the_taps_is_incompatible(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target]
) -> None:
    shallow = make_target(layers=2)
    assert "hidden_states[3]" in compatibility(make_pair("eagle3"), shallow).lines[0]


# ------------------------------------------------------------ making


def test_a_report_gives_headline_plan_and_suites(make_pair: Callable[..., Pair], report_folder: Path) -> None:
    pair = make_pair("ngram", report_folder=report_folder)
    measured = pair.manifest.measurements
    assert pair.plan == Plan(2)
    assert [h.temperature for h in measured.headline] == [0.0]
    assert measured.headline[0].tau.value is not None
    assert list(measured.suites) == ["a"]
    assert {Path(name).name for name in pair.manifest.reports} == {"report.json", "report.md", "report.html"}
    assert verify(pair.folder) == []


def test_a_report_about_another_drafter_is_refused(make_pair: Callable[..., Pair], report_folder: Path) -> None:
    with pytest.raises(BadInputError, match=r"about 'ngram'.*'eagle3'"):
        make_pair("eagle3", report_folder=report_folder)


def test_a_report_about_another_target_is_refused(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target], report_folder: Path
) -> None:
    with pytest.raises(BadInputError, match="another target"):
        make_pair("ngram", target=make_target(layers=5), report_folder=report_folder)


def test_the_same_pair_again_changes_nothing(make_pair: Callable[..., Pair]) -> None:
    first = make_pair("ngram")
    before = (first.folder / "pair.json").stat().st_mtime_ns
    assert make_pair("ngram").manifest == first.manifest
    assert (first.folder / "pair.json").stat().st_mtime_ns == before


def test_a_new_measurement_joins_the_older_reports(
    make_pair: Callable[..., Pair], report_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_today", lambda: "2031-01-01")
    make_pair("ngram", report_folder=report_folder)
    monkeypatch.setattr(making, "_today", lambda: "2031-02-02")
    report = report_folder / "report.json"
    report.write_text(report.read_text().replace('"created"', ' "created"', 1))
    pair = make_pair("ngram", report_folder=report_folder)
    assert {name.split("/")[0] for name in pair.manifest.reports} == {"2031-01-01", "2031-02-02"}
    assert verify(pair.folder) == []


def test_another_pair_is_never_overwritten(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    first = make_pair("ngram", tmp_path / "pair")
    with pytest.raises(BadInputError, match="already holds another pair"):
        make_pair("eagle3", tmp_path / "pair")
    assert verify(first.folder) == []


def test_a_folder_of_something_else_is_never_overwritten(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(BadInputError, match="not a pair"):
        make_pair("ngram", tmp_path / "thesis")
    assert [p.name for p in tmp_path.rglob("*")] == ["thesis", "chapter.txt"]


def test_a_failure_leaves_nothing_behind(
    make_pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "write_calibration", full_disk)
    with pytest.raises(OSError, match="No space"):
        make_pair("ngram")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_drafter_is_copied_as_it_is(
    make_pair: Callable[..., Pair],
    make_target: Callable[..., Target],
    make_drafter: Callable[[str, Target], Drafter],
    tmp_path: Path,
) -> None:
    make_drafter("eagle3", make_target()).save(tmp_path / "saved")
    (tmp_path / "saved" / "optimizer.pt").write_bytes(b"not for shipping")
    pair = make_pair("eagle3", drafter=tmp_path / "saved")
    assert set(pair.manifest.drafter.files) == {"config.json", "model.safetensors"}
    assert (pair.drafter_folder / "model.safetensors").read_bytes() == (
        tmp_path / "saved" / "model.safetensors"
    ).read_bytes()


def test_a_next_version_names_its_parent(
    make_pair: Callable[..., Pair], make_target: Callable[..., Target], tmp_path: Path
) -> None:
    first = make_pair("ngram", tmp_path / "1")
    second = make_pair("ngram", tmp_path / "2", target=make_target(noise=0.01), parent=first)
    lineage = second.manifest.lineage
    assert second.version == 2
    assert lineage.parent is not None
    assert (lineage.parent.version, lineage.parent.digest) == (1, first.digest)
    assert "weights" in lineage.reason


def test_prompts_come_back_as_they_were(make_pair: Callable[..., Pair], prompts: list[Prompt]) -> None:
    chat = dataclasses.replace(
        prompts[0], text="two\u2028lines", messages=({"role": "user", "content": "two\u2028lines"},)
    )
    assert make_pair("ngram", calibration=[chat, *prompts[1:]]).calibration() == [chat, *prompts[1:]]


def test_without_a_tokenizer_a_pair_is_still_made(
    make_target: Callable[..., Target], make_drafter: Callable, recipe: Recipe, tmp_path: Path
) -> None:
    target = Target(make_target().model)
    pair = new_pair(tmp_path / "pair", target, make_drafter("ngram", target), recipe, calibration=[])
    assert pair.tokenizer() is None
    assert verify(pair.folder, target) == []
