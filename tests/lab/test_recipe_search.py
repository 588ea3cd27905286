"""A search: what is drawn, what is trained for how long, and what wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any
from xml.etree import ElementTree

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.common.digests import read_sealed
from outrider.common.errors import NotFiniteError
from outrider.decode import Plan
from outrider.eval.tuner import _Tuner
from outrider.heads import Ngram
from outrider.lab import recipe_search as module
from outrider.lab.recipe_search import Score, Search
from outrider.lab.recipe_search import search as search_recipes
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import compare as comparing

from ..train.conftest import MakeRecipe
from ..train.test_compare import DRAFTERS, SECONDS, recipes_in


@pytest.fixture
def target(tiny_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(tiny_llama(vocab=len(tiny_tokenizer)), tiny_tokenizer, {"path": "in memory"})


@pytest.fixture
def recipe(tmp_path: Path) -> MakeRecipe:
    return recipes_in(tmp_path)


def test_a_search_trains_few_for_the_whole_time_and_keeps_every_score(recipe, target, tmp_path, monkeypatch):
    """Seven candidates: what was given for all of the time, six others for a third of it, and two of these for all. A
    second search makes nothing anew."""
    train = comparing.train
    trained = []
    take_times = _Tuner.chain_times
    timings = []

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
    monkeypatch.setattr(comparing, "train", counted)
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
    report = search_recipes([given], 0.9, out, search, target)
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
    search_recipes([given], 0.9, out, search, target)
    assert trained == []
    with pytest.raises(BadInputError, match=r"search.json is of a search of other candidates; choose another --out"):
        search_recipes([given], 0.9, out, Search.of(7, ["drafter.steps=[1, 2, 3, 4, 5, 6, 7]"]), target)
    hotter = given.model_copy(update={"eval": given.eval.model_copy(update={"temperatures": [1.0]})})
    with pytest.raises(BadInputError, match=r"search.json is of a search of other eval"):
        search_recipes([hotter], 0.9, out, search, target)


def test_a_search_is_drawn_over_round_numbers() -> None:
    """Also where they do not begin at one; a candidate that was trained once has a mark."""
    drawn = ElementTree.fromstring(module.over_training({"a": [(3, 0.66), (81, 1.2)], "b": [(81, 1.41)]}, "b"))
    labels = [text.text for text in drawn.iter("text") if text.get("text-anchor") == "end"]
    assert labels == ["0.75×", "1×", "1.25×", "1.5×"]
    assert [line.get("class") for line in drawn.iter("polyline")] == ["curve cx", "curve c0"]


def test_what_diverges_is_left_out_and_anything_else_stops_a_search(recipe, target, tmp_path, monkeypatch):
    """A learning rate at which the loss grows without end; then a full disk, after which nothing is kept as a score."""
    train = comparing.train
    failed = []
    full = []

    def unsteady(made: Recipe, *args: Any, **kwargs: Any) -> Any:
        if float(made.training.get("learning_rate", 0)) == 9.0:
            if full:
                raise BadInputError("the disk is full")
            failed.append(made.name)
            raise NotFiniteError("training stopped before step 3, which was not applied: the loss is nan.")
        return train(made, *args, **kwargs)

    monkeypatch.setattr(comparing, "train", unsteady)
    given = [recipe("small", data={"on_policy": 0.5}), recipe("heads")]
    search, out = Search.of(4, ["training.learning_rate=[9.0]"]), tmp_path / "out"
    full.append(True)
    with pytest.raises(BadInputError, match="the disk is full"):
        search_recipes(given, 0.3, out, search, target)
    assert not (out / "search.json").exists()
    full.clear()
    report = search_recipes(given, 0.3, out, search, target)
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

    monkeypatch.setattr(comparing, "train", diverges)
    with pytest.raises(NotFiniteError, match="the loss is nan"):
        search_recipes([recipe("eagle")], 0.3, tmp_path / "out", Search(4), target)
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
            search_recipes(given, SECONDS, tmp_path / "out", Search.of(candidates, over), target)
    cached = recipe("eagle", data={"features": "cached"})
    with pytest.raises(BadInputError, match=r"take data\.features=online"):
        search_recipes([cached], SECONDS, tmp_path / "out", Search(9), target)


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
    made = recipe("eagle", measured={"limit": 9})
    suites = [Namespace(some=lambda limit, n=n: range(n)[:limit]) for n in (1, 4)]
    asked = []

    def best(*arguments: Any) -> Any:
        asked.append((arguments[3].limit, arguments[5]))
        return Namespace(plan=Plan(1), tau=1.0, predicted=1.0), Namespace(predicted=1.0), None

    monkeypatch.setattr(module, "best_chain", best)
    monkeypatch.setattr(module, "load_drafter", lambda *_: Ngram())
    comparison: Any = Namespace(seconds=27.0, target=target, suites=suites, asked=[made])
    module._Scoring(comparison)._score(made, seconds / 27)
    assert asked == [(limit, most)]


def test_drafters_of_other_depths_are_timed_for_themselves(recipe, target, tmp_path):
    """P-EAGLE drafts all its `steps` at once; the times of three say nothing of a drafter that has one."""
    values = {"type": "peagle", "num_layers": 1, "steps": 3, "mask_token_id": 40, "draft_vocab_size": 96}
    search, out = Search.of(4, ["drafter.steps=[1, 2]", "training.learning_rate=[1e-3, 1e-2]"]), tmp_path / "out"
    search_recipes([recipe("parallel", values)], 0.3, out, search, target)
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
    report = search_recipes([recipe("eagle")], 0.2, tmp_path / "out", search, target)
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
