"""The processes that a launcher started together: as one group, the work of one for all, and the command they run."""

from __future__ import annotations

import argparse
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from torch import distributed

from ..common import OutriderError
from ..common.file_process_group import PREFIX, LaunchGroup, clear_abandoned
from ..common.progress import hide_library_bars, plain_lines, say_retries_once
from ..common.runtime import keep_large_blocks, remember_few_shapes, require_docstrings
from ..common.signals import how, number_of, stop_with_launcher, stoppable
from ..common.terminal import VisibleConsole, log_to_stderr, open_output, print_to_stderr
from ..targets import Target
from ..targets.sharding import follow, leading, leave_group, processes, share


@contextmanager
def launch_group(folder: Path) -> Iterator[LaunchGroup]:
    """Yield this process's place among those of its launch, which all see `folder`. All of them call it together."""
    if processes() == 1:
        yield LaunchGroup()
        return
    rank = distributed.get_rank()
    if rank == 0:
        clear_abandoned(folder)
    group = LaunchGroup(folder / f"{PREFIX}{share(uuid.uuid4().hex)}", rank, processes())
    with group.joined(distributed.barrier):
        yield group


@contextmanager
def one_leads(group: LaunchGroup, target: Target) -> Iterator[None]:
    """Let the main process alone run the block's work, while the others take part in passes of a sharded target."""
    if group.size == 1 or not target.sharded:
        yield
    elif group.is_main:
        with leading(target):
            yield
    else:
        with group.watching_peers():
            follow(target)
        yield


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
