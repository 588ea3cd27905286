"""The verbs that make drafters: distill, train, plan, compare, and the quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..common.places import COMPARISON, QUICKSTART, TRAINED, require_place
from ..common.terminal import VisibleConsole
from . import dry_runs, export_cli
from .options import FINDING, AsJson, Overrides, RecipeName, SeveralRecipes, recipe_of, recipes_of
from .output import console_for, finish


def distill(
    recipe: RecipeName, changes: Overrides = None, dry_run: dry_runs.DryRun = False, as_json: AsJson = False
) -> None:
    """Let the target answer the prompts: what a drafter learns from."""
    loaded = recipe_of(recipe, changes)
    require_place(loaded.output_folder, *TRAINED, COMPARISON)
    if dry_run:
        return dry_runs.of_recipe(loaded, trains=False).tell(as_json)
    from ..distill import distill as run
    from ..distill import provenance

    console = console_for(as_json)
    folder = run(loaded, console=console)
    console.print(f"responses: [bold]{escape(str(folder))}[/bold]")
    finish(as_json, "distill", {"folder": str(folder), "counts": provenance(folder)["counts"]})


def train(
    recipe: RecipeName,
    changes: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; checkpoints of an earlier run are moved aside.")
    ] = False,
    engine: export_cli.Engine = None,
    dry_run: dry_runs.DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter (distils first if needed).

    For many processes: accelerate launch -m outrider.train RECIPE.
    """
    loaded = recipe_of(recipe, changes)
    require_place(loaded.output_folder, *TRAINED)
    export_cli.check_servable(loaded, engine)
    if dry_run:
        return dry_runs.of_recipe(loaded).tell(as_json)
    from ..train import train as run
    from ..train.callbacks import held_out_taus

    console = console_for(as_json)
    result = run(loaded, resume=not fresh, console=console)
    console.print(
        f"drafter after {result.steps} steps: [bold]{escape(str(result.drafter_folder))}[/bold]"
        f"{escape(held_out_taus(result.metrics, result.kept))}"
    )
    made = {"drafter": str(result.drafter_folder), "steps": result.steps}
    finish(as_json, "train", made | {"metrics": result.metrics})


def plan(
    recipe: RecipeName,
    changes: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes, one GPU each (default: the accelerate config's, else 1).")
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(help="none, zero1, zero2, zero3 or fsdp (default: the accelerate config's, else none)."),
    ] = None,
    accelerate_config: Annotated[Path | None, typer.Option(help="A file written by `accelerate config`.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Prompts, where the recipe's sources do not tell.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the target, and measure this machine's own times, too.")
    ] = False,
    engine: export_cli.Engine = None,
    as_json: AsJson = False,
) -> None:
    """Before anything is spent: memory, disk, operations and time.

    On this machine and on named GPUs, from the configs and the lengths of local prompts.
    """
    loaded = recipe_of(recipe, changes)
    export_cli.check_servable(loaded, engine)
    from ..train.resource_estimate import plan as run
    from .plan import read_launch, show

    launched = read_launch(accelerate_config) if accelerate_config else (1, "none")
    found = run(loaded, processes or launched[0], sharding or launched[1], rows, measure)  # type: ignore[arg-type]
    body = vars(found) | {"peak_memory": found.memory.peak}
    finish(as_json, "plan", body, show=lambda: show(found, VisibleConsole()))


def compare(
    recipes: SeveralRecipes,
    budget: Annotated[float, typer.Option(help="Seconds of training for each recipe.")] = 180.0,
    out: Annotated[
        Path, typer.Option(help="Folder of responses, trainings and report; what is finished in it is reused.")
    ] = Path("runs/compare"),
    dry_run: dry_runs.DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train recipes for the same time on the same data, and compare.

    All are measured in one run: τ, speedup, parameters, with intervals.
    """
    loaded = recipes_of(recipes)
    require_place(out, COMPARISON)
    if dry_run:
        return dry_runs.of_comparison(loaded, budget, out).tell(as_json)
    from ..eval.reports.render import print_comparison
    from ..train.compare import compare as run
    from .json_schemas import report_fields

    console = console_for(as_json)
    report = run(loaded, budget, out, console=console)
    if not as_json:
        print_comparison(report, console)
        console.print(f"report: [bold]{escape(str(out / 'report'))}[/bold]")
    finish(as_json, "compare", report_fields(report, out / "report"))


def quickstart(
    out: Annotated[Path, typer.Option(help="Working folder; finished stages in it are reused.")] = Path("quickstart"),
    target: Annotated[
        str, typer.Option(help="embedded, or smollm2: a real model, fetched before; takes longer.")
    ] = "embedded",
) -> None:
    """The whole story on the embedded target, in a few minutes.

    Distil, train, measure, pair; change the target; probe, refresh, gate.
    """
    require_place(out, QUICKSTART, what="the quickstart")
    from .quickstart import QuickstartBudget, tell

    if not tell(out, VisibleConsole(), QuickstartBudget.of(target)):
        raise typer.Exit(FINDING)
