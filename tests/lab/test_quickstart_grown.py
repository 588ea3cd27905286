"""The quickstart's last stage: which size is measured, in what time, and with which plans."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from outrider.decode import Costs
from outrider.eval import Report
from outrider.eval.suites import load_suites
from outrider.eval.tuning_record import BatchTuning, Candidate, CostRecord
from outrider.heads.eagle import Eagle1, Eagle1Config
from outrider.lab import quickstart_grown
from outrider.lab.grow import SHAPES
from outrider.lab.quickstart_grown import (
    GrownMeasurement,
    GrownStage,
    WeightPace,
    best_plans,
    fitting_shape,
    measure_weights,
    shortest_first,
)
from outrider.recipes import EvalSpec
from outrider.scripts.quickstart import QuickstartBudget, Workplace
from outrider.targets import Target

DOUBLE = ("llama", 128, 8, 8, 4, 32, 512, 1024, 4096, {})


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes that a test can make, or not, in place of real ones."""
    for name, sizes in {"double": DOUBLE, "huge": (*DOUBLE[:6], 2**24, *DOUBLE[7:])}.items():
        monkeypatch.setitem(cast(dict[str, Any], SHAPES), name, sizes)
    monkeypatch.setattr(quickstart_grown, "measure_weights", partial(measure_weights, width=64))


def workplace(out: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """Return a workplace with a saved head and its tuning, as the stages before leave it."""
    place = Workplace(out, Console(), QuickstartBudget(suite_prompts=2))
    target = Target.load(folder, device="cpu")
    measurement, _ = grown_measurement(target, 0, tokens=8)
    measurement.head.save(out / "drafter")
    suites = [shortest_first(suite) for suite in load_suites(["code", "docs"], target.require_tokenizer(), 2)]
    tuned = type("Tuned", (), {"batches": [measurement.found]})
    for name, value in {"target": target, "tuning": tuned, "recipe": place.asked}.items():
        monkeypatch.setattr(Workplace, name, value)
    monkeypatch.setattr(Workplace, "suites", lambda *_: suites)
    return place


@pytest.mark.usefixtures("shapes")
def test_the_last_stage_measures_the_largest_size_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path
) -> None:
    place = workplace(tmp_path, target_folder, monkeypatch)
    stage = GrownStage(shapes=("huge", "double"), tokens=6)
    assert stage.run(place).startswith("at DOUBLE, the same text: plain ")
    grown = Report.load(tmp_path / "grown")
    assert all(f.identical in (None, f.num_prompts) for f in grown.figures)
    rows, note = stage.rows(place)
    assert rows[0][0].startswith("v1 at DOUBLE: eagle1")
    assert note.startswith("; at DOUBLE ")


@pytest.mark.usefixtures("shapes")
def test_figures_of_an_earlier_run_are_not_shown_where_no_size_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path
) -> None:
    place = workplace(tmp_path, target_folder, monkeypatch)
    stage = GrownStage(shapes=("huge",), tokens=6)
    (tmp_path / "grown").mkdir()
    assert "fits the memory" in stage.run(place)
    assert not (tmp_path / "grown").exists()
    assert stage.rows(place) == ([], "")


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
        monkeypatch.setitem(cast(dict[str, Any], SHAPES), name, (*DOUBLE[:2], layers, *DOUBLE[3:]))
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
