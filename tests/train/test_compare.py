"""Recipes against each other: the same target, the same data, the same time, one measurement."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.eval import Report
from outrider.eval.reports.render import print_comparison
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import compare as module
from outrider.train import run as train_module
from outrider.train import train
from outrider.train.compare import compare, differences

from .conftest import DRAFT_MODEL, MakeRecipe, weights

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"type": "eagle3", "steps": 2, "draft_vocab_size": 96},
    "heads": {"type": "medusa", "num_heads": 2},
    "small": DRAFT_MODEL,
}
SECONDS = 1.0


@pytest.fixture
def target(tiny_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(tiny_llama(vocab=len(tiny_tokenizer)), tiny_tokenizer, {"path": "in memory"})


def recipes_in(tmp_path: Path) -> MakeRecipe:
    """Return a function `recipe(name, data={…}, eval={…}, **training)`, which makes one of DRAFTERS."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "text": f"def function_{i}(first, second):\n"} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"prompts": [str(prompts)], "max_new_tokens": 8, "holdout": 0.2, "allow_leaks": True}

    def make(
        name: str,
        drafter: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        measured: dict[str, Any] | None = None,
        **training: Any,
    ) -> Recipe:
        settings = {"suites": [str(prompts)], "limit": 3, "max_new_tokens": 8, "repeats": 1, "depth": 2}
        return Recipe.from_dict(
            {
                "name": name,
                "target": {"path": "in memory"},
                "drafter": drafter or DRAFTERS[name],
                "data": shared | (data or {}),
                "training": {"per_device_train_batch_size": 4, "max_steps": 2, "save_total_limit": 1} | training,
                "eval": settings | (measured or {}),
            }
        )

    return make


@pytest.fixture
def recipe(tmp_path: Path) -> MakeRecipe:
    return recipes_in(tmp_path)


def test_all_are_trained_for_the_same_time_on_the_same_responses_and_measured_together(recipe, target, tmp_path):
    report = compare([recipe(name) for name in DRAFTERS], SECONDS, tmp_path / "out", target)
    assert [c.name for c in report.contestants] == [*DRAFTERS, "ngram", "plain", "transformers.generate"]
    for name in DRAFTERS:
        info = report.contestant(name)
        assert info.training is not None
        assert info.training.budget == SECONDS
        assert SECONDS <= info.training.seconds < SECONDS + 5, "it ends with the step in which the time is up"
        assert info.training.steps > 2, "max_steps does not count"
        assert info.training.parameters == info.parameters
        used, made = (json.loads((tmp_path / "out" / f / "provenance.json").read_text()) for f in (name, "data"))
        assert used["data"]["prompts"] == made["prompts"]
    assert report.contestant("ngram").training is None
    assert {f.rule for f in report.figures if f.temperature == 1.0 and f.contestant in DRAFTERS} == {"rejection"}
    suites = {r.prompt for r in report.records_of("eagle", 0.0)}
    assert suites == {r.prompt for r in report.records_of("plain", 0.0)}
    assert all(r.identical for r in report.records if r.temperature == 0.0 and r.contestant in DRAFTERS)


def test_what_is_finished_is_not_done_again(recipe, target, tmp_path, monkeypatch):
    """An interruption in the second training: the first is kept, and so are the responses."""
    recipes = [recipe("heads"), recipe("small")]
    train, trained = module.train, []

    def stopped(made: Recipe, *args: Any, **kwargs: Any) -> Any:
        trained.append(made.name)
        if trained == ["heads", "small"]:
            raise KeyboardInterrupt
        return train(made, *args, **kwargs)

    monkeypatch.setattr(module, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare(recipes, SECONDS, tmp_path / "out", target)
    before = weights(tmp_path / "out" / "heads" / "drafter")
    answered = (tmp_path / "out" / "data" / "provenance.json").stat().st_mtime_ns
    report = compare(recipes, SECONDS, tmp_path / "out", target)
    assert trained == ["heads", "small", "small"]
    assert weights(tmp_path / "out" / "heads" / "drafter") == before
    assert (tmp_path / "out" / "data" / "provenance.json").stat().st_mtime_ns == answered
    assert Report.load(tmp_path / "out" / "report").contestant("heads").training == report.contestant("heads").training


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"max_new_tokens": 9}}, r"data.max_new_tokens \(8 and 9\)"),
        ({"measured": {"depth": 3}}, r"eval.depth \(2 and 3\)"),
        ({"drafter": {"type": "ngram"}}, "nothing to train"),
        ({"drafter": {"type": "medusa", "draft_vocab_size": 100_000}}, "exceeds the target's vocabulary"),
        ({"learning_rat": 1e-3}, "did you mean 'learning_rate'"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "inverse_sqrt"),
        ({"data": {"on_policy": 0.5}, "drafter": DRAFTERS["eagle"]}, "writes no text of its own"),
        ({"report_to": "nothing"}, "report_to"),
    ],
)
def test_recipes_that_cannot_be_compared_are_refused_before_anything_is_spent(recipe, target, tmp_path, change, said):
    with pytest.raises(BadInputError, match=said):
        compare([recipe("heads"), recipe("small", **change)], SECONDS, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_only_drafter_training_and_output_may_differ(recipe):
    """And what a drafter writes for itself to learn from."""
    one, other = recipe("heads"), recipe("small", data={"on_policy": 0.5}, learning_rate=1e-3)
    assert differences(one, other) == []
    moved = other.model_copy(update={"target": other.target.model_copy(update={"path": "elsewhere"})})
    assert differences(one, moved) == ["target.path ('in memory' and 'elsewhere')"]


def test_another_template_is_a_difference(recipe):
    """Both would learn from, and be asked with, the first one's."""
    one, other = recipe("heads"), recipe("small").model_copy(update={"template": {"enable_thinking": False}})
    assert differences(one, other) == ["template.enable_thinking (None and False)"]


@pytest.mark.parametrize("name", ["data", "report", "plain", "ngram"])
def test_names_that_the_folder_or_the_report_has_are_refused(recipe, target, tmp_path, name):
    with pytest.raises(BadInputError, match=f"has a '{name}' of its own"):
        compare([recipe("heads").model_copy(update={"name": name})], SECONDS, tmp_path / "out", target)


def test_patience_without_held_out_rows_is_refused(recipe, target, tmp_path):
    with pytest.raises(BadInputError, match=r"no row is held out .* hold out a larger share"):
        train(
            recipe("heads", measured={"patience": 1, "training_prompts": 1}).model_copy(
                update={"output": str(tmp_path / "out")}
            ),
            target,
        )


def test_each_training_has_a_wandb_run_of_its_own(recipe, target, tmp_path, monkeypatch):
    wandb: Any = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    given = [recipe("heads", report_to="wandb"), recipe("eagle", report_to="wandb")]
    save_whole = train_module.save_whole

    def full(*_: Any) -> None:
        raise BadInputError("the disk is full")

    monkeypatch.setattr(train_module, "save_whole", full)
    with pytest.raises(BadInputError, match="the disk is full"):
        compare(given, 0.2, tmp_path / "out", target)
    assert wandb.run is None, "not even of a training that failed"
    monkeypatch.setattr(train_module, "save_whole", save_whole)
    compare(given, 0.2, tmp_path / "out", target)
    assert wandb.run is None
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2, "the first had only to be saved"


def test_two_recipes_of_one_name_and_a_budget_of_nothing_are_refused(recipe, target, tmp_path):
    with pytest.raises(BadInputError, match="2 recipes are called 'heads'"):
        compare([recipe("heads"), recipe("heads")], SECONDS, tmp_path, target)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadInputError, match=f"more than 0 seconds of training, and come to an end, got {seconds}"):
            compare([recipe("heads")], seconds, tmp_path, target)


def test_a_folder_of_another_budget_or_recipe_is_never_mixed_in(recipe, target, tmp_path):
    compare([recipe("heads")], 0.2, tmp_path / "out", target)
    said = r"trained for 0.2 seconds, now 3 seconds are asked for. Choose another --out"
    with pytest.raises(BadInputError, match=said):
        compare([recipe("heads")], 3, tmp_path / "out", target)
    with pytest.raises(BadInputError, match=r"training.learning_rate"):
        compare([recipe("heads", learning_rate=1e-4)], 0.2, tmp_path / "out", target)


def test_the_report_shows_every_method_at_every_temperature_best_first(recipe, target, tmp_path):
    report = compare([recipe("heads"), recipe("small")], 0.3, tmp_path / "out", target)
    for width in (200, 80):
        console = Console(width=width, record=True, file=io.StringIO())
        print_comparison(report, console)
        shown = console.export_text()
        columns = ("τ at 0", "τ at 1", "speedup at 0", "speedup at 1", "parameters", "steps")
        for words in (*columns, "heads", "small", "ngram", "plain", "rejection (heads, small)"):
            assert words in shown, (width, words)
        assert "…" not in shown
        assert shown.index("speedup at 0") < shown.index("τ at 0"), "what a telephone shows first decides"
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "At the same training time" in page
    assert "0.3 s each on the same" in page
    assert not re.search("[0-9a-f]{20}", page), "a digest of 64 digits breaks lines"
    drawn = (tmp_path / "out" / "report" / "comparison.svg").read_text()
    assert drawn.count("<polygon") == 2 * 3 + 2, "two temperatures of three drafters, and the legend"
    taus = {name: report.headline(name).tau for name in ("heads", "small", "ngram")}
    order = [line.split()[0] for line in shown.splitlines() if line.split() and line.split()[0] in taus][:3]
    assert order == sorted(taus, key=lambda name: -taus[name].value)
