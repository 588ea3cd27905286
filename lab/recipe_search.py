"""Recipes drawn around given ones, and compared by successive halving (arXiv 1502.07943).

What was drawn is trained for a short time, the best third for three times as long, and so on, until few are left for
the whole time. The given recipes are among these: a short training flatters what learns quickly, and so what is found
is no slower than what was given. Each training begins anew: the schedule of its learning rate ends with its time.
Rounds are timed once for all candidates that draft alike, so that chance in a timing decides nothing among them (after
an interruption anew).

Beside what a comparison (`train.compare`) leaves in its folder there is:

<folder>/search/<recipe>/<seconds>/   each shorter training
<folder>/search.json                  what was drawn, and predicted to reach after these
<folder>/search.svg                   the same, and what the last of all were measured to reach
<folder>/best.yaml                    the recipe that was measured to be the fastest
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from ..common import BadInputError, OutriderError
from ..common.atomic import clear_away, write_atomically
from ..common.digests import read_sealed, write_json
from ..common.errors import NotFiniteError
from ..common.locks import locked
from ..eval import Report
from ..eval.acceptance import DEEPEST
from ..eval.reports import plots
from ..eval.reports.figures import Interval
from ..eval.tuner import ChainTimes, best_chain
from ..heads import load_drafter
from ..heads.registry import drafter_config, is_warm, with_defaults
from ..recipes import Recipe, override
from ..targets import Target
from ..train.arguments import check_training
from ..train.check import check
from ..train.compare import Comparison, check_comparison, check_trains, placed
from ..train.drafter_init import FREE

SCORES = "search.json"
REDUCTION = 3  # of the candidates one in so many goes on, for so many times as long
FINALISTS = 3  # that are trained for the whole time, at most; one more than are given, where that is more
EARLY = 0.3  # of the whole time; shorter trainings differ by so much that fewer prompts tell them apart
_FACTORS = {"training.learning_rate": (1 / 3, 3.0), "drafter.draft_vocab_size": (0.5, 2.0)}  # of a recipe's own value
_VALUES = {"drafter.num_layers": (1, 2), "drafter.steps": (1, 2, 4), "drafter.loss": ("soft_ce", "lk_hybrid")}
_BY_HELD_OUT = ("load_best_model_at_end", "metric_for_best_model")  # of `training`, where no rows are held out
_OWN = object()  # stands for the recipe's own value
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """The predicted result of a trained candidate at its best draft depth: τ, and speed over the plain target's."""

    depth: int
    tau: float
    speedup: float


@dataclass(frozen=True)
class Search:
    """How many candidates there are, the given recipes among them, and what the others are drawn from.

    Attributes:
        over: values of settings, by their keys (`drafter.steps`); if there are none, usual ones around each recipe.
    """

    candidates: int
    over: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.candidates < 2:
            raise BadInputError(f"a search compares two candidates or more, got {self.candidates}.")

    @classmethod
    def of(cls, candidates: int, over: Sequence[str]) -> Self:
        """Return a search from words such as `drafter.steps=[1, 2]`. BadInputError: what is no list of values."""
        values: dict[str, Any] = {}
        for words in over:
            override(values, words)
            section, _, name = words.partition("=")[0].strip().partition(".")
            found = values[section].get(name) if isinstance(values[section], dict) else None
            if section not in ("drafter", "training") or not isinstance(found, list) or not found:
                raise BadInputError(
                    "a search goes over lists of values of the drafter or the training, such as drafter.steps=[1, 2]; "
                    f"found {words:.80}."
                )
        return cls(
            candidates, {f"{section}.{name}": values[section][name] for section in values for name in values[section]}
        )

    def draw(self, recipes: Sequence[Recipe], problem: Callable[[Recipe], str] = lambda _: "") -> list[Recipe]:
        """Return the given recipes, and others around them, each with a name of its own.

        Args:
            problem: says why a recipe cannot be trained; "" if it can. Such a one is left out.

        Raises:
            BadInputError: no other recipe is asked for, or can be trained.
        """
        if self.candidates <= len(recipes):
            raise BadInputError(
                f"a search draws recipes around the given ones: expected more than {len(recipes)} candidates, those "
                f"among them, got {self.candidates}."
            )
        others: list[Recipe] = []
        for recipe in recipes:
            space = self.over or _usual_values(recipe)
            for values in product(*space.values()):
                changed = _changed(recipe, dict(zip(space, values, strict=True)))
                others += [changed] if changed != recipe else []
        drawn = list[Recipe]()
        seen = {_content(recipe) for recipe in recipes}
        why = ""
        for one in random.Random(self.seed).sample(others, len(others)):
            if len(recipes) + len(drawn) == self.candidates:
                break
            if refused := problem(one):
                _log.info("search: %s", why := refused)
            elif (content := _content(one)) not in seen:
                seen.add(content)
                drawn.append(one)
        if not drawn:
            raise BadInputError(f"a search found no other recipe to try. {why or 'Name values with --over.'}")
        given = {recipe.name for recipe in recipes}  # the best of an earlier search has such a name, too
        names = (f"{{}}-{i}" for i in count(1) if not any(name.endswith(f"-{i}") for name in given))
        named = [o.model_copy(update={"name": name.format(o.name[:90])}) for o, name in zip(drawn, names, strict=False)]
        return [*recipes, *named]

    def halve(
        self,
        candidates: Sequence[Recipe],
        seconds: float,
        score: Callable[[Recipe, float], Score],
        file: Path,
        given: int = 0,
    ) -> list[Recipe]:
        """Return the finalists, which are still to be trained for all of the `seconds`.

        Args:
            score: trains a candidate for so many seconds, and measures it.
            file: keeps the scores of what is not given; those that it holds are not made again.
            given: so many of the first candidates are finalists without a score, beside at least one other.

        Raises:
            BadInputError: `file` is of another search.
        """
        known = kept_scores(file, candidates, seconds)
        left = list(candidates[given:])
        rounds = max(1, math.ceil(math.log(len(candidates) / FINALISTS, REDUCTION) - 1e-9))
        for before in range(rounds, 0, -1):
            if len(left) == 1:
                break
            time = round(seconds / REDUCTION**before, 3)
            scores = known.setdefault(f"{time:g} seconds", {})
            for recipe in left:
                if recipe.name not in scores:
                    scores[recipe.name] = asdict(score(recipe, time))
                    write_json(file, known)
            order = sorted(left, key=lambda recipe: -scores[recipe.name]["speedup"])
            best = scores[order[0].name]
            said = "search: %d candidates, %g seconds each; the best, %s: τ %.2f, %.2f× predicted at depth %d"
            _log.info(said, len(left), time, order[0].name, best["tau"], best["speedup"], best["depth"])
            most = math.ceil(len(candidates) / REDUCTION ** (1 + rounds - before))
            left = order[: max(1, most - given)]
        return [*candidates[:given], *left]


def kept_scores(file: Path, candidates: Sequence[Recipe], seconds: float) -> dict[str, Any]:
    """Return what `halve` has kept in `file`, or the beginning of it. BadInputError if it is of another search."""
    told = {r.name: r.model_dump(mode="json", include={"drafter", "training", "data"}) for r in candidates}
    shared = candidates[0].model_dump(mode="json", include={"target", "template", "eval"})
    asked = {"candidates": told, "seconds": seconds, **shared}
    known = _read(file) or asked
    if other := [name for name, value in asked.items() if known.get(name) != value]:
        raise BadInputError(f"{file} is of a search of other {', '.join(other)}; choose another --out.")
    return known


def scored(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of training and the predicted speedups of each candidate in a file that `halve` has kept."""
    lines: dict[str, list[tuple[float, float]]] = {}
    kept = _read(file)
    for time in (key for key in kept if key.endswith(" seconds")):
        for name, score in kept[time].items():
            lines.setdefault(name, []).append((float(time.split()[0]), score["speedup"]))
    return lines


def _read(file: Path) -> dict[str, Any]:
    return read_sealed(file, "Delete it, and all is scored again.") if file.is_file() else {}


def timing_key(recipe: Recipe, max_depth: int | None) -> str:
    """Return the key under which drafters share one timing of their rounds.

    `max_depth` is the drafter's own: `steps` are unrolled in training by some, and drafted at once by others.
    """
    settings = {name: value for name, value in with_defaults(recipe.drafter).items() if name not in FREE}
    return json.dumps([settings, max_depth], sort_keys=True)


def _content(recipe: Recipe) -> str:
    """Return what tells a candidate from another."""
    told = [with_defaults(recipe.drafter), check_training(recipe.training), recipe.data.model_dump(mode="json")]
    return json.dumps(told, sort_keys=True, default=str)


def at_depth(recipe: Recipe, depth: int) -> Recipe:
    """Return a recipe whose drafter is measured in chains of that depth."""
    chain = {"depth": depth, "width": 1, "nodes": None, "tree": None}
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update=chain)})


def _usual_values(recipe: Recipe) -> dict[str, Sequence[Any]]:
    """Return values around a recipe's own ones, of the settings that it has."""
    values = recipe.drafter
    space: dict[str, Sequence[Any]] = {}
    config, training = None if is_warm(values) else drafter_config(values)[1], check_training(recipe.training)
    for key, usual in (_FACTORS | _VALUES).items():
        section, name = key.split(".")
        if own := training.get(name, 5e-5) if section == "training" else getattr(config, name, None):
            others = [type(own)(own * factor) for factor in usual] if key in _FACTORS else usual
            space[key] = [_OWN, *(value for value in others if value != own)]
    return space


def _changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other settings."""
    values = recipe.model_dump()
    for key, value in settings.items():
        section, name = key.split(".", 1)
        if value is not _OWN:
            values[section][name] = value
    return Recipe.from_dict(values, recipe.name)


def search(
    recipes: Sequence[Recipe],
    seconds: float,
    folder: str | Path,
    asked: Search,
    target: Target | None = None,
    console: Console | None = None,
) -> Report:
    """Draw recipes around the given ones, train the best for `seconds`, and measure these as a comparison does.

    Raises BadInputError as `train.compare.compare` does, or if nothing can be drawn.
    """
    place = check_comparison(recipes, seconds, folder)
    if any(recipe.name == "search" for recipe in recipes):
        raise BadInputError("the folder has a 'search' of its own; give the recipe another name.")
    if any(recipe.data.features == "cached" for recipe in recipes):
        raise BadInputError(
            "data.features: cached would be stored for every candidate of a search; take data.features=online."
        )
    with locked(place):
        comparison = Comparison.begin(recipes, seconds, place, target, console)
        problem = partial(_problem, place=place, seconds=seconds, target=comparison.target)
        candidates = [placed(recipe, place) for recipe in asked.draw(recipes, problem)]
        kept_scores(place / SCORES, candidates, seconds)
        comparison.answer()
        finalists = _finalists(asked, comparison, candidates)
        report = comparison.measure(finalists)
        _write_best(comparison, finalists, report, len(candidates))
        return report


def _finalists(asked: Search, comparison: Comparison, candidates: Sequence[Recipe]) -> list[Recipe]:
    """Return the candidates that were trained for all of the time, each at its best depth."""
    scoring = _Scoring(comparison)
    seconds = comparison.seconds
    given = len(comparison.asked)
    # First what was given: if that cannot be trained, the search ends at once.
    ends = {recipe.name: scoring.trained(recipe, seconds) for recipe in candidates[:given]}
    left = asked.halve(candidates, seconds, scoring, comparison.place / SCORES, given)
    ends |= {recipe.name: scoring.trained(recipe, seconds) for recipe in left[given:]}
    return [at_depth(recipe, ends[recipe.name].depth) for recipe in left if ends[recipe.name].speedup]


def _write_best(comparison: Comparison, finalists: Sequence[Recipe], report: Report, num_candidates: int) -> None:
    """Write best.yaml and search.svg."""
    place, seconds = comparison.place, comparison.seconds
    best = max(finalists, key=lambda recipe: report.headline(recipe.name).speedup.value)
    data = best.data.model_copy(update={"responses": comparison.asked[0].data.responses})
    kept = best.model_copy(update={"data": data, "output": "runs/{name}"})
    write_atomically(place / "best.yaml", _why(best, report, num_candidates, seconds) + kept.to_yaml())
    lines = scored(place / SCORES)
    for recipe in finalists:
        lines.setdefault(recipe.name, []).append((seconds, report.headline(recipe.name).speedup.value))
    write_atomically(place / "search.svg", plots.standalone(over_training(lines, best.name)))


def over_training(scores: Mapping[str, Sequence[tuple[float, float]]], best: str) -> str:
    """Return the plot of each candidate's speedup over its seconds of training, with the best one above the others."""
    names = [*(name for name in scores if name != best), best]
    figures = {name: {f"{time:.3g} s": _alone(value) for time, value in scores[name]} for name in names}
    values = [value for line in scores.values() for _, value in line]
    limits = math.floor(10 * min(1.0, *values)) / 10, math.ceil(10 * max(1.0, *values)) / 10 + 0.1
    title = "Speedup over the plain target by seconds of training, predicted, and at last measured"
    colours = [plots.OTHER] * (len(names) - 1) + ["c0"]
    return plots.curves(title, f"training; in colour: {best}", figures, limits, "×", colours)


def _alone(value: float) -> Interval:
    return Interval(value, math.nan, math.nan)


def _why(recipe: Recipe, report: Report, candidates: int, seconds: float) -> str:
    """Return the comment above the recipe that won."""
    figures = report.headline(recipe.name)
    assert figures.tau is not None
    return (
        f"# The fastest of {candidates} candidates: {figures.speedup.text(unit='×')} of the plain target, τ "
        f"{figures.tau.text()}, after {seconds:g} seconds of training.\n"
        "# search.json beside it has the others, and report/ the conditions.\n"
    )


def _problem(recipe: Recipe, place: Path, seconds: float, target: Target) -> str:
    """Return why a recipe cannot be trained for the target: a draft vocabulary may be too large, say. "" if it can."""
    try:
        check(recipe.model_copy(update={"output": str(place / recipe.name)}), seconds=seconds)
        check_trains(recipe, target)
    except (OutriderError, torch.OutOfMemoryError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Scoring:
    """Scores of the candidates of a search, of which the last ones are trained for all of the comparison's time.

    A score costs little: no rows are held out, the learning rate warms up for the same share of the time, a training of
    less than `EARLY` is measured on fewer prompts in chains that are not so deep, and `times` of rounds serve all that
    draft with the same settings.
    """

    comparison: Comparison
    times: dict[str, ChainTimes] = field(default_factory=dict)

    def __call__(self, recipe: Recipe, seconds: float) -> Score:
        """Return what a candidate reaches after so many seconds of training."""
        output, share = (
            recipe.output_folder.parent / "search" / recipe.name / f"{seconds:g}",
            seconds / self.comparison.seconds,
        )
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
            self.comparison.train(recipe, seconds)
            return self._score(recipe, seconds / self.comparison.seconds)
        except (NotFiniteError, torch.OutOfMemoryError) as error:
            if recipe.name in {given.name for given in self.comparison.asked}:
                raise
            _log.warning("search: %s is left out: %s", recipe.name, error)
            return Score(1, 1.0, 0.0)

    def _score(self, recipe: Recipe, share: float) -> Score:
        drafter = load_drafter(recipe.output_folder / "drafter", self.comparison.target)
        settings = timing_key(recipe, drafter.max_depth)
        prompts = max(len(suite.some(recipe.eval.limit)) for suite in self.comparison.suites)
        limit, most = (math.ceil(prompts / 3), DEEPEST // 2) if share < EARLY else (prompts, DEEPEST)
        asked, known = recipe.eval.model_copy(update={"limit": limit}), self.times.get(settings)
        chain, plain, self.times[settings] = best_chain(
            self.comparison.target, drafter, self.comparison.suites, asked, known, most
        )
        return Score(chain.plan.depth, round(chain.tau, 4), round(chain.predicted / plain.predicted, 4))
