"""The suites that a recipe names: `code`, `docs` and `prose` come with Outrider, anything else is a prompt file."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..common import BadInputError
from . import embedded_file

PACKAGED = ("code", "docs", "prose")


def find_suites(names: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the titles and files of suites. BadInputError: see `find_suite`; or two have one title."""
    suites = [find_suite(name) for name in names]
    for title, count in Counter(title for title, _ in suites).items():
        if count > 1:
            raise BadInputError(
                f"{count} suites are called {title!r}; figures are reported by name, so give each file another one."
            )
    return suites


def find_suite(name: str) -> tuple[str, Path]:
    """Return a suite's title and file.

    Raises:
        BadInputError: it is neither packaged nor a file.
    """
    if name in PACKAGED:
        return name, embedded_file(f"suites/{name}.jsonl")
    file = Path(name).expanduser()
    if file.is_file():  # Spec-Bench and EAGLE call every one of their files question.jsonl
        return file.absolute().parent.name if file.stem == "question" else file.stem, file
    near = difflib.get_close_matches(name, PACKAGED, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"packaged suites: {', '.join(PACKAGED)}; anything else must be a prompt file."
    )
    raise BadInputError(f"no suite {name!r}: it is neither packaged nor a file; {hint}")
