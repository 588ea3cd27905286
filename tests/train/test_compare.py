"""Recipes against each other: the same target, the same data, the same time, one measurement."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.common.digests import read_sealed
from outrider.common.errors import NotFiniteError
from outrider.decode import Plan
from outrider.eval import Report
from outrider.eval.reports.render import print_comparison
from outrider.eval.tuner import _Tuner
from outrider.heads import Ngram
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import compare as module
from outrider.train import run as train_module
from outrider.train import train
from outrider.train.compare import compare, differences
from outrider.train.search import Score, Search

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


@pytest.fixture
def recipe(tmp_path: Path) -> MakeRecipe:
    """`recipe(name, data={…}, eval={…}, **training)`: one of DRAFTERS."""
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


@pytest.mark.parametrize("name", ["data", "search", "plain", "ngram"])
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


def test_a_search_trains_few_for_the_whole_time_and_keeps_every_score(recipe, target, tmp_path, monkeypatch):
    """Seven candidates: what was given for all of the time, six others for a third of it, and two of these for all. A
    second search makes nothing anew."""
    train, trained, take_times, timings = module.train, [], _Tuner.chain_times, []

    def counted(made: Recipe, *args: Any, seconds: float, **kwargs: Any) -> Any:
        trained.append((made.name, seconds))
        return train(made, *args, seconds=seconds, **kwargs)

    def timed(tuner: _Tuner, *args: Any) -> Any:
        timings.append(tuner.drafter.name)
        return take_times(tuner, *args)

    def scored(scoring: Any, made: Recipe, share: float) -> Score:
        found = score(scoring, made, share)
        depths.update({made.name: found.depth} if share == 1 else {})
        return found

    score, depths = module._Scoring._score, dict[str, int]()
    monkeypatch.setattr(module._Scoring, "_score", scored)
    monkeypatch.setattr(module, "train", counted)
    monkeypatch.setattr(_Tuner, "chain_times", timed)
    search = Search.of(7, ["drafter.steps=[1, 2, 3]", "training.learning_rate=[1e-3, 3e-3, 1e-2]"])
    out = tmp_path / "out"
    given = recipe(
        "eagle",
        warmup_steps="6e0",
        learning_rate="3e-3",
        measured={"training_prompts": 1, "patience": 9},
        data={"holdout": 0.5},
    )
    report = compare([given], 0.9, out, target, search=search)
    whole = [name for name, seconds in trained if seconds == 0.9]
    assert [seconds for _, seconds in trained] == [0.9, *[0.3] * 6, 0.9, 0.9]
    kept = read_sealed(out / "search.json", "")
    assert len(timings) == 1, "seven candidates that draft alike"
    scores = kept["0.3 seconds"]
    assert scores.keys() == kept["candidates"].keys() - {"eagle"}
    assert len(scores) == 6
    order = sorted(scores, key=lambda name: -scores[name]["speedup"])
    assert whole == ["eagle", *order[:2]], "what was given, and the best two of the others"
    assert {c.name for c in report.contestants if c.training} == set(whole)
    best = load_recipe(out / "best.yaml")
    assert best.name == max(whole, key=lambda name: report.headline(name).speedup.value)
    assert best.data == given.data
    assert depths.keys() == set(whole), "found anew after all of the training"
    assert best.eval.depth == depths[best.name]
    assert (out / "best.yaml").read_text().startswith("# The fastest of 7 candidates: ")
    short = load_recipe(out / "search" / order[0] / "0.3" / "recipe.yaml")
    assert (short.training["warmup_steps"], short.data.holdout) == (2, 0.0), "a third of the time; nothing for metrics"
    assert best.training["warmup_steps"] in (6, "6e0")
    assert not (out / "search" / order[0] / "0.3" / "checkpoints").exists()
    plot = (out / "search.svg").read_text()
    lines = [line for line in ElementTree.fromstring(plot).iter() if line.tag.endswith("polyline")]
    assert len(lines) == 7
    assert [line.get("class") for line in lines][-1] == "curve c0", "the best one lies above the others"
    assert f"0.9 s: {report.headline(best.name).speedup.value:.2f}×" in plot
    trained.clear()
    compare([given], 0.9, out, target, search=search)
    assert trained == []
    with pytest.raises(BadInputError, match=r"search.json is of a search of other candidates; choose another --out"):
        compare([given], 0.9, out, target, search=Search.of(7, ["drafter.steps=[1, 2, 3, 4, 5, 6, 7]"]))
    hotter = given.model_copy(update={"eval": given.eval.model_copy(update={"temperatures": [1.0]})})
    with pytest.raises(BadInputError, match=r"search.json is of a search of other eval"):
        compare([hotter], 0.9, out, target, search=search)


def test_what_diverges_is_left_out_and_anything_else_stops_a_search(recipe, target, tmp_path, monkeypatch):
    """A learning rate at which the loss grows without end; then a full disk, after which nothing is kept as a score."""
    train, failed, full = module.train, [], []

    def unsteady(made: Recipe, *args: Any, **kwargs: Any) -> Any:
        if float(made.training.get("learning_rate", 0)) == 9.0:
            if full:
                raise BadInputError("the disk is full")
            failed.append(made.name)
            raise NotFiniteError("training stopped before step 3, which was not applied: the loss is nan.")
        return train(made, *args, **kwargs)

    monkeypatch.setattr(module, "train", unsteady)
    given = [recipe("small", data={"on_policy": 0.5}), recipe("heads")]
    search, out = Search.of(4, ["training.learning_rate=[9.0]"]), tmp_path / "out"
    full.append(True)
    with pytest.raises(BadInputError, match="the disk is full"):
        compare(given, 0.3, out, target, search=search)
    assert not (out / "search.json").exists()
    full.clear()
    report = compare(given, 0.3, out, target, search=search)
    assert {c.name for c in report.contestants if c.training} == {"small", "heads"}
    assert len(set(failed)) == 2
    scores = read_sealed(out / "search.json", "")["0.1 seconds"]
    assert {name for name, score in scores.items() if score["speedup"] == 0} == set(failed)
    best = load_recipe(out / "best.yaml")
    assert best.data.on_policy == (0.5 if best.drafter["type"] == "draft_model" else 0.0)


def test_a_given_recipe_that_diverges_stops_a_search_at_once(recipe, target, tmp_path, monkeypatch):
    begun = []

    def diverges(made: Recipe, *_: Any, **__: Any) -> Any:
        begun.append(made.name)
        raise NotFiniteError("the loss is nan")

    monkeypatch.setattr(module, "train", diverges)
    with pytest.raises(NotFiniteError, match="the loss is nan"):
        compare([recipe("eagle")], 0.3, tmp_path / "out", target, search=Search(4))
    assert begun == ["eagle"]


def test_a_search_that_finds_nothing_to_try_says_why(recipe, target, tmp_path):
    tried = [(9, ["drafter.stepps=[1, 2]"], "did you mean 'steps'")]
    tried += [(9, ["training.learning_rat=[1.0]"], "did you mean 'learning_rate'")]
    tried += [(9, ["drafter.taps=[[99]]"], "99"), (9, ["drafter.steps=[2]"], "Name values with --over")]
    tried += [(9, ["training.lr_scheduler_type=[inverse_sqrt]"], "cannot follow a time budget")]
    tried += [(2, ["drafter.steps=[1, 3]"], "expected more than 2 candidates")]
    for candidates, over, said in tried:
        given = [recipe("eagle"), recipe("heads")][: 2 if candidates == 2 else 1]
        with pytest.raises(BadInputError, match=said):
            compare(given, SECONDS, tmp_path / "out", target, search=Search.of(candidates, over))
    cached = recipe("eagle", data={"features": "cached"})
    with pytest.raises(BadInputError, match=r"take data\.features=online"):
        compare([cached], SECONDS, tmp_path / "out", target, search=Search(9))


def test_no_candidate_is_drawn_twice_and_others_take_the_places_of_what_does_not_fit(recipe):
    over = ["training.learning_rate=[1e-3, 1e-2, 3e-2]", "drafter.num_layers=[1, 2]"]
    given = [recipe("eagle"), recipe("eagle", learning_rate="1e-2").model_copy(update={"name": "other"})]
    drawn = Search.of(40, over).draw(given)
    assert len(drawn) == 2 + 5, "six combinations, of which one is given"
    few = Search.of(5, over).draw(given, lambda r: "" if r.drafter.get("num_layers") == 2 else "one layer")
    assert [r.drafter.get("num_layers") for r in few[2:]] == [2] * 3


def test_given_recipes_stay_to_the_end(recipe, tmp_path):
    """Of 36 candidates two are given: what is slow at first may be the best at last. They take no time of their own."""
    candidates = [recipe("eagle").model_copy(update={"name": f"c{i}"}) for i in range(36)]
    seen: dict[float, list[str]] = {}

    def score(one: Recipe, seconds: float) -> Score:
        seen.setdefault(seconds, []).append(one.name)
        return Score(1, 1.0, int(one.name[1:]) / 100)

    left = Search(36).halve(candidates, 27.0, score, tmp_path / "search.json", 2)
    assert [len(names) for names in seen.values()] == [34, 10, 2], "given ones have no short training"
    assert not {"c0", "c1"} & set(chain(*seen.values()))
    assert [one.name for one in left] == ["c0", "c1", "c35"]
    left = Search(36).halve(candidates[:6], 27.0, score, tmp_path / "few.json", 4)
    assert {one.name for one in left} == {"c0", "c1", "c2", "c3", "c5"}, "one at least that was not given"
    mixed = [one.model_copy(update={"data": one.data.model_copy(update={"on_policy": 0.5})}) for one in candidates]
    with pytest.raises(BadInputError, match=r"search.json is of a search of other candidates"):
        Search(36).halve(mixed, 27.0, score, tmp_path / "search.json", 2)
    tupled = [
        recipe("eagle", DRAFTERS["eagle"] | {"taps": (1, 2)}).model_copy(update={"name": f"c{i}"}) for i in (1, 2)
    ]
    for _ in range(2):
        Search(36).halve(tupled, 27.0, score, tmp_path / "tuples.json", 1)
    left = Search(36).halve(candidates, 27.0, score, tmp_path / "other.json")
    assert [one.name for one in left] == ["c35", "c34"]
    seen.clear()
    left = Search(36).halve(candidates[:28], 27.0, score, tmp_path / "last.json", 3)
    assert [len(names) for names in seen.values()] == [25, 7], "the last one left needs no score"
    assert [one.name for one in left] == ["c0", "c1", "c2", "c27"]


@pytest.mark.parametrize(("seconds", "limit", "most"), [(3.0, 2, 4), (8.0, 2, 4), (9.0, 4, 8), (27.0, 4, 8)])
def test_short_trainings_are_scored_on_fewer_prompts_in_shorter_chains(
    recipe, target, monkeypatch, seconds, limit, most
):
    """Of suites of four prompts and of one: a third of the larger one's, rounded up."""
    made, suites, asked = recipe("eagle", measured={"limit": 9}), [Namespace(prompts=range(n)) for n in (1, 4)], []

    def best(*arguments: Any) -> Any:
        asked.append((arguments[3].limit, arguments[5]))
        return Namespace(plan=Plan(1), tau=1.0, predicted=1.0), Namespace(predicted=1.0), None

    monkeypatch.setattr(module, "best_chain", best)
    monkeypatch.setattr(module, "load_drafter", lambda *_: Ngram())
    module._Scoring(27.0, target, suites, None, set())._score(made, seconds / 27)
    assert asked == [(limit, most)]


def test_drafters_of_other_depths_are_timed_for_themselves(recipe, target, tmp_path):
    """P-EAGLE drafts all its `steps` at once; the times of three say nothing of a drafter that has one."""
    values = {"type": "peagle", "num_layers": 1, "steps": 3, "mask_token_id": 40, "draft_vocab_size": 96}
    search, out = Search.of(4, ["drafter.steps=[1, 2]", "training.learning_rate=[1e-3, 1e-2]"]), tmp_path / "out"
    compare([recipe("parallel", values)], 0.3, out, target, search=search)
    kept = read_sealed(out / "search.json", "")
    depths = {
        name: (kept["candidates"][name]["drafter"]["steps"], s["depth"]) for name, s in kept["0.1 seconds"].items()
    }
    assert {steps for steps, _ in depths.values()} == {1, 2}, "after three had been timed"
    assert all(depth <= steps for steps, depth in depths.values())


def test_candidates_are_drawn_around_each_recipe_and_never_twice(recipe):
    given = [recipe("eagle"), recipe("heads")]
    drawn = Search(40).draw(given)
    assert drawn[:2] == given
    assert drawn == Search(40).draw(given)
    assert len({r.name for r in drawn}) == 40
    contents = [json.dumps(r.model_dump(exclude={"name"}), sort_keys=True) for r in drawn]
    assert len(set(contents)) == 40
    assert all(r.data == given[0].data and r.eval == given[0].eval for r in drawn)
    assert {r.drafter["steps"] for r in drawn if r.drafter["type"] == "eagle3"} == {1, 2, 4}
    assert len(Search(40).draw([recipe("heads", learning_rate=1e-3)])) < 40, "medusa has few settings"
    again = Search(40).draw([*given, drawn[2].model_copy(update={"name": "eagle-3"})])
    assert len({r.name for r in again}) == 40, "the best of an earlier search is given, too"


def test_what_was_drawn_and_does_not_fit_the_target_is_left_out(recipe, target, tmp_path):
    """A draft vocabulary larger than the target's; a given one that does not fit is refused, as without a search."""
    search = Search.of(9, [f"drafter.draft_vocab_size=[32, {2 * target.vocab_size}]"])
    report = compare([recipe("eagle")], 0.2, tmp_path / "out", target, search=search)
    assert len([c for c in report.contestants if c.training]) == 2
    assert "of 2 candidates" in (tmp_path / "out" / "best.yaml").read_text()


@pytest.mark.parametrize(
    ("candidates", "over", "said"),
    [
        (1, [], "two candidates or more, got 1"),
        (9, ["drafter.steps=2"], r"lists of values .* such as drafter.steps=\[1, 2\]; found drafter.steps=2"),
        (9, ["drafter.steps=[]"], "found drafter.steps=\\[\\]"),
        (9, ["data.limit=[1, 2]"], "of the drafter or the training"),
        (9, ["drafter.steps"], "expected key.path=value"),
    ],
)
def test_bad_searches_are_refused(candidates, over, said):
    with pytest.raises(BadInputError, match=said):
        Search.of(candidates, over)
