"""What making a pair writes, keeps and refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.common.atomic import machine_tag
from outrider.decode import Plan
from outrider.eval.model_card import portable
from outrider.heads.registry import with_defaults
from outrider.pair import Pair, new_pair, verify
from outrider.pair import new as making
from outrider.pair.manifest import Parent
from outrider.targets.fingerprint import digest_file

from ..eval.conftest import refusal
from .conftest import measured_at


@pytest.fixture
def today(monkeypatch) -> Callable[[str], None]:
    """`today(date)`: pairs are made on that day."""
    return lambda date: monkeypatch.setattr(making, "_today", lambda: date)


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_pair_json_says_what_the_pair_is(make_pair, make_target, recipe, today):
    today("2031-01-01")
    pair = make_pair("ngram")
    made = pair.manifest
    assert (made.schema_version, made.name, made.version, made.created) == (3, "tiny", 1, "2031-01-01")
    assert made.outrider_version == version("outrider")
    assert (made.drafter.type, list(made.drafter.files)) == ("ngram", ["config.json", "model.safetensors"])
    assert made.recipe == digest_file(pair.folder / "recipe.yaml")
    assert made.calibration == digest_file(pair.folder / "calibration.jsonl")
    kept = {"drafter": with_defaults(recipe.drafter), "output": portable(recipe.output)}
    assert (pair.folder / "recipe.yaml").read_text(encoding="utf-8") == recipe.to_yaml(**kept)
    assert set(made.target.tokenizer_files) >= {"tokenizer.json", "tokenizer_config.json"}
    assert made.target.adapter_files == made.reports == {}
    assert made.target.fingerprint.restored() == make_target().fingerprint()
    assert (made.lineage.parent, made.lineage.reason) == (None, "first version")
    assert (made.measurements.headline, made.measurements.suites, made.measurements.conditions) == ([], {}, {})
    assert made.checksum == made.computed_checksum()
    assert verify(pair.folder) == []


def test_its_recipe_names_no_more_folders_of_this_machine_than_a_refresh_reads(
    make_pair, recipe, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    inside, outside = (tmp_path / place for place in ("work/data/mine.jsonl", "elsewhere/theirs.jsonl"))
    data = recipe.data.model_copy(update={"prompts": [str(inside), str(outside)], "responses": "/home/me/answers"})
    training = {**recipe.training, "logging_dir": "/home/me/logs"}
    changed = recipe.model_copy(update={"output": "/home/me/runs/7", "data": data, "training": training})
    kept = make_pair("ngram", recipe=changed).recipe()
    assert (kept.output, kept.data.responses, kept.training["logging_dir"]) == ("7", "answers", "logs")
    assert kept.data.prompts == ["data/mine.jsonl", str(outside)]
    assert f"the pair's recipe names {outside}" in caplog.text
    assert str(inside) not in caplog.text


def test_the_pair_is_all_that_is_left_beside_it(make_pair, tmp_path):
    make_pair("ngram", tmp_path / "deep" / "er" / "pair")
    assert [p.name for p in (tmp_path / "deep" / "er").iterdir()] == ["pair"]


def test_without_prompts_there_is_no_baseline(make_pair):
    pair = make_pair("ngram", calibration=[])
    assert pair.manifest.calibration is None
    assert pair.manifest.measurements.baseline is None
    assert pair.calibration() == []
    assert not (pair.folder / "calibration.jsonl").exists()


def test_the_baseline_is_measured_on_the_prompts_with_the_plan(make_pair, prompts):
    baseline = make_pair("draft_model").manifest.measurements.baseline
    assert (baseline.max_new_tokens, baseline.temperature, baseline.seed) == (16, 0.0, 0)
    assert [m.id for m in baseline.prompts] == [p.id for p in prompts]
    assert all(m.accepted >= 2 * m.rounds for m in baseline.prompts), "the target drafts for itself, at depth 3"


def test_prompts_come_from_the_recipes_suites_if_none_are_given(make_pair, prompts, monkeypatch):
    monkeypatch.setattr(making, "choose_prompts", lambda recipe, target: prompts[:2])
    assert make_pair("ngram", calibration=None).calibration() == prompts[:2]


@pytest.mark.parametrize("source", [{"path": "org/base", "revision": "main", "adapter": None}, {}])
def test_a_name_on_the_hub_is_kept_as_it_is(make_pair, make_target, source):
    found = make_pair("ngram", target=make_target(source=source)).manifest.target.source
    assert (found.path, found.revision, found.adapter) == (source.get("path"), source.get("revision"), None)


def test_a_local_path_is_made_absolute(make_pair, make_target, tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "lora").mkdir()
    monkeypatch.chdir(tmp_path)
    made = make_pair("ngram", target=make_target(source={"path": "base", "adapter": "lora"})).manifest.target
    assert (made.source.path, made.source.adapter) == (str(tmp_path / "base"), str(tmp_path / "lora"))
    assert made.adapter_files == {}, "a folder without an adapter's weights"


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_the_reason_of_a_version_is_what_changed(make_pair, make_target, tmp_path, kind):
    first = make_pair("ngram", tmp_path / "1")
    noise = 0.01 if kind == "ngram" else 0.0
    second = make_pair(kind, tmp_path / "2", target=make_target(noise=noise), parent=first)
    third = make_pair(kind, tmp_path / "3", target=make_target(noise=noise), parent=second)
    reason = second.manifest.lineage.reason
    changed = reason.startswith("the target changed: ") and "weights" in reason
    assert changed if noise else reason == "a new drafter for the same target"
    for number, (pair, parent) in enumerate([(second, first), (third, second)], 2):
        assert pair.version == number
        assert pair.manifest.lineage.parent == Parent(name="tiny", version=number - 1, digest=parent.digest)


@pytest.mark.parametrize(
    "changes", [{"depth": 2}, {"depth": 2, "width": 2, "nodes": 4}, {"tree": [-1, -1, 0], "depth": 2}]
)
def test_without_a_report_the_plan_is_the_recipes(make_target, make_drafter, recipe, tmp_path, changes):
    target = make_target()
    drafter, planned = make_drafter("eagle3", target), measured_at(recipe, **changes)
    plan = new_pair(tmp_path / "pair", target, drafter, planned, calibration=[]).manifest.plan
    assert plan.model_dump() == {"verify": "auto"} | changes


def test_only_what_a_drafter_is_made_of_is_copied_as_it_is(make_pair, make_target, make_drafter, tmp_path):
    saved = tmp_path / "saved"
    make_drafter("eagle3", make_target()).save(saved)
    (saved / "optimizer.pt").write_bytes(b"not for shipping")
    (saved / "more" / "files").mkdir(parents=True)
    for name in ("a.json", "b.safetensors", "c.jinja", "d.model", "e.txt", "f.bin", "g.pt"):
        (saved / "more" / "files" / name).write_text("x")
    (saved / "folder.json").mkdir()
    pair = make_pair("eagle3", drafter=str(saved))
    copied = [f"more/files/{name}" for name in ("a.json", "b.safetensors", "c.jinja", "d.model", "e.txt")]
    assert names(pair.drafter_folder) == ["config.json", "model.safetensors", *copied]
    assert sorted(pair.manifest.drafter.files) == ["config.json", "model.safetensors", *copied]
    weights = (pair.drafter_folder / "model.safetensors").read_bytes()
    assert weights == (saved / "model.safetensors").read_bytes()


def test_a_folder_that_holds_no_drafter_is_refused_before_anything_is_written(make_pair, tmp_path):
    (tmp_path / "saved").mkdir()
    with pytest.raises(BadInputError):
        make_pair("ngram", drafter=tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_report_is_kept_with_its_figures_and_conditions(make_pair, report_folder, today):
    today("2031-01-01")
    (report_folder / "notes.txt").write_text("mine")
    (report_folder / "report.md").unlink()
    pair = make_pair("ngram", report_folder=str(report_folder))
    kept = ["2031-01-01/report.html", "2031-01-01/report.json"]
    assert sorted(pair.manifest.reports) == names(pair.folder / "reports") == kept
    report = json.loads((report_folder / "report.json").read_text())
    measured = pair.manifest.measurements
    assert measured.suites == {suite["name"]: suite["digest"] for suite in report["conditions"]["suites"]}
    assert "suites" not in measured.conditions
    assert measured.conditions["device"] == "cpu"
    assert measured.baseline is not None
    assert [h.temperature for h in measured.headline] == [0.0, 1.0]
    assert measured.headline[0].tau.value is not None
    found = {(f["contestant"], f["suite"], f["temperature"]): f for f in report["figures"]}
    for headline in measured.headline:
        figures = found["ngram", "all", headline.temperature]
        assert (headline.rule, headline.num_prompts) == (figures["rule"], 4)
        assert headline.tau.model_dump() == figures["tau"]
        assert headline.speedup.model_dump() == figures["speedup"]
    assert pair.plan == Plan(2)


def test_a_report_about_plain_decoding_is_refused(make_pair, report_folder):
    file = report_folder / "report.json"
    report = json.loads(file.read_text())
    report["contestants"] = [c for c in report["contestants"] if c["kind"] != "drafter"]
    del report["checksum"]
    file.write_text(json.dumps(report))
    said = refusal(make_pair, "ngram", report_folder=report_folder)
    about = "the report is about plain decoding only, but the pair's drafter is of type 'ngram'"
    assert said.startswith(f"{about}; measure that one, first in")


def test_a_report_about_another_drafter_says_which(make_pair, report_folder):
    said = refusal(make_pair, "eagle3", report_folder=report_folder)
    about = "the report is about 'ngram', a drafter of type 'ngram', but the pair's drafter is of type 'eagle3'"
    assert said.startswith(f"{about}; measure that")


def test_a_report_about_another_target_says_which(make_pair, make_target, report_folder):
    other = make_target(noise=0.1)
    said, found = make_target().fingerprint().digest[:12], other.fingerprint().digest[:12]
    about = f"another target: its fingerprint is {said}…, this target's {found}… (torch.float32). Measure this one"
    assert about in refusal(make_pair, "ngram", target=other, report_folder=report_folder)


def test_a_report_of_the_same_day_gives_way_to_the_new_one_and_older_ones_stay(make_pair, report_folder, today):
    report, written = report_folder / "report.json", {}
    for turn, date in enumerate(("2031-01-01", "2031-02-02", "2031-02-02")):
        today(date)
        report.write_text(report.read_text().replace('"created"', ' "created"', turn))
        written[date] = report.read_bytes()
        pair = make_pair("ngram", report_folder=report_folder)
    assert {p.name: (p / "report.json").read_bytes() for p in (pair.folder / "reports").iterdir()} == written
    assert len(set(written.values())) == 2
    assert {name.split("/")[0] for name in pair.manifest.reports} == set(written)
    assert verify(pair.folder) == []


@pytest.mark.parametrize("reported", [False, True])
def test_the_same_pair_again_changes_nothing(make_pair, report_folder, today, reported):
    report, kept = (report_folder, {"report.json", "report.md", "report.html"}) if reported else (None, set())
    today("2031-01-01")
    first = make_pair("ngram", report_folder=report)
    before = (first.folder / "pair.json").stat().st_mtime_ns
    today("2031-02-02")
    assert make_pair("ngram", report_folder=report) == first
    assert {Path(name).name for name in first.manifest.reports} == kept
    assert {p.parent.name for p in first.folder.glob("reports/*/*")} == ({"2031-01-01"} if reported else set())
    assert (first.folder / "pair.json").stat().st_mtime_ns == before


def test_another_recipe_of_the_same_pair_takes_its_place(make_pair, recipe, tmp_path):
    first = make_pair("ngram")
    renamed = make_pair("ngram", recipe=recipe.model_copy(update={"name": "other"}))
    assert (renamed.name, renamed.digest, renamed.folder) == ("other", first.digest, first.folder)
    assert Pair.load(first.folder).name == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["ngram"]


def test_a_damaged_pair_is_made_anew(make_pair):
    pair = make_pair("ngram")
    (pair.folder / "recipe.yaml").unlink()
    make_pair("ngram")
    assert verify(pair.folder) == []


def test_another_pair_in_its_place_is_named(make_pair, tmp_path):
    first = make_pair("ngram", tmp_path / "pair")
    said = refusal(make_pair, "draft_model", tmp_path / "pair", parent=first)
    assert verify(first.folder) == []
    held = f"'{tmp_path / 'pair'}' already holds another pair: tiny version 1 ({first.digest[:12]}…)"
    assert said.startswith(f"{held}, this one is tiny version 2 (")
    assert said.endswith("…). Nothing was written; choose another folder.")
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


def test_an_empty_folder_is_taken_and_what_is_no_pair_is_never_overwritten(make_pair, tmp_path):
    (tmp_path / "empty").mkdir()
    assert verify(make_pair("ngram", tmp_path / "empty").folder) == []
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for name, said in {"file": "is a file.", "thesis": "exists and is not a pair: it holds 'chapter.txt'"}.items():
        assert said in refusal(make_pair, "ngram", tmp_path / name)
    assert {p.name for p in tmp_path.iterdir()} == {"empty", "file", "thesis"}
    assert names(tmp_path / "thesis") == ["chapter.txt"]


def test_what_an_interrupted_attempt_left_does_not_get_into_the_pair(make_pair, tmp_path):
    left = tmp_path / f".pair.outrider-999999999-{machine_tag()}-0.tmp"  # of a process that has died
    left.mkdir()
    (left / "old.txt").write_text("old")
    pair = make_pair("ngram", tmp_path / "pair")
    assert verify(pair.folder) == []
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


def test_the_kept_adapter_stays_where_the_same_target_comes_from_memory(make_pair, make_target, lora, recipe):
    adapter = lora(r=4)
    first = make_pair("ngram", target=make_target(source={"path": "org/base", "adapter": str(adapter)}))
    config = json.dumps({"base_model_name_or_path": None, "r": 4}, indent=2, sort_keys=True)
    assert (first.folder / "adapter" / "adapter_config.json").read_text() == config
    shutil.rmtree(adapter)
    again = make_pair("ngram", recipe=recipe.model_copy(update={"name": "other"}))
    assert again.manifest.target == first.manifest.target
    assert names(again.folder / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]
    assert verify(again.folder) == []
