"""A drafter that arrives from elsewhere becomes a pair: it has no recipe, so one is written that says what is known."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from ..common import BadInputError
from ..heads import Drafter
from ..recipes import Recipe
from ..targets import Target
from .new import new_pair
from .pair import Pair

# What a refresh learns from, if nobody names other prompts: `outrider refresh … data.prompts=[…]`.
PROMPTS = ["embedded:code", "embedded:docs", "embedded:prose"]


def arrival_recipe(name: str, target: Target, drafter: Drafter) -> Recipe:
    """Return a recipe for a drafter that was trained elsewhere: its type, its target, and the shipped prompts."""
    path = target.source.get("path")
    if path is None:
        raise BadInputError("this target was given in memory; load it from a folder or the Hub to make a pair.")
    spec = {k: v for k, v in target.source.items() if v is not None}
    dtype = str(target.dtype).removeprefix("torch.")
    values = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._") or drafter.name,
        "target": spec | {"dtype": dtype},
        "drafter": {"type": drafter.name},
        "data": {"prompts": PROMPTS},
        "eval": {"depth": min(4, drafter.max_depth or 4)},
    }
    return Recipe.from_dict(values)


def paired(folder: str | Path, target: Target, drafter: Drafter, console: Console | None = None) -> Pair:
    """Make a pair of a drafter that was trained elsewhere, and measure its probe baseline.

    Raises:
        BadInputError: something else is in `folder`, or the target cannot be named.
        IncompatibleError: the drafter cannot draft for this target.
    """
    recipe = arrival_recipe(Path(folder).name, target, drafter)
    return new_pair(folder, target, drafter, recipe, console=console)
