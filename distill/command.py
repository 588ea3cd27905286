"""The command `python -m outrider.VERB RECIPE [key=value …]`, which each process of a launch runs."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence

from rich.console import Console

from ..common import OutriderError
from ..common.progress import hide_library_bars, plain_lines, say_retries_once
from ..common.runtime import keep_large_blocks, remember_few_shapes, require_docstrings
from ..common.signals import how, number_of, stop_with_launcher, stoppable
from ..common.terminal import VisibleConsole, log_to_stderr, open_output, print_to_stderr
from ..targets.sharding import leave_group


def recipe_parser(verb: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m outrider.VERB RECIPE [key=value …]`."""
    parser = argparse.ArgumentParser(prog=f"python -m outrider.{verb}", description=description)
    parser.add_argument("recipe", help="a YAML file, or the name of a packaged recipe such as embedded-eagle3")
    changes = f"settings to change, for example {example}"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=changes)
    return parser


def run_command(
    verb: str,
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    work: Callable[[argparse.Namespace, Console | None], str],
) -> int:
    """Do a verb's work in this process of a launch; return its exit code: 0, 2, 3, or of a signal 130, 143 or 129.

    Args:
        work: returns what the first process says at the end; the console is None in the others.
    """
    if arguments is None:  # the process is this command's own
        open_output()
    given, rank = parser.parse_intermixed_args(arguments), os.environ.get("RANK", "0")
    log_to_stderr(logging.INFO if rank == "0" else logging.ERROR)
    say_retries_once()
    hide_library_bars()
    keep_large_blocks()
    remember_few_shapes()
    stop_with_launcher()
    prefix = "" if rank == "0" else f"[process {rank}] "
    ended_well, console = False, None if prefix else VisibleConsole(stderr=True)
    try:
        require_docstrings()
        with stoppable(), plain_lines(console, verb):
            said, code = work(given, console), 0
        ended_well = True
    except OutriderError as error:
        said, code = f"{prefix}error: {error}", error.exit_code
    except KeyboardInterrupt as error:
        again = "" if str(error).endswith(".") else "; run the same command again."
        said, code = f"{prefix}{str(error) or how(error)}{again}", 128 + number_of(error)
    finally:
        leave_group(ended_well)
    if code or not prefix:
        print_to_stderr(said)
    return code
