"""The whole story on a tiny stand-in for the embedded target; and on the real one where it is installed (slow)."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import outrider.recipes
from outrider.common import BadInputError
from outrider.costs.machine_speed import Pace
from outrider.eval import tuner
from outrider.formats import LAYOUTS
from outrider.pair import Pair
from outrider.scripts import quickstart
from outrider.scripts.quickstart import QuickstartBudget, QuickstartSizes, expected_seconds, tell
from outrider.targets import embedded_path

TRAINED: dict[str, Any] = {"prompts": 8, "least_prompts": 8, "refresh_share": 0.75, "new_tokens": 8}
TRAINED |= {"train_seconds": 3.0, "refresh_seconds": 3.0}  # the pass for the features counts
MEASURED: dict[str, Any] = {"suite_prompts": 2, "suite_tokens": 6, "gate_prompts": 14}
TUNED: dict[str, Any] = {"tune_prompts": 2, "tune_tokens": 6}
CHANGED: dict[str, Any] = {"lora_steps": 2, "lora_rows": 2, "lora_length": 16}
TINY = QuickstartBudget(**TRAINED, **MEASURED, **TUNED, **CHANGED)


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path) -> None:
    """A tiny target, prompts and recipe where the package has its own."""
    here = tmp_path / "recipes"
    shutil.copytree(target_folder, here / "embedded" / "target")
    for kind in ("suites", "prompts", "texts"):
        (here / "embedded" / kind).mkdir()
        for suite in ("code", "docs", "prose"):
            texts = (f"for {suite}_{i} in {kind}:\n    print({i})\n" for i in range(6))
            rows = [{"id": f"{kind}/{suite}/{i}", "text": text} for i, text in enumerate(texts)]
            (here / "embedded" / kind / f"{suite}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = yaml.safe_load(outrider.recipes.packaged_recipes()["embedded-eagle1"].read_text())
    recipe["training"] |= {"disable_tqdm": True}
    (here / "embedded-eagle1.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(tuner, "WIDTHS", (0, 1, 2, 4, 8))
    monkeypatch.setattr(tuner, "TREE_SIZES", (4,))
    monkeypatch.setattr(outrider.recipes, "_HERE", here)
    # Stages of other packages are tested there.
    monkeypatch.setattr(quickstart, "LAST_STAGES", [])
    for place in ("outrider.targets", "outrider.targets.loading"):
        monkeypatch.setattr(f"{place}.embedded_path", lambda: here / "embedded" / "target")


def told(out: Path, budget: QuickstartBudget) -> tuple[bool, str]:
    text = io.StringIO()
    return tell(out, Console(file=text, width=140), budget), text.getvalue()


@pytest.mark.usefixtures("embedded")
def test_the_story_runs_and_a_second_run_reuses_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "story"
    passed, text = told(out, TINY)
    assert isinstance(passed, bool)
    for line in ("v1: eagle1", "v1: ngram", "v2 on the changed target", "report.html"):
        assert line in text
    assert "serve it: outrider export" in text
    assert " tuned" in text
    first, second = Pair.load(out / "pair-v1"), Pair.load(out / "refreshed" / "pair")
    assert second.manifest.lineage.parent is not None
    assert second.manifest.lineage.parent.digest == first.digest
    assert first.fingerprint().digest != second.fingerprint().digest
    assert first.tuned(first.load_target()) is not None
    _, drafter, _ = second.open()
    taking = {to: layouts["eagle1"] for to, layouts in LAYOUTS.items() if "eagle1" in layouts}
    assert taking.keys() >= {"vllm", "sglang"}
    assert [lack for layout in taking.values() for lack in layout.lacks(drafter.config, 6)] == []
    assert first.plan.control is None, "what depends on a machine is no part of a pair's identity"
    sizes = json.loads((out / "story.json").read_text())["sizes"]
    assert (sizes["prompts"], sizes["refresh_prompts"]) == (8, 6)

    monkeypatch.setattr(
        "outrider.targets.Target.load", lambda *_, **__: pytest.fail("a second run has nothing left to do")
    )
    again, text = told(out, TINY)
    assert again == passed
    assert "11 stages were reused" in text

    with pytest.raises(BadInputError, match="another target, budget or version"):
        told(out, replace(TINY, prompts=9))


@pytest.mark.slow
@pytest.mark.skipif(not embedded_path().exists(), reason="the embedded target is not installed")
def test_the_story_on_the_embedded_target_ends_well(tmp_path: Path) -> None:
    """With the budget that users get: stale after the fine-tune, and the gate passes after the refresh."""
    passed, text = told(tmp_path / "story", QuickstartBudget())
    assert passed
    assert "stale" in text


def test_a_slow_machine_gets_fewer_prompts_and_no_machine_fewer_than_the_least() -> None:
    """The story shrinks with the pace; what was recorded comes back as it was."""
    fast = Pace("float32", False, prefill=1e-4, answer=1e-3, step=0.09, token=4e-3)
    budget, taken, states = QuickstartBudget(), [], []
    for factor in (1, 2, 4, 100):
        pace = replace(fast, **{n: factor * getattr(fast, n) for n in ("prefill", "answer", "step", "token")})
        sizes = QuickstartSizes.fitting(budget, pace)
        taken.append(sizes.prompts)
        states += [change for change in budget.changes(Path("story"), sizes) if "data.features" in change]
        assert QuickstartSizes(**json.loads(json.dumps(asdict(sizes)))) == sizes
        if sizes.prompts > budget.least_prompts:
            assert expected_seconds(budget, sizes.prompts, pace) <= budget.seconds
    assert taken == sorted(taken, reverse=True)
    assert (taken[0], taken[-1]) == (budget.prompts, budget.least_prompts)
    assert (states[0], states[-1]) == ('data.features="cached"', 'data.features="online"')


def test_smollm2_is_fetched_first_and_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BadInputError, match="run `outrider fetch smollm2`"):
        told(tmp_path / "story", QuickstartBudget.of("smollm2"))
    assert not (tmp_path / "story").exists()
    with pytest.raises(BadInputError, match="expected embedded or smollm2, found 'gpt2'"):
        QuickstartBudget.of("gpt2")


def test_what_is_measured_on_smollm2_is_not_learned(tmp_path: Path) -> None:
    quickstart.write_unmeasured(tmp_path / "answers.jsonl")
    rows = [
        json.loads(line)["messages"][0]["content"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    ]
    [suite] = QuickstartBudget.of("smollm2").suites
    asked = {json.loads(line)["turns"][0] for line in Path(suite).read_text().splitlines()}
    assert (len(rows), len(asked), asked & {*rows}) == (1956, 48, set())


def prepared(budget: QuickstartBudget) -> QuickstartBudget:
    """Return the budget with answers that ship: written for the stand-in, four of whose questions are measured."""
    here = outrider.recipes._HERE / "smollm2"
    here.mkdir()
    messages = [[{"role": r, "content": f"{r} {i}: def f_{i}():"} for r in ("user", "assistant")] for i in range(12)]
    (here / "answers.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
    (here / "questions.jsonl").write_text(
        "".join(json.dumps({"turns": [m[0]["content"]]}) + "\n" for m in messages[:4])
    )
    recipe = yaml.safe_load((here.parent / "embedded-eagle1.yaml").read_text())
    recipe["data"] |= {"answers": "given", "max_new_tokens": 16}
    (here.parent / "given.yaml").write_text(yaml.safe_dump(recipe))
    suites = (str(here / "questions.jsonl"),)
    return replace(budget, recipe="given", given=True, prepared="smollm2-pair", suites=suites, grown=False)


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_the_story_runs_on_given_answers(tmp_path: Path) -> None:
    """A refresh's are the changed target's own."""
    _, text = told(tmp_path / "story", prepared(TINY))
    assert "prepared, as they ship with Outrider: 8 responses" in " ".join(text.split())
    refreshed = Pair.load(tmp_path / "story" / "refreshed" / "pair").recipe()
    assert (refreshed.data.answers, refreshed.data.max_new_tokens) == ("target", 8)


@pytest.mark.usefixtures("embedded")
def test_what_was_prepared_is_taken_and_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that ship with a recipe, and the head of a pair that a package registers."""
    budget = prepared(TINY)
    place = quickstart.Workplace(tmp_path / "story", Console(file=io.StringIO()), budget)
    place.sizes = QuickstartSizes("float32", False, 8, 6, 1.0, {})
    place.out.mkdir()
    quickstart.write_unmeasured(place.out / "answers.jsonl")
    assert quickstart.distil(place).startswith("prepared, as they ship with Outrider: 8 responses")
    monkeypatch.setattr(quickstart, "plugin", lambda kind, name: None)
    assert quickstart.train_head(place).endswith("steps in 3 seconds")
    pair = quickstart.new_pair(tmp_path / "pair", place.target, place.out / "drafter", place.recipe, calibration=[])
    monkeypatch.setattr(quickstart, "plugin", lambda kind, name: {("pairs", "smollm2-pair"): pair.folder}[kind, name])
    shutil.rmtree(place.out / "drafter")
    assert quickstart.train_head(place).startswith("prepared: the head of smollm2-pair")
    assert (
        quickstart.load_drafter(place.out / "drafter", place.target).digest() == pair.drafter_for(place.target).digest()
    )
