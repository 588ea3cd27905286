"""`outrider lab search`: better recipes around the given ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..common.places import COMPARISON, require_place
from ..scripts.options import AsJson, SeveralRecipes, recipes_of
from ..scripts.output import console_for, finish


def search(
    recipes: SeveralRecipes,
    candidates: Annotated[
        int,
        typer.Option(min=2, help="The given recipes, and others drawn around them; the best get all of the time."),
    ] = 36,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[…]", help="What is tried, instead of values around each recipe; repeatable."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds of training for the best.")] = 180.0,
    out: Annotated[
        Path, typer.Option(help="Folder of responses, trainings and report; what is finished in it is reused.")
    ] = Path("runs/search"),
    as_json: AsJson = False,
) -> None:
    """Find a faster recipe by successive halving, and measure the best of all in one run."""
    loaded = recipes_of(recipes)
    require_place(out, COMPARISON)
    from ..eval.reports.render import print_comparison
    from ..scripts.json_schemas import report_fields
    from .recipe_search import Search
    from .recipe_search import search as run

    console = console_for(as_json)
    report = run(loaded, budget, out, Search.of(candidates, over or []), console=console)
    if not as_json:
        print_comparison(report, console)
        console.print(f"report: [bold]{escape(str(out / 'report'))}[/bold]")
        console.print(f"best recipe: [bold]{escape(str(out / 'best.yaml'))}[/bold]")
    finish(as_json, "search", report_fields(report, out / "report"))
