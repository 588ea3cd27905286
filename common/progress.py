"""The progress of long work: a bar on a terminal, and a plain line every ten seconds in a log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .terminal import print_to_stderr

Advance = Callable[[int, str], None]

EVERY = 10.0  # seconds from one plain line to the next

_is_quiet = ContextVar("is_quiet", default=False)


@contextmanager
def quietly(wanted: bool = True) -> Iterator[None]:
    """Show no progress and announce nothing while what is inside runs, if that is wanted. For commands."""
    token = _is_quiet.set(wanted)
    try:
        yield
    finally:
        _is_quiet.reset(token)


@contextmanager
def progress(
    console: Console | None, description: str, total: int, done: int = 0, transient: bool = False
) -> Iterator[Advance]:
    """Yield `advance(count, note)`; `note`, such as a rate, stands after the bar. `transient` removes it at the end.

    Where the console is no terminal there are `plain_lines` instead, and nothing where it is None.
    """
    if console is None or not console.is_terminal or _is_quiet.get():
        with plain_lines(console, description, total, done) as advance:
            yield advance
        return
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=transient) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")
        yield lambda count, note: bar.update(task, advance=count, note=note)


def announce(console: Console | None, text: str) -> None:
    """Say what long work will do, before it begins, where there is a console."""
    if console is not None and not _is_quiet.get():
        console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(eq=False)
class _Task:
    """Work that is being done: `done` of `total` parts, 0 where they are not counted."""

    description: str
    total: int
    done: int
    note: str = ""
    new: int = 0  # parts since it began
    began: float = field(default_factory=time.monotonic)

    def advance(self, count: int, note: str) -> None:
        self.done += count
        self.new += count
        self.note = note

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        parts = [f"{self.done:,} of {self.total:,}"] if self.total else []
        parts += [self.note] if self.note else []
        left = (self.total - self.done) * seconds / self.new if self.new else 0.0
        parts.append(f"about {duration(left)} left" if left > 0 else f"{duration(seconds)} so far")
        return f"{self.description}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Return a time in words, such as `90 s` or `25 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


_tasks: list[_Task] = []  # from the outermost to the innermost


@contextmanager
def plain_lines(console: Console | None, description: str, total: int = 0, done: int = 0) -> Iterator[Advance]:
    """Yield `advance(count, note)`; every ten seconds a line about the innermost work goes to stderr, if it changed.

    Nothing is written for a console that is a terminal, or None.
    """
    if console is None or console.is_terminal or _is_quiet.get():
        yield lambda *_: None
        return
    task, ended = _Task(description, total, done), threading.Event()
    _tasks.append(task)
    clock = threading.Thread(target=_tell, args=(ended,), daemon=True) if _tasks[0] is task else None
    if clock is not None:
        clock.start()
    try:
        yield task.advance
    finally:
        ended.set()
        if clock is not None:
            clock.join()
        _tasks.remove(task)


def _tell(ended: threading.Event) -> None:
    told = ""
    with suppress(OSError, ValueError):  # stderr was closed
        while not ended.wait(EVERY):
            if (line := _tasks[-1].line()) != told:
                print_to_stderr(told := line)


def hide_library_bars() -> None:
    """Turn off the bars that libraries draw, unless one process draws them on a terminal. For commands.

    A log would hold them as one endless line, and several processes' would run through each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and sys.stderr.isatty():
        return
    from datasets import disable_progress_bars as hide_bars_of_datasets
    from huggingface_hub.utils import disable_progress_bars as hide_bars_of_the_hub
    from transformers.utils import logging as transformers_logging

    hide_bars_of_datasets()
    hide_bars_of_the_hub()
    transformers_logging.disable_progress_bar()


_RETRYING = "huggingface_hub.utils._http"  # writes two lines for each try, to two handlers

_log = logging.getLogger(__name__)


def say_retries_once() -> None:
    """Make the Hub's library report once, and not at every try, that it cannot be reached. For commands."""
    logger = logging.getLogger(_RETRYING)
    if not any(isinstance(known, _Once) for known in logger.filters):
        logger.addFilter(_Once())


class _Once(logging.Filter):
    """A filter that drops the library's messages about tries, and logs one of our own at the first."""

    warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not ("thrown while requesting" in text or text.startswith("Retrying in")):
            return True
        if not self.warned:
            self.warned = True
            _log.warning("the Hub does not answer; trying again for about half a minute …")
        return False
