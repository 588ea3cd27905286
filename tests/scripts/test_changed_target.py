"""A target that changed at its place is refused, and its tensors named, wherever a run of the earlier one is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider.common import BadInputError
from outrider.common.untrusted_files import read_json
from outrider.pair import Pair
from outrider.pair.refresh import RefreshOptions, refresh
from outrider.scripts.cli import app
from outrider.targets import Target
from outrider.train.stopping import Until

from .conftest import Command, failed, succeeded

TENSOR = "model.layers.2.self_attn.q_proj.weight"
NAMED = f"1 of 57 weights (first: {TENSOR}) differ"
ALLOWED = "target.allow_changed=true"


def change_weight(target: Path) -> None:
    """Change one tensor by a hundredth, in the same place."""
    tensors = load_file(target / "model.safetensors")
    tensors[TENSOR] = tensors[TENSOR] * 1.01
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def change_template(target: Path) -> None:
    with (target / "chat_template.jinja").open("a") as file:
        file.write("\n")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weight": (change_weight, NAMED),
    "template": (change_template, "chat_template differ"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """A folder with a target, and a run, a pair, a comparison and a refresh that were made for it."""
    here = tmp_path_factory.mktemp("finished")
    shutil.copytree(target_folder, here / "target")
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n"} for i in range(6)]
    (here / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "tiny",
        "target": {"path": "target"},
        "drafter": {"type": "eagle3", "taps": [1, 3, 5], "steps": 1, "draft_vocab_size": 64},
        "data": {"prompts": ["prompts.jsonl"], "max_new_tokens": 8, "holdout": 0.0, "allow_leaks": True},
        "training": {"max_steps": 2, "disable_tqdm": True},
        "eval": {"suites": ["prompts.jsonl"], "limit": 2, "max_new_tokens": 8, "repeats": 1, "temperatures": [0.0]},
        "output": "run",
    }
    recipe["eval"] |= {"depth": 2, "baselines": []}
    (here / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        for words in (["train", "tiny.yaml"], ["pair", "new", "pair", "tiny.yaml"]):
            succeeded(CliRunner().invoke(app, words))
        succeeded(CliRunner().invoke(app, ["compare", "tiny.yaml", "--budget", "0.5", "--out", "comparison"]))
        until = RefreshOptions(until=Until(tokens=10))
        refresh(
            Pair.load("pair"), Target.load("target", device="cpu"), "refreshed", options=until, generate_baseline=False
        )
    return here


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `finished`, in which this test runs."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "words",
    [
        ["distill", "tiny.yaml"],
        ["train", "tiny.yaml"],
        ["lab", "vocab", "tiny.yaml"],
        ["eval", "tiny.yaml"],
        ["eval", "tiny.yaml", "eval.dtype=bfloat16"],
        ["pair", "new", "made", "tiny.yaml"],
        ["eval", "tiny.yaml", "output=elsewhere", "--drafter", "run/drafter"],
        ["eval", "tiny.yaml", "output=elsewhere", "--drafter", "run/checkpoints/checkpoint-2"],
        ["eval", "tiny.yaml", "output=elsewhere", "--drafter", "pair/drafter"],
        ["pair", "new", "made", "tiny.yaml", "output=elsewhere", "--drafter", "pair/drafter"],
        ["train", "tiny.yaml", "output=elsewhere", "data.responses=run/data"],
        ["compare", "tiny.yaml", "--budget", "0.5", "--out", "comparison"],
    ],
    ids=" ".join,
)
def test_a_verb_that_reads_what_another_target_left_names_what_changed(
    here: Path, outrider: Command, words: list[str], change: str
) -> None:
    make, said = CHANGES[change]
    make(here / "target")
    failed(outrider(*words), said.removesuffix(" differ"))
    assert not (here / "made").exists()
    assert not (here / "run" / "report").exists()


@pytest.mark.parametrize("words", [["eval", "tiny.yaml"], ["eval", "tiny.yaml", "eval.dtype=bfloat16"]], ids=" ".join)
def test_the_same_target_may_be_measured_in_another_dtype_and_place(
    here: Path, outrider: Command, words: list[str]
) -> None:
    shutil.move(here / "target", here / "moved")
    succeeded(outrider(*words, "target.path=moved"))


def test_a_run_of_an_earlier_version_is_compared_by_its_responses(here: Path, outrider: Command) -> None:
    (here / "run" / "target.json").unlink()
    change_weight(here / "target")
    failed(outrider("eval", "tiny.yaml"), NAMED)


def test_a_change_that_is_allowed_is_written_into_all_that_is_made(here: Path, outrider: Command) -> None:
    change_weight(here / "target")
    succeeded(outrider("eval", "tiny.yaml", ALLOWED, "--out", "report"))
    assert read_json(here / "report" / "report.json")["conditions"]["target"]["changed"] in NAMED
    assert TENSOR in (here / "report" / "report.md").read_text()
    succeeded(outrider("pair", "new", "made", "tiny.yaml", ALLOWED, "--report", "report"))
    assert TENSOR in Pair.load("made").manifest.lineage.reason
    assert "allow_changed: true" in (here / "made" / "recipe.yaml").read_text()
    words = ["train", "tiny.yaml", "output=elsewhere", "data.responses=run/data", ALLOWED]
    succeeded(outrider(*words))
    assert TENSOR in read_json(here / "elsewhere" / "provenance.json")["target"]["changed"]
    succeeded(outrider("eval", "tiny.yaml", "output=elsewhere", "data.responses=run/data"))


def test_a_training_on_given_responses_goes_on_for_its_own_target_alone(here: Path, outrider: Command) -> None:
    """Its responses do not tell: they may be another target's from the first."""
    words = ["train", "tiny.yaml", "output=elsewhere", "data.responses=run/data"]
    succeeded(outrider(*words))
    change_weight(here / "target")
    shutil.rmtree(here / "run" / "data")
    succeeded(outrider("distill", "tiny.yaml", "output=fresh"))
    shutil.move(here / "fresh" / "data", here / "run" / "data")
    failed(outrider(*words, "training.max_steps=4"), "the run in elsewhere was made for another target", NAMED)


def test_a_refresh_that_ended_early_is_no_other_targets(here: Path) -> None:
    change_weight(here / "target")
    changed, until = Target.load("target", device="cpu"), RefreshOptions(until=Until(tokens=10))
    with pytest.raises(BadInputError, match="the run in refreshed was made for another target"):
        refresh(Pair.load("pair"), changed, "refreshed", options=until)


def test_tokens_are_not_shown_by_another_tokenizer(here: Path, outrider: Command) -> None:
    values = json.loads((here / "target" / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (here / "target" / "tokenizer.json").write_text(json.dumps(values))
    failed(outrider("data", "show", "tiny.yaml"), "another tokenizer")
