"""The verbs that write other folders: exports to engines, published drafters read in and lint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..common.places import PAIR, require_new, require_place
from ..common.terminal import VisibleConsole
from .options import PairFolder, TargetNow, pair_of
from .output import finish, print_lines

if TYPE_CHECKING:
    from ..recipes import Recipe


Engine = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help="Check first that vllm, sglang, hf, … can serve such a drafter, or say what can.",
    ),
]


def check_servable(recipe: Recipe, engine: str | None) -> None:
    """Refuse a recipe whose drafter `engine` cannot serve; None asks nothing."""
    if engine is None:
        return
    from ..train.check import check_servable as check

    check(recipe, engine)


def export(
    pair: PairFolder,
    to: Annotated[
        str,
        typer.Option("--to", help="A layout, such as vllm, sglang, hf or llama.cpp; any other word lists all."),
    ],
    out: Annotated[Path | None, typer.Option(help="A new folder (default: runs/exports/NAME-vVERSION-TO).")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens of a round (default: the tuned plan's, else the pair's).")
    ] = None,
    target: TargetNow = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Serve the target's adapter as a LoRA module of its base, not merged.")
    ] = False,
    precision: Annotated[
        str,
        typer.Option(
            help="Of its matrices, for vLLM fp8, w8a16, w4a16, for llama.cpp f32, f16, bf16, q8_0, q5_1 … q4_0 "
            "(default: their own). What it costs in τ is measured first."
        ),
    ] = "",
) -> None:
    """Write a pair's drafter as another engine reads it.

    It is read back, its logits are compared, and the command that serves it is shown.
    """
    loaded = pair_of(pair)
    from ..pair import export_pair

    loaded_target = None if target is None else loaded.load_target(target, adapter=loaded.adapter)
    console = VisibleConsole(highlight=False, soft_wrap=True, stderr=True)
    made = export_pair(loaded, to, out, depth, loaded_target, lora, precision, console)
    line = (
        f"[green]✓[/green] {escape(str(made.folder))}: layout {made.exported.layout}, read back with the drafter's own "
        f"logits (largest difference {made.exported.difference:.1e} of their spread)"
    )
    if made.exported.rounding:
        line += f"; rounded to {precision}, which moved them by {made.exported.rounding:.1e} of it at most"
    command = made.launch.command
    oldest = made.launch.oldest
    adapter = made.launch.adapter
    more = made.cost.lines if made.cost else []
    more += [] if command is None else [command]
    more += [] if oldest is None else [f"it needs {made.launch.engine} {oldest}"]
    more += [] if adapter is None else [f"requests ask for the model {adapter['name']}"]
    print_lines([line, *map(escape, more)])


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A drafter in another program's layout.")],
    target: Annotated[str, typer.Option(help="The target it drafts for: a folder, a Hub id, or 'embedded'.")],
    out: Annotated[Path, typer.Option(help="Where the drafter (or the pair) goes.")],
    adapter: Annotated[str | None, typer.Option(help="A PEFT adapter of the target.")] = None,
    as_pair: Annotated[
        bool, typer.Option("--pair", help="Make a pair of it, which can be measured, probed and refreshed.")
    ] = False,
) -> None:
    """Read a drafter that another program wrote, as one of ours.

    Nothing is guessed, and nothing is dropped.
    """
    if as_pair:
        require_place(out, PAIR, what="the pair")
    else:
        require_new(out, "the drafter")
    from ..common.digests import save_whole
    from ..formats import import_drafter, recognised
    from ..pair.new import paired
    from ..targets import Target

    layout = recognised(folder)
    loaded = Target.load(target, adapter=adapter)
    drafter = import_drafter(folder, loaded)
    console = VisibleConsole(highlight=False, soft_wrap=True)
    if as_pair:
        paired(out, loaded, drafter, console=console)
    else:
        save_whole(drafter, out)
    kind = "pair" if as_pair else "drafter"
    console.print(f"{kind} of type {drafter.name}, from the layout {layout.name}: [bold]{escape(str(out))}[/bold]")


def lint(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A drafter as another program reads it.")],
    target: Annotated[
        str | None, typer.Option(help="The target's folder, or 'embedded' (default: the one that the files name).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What is wrong or unusual in a drafter's files.

    And what an engine would do with it. Exit code 1 for a fault.
    """
    from ..formats import recognised
    from ..formats.lint import lint as run

    findings = run(folder, target)
    lines = [
        f"{'[red]✗[/red]' if one.is_fault else '[yellow]?[/yellow]'} [bold]{one.check}[/bold] {escape(one.found)} "
        f"[dim]{escape(one.engine)}[/dim]"
        for one in findings
    ]
    code = int(any(one.is_fault for one in findings))
    body = {"folder": str(folder), "findings": findings}
    if not findings:
        layout = recognised(folder)
        whole = ", a whole model, of which only config.json was read" if layout.is_model else ""
        kind = f"read as a drafter of type {layout.drafter} in the layout {layout.name}{whole}"
        lines = [f"[green]✓[/green] {escape(str(folder))}: nothing found; {kind}"]
    finish(as_json, "lint", body, code, lambda: print_lines(lines))


def formats(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Which drafter goes to which engine, and how that is known.

    Served by a real one here, read back by its source, or not, and why.
    """
    from ..formats.support import ENGINES, support

    rows = support()
    colours = {"served": "green", "read back": "yellow", "no": "dim"}
    lines = []
    for one in rows:
        colour = colours[one.level]
        lines.append(f"{one.drafter:16} {ENGINES[one.engine]:12} [{colour}]{one.level:9}[/{colour}] {escape(one.said)}")
    finish(as_json, "formats", {"support": rows}, 0, lambda: print_lines(lines))
