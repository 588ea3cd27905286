"""`accelerate launch -m outrider.distill RECIPE [key=value …]`: every process of the launch answers prompts.

`outrider distill RECIPE` does the same with one process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.signals import end_by_interrupt, watched

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Distil a recipe; return the exit code (see `run_command`)."""
    from .command import recipe_parser, run_command

    parser = recipe_parser("distill", "Let the target answer the recipe's prompts.", "data.limit=100")
    return run_command("distill", parser, arguments, _distill)


def _distill(given: argparse.Namespace, console: Console | None) -> str:
    from accelerate import PartialState

    from ..common import BadInputError
    from ..common.machine import best_device
    from ..recipes import load_recipe
    from .responses import distill

    asked = int(os.environ.get("WORLD_SIZE", "1"))
    started = PartialState(cpu=asked > 1 and best_device().type == "cpu").num_processes
    if started != asked:
        raise BadInputError(
            f"the launcher started {asked} processes, but they run as {started}. Start them with `accelerate "
            "launch --multi_gpu` or torchrun."
        )
    folder = distill(load_recipe(given.recipe, given.overrides), console=console)
    return f"responses: {folder}" + (f" ({asked} processes)" if asked > 1 else "")


if __name__ == "__main__":
    end_by_interrupt()
    with watched():
        raise SystemExit(main())
