"""Several recipes on one target at the same data and the same training time, then measured in one run.

<folder>/data/       the target's responses, made once (unless the recipes name finished ones)
<folder>/<recipe>/   each training, as `train` leaves it
<folder>/report/     what was measured: report.json, report.md, report.html, comparison.svg

A search (search.py) draws more recipes around the given ones, of which few are trained for the whole time:

<folder>/search/<recipe>/<seconds>/   each shorter training
<folder>/search.json                  what was drawn, and predicted to reach after these
<folder>/search.svg                   the same, and what the last of all were measured to reach
<folder>/best.yaml                    the recipe that was measured to be the fastest
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..common import BadInputError, OutriderError
from ..common.atomic import clear_away, write_atomically
from ..common.errors import NotFiniteError
from ..common.locks import locked
from ..distill.data_set import learnt_questions
from ..distill.responses import data_folder, distill
from ..eval import Report
from ..eval.acceptance import DEEPEST
from ..eval.measure import GENERATE, PLAIN, Contestant, baseline, measure, plan_of
from ..eval.reports import plots
from ..eval.reports.render import write_report
from ..eval.reports.report import TrainingInfo
from ..eval.suites import Suite, suites_of
from ..eval.tuner import ChainTimes, best_chain
from ..heads import load_drafter
from ..recipes import Recipe
from ..targets import Target
from .arguments import check_training
from .callbacks import held_out_taus
from .check import check
from .drafter_init import check_makes
from .provenance import PROVENANCE, check_same_run, read_provenance, require_result
from .run import train
from .search import EARLY, Score, Search, at_depth, kept_scores, scored, timing_key

_SHARED = ("target", "data", "eval", "template")  # sections in which recipes must say the same, but for a method's own:
_METHOD = ("data.on_policy", "data.on_policy_temperature", "data.verified")
_BY_HELD_OUT = ("load_best_model_at_end", "metric_for_best_model")  # of `training`, where no rows are held out

_log = logging.getLogger(__name__)


def compare(
    recipes: Sequence[Recipe],
    seconds: float,
    folder: str | Path,
    target: Target | None = None,
    console: Console | None = None,
    search: Search | None = None,
) -> Report:
    """Train each recipe for `seconds`, then measure all drafters, the baselines and the plain target in turns.

    What is finished in `folder` is not done again: responses, trainings, and of an interrupted training what its last
    checkpoint holds. The report is saved to `<folder>/report`; each drafter in it knows how it was trained.

    Args:
        seconds: of training each, the target's passes for cached features included.
        target: used instead of loading the recipes' target.
        console: shows progress there.
        search: draws others around `recipes`, of which only the best are trained for the whole time, too.

    Raises BadInputError if the recipes differ in more than drafter and training, one of them has nothing to train or
    cannot be made for the target, or `folder` holds a training of another recipe or time. All before anything is spent.
    """
    if not 0 < seconds < math.inf:
        raise BadInputError(f"the budget must be more than 0 seconds of training, and come to an end, got {seconds:g}.")
    check_comparable(recipes)
    place = Path(folder).expanduser()
    for recipe in recipes:
        check(recipe.model_copy(update={"output": str(place / recipe.name)}), seconds=seconds)
        if search and recipe.data.features == "cached":
            raise BadInputError(
                "data.features: cached would be stored for every candidate of a search; take data.features=online."
            )
    with locked(place):
        return _compare(recipes, seconds, place, target, console, search)


def _compare(
    recipes: Sequence[Recipe],
    seconds: float,
    place: Path,
    target: Target | None,
    console: Console | None,
    search: Search | None,
) -> Report:
    moved = [_placed(recipe, place) for recipe in recipes]
    finished = {recipe.name: _finished(recipe, seconds) for recipe in moved}
    first, is_given, scores = moved[0], target is not None, place / "search.json"
    target = target or Target.load(**first.target.to_load())
    for recipe in (r for r in moved if not finished[r.name]):
        check_makes(recipe, target)
    if search:
        problem = partial(_problem, place=place, seconds=seconds, target=target)
        moved = [_placed(recipe, place) for recipe in search.draw(recipes, problem)]
        kept_scores(scores, moved, seconds)
    candidates = len(moved)
    learnt, about = learnt_questions(data_folder(first)), f"the responses in {data_folder(first)}"
    suites = suites_of(target, first.eval, first.template, learnt, about, first.data.allow_leaks)
    baselines = [baseline(name, target) for name in first.eval.baselines]
    distill(first.model_copy(update={"output": str(place), "data": recipes[0].data}), target, console)
    if search:
        scoring = _Scoring(seconds, target, suites, console, finished.keys())
        # First what was given: if that cannot be trained, the search ends at once.
        ends = {recipe.name: scoring.trained(recipe, seconds) for recipe in moved[: len(recipes)]}
        left = search.halve(moved, seconds, scoring, scores, len(recipes))
        ends |= {recipe.name: scoring.trained(recipe, seconds) for recipe in left[len(recipes) :]}
        moved = [at_depth(recipe, ends[recipe.name].depth) for recipe in left if ends[recipe.name].speedup]
    else:
        for recipe in moved:
            _train(recipe, seconds, target, console)
    if not is_given and first.eval.dtype not in ("auto", first.target.dtype):
        target = Target.load(**first.target.to_load() | {"dtype": first.eval.dtype})
    entrants = [
        Contestant.of(r.name, load_drafter(require_result(r.output_folder, "drafter"), target), plan_of(r.eval))
        for r in moved
    ]
    entrants += [Contestant.of(b.name, b, plan_of(first.eval)) for b in baselines]
    report = measure(target, entrants, suites, first.eval, console=console)
    trained = {recipe.name: _how(recipe) for recipe in moved}
    report.contestants = [c.model_copy(update={"training": trained.get(c.name)}) for c in report.contestants]
    write_report(report, place / "report")
    if search:
        best = max(moved, key=lambda recipe: report.headline(recipe.name).speedup.value)
        data = best.data.model_copy(update={"responses": recipes[0].data.responses})
        kept = best.model_copy(update={"data": data, "output": "runs/{name}"})
        write_atomically(place / "best.yaml", _why(best, report, candidates, seconds) + kept.to_yaml())
        lines = scored(scores)
        for recipe in moved:
            lines.setdefault(recipe.name, []).append((seconds, report.headline(recipe.name).speedup.value))
        write_atomically(place / "search.svg", plots.standalone(plots.over_training(lines, best.name)))
    return report


def _placed(recipe: Recipe, place: Path) -> Recipe:
    """Return a recipe on the shared responses, with an output of its own."""
    data = recipe.data.model_copy(update={"responses": recipe.data.responses or str(place / "data")})
    return recipe.model_copy(update={"data": data, "output": str(place / recipe.name)})


def _problem(recipe: Recipe, place: Path, seconds: float, target: Target) -> str:
    """Return why a recipe cannot be trained for the target: a draft vocabulary may be too large, say. "" if it can."""
    try:
        check(recipe.model_copy(update={"output": str(place / recipe.name)}), seconds=seconds)
        check_makes(recipe, target)
    except (OutriderError, torch.OutOfMemoryError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Scoring:
    """Scores of the candidates of a search, of which the last ones are trained for `whole` seconds.

    A score costs little: no rows are held out, the learning rate warms up for the same share of the time, a training of
    less than `EARLY` is measured on fewer prompts in chains that are not so deep, and `times` of rounds serve all that
    draft with the same settings.
    """

    whole: float
    target: Target
    suites: Sequence[Suite]
    console: Console | None
    given: Set[str]  # names of candidates that must be trained
    times: dict[str, ChainTimes] = field(default_factory=dict)

    def __call__(self, recipe: Recipe, seconds: float) -> Score:
        """Return what a candidate reaches after so many seconds of training."""
        output, share = recipe.output_folder.parent / "search" / recipe.name / f"{seconds:g}", seconds / self.whole
        data, training = recipe.data.model_copy(update={"holdout": 0.0}), check_training(recipe.training)
        training = {name: value for name, value in training.items() if name not in _BY_HELD_OUT}
        if (warming := training.get("warmup_steps", 0)) > 1:  # below, it is a share
            training |= {"warmup_steps": math.ceil(warming * share)}
        told = recipe.eval.model_copy(update={"training_prompts": 0, "patience": None})
        changed = {"output": str(output), "data": data, "training": training, "eval": told}
        recipe = recipe.model_copy(update=changed)
        score = self.trained(recipe, seconds)
        clear_away(output / "checkpoints")
        return score

    def trained(self, recipe: Recipe, seconds: float) -> Score:
        """Train a candidate, and return what it is predicted to reach: a speedup of 0 where what was drawn diverges, or
        does not fit into memory."""
        try:
            _train(recipe, seconds, self.target, self.console)
            return self._score(recipe, seconds / self.whole)
        except (NotFiniteError, torch.OutOfMemoryError) as error:
            if recipe.name in self.given:
                raise
            _log.warning("search: %s is left out: %s", recipe.name, error)
            return Score(1, 1.0, 0.0)

    def _score(self, recipe: Recipe, share: float) -> Score:
        drafter = load_drafter(recipe.output_folder / "drafter", self.target)
        settings = timing_key(recipe, drafter.max_depth)
        prompts = max(len(suite.prompts[: recipe.eval.limit]) for suite in self.suites)
        limit, most = (math.ceil(prompts / 3), DEEPEST // 2) if share < EARLY else (prompts, DEEPEST)
        asked, known = recipe.eval.model_copy(update={"limit": limit}), self.times.get(settings)
        chain, plain, self.times[settings] = best_chain(self.target, drafter, self.suites, asked, known, most)
        return Score(chain.plan.depth, round(chain.tau, 4), round(chain.predicted / plain.predicted, 4))


def _why(recipe: Recipe, report: Report, candidates: int, seconds: float) -> str:
    """Return the comment above the recipe that won."""
    figures = report.headline(recipe.name)
    assert figures.tau is not None
    return (
        f"# The fastest of {candidates} candidates: {figures.speedup.text(unit='×')} of the plain target, τ "
        f"{figures.tau.text()}, after {seconds:g} seconds of training.\n"
        "# search.json beside it has the others, and report/ the conditions.\n"
    )


def check_comparable(recipes: Sequence[Recipe]) -> None:
    """Raise BadInputError unless each recipe has something to train, and they differ in drafter and training alone."""
    if not recipes:
        raise BadInputError("there is nothing to compare: give one or more recipes.")
    taken = {"data", "report", "search", PLAIN, GENERATE, *recipes[0].eval.baselines}
    for name, count in Counter(r.name for r in recipes).items():
        if name in taken:
            raise BadInputError(f"the report or the folder has a {name!r} of its own; give the recipe another name.")
        if count > 1:
            raise BadInputError(
                f"{count} recipes are called {name!r}; give each a name of its own, under which it appears in the "
                "table."
            )
    first = recipes[0]
    for other in recipes[1:]:
        if lines := differences(first, other):
            one = lines[0].partition(" ")[0]
            raise BadInputError(
                f"{first.name} and {other.name} cannot be compared, they differ in: {'; '.join(lines)}. "
                f"Give all of them the same, for example by {one}=… after the recipes, which changes every one."
            )
    for recipe in recipes:
        if recipe.joint is not None:
            raise BadInputError(
                f"{recipe.name} trains its target, too (joint), and a comparison has one target for all; leave it out, "
                "or measure it alone."
            )


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the settings beside drafter and training in which two recipes differ, each with both values."""
    a, b = one.model_dump(), other.model_dump()
    return [
        f"{section}.{key} ({a[section].get(key)!r} and {b[section].get(key)!r})"
        for section in _SHARED
        for key in a[section] | b[section]
        if a[section].get(key) != b[section].get(key) and f"{section}.{key}" not in _METHOD
    ]


def _finished(recipe: Recipe, seconds: float) -> bool:
    """Tell whether this training is done; one of another recipe, or of another time, is refused."""
    output = recipe.output_folder
    check_same_run(recipe, output)
    if not ((output / PROVENANCE).is_file() and (output / "drafter").is_dir()):
        return False
    spent = read_provenance(output)["training"].get("budget")
    if spent != seconds:
        then = "without a time budget" if spent is None else f"for {spent:g} seconds"
        raise BadInputError(
            f"{output} holds a drafter that was trained {then}, now {seconds:g} seconds are asked for. Choose another "
            "--out, or delete it."
        )
    return True


def _train(recipe: Recipe, seconds: float, target: Target, console: Console | None) -> None:
    if _finished(recipe, seconds):
        _log.warning("%s: trained before, in %s", recipe.name, recipe.output_folder)
        return
    theirs = _wandb_run()  # the caller's own run, if there is one, holds all
    try:
        result = train(recipe, target, console=console, seconds=seconds)
    finally:
        if theirs is None and (run := _wandb_run()) is not None:
            run.finish()  # else transformers would report the next training to the same run
    _log.info("%s: %d steps in %g seconds%s", recipe.name, result.steps, seconds, held_out_taus(result.metrics))


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)


def _how(recipe: Recipe) -> TrainingInfo:
    saved = read_provenance(recipe.output_folder)
    training = saved["training"]
    return TrainingInfo(
        seconds=training["spent"],
        budget=training["budget"],
        steps=training["steps"],
        sequences=training["rows"],
        processes=training["processes"],
        parameters=saved["drafter"]["trained_parameters"],
        held_out_tau=saved["metrics"].get("eval_tau"),
    )
