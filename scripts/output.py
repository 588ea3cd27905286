"""Where a verb speaks: to people on stdout, or to them on stderr while stdout holds one JSON answer for a program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import TextIO

from rich.console import Console

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
    """Write an answer for a program to stdout."""
    stdout = _answers.get() or sys.stdout
    stdout.write(text)
    stdout.flush()


def console_for(as_json: bool) -> Console:
    """Return the console that a verb speaks to people with."""
    return Console(stderr=as_json)
