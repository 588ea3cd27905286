"""`accelerate launch -m outrider.distill RECIPE [key=value …]`: every process of the launch answers prompts.

`outrider distill RECIPE` does the same with one process.
"""

from __future__ import annotations

import argparse
import logging
import os

from accelerate import PartialState

from ..common import BadInputError, OutriderError
from ..common.machine import best_device
from ..common.progress import hide_library_bars, plain_lines
from ..common.runtime import keep_large_blocks, remember_few_shapes
from ..common.signals import how, number_of, stop_with_launcher, stoppable
from ..common.terminal import VisibleConsole, log_to_stderr, print_to_stderr
from ..recipes import load_recipe
from ..targets.sharding import leave_group
from .responses import distill


def main(arguments: list[str] | None = None) -> int:
    """Distil a recipe; returns the exit code (0 fine, 2 bad input, 3 incompatible, 130, 143 or 129 stopped)."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.distill", description="Let the target answer the recipe's prompts."
    )
    parser.add_argument("recipe", help="a YAML file, or the name of a packaged recipe such as embedded-eagle3")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings to change, for example data.limit=100"
    )
    given = parser.parse_intermixed_args(arguments)
    rank = os.environ.get("RANK", "0")
    log_to_stderr(logging.INFO if rank == "0" else logging.ERROR)
    hide_library_bars()
    keep_large_blocks()
    remember_few_shapes()
    stop_with_launcher()
    return _run(given, "" if rank == "0" else f"[process {rank}] ")


def _run(given: argparse.Namespace, prefix: str) -> int:
    asked, ended_well = int(os.environ.get("WORLD_SIZE", "1")), False
    console = None if prefix else VisibleConsole(stderr=True)
    try:
        with stoppable(), plain_lines(console, "distill"):
            started = PartialState(cpu=asked > 1 and best_device().type == "cpu").num_processes
            if started != asked:
                raise BadInputError(
                    f"the launcher started {asked} processes, but they run as {started}. Start them with `accelerate "
                    "launch --multi_gpu` or torchrun."
                )
            recipe = load_recipe(given.recipe, given.overrides)
            folder = distill(recipe, console=console)
        ended_well = True
    except OutriderError as error:
        return _say(f"{prefix}error: {error}", error.exit_code)
    except KeyboardInterrupt as error:
        return _say(f"{prefix}{error or how(error)}; run the same command again.", 128 + number_of(error))
    finally:
        leave_group(ended_well)
    processes = f" ({asked} processes)" if asked > 1 else ""
    return 0 if prefix else _say(f"responses: {folder}{processes}", 0)


def _say(line: str, code: int) -> int:
    print_to_stderr(line)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
