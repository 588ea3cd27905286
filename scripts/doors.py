"""The verbs at the doors: pairs out to other engines, published drafters in, and a look at either."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

PairFolder = Annotated[Path, typer.Argument(metavar="PAIR", help="A pair's folder.")]


def add_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(name="export")(export)


def export(
    pair: PairFolder,
    to: Annotated[str, typer.Option("--to", help="vllm, speculators, sglang, hf, medusa, eagle or gguf.")],
    out: Annotated[Path | None, typer.Option(help="A new folder (default: runs/exports/NAME-vVERSION-TO).")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens of a round (default: the tuned plan's, else the pair's).")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Where the target is now (default: where the pair says).")] = None,
) -> None:
    """Write a pair's drafter as another engine reads it; read it back, compare its logits, and say how to start it."""
    from ..pair import Pair, export_pair

    loaded = Pair.load(pair)
    made = export_pair(loaded, to, out, depth, None if target is None else loaded.load_target(target))
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[green]✓[/green] {escape(str(made.folder))}: layout {made.exported.layout}, read back with the drafter's own "
        f"logits (largest difference {made.exported.difference:.1e} of their spread)"
    )
    if made.launch.command is not None:
        console.print(escape(made.launch.command))
