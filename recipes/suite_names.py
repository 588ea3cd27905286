"""The suites that a recipe names: `code`, `docs` and `prose` come with Outrider, anything else is a prompt file or a
data set on the Hub."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..common import BadInputError
from . import embedded_file

PACKAGED = ("code", "docs", "prose")
_ON_HUB = re.compile(r"[\w.-]+/([\w.-]+)(/[\w.-]+)?(:[\w.-]+)?")  # org/name[/config][:split]


def find_suites(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the titles and sources of suites. BadInputError: see `find_suite`; or two have one title."""
    suites = [find_suite(name) for name in names]
    for title, count in Counter(title for title, _ in suites).items():
        if count > 1:
            raise BadInputError(
                f"{count} suites are called {title!r}; figures are reported by name, so give each file another one."
            )
    return suites


def find_suite(name: str) -> tuple[str, str]:
    """Return a suite's title and source: a file, or a data set on the Hub.

    Raises:
        BadInputError: it is none of these.
    """
    if name in PACKAGED:
        return name, str(embedded_file(f"suites/{name}.jsonl"))
    file = Path(name).expanduser()
    if file.is_dir():
        raise BadInputError(f"the suite {name!r} is a folder; name one file of prompts in it.")
    if file.exists():  # Spec-Bench and EAGLE call every one of their files question.jsonl
        return file.absolute().parent.name if file.stem == "question" else file.stem, str(file)
    if (found := _ON_HUB.fullmatch(name)) and not re.search(r"\.\w+$", name) and not name.startswith("."):
        return found[1], name
    near = difflib.get_close_matches(name, PACKAGED, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"packaged suites: {', '.join(PACKAGED)}; anything else must be a prompt file, or org/name on the Hub."
    )
    raise BadInputError(f"no suite {name!r}: it is neither packaged nor a file; {hint}")
