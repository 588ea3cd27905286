"""Recipes drawn around given ones, and compared by successive halving (arXiv 1502.07943).

What was drawn is trained for a short time, the best third for three times as long, and so on, until few are left for
the whole time. The given recipes are among these: a short training flatters what learns quickly, and so what is found
is no slower than what was given. Each training begins anew: the schedule of its learning rate ends with its time.
Rounds are timed once for all candidates that draft alike, so that chance in a timing decides nothing among them (after
an interruption anew).
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any, Self

from ..common import BadInputError
from ..common.digests import read_sealed, write_json
from ..heads.registry import drafter_config, is_warm, with_defaults
from ..recipes import Recipe, override
from .arguments import check_training
from .drafter_init import FREE

REDUCTION = 3  # of the candidates one in so many goes on, for so many times as long
FINALISTS = 3  # that are trained for the whole time, at most; one more than are given, where that is more
EARLY = 0.3  # of the whole time; shorter trainings differ by so much that fewer prompts tell them apart
_FACTORS = {"training.learning_rate": (1 / 3, 3.0), "drafter.draft_vocab_size": (0.5, 2.0)}  # of a recipe's own value
_VALUES = {"drafter.num_layers": (1, 2), "drafter.steps": (1, 2, 4), "drafter.loss": ("soft_ce", "lk_hybrid")}
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
        drawn, seen, why = list[Recipe](), {_content(recipe) for recipe in recipes}, ""
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
