"""What tables of the results page are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]
NOTHING = "–"
MEGABYTE = 1e6


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def interval(found: Result | None, digits: int = 2, sign: str = "") -> str:
    """Return a value with its interval: `1.22 [1.09, 1.37]`."""
    if found is None:
        return NOTHING
    value, low, high = (f"{found[key]:{sign}.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
