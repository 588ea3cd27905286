"""`accelerate launch -m outrider.train RECIPE [key=value …]`, or `python -m outrider.train …` for one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.signals import end_by_interrupt, watched

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a recipe; return the exit code (see `run_command`)."""
    from ..distill.command import recipe_parser, run_command

    parser = recipe_parser("train", "Train a drafter for a target, as a recipe says.", "training.max_steps=100")
    fresh = "start over; checkpoints of an earlier run are moved aside"
    parser.add_argument("--fresh", action="store_true", help=fresh)
    return run_command("train", parser, arguments, _train)


def _train(given: argparse.Namespace, console: Console | None) -> str:
    from ..recipes import load_recipe
    from .callbacks import held_out_taus
    from .run import train

    result = train(load_recipe(given.recipe, given.overrides), resume=not given.fresh, console=console)
    return f"drafter after {result.steps} steps: {result.drafter_folder}{held_out_taus(result.metrics, result.kept)}"


if __name__ == "__main__":
    end_by_interrupt()
    with watched():
        raise SystemExit(main())
