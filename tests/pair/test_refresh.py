"""A refresh writes the next version of a pair, for a changed target, from the old drafter."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from outrider.common import BadInputError, IncompatibleError
from outrider.eval.measure import contestants, measure
from outrider.eval.reports.render import write_report
from outrider.eval.suites import load_suites
from outrider.heads import DraftModel, LowRank, load_drafter
from outrider.pair import Pair, gate_pairs, new_pair, probe, verify
from outrider.pair.comparison import newest_report
from outrider.pair.refresh import RefreshOptions, _measured_as, refresh, refresh_recipe
from outrider.recipes import Recipe, load_recipe
from outrider.train.check import check
from outrider.train.stopping import Until

from .conftest import TEXTS, MakePair


@pytest.fixture
def trained(tmp_path, recipe, make_pair) -> MakePair:
    """`trained(type, **training)`: a pair whose recipe can be run again."""
    rows = [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, quiet = str(tmp_path / "prompts.jsonl"), {"save_strategy": "no", "disable_tqdm": True}

    def make(kind: str = "eagle3", **training: Any) -> Pair:
        values = recipe.model_dump() | {
            "drafter": {"type": kind, "steps": 3} if kind == "eagle3" else {"type": kind},
            "data": {"prompts": [prompts], "max_new_tokens": 12, "holdout": 0.0, "allow_leaks": True},
            "training": {"report_to": "none", "per_device_train_batch_size": 2} | quiet | training,
            "output": str(tmp_path / "run"),
        }
        values["eval"] |= {"suites": [prompts], "limit": 2, "max_new_tokens": 8, "baselines": ["ngram"]}
        return make_pair(kind, recipe=Recipe.from_dict(values), calibration=None)

    return make


def test_a_refresh_writes_version_two_with_its_parent(trained, make_target, tmp_path):
    first, changed = trained(max_steps=5, learning_rate=1e-2), make_target(noise=0.03)
    second = refresh(first, changed, tmp_path / "refreshed")
    assert second.folder == tmp_path / "refreshed" / "pair"
    assert (second.name, second.version) == (first.name, 2)
    assert second.manifest.lineage.parent.digest == first.digest
    assert second.fingerprint() == changed.fingerprint()
    assert verify(second.folder, changed) == verify(first.folder) == []
    assert second.manifest.measurements.headline
    assert [p.id for p in second.calibration()] == [p.id for p in first.calibration()]
    assert probe(second, changed).ratio.value == 1.0
    old, new = (load_file(p.drafter_folder / "model.safetensors")["fc.weight"] for p in (first, second))
    assert 0 < (old - new).norm() < 0.5 * old.norm(), "trained on from the old weights, not from new ones"

    written = (second.folder / "pair.json").stat().st_mtime_ns
    assert refresh(first, changed, tmp_path / "refreshed").manifest == second.manifest
    assert (second.folder / "pair.json").stat().st_mtime_ns == written


def said(out: io.StringIO) -> str:
    return " ".join(out.getvalue().split())


def test_a_refresh_measures_as_its_parent_was_measured_and_says_it_before(trained, make_target, tmp_path):
    """Its recipe would take two prompts at two temperatures; the parent's report has three, at one of them."""
    first = trained("ngram")
    target = make_target()
    out = io.StringIO()
    settings = first.recipe().eval.model_copy(update={"limit": 3, "temperatures": [0.0], "repeats": 1})
    suites = load_suites(settings.suites, target.require_tokenizer(), 3)
    drafter = load_drafter(first.drafter_folder, target)
    report = measure(target, contestants(target, drafter, settings), suites, settings, generate_baseline=False)
    write_report(report, tmp_path / "first")
    first = new_pair(first.folder, target, drafter, first.recipe(), tmp_path / "first")
    second = refresh(first, make_target(noise=0.03), tmp_path / "refreshed", console=Console(file=out))
    [suite] = newest_report(second).conditions.suites
    assert (suite.num_prompts, newest_report(second).conditions.temperatures) == (3, [0.0])
    assert "measuring 3 prompts with ngram, plain, transformers.generate, at temperature 0, once: 9 answers" in said(
        out
    )
    assert gate_pairs(second, first).lines
    asked = refresh(first, make_target(noise=0.05), tmp_path / "asked", ["eval.limit=1", "eval.repeats=2"])
    [suite] = newest_report(asked).conditions.suites
    assert (suite.num_prompts, newest_report(asked).conditions.repeats) == (1, 2)


def test_a_refresh_for_a_time_without_a_report_before_measures_no_more_than_a_calibration(trained, monkeypatch):
    pair, few = trained(), RefreshOptions(seconds=60)
    whole = pair.recipe().eval.model_copy(update={"limit": None, "suites": ["code", "docs", "prose"]})
    assert _measured_as(pair, whole, [], few).limit == 11, "32 prompts of three suites"
    assert _measured_as(pair, whole, ["eval.limit=null"], few).limit is None
    assert _measured_as(pair, whole, [], RefreshOptions()).limit is None


def test_a_drafter_without_weights_is_measured_again(trained, make_target, tmp_path):
    second = refresh(trained("ngram"), make_target(noise=0.03), tmp_path / "refreshed")
    assert second.version == 2
    assert not (tmp_path / "refreshed" / "data").exists()


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"max_steps": 50}, {"max_steps": 20}),
        ({"num_train_epochs": 5}, {"num_train_epochs": 2.0}),
        ({}, {"num_train_epochs": pytest.approx(1.2)}),
    ],
)
def test_the_budget_is_a_share_of_the_first_training(training, expected, trained, make_target, tmp_path):
    found = refresh_recipe(trained(**training), make_target(), tmp_path / "out").training
    assert {key: found[key] for key in expected} == expected


def test_the_recipe_of_a_refresh_points_at_the_new_target_and_the_old_drafter(trained, make_target, tmp_path):
    pair, target = trained(max_steps=50), make_target()
    target.source = {"path": "base", "revision": None, "adapter": "tuned"}
    recipe = refresh_recipe(pair, target, tmp_path / "out", ["training.max_steps=3", "data.limit=2"])
    assert (recipe.target.path, recipe.target.adapter, recipe.target.dtype) == ("base", "tuned", "float32")
    assert Path(recipe.drafter["init"]).samefile(pair.drafter_folder)
    assert (recipe.training["max_steps"], recipe.data.limit, recipe.output_folder) == (3, 2, tmp_path / "out")


def test_a_refresh_leaves_out_keys_of_trainings_that_are_gone(trained, make_target):
    """As an earlier version wrote them into the recipe of a pair, which is sealed and cannot be mended by hand."""
    pair = trained()
    pair.recipe_file.write_text(pair.recipe_file.read_text().replace("data:\n", "data:\n  verified: 0.5\n"))
    with pytest.raises(BadInputError, match=r"data\.verified is a key that Outrider had until"):
        load_recipe(pair.recipe_file)
    assert refresh_recipe(pair, make_target(), pair.folder / "out").data == pair.recipe().data


def test_a_refresh_pushes_only_where_it_is_asked_to(trained, make_target, tmp_path):
    """A pair may be a stranger's: its recipe names no place where this user's drafter goes."""
    pair, asked = trained(push_to_hub=True, hub_model_id="stranger/head"), ["training.push_to_hub=true"]
    assert not refresh_recipe(pair, make_target(), tmp_path / "out").training["push_to_hub"]
    assert refresh_recipe(pair, make_target(), tmp_path / "out", asked).training["push_to_hub"]


def test_a_refreshed_pair_is_not_cut_again(trained, make_pair, make_target, tmp_path):
    first = trained("ngram", max_steps=50)
    second = make_pair("ngram", tmp_path / "second", recipe=first.recipe(), parent=first)
    assert refresh_recipe(second, make_target(), tmp_path / "out").training["max_steps"] == 50


def test_an_incompatible_target_is_refused_before_any_work(trained, make_target, tmp_path):
    with pytest.raises(IncompatibleError, match="hidden_states"):
        refresh(trained(), make_target(layers=2), tmp_path / "refreshed")
    assert not (tmp_path / "refreshed").exists()


def test_what_the_parent_learned_is_not_measured_on(trained, make_target, tmp_path, monkeypatch):
    pair, target = trained(), make_target()
    [suite] = load_suites(pair.recipe().eval.suites, target.require_tokenizer(), 1)
    monkeypatch.setattr(Pair, "learnt", lambda _: set(suite.prompts[0].asked_digests()))
    with pytest.raises(BadInputError, match="what the drafter learned from the training data of the pair"):
        refresh(pair, target, tmp_path / "refreshed", ["data.allow_leaks=false"])
    assert not (tmp_path / "refreshed").exists()


def test_a_refresh_never_writes_into_the_pair(trained, make_target):
    pair = trained()
    with pytest.raises(BadInputError, match="lies inside the pair"):
        refresh(pair, make_target(), pair.folder / "next")
    assert verify(pair.folder) == []


@pytest.mark.parametrize("override", ["target.path=elsewhere", "target={path: x}", "output=elsewhere"])
def test_overrides_that_a_refresh_cannot_follow_are_refused(trained, make_target, tmp_path, override):
    with pytest.raises(BadInputError, match="a refresh cannot follow"):
        refresh(trained("ngram"), make_target(), tmp_path / "out", [override])


def test_a_low_rank_refresh_keeps_the_parents_weights_as_they_are(trained, make_target, tmp_path):
    """Two targets' versions hold the parent's file and a small change each; they draft as plain ones of its type."""
    parent = trained(max_steps=3)
    weights = parent.drafter_folder / "model.safetensors"
    for name, noise in (("one", 0.05), ("other", 0.1)):
        target = make_target(noise=noise)
        made = refresh(parent, target, tmp_path / name, ["training.max_steps=4"], options=RefreshOptions(rank=2))
        assert (made.drafter_folder / "base" / "model.safetensors").read_bytes() == weights.read_bytes()
        assert (made.drafter_folder / "adapter_model.safetensors").stat().st_size < weights.stat().st_size / 2
        assert (made.manifest.drafter.type, made.version) == ("eagle3", 2)
        assert type(made.drafter_for(target)).__name__ == "Eagle3"
        assert verify(made.folder) == []
        assert probe(made, target).exit_code == 0
    again = refresh(made, target, tmp_path / "third", ["training.max_steps=2"], options=RefreshOptions(rank=2))
    assert (again.drafter_folder / "base" / "model.safetensors").read_bytes() == weights.read_bytes()
    whole = refresh(made, target, tmp_path / "whole", ["training.max_steps=2"])
    assert sorted(whole.manifest.drafter.files) == ["config.json", "model.safetensors"]


def test_a_low_rank_change_learns_as_its_base_does(trained, make_target, tmp_path):
    """From packs, whose texts its base keeps apart; but it writes no text, as a draft model by itself would."""
    packed = ["training.packing=true", "training.max_length=64", "training.per_device_train_batch_size=1"]
    head, target = trained(max_steps=3), make_target()
    made = refresh(head, make_target(noise=0.05), tmp_path / "packed", packed, options=RefreshOptions(rank=2))
    assert made.manifest.drafter.type == "eagle3"
    DraftModel(target.model).save(tmp_path / "draft-model")
    change = LowRank.over(tmp_path / "draft-model", target, 2)
    assert change.learns_as is DraftModel
    recipe = head.recipe(["data.on_policy=0.5"])
    with pytest.raises(BadInputError, match="type 'low_rank' writes no text of its own"):
        check(recipe, change)


def test_a_low_rank_refresh_that_only_made_it_worse_changes_nothing(trained, make_target, tmp_path):
    parent, target = trained(max_steps=50), make_target(noise=0.05)
    harm = ["data.holdout=0.6", "training.learning_rate=1", "training.max_steps=4"]
    made = refresh(parent, target, tmp_path / "out", harm, options=RefreshOptions(rank=2))
    then, now = (pair.drafter_for(target).state_dict() for pair in (parent, made))
    assert all(torch.equal(then[name], now[name]) for name in then)


def test_a_refresh_ends_after_so_many_tokens_and_says_so(trained, make_target, tmp_path):
    pair, target = trained(max_steps=50), make_target(noise=0.05)
    how = RefreshOptions(until=Until(tokens=60, every=2))
    refresh(pair, target, tmp_path / "out", ["data.holdout=0.6"], options=how)
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())["training"]
    assert "tokens were learnt from, of 60" in told["ended"]
    assert 0 < told["steps"] < 20
    assert [point["step"] for point in told["curve"][:2]] == [0, 2]
    assert all(point["tau"] > 1 for point in told["curve"])
    before = (tmp_path / "out" / "provenance.json").stat().st_mtime_ns
    refresh(pair, target, tmp_path / "out", ["data.holdout=0.6"], options=how)
    assert (tmp_path / "out" / "provenance.json").stat().st_mtime_ns == before, "it had ended"
    with pytest.raises(BadInputError, match="asked for in another way"):
        refresh(
            pair,
            target,
            tmp_path / "out",
            ["data.holdout=0.6"],
            options=RefreshOptions(until=Until(tokens=70, every=2)),
        )


def test_a_refresh_ends_when_nothing_more_is_gained(trained, make_target, tmp_path):
    """With a learning rate of nearly nothing the curve is flat from the start."""
    overrides = ["data.holdout=0.6", "training.learning_rate=1e-12", "training.max_steps=40"]
    refresh(
        trained(max_steps=50),
        make_target(),
        tmp_path / "out",
        overrides,
        options=RefreshOptions(until=Until(gain=0.01, every=2)),
    )
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())["training"]
    assert told["ended"].startswith("τ has risen by less than 1.0% over 2 evaluations")
    assert (told["steps"], len(told["curve"])) == (4, 3)


def test_a_refresh_trains_for_a_time(trained, make_target, tmp_path):
    refresh(trained(max_steps=50), make_target(), tmp_path / "out", options=RefreshOptions(seconds=0.3))
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())["training"]
    assert told["budget"] == 0.3
    with pytest.raises(BadInputError, match="choose one of the two"):
        RefreshOptions(seconds=1.0, until=Until(tokens=1))
