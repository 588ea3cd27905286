"""What `outrider eval`, `outrider tune` and `outrider pair new` work on: a drafter on its target.

It comes from a recipe's run or from a pair. The target is loaded in the dtype that is measured (`eval.dtype`, else
`target.dtype`): a pair names exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..decode import Plan
from ..eval import Report
from ..eval.measure import Contestant, contestants, measure, plan_of
from ..eval.suites import Suite, load_suites
from ..eval.tuner import tune
from ..eval.tuning import BatchTuning, Tuning
from ..ground import BadInputError
from ..heads import Drafter, load_drafter
from ..pair import Pair
from ..pair.pair import tuned_drafter
from ..recipes import EvalSpec, Recipe, load_recipe
from ..targets import Target
from ..train.provenance import require_result


@dataclass
class Subject:
    """A drafter on its target, under a plan, and how to measure it.

    Attributes:
        report_folder: where a report goes if nobody says otherwise. Never inside a pair, whose files are sealed.
        tuned: what the tuner found, to be measured beside the first: another plan, perhaps of a fusion.
    """

    target: Target
    drafter: Drafter
    plan: Plan
    settings: EvalSpec
    report_folder: Path
    tuned: BatchTuning | None = None

    def measure(self, console: Console | None = None) -> Report:
        """Measure the drafter beside its baselines and the plain target."""
        first, *others = contestants(self.target, self.drafter, self.settings, self.plan)
        tuned = [] if self.tuned is None else [tuned_contestant(self.tuned, self.drafter)]
        return measure(self.target, [first, *tuned, *others], self._suites(), self.settings, console=console)

    def tune(self, batch_sizes: Sequence[int], console: Console | None = None) -> Tuning:
        """The fastest plan for each batch size."""
        return tune(self.target, self.drafter, self._suites(), self.settings, batch_sizes, console)

    def _suites(self) -> list[Suite]:
        return load_suites(self.settings.suites, self.target.require_tokenizer(), self.settings.limit)


def load_subject(
    name: str,
    changes: Sequence[str] = (),
    drafter: Path | None = None,
    asked: dict[str, Any] | None = None,
    tuned: bool = False,
) -> Subject:
    """A recipe's run or a pair, by whether `name` is a folder that holds a pair.json.

    Args:
        changes: `key=value` overrides of the recipe (a pair brings its own).
        drafter: a saved drafter to take instead.
        asked: fields of EvalSpec that replace the recipe's.
        tuned: whether a pair's tuned plan is measured too.

    Raises:
        BadInputError: there is no such recipe or pair, or no tuned plan.
    """
    is_pair = (Path(name).expanduser() / "pair.json").is_file()
    recipe = load_recipe(str(Path(name).expanduser() / "recipe.yaml") if is_pair else name, changes)
    asked = dict(asked or {})
    other_shape = bool({"depth", "width", "nodes"} & set(asked))
    settings = recipe.eval.model_copy(update=asked | ({"tree": None} if other_shape else {}))
    if is_pair:
        return _of_pair(Path(name), settings, drafter, other_shape, tuned)
    if tuned:
        raise BadInputError(
            f"--tuned: {name!r} is a recipe; tuned plans are kept in pairs. "
            "Make one with `outrider pair new`, then run `outrider tune`."
        )
    target = load_target(recipe)
    return Subject(
        target, trained_drafter(recipe, target, drafter), plan_of(settings), settings, recipe.output_folder / "report"
    )


def _of_pair(folder: Path, settings: EvalSpec, drafter: Path | None, other_shape: bool, tuned: bool) -> Subject:
    pair = Pair.load(folder)
    target, own, plan = pair.open()
    plan = replace(plan_of(settings), verify=plan.verify) if other_shape else plan
    # The pair's target has the pair's dtype, whatever the recipe once asked for.
    settings = settings.model_copy(update={"dtype": "auto"})
    found = pair.tuned(target, temperature=settings.temperatures[0]) if tuned else None
    if tuned and found is None:
        raise BadInputError(
            f"--tuned: this pair was not tuned for this machine and dtype; run `outrider tune {folder}` first."
        )
    report_folder = Path("runs") / "reports" / f"{pair.name}-v{pair.version}"
    return Subject(target, load_drafter(drafter, target) if drafter else own, plan, settings, report_folder, found)


def tuned_contestant(found: BatchTuning, drafter: Drafter) -> Contestant:
    """Return the tuned plan of `drafter`, or of its fusion with the drafter without weights that the tuner found."""
    kind = "" if found.statistical is None else f" + {found.statistical['type']}"
    return Contestant(f"{drafter.name}{kind} tuned", tuned_drafter(found, drafter), found.plan)


def load_target(recipe: Recipe) -> Target:
    """The recipe's target in the dtype that is measured, and with the adapter that joint training gave it.

    Raises:
        BadInputError: it has not been trained yet.
    """
    spec = recipe.target.model_dump()
    if recipe.joint is not None:
        adapter = recipe.output_folder / "adapter"
        if not adapter.is_dir():
            raise BadInputError(
                f"the recipe trains its target, too, and there is no adapter in {recipe.output_folder}: "
                "run `outrider train` with it first."
            )
        spec["adapter"] = str(require_result(recipe.output_folder, "adapter"))
    return Target.load(**spec | ({} if recipe.eval.dtype == "auto" else {"dtype": recipe.eval.dtype}))


def trained_drafter(recipe: Recipe, target: Target, folder: Path | None = None) -> Drafter:
    """The drafter in `folder`, else the one that the recipe's training left."""
    own = recipe.output_folder / "drafter"
    if folder is None and not own.is_dir():
        raise BadInputError(
            f"there is no trained drafter in {recipe.output_folder}: "
            "run `outrider train` with this recipe first, or name the folder of a saved one with --drafter."
        )
    return load_drafter(folder or require_result(recipe.output_folder, "drafter"), target)
