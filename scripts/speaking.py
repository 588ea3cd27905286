"""Where a verb speaks: to people on stdout, or to them on stderr while stdout holds one JSON answer for a program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from rich.console import Console


@contextmanager
def speaking(as_json: bool) -> Iterator[Console]:
    """Yield a verb's console. With `as_json` it is on stderr, and so is whatever libraries print meanwhile."""
    if not as_json:
        yield Console()
        return
    with redirect_stdout(sys.stderr):
        yield Console(stderr=True)
