"""A progress bar for long work, on a terminal; nothing elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]


@contextmanager
def progress(
    console: Console | None, description: str, total: int, done: int = 0, transient: bool = False
) -> Iterator[Advance]:
    """Yield `advance(count, note)`; `note`, such as a rate, stands after the bar. `transient` removes it at the end."""
    if console is None or not console.is_terminal:
        yield lambda *_: None
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
