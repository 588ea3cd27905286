"""Several recipes on one target at the same data and the same training time, then measured in one run.

<folder>/data/       the target's responses, made once (unless the recipes name finished ones)
<folder>/<recipe>/   each training, as `train` leaves it
<folder>/report/     what was measured: report.json, report.md, report.html, comparison.svg
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common import BadInputError
from ..common.locks import locked
from ..common.places import COMPARISON, mark, require_place
from ..distill.data_set import learnt_questions
from ..distill.responses import data_folder, distill
from ..eval import Report
from ..eval.measure import GENERATE, PLAIN, Contestant, baseline, measure, plan_of
from ..eval.reports.render import write_report
from ..eval.reports.report import TrainingInfo
from ..eval.suites import Suite, suites_of
from ..heads import Drafter, load_drafter
from ..recipes import Recipe
from ..targets import Target
from .arguments import training_arguments, unpushed
from .callbacks import held_out_taus
from .check import check, check_by_configs, check_recomputes
from .drafter_init import check_makes
from .provenance import PROVENANCE, check_same_run, keep_target, read_provenance, require_result
from .run import train

_SHARED = ("target", "data", "eval", "template")  # sections that must be the same in recipes, but for a method's own:
_METHOD = ("data.on_policy", "data.on_policy_temperature")

_log = logging.getLogger(__name__)


def compare(
    recipes: Sequence[Recipe],
    seconds: float,
    folder: str | Path,
    target: Target | None = None,
    console: Console | None = None,
) -> Report:
    """Train each recipe for `seconds`, then measure all drafters, the baselines and the plain target in turns.

    What is finished in `folder` is not done again: responses, trainings, and of an interrupted training what its last
    checkpoint holds. The report is saved to `<folder>/report`; it has how each drafter was trained.

    Args:
        seconds: of training each, the target's passes for cached features included.
        target: used instead of loading the recipes' target.
        console: shows progress there.

    Raises BadInputError if the recipes differ in more than drafter and training, one of them has nothing to train or
    cannot be made for the target, or `folder` holds a training of another recipe or time. All before anything is spent.
    """
    place = check_comparison(recipes, seconds, folder)
    with locked(place):
        comparison = Comparison.begin(recipes, seconds, place, target, console)
        comparison.answer()
        for recipe in comparison.recipes:
            comparison.train(recipe)
        return comparison.measure(comparison.recipes)


def check_comparison(recipes: Sequence[Recipe], seconds: float, folder: str | Path) -> Path:
    """Return the folder of a comparison; raises BadInputError for what cannot be compared, or trained for a time."""
    if not 0 < seconds < math.inf:
        raise BadInputError(f"the budget must be more than 0 seconds of training, and come to an end, got {seconds:g}.")
    check_comparable(recipes)
    place = Path(folder).expanduser()
    for recipe in recipes:
        check(recipe.model_copy(update={"output": str(place / recipe.name)}), seconds=seconds)
    require_place(place, COMPARISON)
    return place


@dataclass
class Comparison:
    """The work of one comparison in a folder that is locked.

    Attributes:
        asked: the recipes as they were given. recipes: the same on shared responses, each with an output of its own.
        seconds: of training each.
        is_given: the target came from the caller, and is measured as it is.
        suites, baselines: what is measured, and beside what.
    """

    asked: Sequence[Recipe]
    recipes: Sequence[Recipe]
    seconds: float
    place: Path
    target: Target
    is_given: bool
    console: Console | None
    suites: Sequence[Suite]
    baselines: Sequence[Drafter]

    @classmethod
    def begin(
        cls,
        recipes: Sequence[Recipe],
        seconds: float,
        place: Path,
        target: Target | None = None,
        console: Console | None = None,
    ) -> Comparison:
        """Return the comparison, after everything that can be refused before anything is spent."""
        moved = [placed(recipe, place) for recipe in recipes]
        finished = [recipe for recipe in moved if _finished(recipe, seconds)]
        first, is_given = moved[0], target is not None
        for recipe in moved:
            if target is None and recipe not in finished:
                check_by_configs(recipe, training_arguments(recipe))
        target = target or Target.load(**first.target.to_load())
        for recipe in moved:
            if recipe in finished:
                keep_target(recipe, target, goes_on=True)
            else:
                check_trains(recipe, target)
        learnt, about = learnt_questions(data_folder(first)), f"the responses in {data_folder(first)}"
        suites = suites_of(target, first.eval, first.template, learnt, about, first.data.allow_leaks)
        baselines = [baseline(name, target) for name in first.eval.baselines]
        return cls(recipes, moved, seconds, place, target, is_given, console, suites, baselines)

    def answer(self) -> None:
        """Let the target answer the shared prompts, unless it has."""
        mark(self.place, COMPARISON)
        first = self.recipes[0]
        shared = first.model_copy(update={"output": str(self.place), "data": self.asked[0].data})
        distill(shared, self.target, self.console)

    def train(self, recipe: Recipe, seconds: float | None = None) -> None:
        """Train a placed recipe for all of the time, or for `seconds`, unless that is done."""
        _train(recipe, self.seconds if seconds is None else seconds, self.target, self.console)

    def measure(self, recipes: Sequence[Recipe]) -> Report:
        """Measure the trained drafters of placed recipes in one run, and write the report."""
        first, target = self.recipes[0], self.target
        if not self.is_given and first.eval.dtype not in ("auto", first.target.dtype):
            target = Target.load(**first.target.to_load() | {"dtype": first.eval.dtype})
        entrants = [
            Contestant.of(r.name, load_drafter(require_result(r.output_folder, "drafter"), target), plan_of(r.eval))
            for r in recipes
        ]
        entrants += [Contestant.of(b.name, b, plan_of(first.eval)) for b in self.baselines]
        report = measure(target, entrants, self.suites, first.eval, console=self.console)
        trained = {recipe.name: _how(recipe) for recipe in recipes}
        report.contestants = [c.model_copy(update={"training": trained.get(c.name)}) for c in report.contestants]
        write_report(report, self.place / "report")
        return report


def check_trains(recipe: Recipe, target: Target) -> None:
    """Refuse a drafter that its training would refuse, before another one is trained."""
    check_recomputes(check_makes(recipe, target), training_arguments(recipe))


def placed(recipe: Recipe, place: Path) -> Recipe:
    """Return a recipe on the shared responses, with an output of its own, whose drafter stays there."""
    data = recipe.data.model_copy(update={"responses": recipe.data.responses or str(place / "data")})
    moved = {"data": data, "training": unpushed(recipe.training), "output": str(place / recipe.name)}
    return recipe.model_copy(update=moved)


def check_comparable(recipes: Sequence[Recipe]) -> None:
    """Raise BadInputError unless each recipe has something to train, and they differ in drafter and training alone."""
    if not recipes:
        raise BadInputError("there is nothing to compare: give one or more recipes.")
    taken = {"data", "report", PLAIN, GENERATE, *recipes[0].eval.baselines}
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
    """Return whether this training is done; one of another recipe, or of another time, is refused."""
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
    _log.info(
        "%s: %d steps in %g seconds%s", recipe.name, result.steps, seconds, held_out_taus(result.metrics, result.kept)
    )


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
