"""What eval, tune and pair new work on: what was asked for is followed or refused, never silently something else."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from outrider.common.digests import CHECKSUM, seal
from outrider.eval import Report
from outrider.heads import Ngram
from outrider.pair import Pair, new_pair, verify
from outrider.recipes import load_recipe
from outrider.scripts.eval_setup import EvalOptions, load_setup
from outrider.targets import Target

from .conftest import Command, failed, succeeded


@pytest.fixture
def pair(recipe_file: Path, tmp_path: Path, target_folder: Path) -> Path:
    recipe = load_recipe(str(recipe_file), ["drafter={type: ngram}"])
    return new_pair(tmp_path / "pair", Target.load(target_folder), Ngram(), recipe).folder


@pytest.fixture
def adapter(tmp_path: Path, target_folder: Path) -> Path:
    torch.manual_seed(0)
    model = get_peft_model(Target.load(target_folder).model, LoraConfig(target_modules=["down_proj"], r=2))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    model.save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


@pytest.mark.parametrize(
    "change", ["target.path=embedded", "drafter.depth=1", "data.limit=5", "eval.dtype=bfloat16", "name=x"]
)
def test_overrides_that_a_pair_cannot_follow_are_refused(outrider: Command, pair: Path, change: str) -> None:
    failed(outrider("eval", pair, change), change, "a pair cannot follow", "--target")


def test_overrides_of_eval_are_followed(pair: Path) -> None:
    setup = load_setup(str(pair), EvalOptions(["eval.depth=1", "eval.limit=2", "eval.max_new_tokens=5"]))
    assert (setup.plan.depth, setup.settings.limit, setup.settings.max_new_tokens) == (1, 2, 5)
    assert load_setup(str(pair), EvalOptions(["data.allow_leaks=true"])).suites
    static = load_setup(str(pair), EvalOptions(["eval.tree=[-1, -1]"])).plan.tree
    assert static is not None
    assert static.parents == (-1, -1)


def test_a_pair_is_measured_on_a_changed_target(
    outrider: Command, pair: Path, adapter: Path, target_folder: Path, tmp_path: Path
) -> None:
    """The report is about the changed target, and lies beside the one about the pair's own."""
    arguments = ["eval", pair, "--target", target_folder, "--adapter", adapter, "--limit", 1, "--json"]
    report = json.loads(succeeded(outrider(*arguments, "--out", tmp_path / "report")).stdout)
    changed = Target.load(target_folder, adapter=adapter).fingerprint().digest
    assert report["conditions"]["target"]["fingerprint"] == changed
    own, other = (load_setup(str(pair), EvalOptions(target=t)).report_folder for t in (None, str(target_folder)))
    assert own.name == "tiny-v1"
    assert other.name.startswith("tiny-v1-on-")


def test_an_adapter_needs_a_target(outrider: Command, pair: Path, adapter: Path, recipe_file: Path) -> None:
    failed(outrider("eval", pair, "--adapter", adapter), "--target")
    failed(outrider("eval", recipe_file, "--target", "embedded"), "is a recipe", "target.path")


def test_a_pair_needs_no_working_directory(
    outrider: Command, target_folder: Path, tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its suites are named by relative path: it is measured, probed and refreshed elsewhere, without these files."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "mine").mkdir(parents=True)
    elsewhere.mkdir()
    shutil.copy(tmp_path / "prompts.jsonl", home / "mine" / "test.jsonl")
    monkeypatch.chdir(home)
    recipe = load_recipe(str(recipe_file), ["drafter={type: ngram}", "eval.suites=[mine/test.jsonl]"])
    target = Target.load(target_folder)
    made = new_pair(home / "pair", target, Ngram(), recipe)
    assert sorted(made.manifest.suites) == ["mine/test.jsonl"]
    shutil.move(home / "pair", elsewhere / "pair")
    shutil.rmtree(home)
    monkeypatch.chdir(elsewhere)
    report = json.loads(succeeded(outrider("eval", "pair", "--json")).stdout)
    assert [(suite["name"], suite["num_prompts"]) for suite in report["conditions"]["suites"]] == [("test", 3)]
    assert {m.suite for m in made.manifest.measurements.baseline.prompts} == {"test"}
    succeeded(outrider("refresh", "pair", "--target", target_folder, "--out", "next"))
    child = Pair.load("next/pair")
    assert child.manifest.suites == made.manifest.suites
    assert child.recipe_file.read_text().count("suites/mine/test.jsonl") == 1
    assert verify("next/pair") == []
    (elsewhere / "pair" / "suites" / "mine" / "test.jsonl").write_text("{}")
    assert verify("pair")[0].startswith("suites/mine/test.jsonl: content differs")


def test_the_page_shows_the_command_that_repeats_the_run_and_the_texts_of_its_prompts(
    outrider: Command, ngram_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "an answer"
    words = ["eval", str(ngram_pair), "eval.seed=3", "--temperature", "1", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/outrider", *words])
    succeeded(outrider(*words))
    page, first = (folder / "report.html").read_text(), Report.load(folder)
    line = html.unescape(re.findall('<p class="command"><code>(.*?)</code>', page)[0])
    shutil.rmtree(folder)
    succeeded(outrider(*shlex.split(line)[1:]))
    again = Report.load(folder)
    assert [(r.answer, r.accepted, r.text) for r in again.records] == [
        (r.answer, r.accepted, r.text) for r in first.records
    ]
    shown = [r for r in again.records if r.text]
    assert [r.contestant for r in shown] == ["ngram"] * 3
    for record in shown:
        assert len(record.text) == record.tokens
        assert "".join(drafts + own for drafts, own in record.pieces()) == "".join(record.text)


@pytest.fixture
def trained(outrider: Command, recipe_file: Path) -> Path:
    succeeded(outrider("train", recipe_file))
    succeeded(outrider("eval", recipe_file))
    return recipe_file


def test_a_quick_look_never_takes_the_place_of_real_figures(outrider: Command, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    real = (run / "report" / "report.json").read_bytes()
    shutil.copytree(run / "drafter", tmp_path / "other")
    for words in (["--limit", 1], ["--drafter", tmp_path / "other"], ["eval.limit=2"], ["--depth", 1], ["--quick"]):
        succeeded(outrider("eval", trained, *words))
        assert (run / "report" / "report.json").read_bytes() == real, words
    assert len(list((run / "reports").iterdir())) == 5
    succeeded(outrider("pair", "new", tmp_path / "pair", trained))
    assert next((tmp_path / "pair" / "reports").glob("*/report.json")).read_bytes() == real


def test_a_quick_look_is_at_one_temperature_once(outrider: Command, trained: Path, tmp_path: Path) -> None:
    quick = ["--quick", "eval.temperatures=[0.5, 1.0]", "eval.repeats=3", "--limit", 1]
    succeeded(outrider("eval", trained, *quick))
    report = Report.load(tmp_path / "run" / "reports" / "quick")
    assert (report.conditions.temperatures, report.conditions.repeats) == ([0.5], 1)
    assert (report.baselines.generate, {len(record.repeats) for record in report.records}) == (None, {1})
    succeeded(outrider("eval", trained, *quick, "--temperature", 1, "--temperature", 0))
    assert Report.load(tmp_path / "run" / "reports" / "quick").conditions.temperatures == [1.0, 0.0]


def test_pair_new_takes_the_report_of_what_it_binds(outrider: Command, trained: Path, tmp_path: Path) -> None:
    """With the same words eval and pair new mean the same measurement; without one the pair says that it has none."""
    succeeded(outrider("eval", trained, "eval.limit=2"))
    succeeded(outrider("pair", "new", tmp_path / "pair", trained, "eval.limit=2"))
    assert Pair.load(tmp_path / "pair").manifest.measurements.headline[0].num_prompts == 2
    shown = succeeded(outrider("pair", "new", tmp_path / "other", trained, "eval.limit=1"))
    assert "this pair holds no figures" in " ".join(shown.stdout.split())
    assert Pair.load(tmp_path / "other").manifest.measurements.headline == []


def test_a_report_of_other_weights_is_refused(outrider: Command, trained: Path, tmp_path: Path) -> None:
    """A headline that other weights earned, of the same type and shape, is no headline of these."""
    drafter = tmp_path / "run" / "drafter"
    weights = load_file(drafter / "model.safetensors")
    name = next(n for n, w in weights.items() if w.is_floating_point())
    weights[name] = weights[name] + 0.5
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    seal(drafter)
    failed(outrider("pair", "new", tmp_path / "pair", trained), "other weights", "Measure this one")
    assert not (tmp_path / "pair").exists()
    report = tmp_path / "run" / "report" / "report.json"
    values = json.loads(report.read_text())
    for contestant in values["contestants"]:
        contestant.pop("digest")
    del values[CHECKSUM]
    report.write_text(json.dumps(values))
    failed(outrider("pair", "new", tmp_path / "pair", trained), "does not say which weights", "Measure again")
