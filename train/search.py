"""Recipes drawn around given ones, and compared by successive halving (arXiv 1502.07943).

All candidates are trained for a short time, the best third for three times as long, and so on, until few are left for
the whole time. The given recipes hold places to the end, since a short training flatters what learns quickly: what is
found is no slower than what was given. Each training begins anew: the schedule of its learning rate ends with its time.
Rounds are timed once for all candidates that draft alike, so that chance in a timing decides nothing among them.
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
from ..heads.registry import drafter_config
from ..recipes import Recipe, override

REDUCTION = 3  # of the candidates one in so many goes on, for so many times as long
FINALISTS = 3  # at most, that are trained for the whole time; more where more are given
EARLY = 1 / 9  # of the whole time; shorter trainings differ by so much that fewer prompts tell them apart
_FACTORS = {"training.learning_rate": (1 / 3, 3.0), "drafter.draft_vocab_size": (0.5, 2.0)}  # of a recipe's own value
_VALUES = {"drafter.num_layers": (1, 2), "drafter.steps": (1, 2, 4), "drafter.loss": ("soft_ce", "lk_hybrid")}
_LEARNT_BY = {
    "loss",
    "steps",
    "feature_loss",
    "noise",
}  # settings that change nothing of how a drafter drafts but its depth
_OWN = object()  # stands for the recipe's own value
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """What a trained candidate is predicted to reach in its best chain: τ, and speed over the plain target's."""

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

    def draw(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        """Return the given recipes, and others around them, each with a name of its own."""
        others = []
        for recipe in recipes:
            space = self.over or _usual_values(recipe)
            for values in product(*space.values()):
                changed = _changed(recipe, dict(zip(space, values, strict=True)))
                others += [changed] if changed != recipe else []
        drawn = random.Random(self.seed).sample(others, min(len(others), max(0, self.candidates - len(recipes))))
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
        """Return the finalists, what all trainings shorter than `seconds` leave, each with its best depth in `eval`.

        Args:
            score: trains a candidate for so many seconds, and measures it.
            file: keeps the scores; those that it holds are not made again.
            given: so many of the first candidates stay to the end, and at least one other.

        Raises:
            BadInputError: `file` is of a search among others.
        """
        told = {recipe.name: {"drafter": recipe.drafter, "training": recipe.training} for recipe in candidates}
        known: dict[str, dict[str, Any]] = _read(file) or {"candidates": told}
        if known["candidates"] != told:
            raise BadInputError(f"{file} is of a search among other candidates; choose another --out, or delete it.")
        left, stay = list(candidates), {recipe.name for recipe in candidates[:given]}
        rounds = math.ceil(math.log(max(1, len(left) / FINALISTS), REDUCTION) - 1e-9)
        for before in range(rounds, 0, -1):
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
            others = [recipe.name for recipe in order if recipe.name not in stay][: max(1, most - given)]
            kept = (recipe for recipe in order if recipe.name in stay or recipe.name in others)
            left = [_at_depth(recipe, scores[recipe.name]["depth"]) for recipe in kept]
        return left


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


def decoded_settings(recipe: Recipe, max_depth: int | None) -> str:
    """Return what rounds may take longer by: drafters that agree in it have the same costs.

    `max_depth` is the drafter's own: `steps` are unrolled in training by some, and drafted at once by others.
    """
    settings = {name: value for name, value in recipe.drafter.items() if name not in _LEARNT_BY}
    return json.dumps([settings, max_depth], sort_keys=True)


def _at_depth(recipe: Recipe, depth: int) -> Recipe:
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"depth": depth})})


def _usual_values(recipe: Recipe) -> dict[str, Sequence[Any]]:
    """Return values around a recipe's own ones, of the settings that it has."""
    values = recipe.drafter
    space: dict[str, Sequence[Any]] = {}
    config = None if "init" in values else drafter_config(values)[1]
    for key, usual in (_FACTORS | _VALUES).items():
        section, name = key.split(".")
        if own := recipe.training.get(name, 5e-5) if section == "training" else getattr(config, name, None):
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
