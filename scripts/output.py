"""Where a verb speaks: to people on stdout, or to them on stderr while stdout holds one JSON answer for a program."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..common.terminal import VisibleConsole, visible

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

_answers: ContextVar[TextIO | None] = ContextVar("answers", default=None)


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Keep stdout for `tell` while a verb runs, if a program asked: what libraries print goes to stderr."""
    if not as_json:
        yield
        return
    token = _answers.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.reset(token)


def tell(text: str) -> None:
    """Write an answer for a program, in JSON, to stdout; where that is not in UTF-8, in ASCII."""
    stdout = _answers.get() or sys.stdout
    text = visible(text)
    if not str(stdout.encoding).lower().startswith("utf"):
        text = _NOT_ASCII.sub(lambda letter: json.dumps(letter[0])[1:-1], text)
    stdout.write(text)
    stdout.flush()


def finish(as_json: bool, kind: str, body: Any, code: int = 0, show: Callable[[], None] | None = None) -> None:
    """End a verb: answer a program with `body`, or show people what there is; then leave with the exit code."""
    if as_json:
        from .json_schemas import answer

        tell(json.dumps(answer(kind, body, code), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    elif show is not None:
        show()
    if code:
        raise typer.Exit(code)


def console_for(as_json: bool) -> Console:
    """Return the console that a verb speaks to people with."""
    return VisibleConsole(stderr=as_json)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of markup as they are, however long."""
    console = VisibleConsole(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)


def print_facts(facts: Iterable[tuple[str, str]], console: Console) -> None:
    """Print names, and beside them their values in markup; on a terminal a long value goes on in the next line."""
    facts = list(facts)
    if not console.is_terminal:
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            console.print(Text(f"{name:<{width}}  ") + Text.from_markup(value))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    console.print(table)
