"""`outrider lab fleet`: few drafters for many adapters of a pair's target, and which adapter takes which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..scripts.options import AsJson, Overrides, PairFolder, pair_of
from ..scripts.output import console_for, finish, print_lines


def fleet(
    pair: PairFolder,
    adapters: Annotated[Path, typer.Option(help="A folder of PEFT adapters of the pair's target.")],
    out: Annotated[Path, typer.Option(help="Where routes and drafters go; the same words go on there.")],
    changes: Overrides = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the change of the drafter that a group learns.")] = 8,
    most: Annotated[int, typer.Option(min=1, help="Groups.")] = 5,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Of training, for each group (default: a refresh's steps).")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Share of τ: who loses less keeps the pair's drafter.")
    ] = 0.05,
    as_json: AsJson = False,
) -> None:
    """Probe every adapter, teach a few drafters, and write down which adapter takes which."""
    from .fleet import OWN, ROUTES, Fleet, FleetOptions, adapters_in

    found, console = adapters_in(adapters), console_for(as_json)
    options = FleetOptions(rank, most, seconds, tolerance, tuple(changes or []))
    routed = Fleet(pair_of(pair), found, out, options, console).run()
    names = {OWN: "the pair's own"} | {group.leader: f"that of {group.leader}" for group in routed.groups}
    lines = [
        f"{escape(route.adapter)}: τ {route.before.text('–')} → {route.now.text('–')} with "
        f"{escape(names[route.drafter])}, {route.kept.text('–')} of the pair's"
        for route in routed.routes
    ]
    lines += [
        f"that of {escape(group.leader)}: {group.bytes / 1e6:.2f} MB, which gives adapters {group.gained:.2f} τ in all"
        for group in routed.groups
    ]
    size = sum(group.bytes for group in routed.groups) / 1e6
    back = "no adapter lost more than that"
    if routed.regained is not None:
        back = f"{routed.regained:.0%} of the lost τ is back"
    lines.append(
        f"[green]✓[/green] {escape(str(out / ROUTES))}: {len(routed.groups)} changes of the drafter, {size:.2f} MB in "
        f"all, for {len(routed.routes)} adapters; {back}"
    )
    finish(as_json, "fleet", routed, show=lambda: print_lines(lines))
