"""What `outrider eval` and `outrider pair new` work on: a drafter on its target, from a recipe's run or from a pair.

The target is loaded in the dtype that is measured (`eval.dtype`, else `target.dtype`): a pair names exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recipes import EvalSpec, Recipe, load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from ..decode import Plan
    from ..eval import Report
    from ..heads import Drafter
    from ..target import Target


@dataclass
class Subject:
    """A drafter on its target, under a plan, and how to measure it.

    Attributes:
        report_folder: where a report goes if nobody says otherwise. Never inside a pair, whose files are sealed.
    """

    target: Target
    drafter: Drafter
    plan: Plan
    settings: EvalSpec
    report_folder: Path

    def measure(self, console: Console | None = None) -> Report:
        """Measure the drafter beside its baselines and the plain target."""
        from ..eval import contestants, load_suites, measure

        suites = load_suites(self.settings.suites, self.target.require_tokenizer(), self.settings.limit)
        return measure(self.target, contestants(self.target, self.drafter, self.settings, self.plan), suites, self.settings, console=console)


def load_subject(name: str, changes: Sequence[str] = (), drafter: Path | None = None, asked: dict[str, Any] | None = None) -> Subject:
    """A recipe's run or a pair, by whether `name` is a folder that holds a pair.json.

    Args:
        changes: `key=value` overrides of the recipe (a pair brings its own).
        drafter: a saved drafter to take instead.
        asked: fields of EvalSpec that replace the recipe's.
    """
    from ..eval import plan_of

    is_pair = (Path(name).expanduser() / "pair.json").is_file()
    recipe = load_recipe(str(Path(name).expanduser() / "recipe.yaml") if is_pair else name, changes)
    settings = recipe.eval.model_copy(update=asked or {})
    if is_pair:
        return _of_pair(Path(name), settings, drafter, bool({"depth", "width", "nodes"} & set(asked or {})))
    target = load_target(recipe)
    return Subject(target, trained_drafter(recipe, target, drafter), plan_of(settings), settings, recipe.output_folder / "report")


def _of_pair(folder: Path, settings: EvalSpec, drafter: Path | None, other_shape: bool) -> Subject:
    from ..eval import plan_of
    from ..heads import load_drafter
    from ..pair import Pair

    pair = Pair.load(folder)
    target, own, plan = pair.open()
    plan = replace(plan_of(settings), verify=plan.verify) if other_shape else plan
    # The pair's target has the pair's dtype, whatever the recipe once asked for.
    settings = settings.model_copy(update={"dtype": "auto"})
    return Subject(target, load_drafter(drafter, target) if drafter else own, plan, settings, Path("runs") / "reports" / f"{pair.name}-v{pair.version}")


def load_target(recipe: Recipe) -> Target:
    """The recipe's target in the dtype that is measured."""
    from ..target import Target

    spec = recipe.target.model_dump()
    return Target.load(**spec | ({} if recipe.eval.dtype == "auto" else {"dtype": recipe.eval.dtype}))


def trained_drafter(recipe: Recipe, target: Target, folder: Path | None = None) -> Drafter:
    """The drafter in `folder`, else the one that the recipe's training left."""
    from ..heads import load_drafter
    from ..target import BadInputError

    own = recipe.output_folder / "drafter"
    if folder is None and not own.is_dir():
        raise BadInputError(f"there is no trained drafter in {recipe.output_folder}: run `outrider train` with this recipe first, or name one with --drafter.")
    return load_drafter(folder or own, target)
