"""The suites that a recipe names: `code`, `docs` and `prose` come with Outrider, anything else is a prompt file."""

from __future__ import annotations

import difflib
from pathlib import Path

from ..common import BadInputError
from . import embedded_file

PACKAGED = ("code", "docs", "prose")


def find_suite(name: str) -> tuple[str, Path]:
    """Return a suite's title and file.

    Raises:
        BadInputError: it is neither packaged nor a file.
    """
    if name in PACKAGED:
        return name, embedded_file(f"suites/{name}.jsonl")
    file = Path(name).expanduser()
    if file.is_file():
        return file.stem, file
    near = difflib.get_close_matches(name, PACKAGED, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"packaged suites: {', '.join(PACKAGED)}; anything else must be a prompt file."
    )
    raise BadInputError(f"no suite {name!r}: it is neither packaged nor a file; {hint}")
