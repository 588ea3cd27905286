"""`accelerate launch -m outrider.train RECIPE [key=value …]`, or `python -m outrider.train …` for one process."""

from __future__ import annotations

import argparse
import logging
import os

from ..common import OutriderError
from ..common.progress import hide_library_bars, plain_lines, say_retries_once
from ..common.runtime import keep_large_blocks, remember_few_shapes
from ..common.signals import how, number_of, stop_with_launcher, stoppable
from ..common.terminal import VisibleConsole, log_to_stderr, print_to_stderr
from ..recipes import load_recipe
from ..targets.sharding import leave_group
from .callbacks import held_out_taus
from .run import TrainingInterruptedError, train


def main(arguments: list[str] | None = None) -> int:
    """Train a recipe; returns the exit code (0 fine, 2 bad input, 3 incompatible, 130, 143 or 129 stopped)."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.train", description="Train a drafter for a target, as a recipe says."
    )
    parser.add_argument("recipe", help="a YAML file, or the name of a packaged recipe such as embedded-eagle3")
    changes = "settings to change, for example training.max_steps=100"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=changes)
    fresh = "start over; checkpoints of an earlier run are moved aside"
    parser.add_argument("--fresh", action="store_true", help=fresh)
    given = parser.parse_intermixed_args(arguments)
    rank = os.environ.get("RANK", "0")
    log_to_stderr(logging.INFO if rank == "0" else logging.ERROR)
    say_retries_once()
    hide_library_bars()
    keep_large_blocks()
    remember_few_shapes()
    stop_with_launcher()
    return _run(given, "" if rank == "0" else f"[process {rank}] ")


def _run(given: argparse.Namespace, prefix: str) -> int:
    ended_well, console = False, None if prefix else VisibleConsole(stderr=True)
    try:
        with stoppable(), plain_lines(console, "train"):
            result = train(load_recipe(given.recipe, given.overrides), resume=not given.fresh, console=console)
        ended_well = True
    except OutriderError as error:
        return _say(f"{prefix}error: {error}", error.exit_code)
    except TrainingInterruptedError as stopped:
        return _say(f"{prefix}{stopped}", stopped.exit_code)
    except KeyboardInterrupt as error:
        return _say(f"{prefix}{how(error)}. Run the same command again.", 128 + number_of(error))
    finally:
        leave_group(ended_well)
    made = f"drafter after {result.steps} steps: {result.drafter_folder}{held_out_taus(result.metrics)}"
    return _say(made, 0) if not prefix else 0


def _say(line: str, code: int) -> int:
    print_to_stderr(line)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
