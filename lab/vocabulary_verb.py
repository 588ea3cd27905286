"""`outrider lab vocab`: which draft vocabulary to keep."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.places import COMPARISON, TRAINED, require_place
from ..scripts.options import AsJson, Overrides, RecipeName, recipe_of
from ..scripts.output import console_for, finish


def vocab(
    recipe: RecipeName,
    changes: Overrides = None,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="A size beside the usual ones; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Responses that acceptance is measured on, at most.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Which draft vocabulary to keep: what each size covers of the target's responses, and what pruning loses."""
    loaded = recipe_of(recipe, changes)
    require_place(loaded.output_folder, *TRAINED, COMPARISON)
    from .vocabulary_study import save, show, study

    console = console_for(as_json)
    report = study(loaded, size or (), limit, console=console)
    folder = save(report, loaded.output_folder / "vocabulary")
    finish(as_json, "vocab", report, show=lambda: show(report, folder, console))
