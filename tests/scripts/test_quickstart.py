"""The whole story on a tiny stand-in for the embedded target; and on the real one where it is installed (slow)."""

from __future__ import annotations

import io
import json
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from rich.console import Console

import outrider.recipes
from outrider.common import BadInputError
from outrider.costs.machine_speed import Pace, WeightPace, measure_weights
from outrider.decode import Costs
from outrider.eval import Report, tuner
from outrider.eval.suites import load_suites
from outrider.eval.tuning_record import BatchTuning, Candidate, CostRecord
from outrider.formats import LAYOUTS
from outrider.heads.eagle import Eagle1, Eagle1Config
from outrider.lab.quickstart_grown import GrownMeasurement, best_plans, fitting_shape, shortest_first
from outrider.pair import Pair
from outrider.recipes import EvalSpec
from outrider.scripts import quickstart, quickstart_grown
from outrider.scripts.quickstart import QuickstartBudget, QuickstartSizes, expected_seconds, tell
from outrider.targets import Target, embedded_path, grow

TRAINED: dict[str, Any] = {"prompts": 8, "least_prompts": 8, "refresh_share": 0.75, "new_tokens": 8}
TRAINED |= {"train_seconds": 3.0, "refresh_seconds": 3.0}  # the pass for the features counts
MEASURED: dict[str, Any] = {"suite_prompts": 2, "suite_tokens": 6, "repeats": 1, "gate_prompts": 14}
MEASURED |= {"shapes": ("huge", "double"), "grown_tokens": 6}
TUNED: dict[str, Any] = {"tune_prompts": 2, "tune_tokens": 6}
CHANGED: dict[str, Any] = {"lora_steps": 2, "lora_rows": 2, "lora_length": 16}
DOUBLE = ("llama", 128, 8, 8, 4, 32, 512, 1024, 4096, {})
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
    for name, sizes in {"double": DOUBLE, "huge": (*DOUBLE[:6], 2**24, *DOUBLE[7:])}.items():
        monkeypatch.setitem(cast(dict[str, Any], grow.SHAPES), name, sizes)
    monkeypatch.setattr(quickstart, "measure_weights", partial(measure_weights, width=64))
    for place in ("outrider.targets", "outrider.targets.loading", "outrider.scripts.quickstart"):
        monkeypatch.setattr(f"{place}.embedded_path", lambda: here / "embedded" / "target")


def told(out: Path, budget: QuickstartBudget) -> tuple[bool, str]:
    text = io.StringIO()
    return tell(out, Console(file=text, width=140), budget), text.getvalue()


@pytest.mark.usefixtures("embedded")
def test_the_story_runs_and_a_second_run_reuses_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "story"
    passed, text = told(out, TINY)
    assert isinstance(passed, bool)
    for line in ("v1: eagle1", "v1: ngram", "v2 on the changed target", "v1 at DOUBLE: eagle1", "report.html"):
        assert line in text
    grown = Report.load(out / "grown")
    assert all(f.identical in (None, f.num_prompts) for f in grown.figures)
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
    assert "12 stages were reused" in text

    with pytest.raises(BadInputError, match="another target, budget or version"):
        told(out, replace(TINY, prompts=9))


@pytest.mark.usefixtures("embedded")
def test_figures_of_an_earlier_run_are_not_shown_where_no_size_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path
) -> None:
    place = quickstart.Workplace(tmp_path, Console(), replace(TINY, shapes=("huge",)))
    measurement, _ = grown_measurement(Target.load(target_folder, device="cpu"), 0, tokens=8)
    measurement.head.save(tmp_path / "drafter")
    (tmp_path / "grown").mkdir()
    monkeypatch.setattr(quickstart.Workplace, "tuning", type("Tuned", (), {"batches": [measurement.found]}))
    monkeypatch.setattr(quickstart.Workplace, "recipe", place.asked)
    assert "fits the memory" in quickstart.grow_to_real_size(place)
    assert not (tmp_path / "grown").exists()


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
    budget, taken = QuickstartBudget(), []
    for factor in (1, 2, 4, 100):
        pace = replace(fast, **{n: factor * getattr(fast, n) for n in ("prefill", "answer", "step", "token")})
        sizes = QuickstartSizes.fitting(budget, pace)
        taken.append(sizes.prompts)
        assert QuickstartSizes(**json.loads(json.dumps(asdict(sizes)))) == sizes
        if sizes.prompts > budget.least_prompts:
            assert expected_seconds(budget, sizes.prompts, pace) <= budget.seconds
    assert taken == sorted(taken, reverse=True)
    assert (taken[0], taken[-1]) == (budget.prompts, budget.least_prompts)


def test_the_largest_size_that_fits_is_grown_and_the_last_one_may_take_longer(target_folder: Path) -> None:
    """Ten times slower products take a smaller size; what has no memory is left out."""
    target = Target.load(target_folder, device="cpu")
    quick = WeightPace(torch.float32, False, token=1e-13, prompt=1e-15)

    def taken(pace: WeightPace, shapes: tuple[str, ...] = ("llama-3.1-70b", "8b", "1b", "0.4b")) -> str | None:
        found = fitting_shape(target, shapes, 60, prompts=4, tokens=(150, 40), pace=pace)
        return found and found[0]

    assert taken(quick, ("1b", "0.4b")) == "1b"
    slow = replace(quick, token=4e-10)
    assert taken(slow, ("1b", "0.4b")) == "0.4b"
    assert taken(replace(slow, token=1.0), ("1b", "0.4b")) == "0.4b"
    assert taken(quick, ("llama-3.1-70b",)) is None, "280 GB"
    assert taken(quick, ()) is None


CHAINS: dict[str, Any] = {"batch_size": 1, "context": 8, "rates": [0.5, 0.4], "ranks": [], "reason": ""}


def grown_measurement(target: Target, seconds: float, tokens: int) -> tuple[GrownMeasurement, io.StringIO]:
    """A head that has learned nothing, its chains, four short prompts of two suites, and `seconds` of time."""
    candidate = Candidate(plan={"depth": 1}, predicted_tau=1.5, round_seconds=1.0, predicted=1.0)
    record = CostRecord(widths=[0], verify=[1.0], draft=[0.0], host=0.0)
    found = BatchTuning(costs=record, candidates=[candidate], chosen=candidate, **CHAINS)
    suites = [shortest_first(s) for s in load_suites(["code", "docs"], target.require_tokenizer(), 3)]
    text, settings = io.StringIO(), EvalSpec(max_new_tokens=tokens, repeats=1, temperatures=[0.0])
    console, until = Console(file=text, width=200), time.perf_counter() + seconds
    return GrownMeasurement(target, Eagle1.build(Eagle1Config(), target), found, suites, settings, until, console), text


def test_passes_slower_than_predicted_take_a_smaller_size_or_shorter_answers(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the stage ends near its time on a machine that is busy, and says what it does."""
    slow = {"second": 5.0, "first": 0.0, "slow": 0.4}
    for name, layers in {"second": 12, "first": 6, "slow": 6}.items():
        monkeypatch.setitem(cast(dict[str, Any], grow.SHAPES), name, (*DOUBLE[:2], layers, *DOUBLE[3:]))
    timed = quickstart_grown.verify_times

    def injected(target: Target, widths: tuple[int, ...], **settings: Any) -> dict[int, float]:
        added = slow[str(target.source["path"]).rpartition("@")[2]]
        return {n: seconds + added for n, seconds in timed(target, widths, **settings).items()}

    monkeypatch.setattr(quickstart_grown, "verify_times", injected)
    target, pace = Target.load(target_folder, device="cpu"), WeightPace(torch.float32, False, token=1e-12, prompt=1e-15)
    measurement, text = grown_measurement(target, 60, tokens=12)
    run = measurement.run(("second", "first"), pace)
    assert run is not None
    assert run.shape == "first"
    assert "a pass at SECOND takes 5.0" in text.getvalue()
    assert run.report.conditions.max_new_tokens == 12
    assert [s.num_prompts for s in run.report.conditions.suites] == [3, 3], "there was time for all"
    asked = [(r.suite, r.prompt_tokens) for r in run.report.records if r.contestant == "plain"]
    assert [suite for suite, _ in asked] == ["code", "docs"] * 3, "in turns"
    assert asked[::2] == sorted(asked[::2]), "the shortest first"

    measurement, text = grown_measurement(target, 0, tokens=32)
    run = measurement.run(("slow",), pace)
    assert run is not None
    assert run.report.conditions.max_new_tokens == 8
    assert "answers of 8 tokens instead of 32" in text.getvalue()
    assert [s.num_prompts for s in run.report.conditions.suites] == [1, 1], "no time was left"
    assert [c.kind for c in run.report.contestants] == ["drafter", "plain"]


def test_plans_follow_what_passes_and_drafting_cost_at_that_size() -> None:
    """Cheap drafting takes deep chains, cheap passes trees, and dear drafting one draft; fusions are chosen apart."""
    candidate = {"predicted_tau": 3.0, "round_seconds": 1.0, "predicted": 1.0}
    fused = [
        Candidate(plan={"depth": depth}, statistical={"type": "ngram"}, **candidate | {"predicted_tau": tau})
        for depth, tau in ((1, 1.9), (4, 2.9))
    ]
    rates, ranks = [0.8, 0.8, 0.8, 0.8], [[0.8, 0.15]] * 4
    record = CostRecord(widths=[0], verify=[1.0], draft=[0.0], host=0.0)
    values = {"batch_size": 1, "context": 8, "rates": rates, "costs": record, "reason": ""}
    found = BatchTuning(ranks=ranks, candidates=fused, chosen=fused[0], **values)
    chains = found.model_copy(update={"ranks": []})

    def plans(found: BatchTuning, verify: float, draft: float) -> list[str]:
        costs = Costs(((0, 1.0), (16, 1.0 + 16 * verify)), (0.0, draft, 2 * draft))
        return [f"{plan} {fused and fused['type']}" for plan, fused in best_plans(found, costs)]

    assert plans(chains, 0.01, 0.01) == ["depth 4 None", "depth 4 ngram"]
    assert plans(chains, 0.01, 2.0) == ["depth 1 None", "depth 1 ngram"]
    assert plans(found, 0.001, 0.01)[0].startswith("static tree"), plans(found, 0.001, 0.01)
    drafting = CostRecord(widths=[0], verify=[1.0], draft=[0.0, 1.0, 2.0, 3.0, 4.0], host=0.0)
    copied = [fused.model_copy(update={"round_seconds": 1.4}) for fused in fused]  # a tenth of what the head takes
    rarely = chains.model_copy(update={"costs": drafting, "candidates": copied})
    assert plans(rarely, 0.01, 2.0) == ["depth 1 None", "depth 4 ngram"]
