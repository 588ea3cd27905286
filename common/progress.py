"""A progress bar for long work, on a terminal; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]


@contextmanager
def progress(
    console: Console | None, description: str, total: int, done: int = 0, transient: bool = False
) -> Iterator[Advance]:
    """Yield `advance(count, note)`; `note` stands after the bar, for example a rate.

    `transient` removes the bar at the end.
    """
    if console is None or not console.is_terminal:
        yield _ignore
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=transient) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")
        yield lambda count, note: bar.update(task, advance=count, note=note)


def _ignore(count: int, note: str) -> None:
    """Draw nothing, where nobody looks."""
