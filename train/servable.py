"""Before anything is trained: can the engine that it is meant for serve such a drafter?"""

from __future__ import annotations

from ..formats import require_served
from ..recipes import Recipe
from .planning import sketch_drafter, sketch_target


def check_servable(recipe: Recipe, engine: str) -> None:
    """Refuse a recipe whose drafter `engine` cannot serve; configs are read, and no weights.

    Raises:
        BadInputError: an unknown engine, or a config that cannot be read.
        IncompatibleError: it serves no drafters of this type, or not with these settings: each is named with the
            nearest one that it serves.
    """
    target = sketch_target(recipe)
    drafter = sketch_drafter(recipe, target)
    require_served(engine, drafter.name, drafter.config, target.num_layers)
