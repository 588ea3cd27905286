"""The verbs at the doors, on a tiny pair: out to an engine, in again, and looked at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .conftest import Command, answer, failed, succeeded, words


@pytest.fixture
def pair(recipe_file: Path, outrider: Command) -> Path:
    """A trained, measured pair."""
    taps, folder = "drafter.taps=[1,3,5]", recipe_file.parent / "pair"
    for verb in (("train",), ("eval",), ("pair", "new", folder)):
        succeeded(outrider(*verb, recipe_file, taps))
    return folder


def test_a_pair_is_exported_with_its_launch_and_its_expectations(pair: Path, outrider: Command) -> None:
    out = pair.parent / "vllm"
    result = succeeded(outrider("export", pair, "--to", "vllm", "--out", out))
    launch = json.loads((out / "launch.json").read_text())
    assert launch["settings"] == {
        "method": "eagle3",
        "model": str(out),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    assert launch["command"] in result.output
    assert launch["command"] in (out / "README.md").read_text()
    served = json.loads((out / "served.json").read_text())
    expected = served["expected"][0]
    report = json.loads(next((pair / "reports").rglob("report.json")).read_text())
    records = [r for r in report["records"] if r["contestant"] == "eagle3"]
    accepted = [a for r in records for a in r["accepted"]]
    assert expected["accepted_at"] == [n for n in (sum(a > d for a in accepted) for d in range(2)) if n]
    assert expected["tau"]["value"] == pytest.approx(sum(r["tokens"] - 1 for r in records) / len(accepted))
    assert served["suites"] == json.loads((pair / "pair.json").read_text())["measurements"]["suites"]


def test_an_export_is_imported_as_a_pair_that_verifies_and_probes(
    pair: Path, target_folder: Path, outrider: Command
) -> None:
    out, back = pair.parent / "sglang", pair.parent / "back"
    assert outrider("export", pair, "--to", "sglang", "--out", out).exit_code == 0
    result = succeeded(outrider("import", out, "--target", target_folder, "--out", back, "--pair"))
    assert "pair of type eagle3, from the layout sglang" in result.output
    for verb in (("pair", "verify", back), ("probe", back, "--target", target_folder)):
        succeeded(outrider(*verb))
    weights = [folder / "drafter" / "model.safetensors" for folder in (pair, back)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_import_never_takes_the_place_of_what_is_there(
    target_folder: Path, tmp_path: Path, outrider: Command
) -> None:
    """`--out` is a model by mistake: it would be gone, tokenizer and all."""
    mine = Path(shutil.copytree(target_folder, tmp_path / "mine"))
    before = sorted(mine.iterdir())
    failed(outrider("import", target_folder, "--target", target_folder, "--out", mine), "exists and is not empty")
    assert sorted(mine.iterdir()) == before


def test_lint_says_nothing_of_a_good_export_and_ends_with_1_on_a_fault(pair: Path, outrider: Command) -> None:
    out = pair.parent / "vllm"
    assert outrider("export", pair, "--to", "vllm", "--out", out).exit_code == 0
    good = outrider("lint", out)
    assert "nothing found; read as a drafter of type eagle3 in the layout speculators" in words(good)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("eagle_aux")}))
    found = answer("lint", outrider("lint", out, "--json"), 1)
    assert "taps-missing" in [finding["check"] for finding in found["findings"]]


def test_lint_of_a_whole_model_says_that_its_weights_were_not_read(target_folder: Path, outrider: Command) -> None:
    shown = words(outrider("lint", target_folder))
    assert "read as a drafter of type draft_model in the layout hf, a whole model, of which only config.json" in shown


def test_an_engine_that_is_unknown_is_refused_before_the_target_is_loaded(
    pair: Path, outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.targets.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    failed(outrider("export", pair, "--to", "lama.cpp"), "did you mean 'llama.cpp'?")
    assert outrider("export", pair, "--to", "medusa").exit_code == 3


def test_the_matrix_is_answered_as_a_table_and_as_json(outrider: Command) -> None:
    found = answer("formats", outrider("formats", "--json"))["support"]
    levels = {(one["drafter"], one["engine"]): one["level"] for one in found}
    assert (levels["eagle3", "vllm"], levels["eagle1", "gguf"]) == ("served", "no")
    assert "eagle3 vLLM served vLLM 0.32, CPU" in words(outrider("formats"))


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_an_unservable_drafter_is_refused_before_it_is_trained(recipe_file: Path, outrider: Command, verb: str) -> None:
    changes = ("drafter.taps=[1,3,5]", "drafter.norm_before_residual=true")
    refused = outrider(verb, recipe_file, *changes, "--for", "sglang")
    assert refused.exit_code == 3
    assert "norm_before_residual: true" in refused.output
    assert "nearest that can be served: norm_before_residual: false" in refused.output
    assert not (recipe_file.parent / "run").exists()
    assert outrider("plan", recipe_file, *changes, "--for", "vllm").exit_code == 0
    assert outrider("plan", recipe_file, *changes, "--for", "llm").exit_code == 2
