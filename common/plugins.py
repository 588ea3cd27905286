"""What other packages add to Outrider: drafters, export layouts, targets, verbs and more.

A package registers an object under the entry-point group `outrider.<kind>` in its own pyproject.toml. `outrider.lab`
does so in ours, so that nothing in the kernel names it.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from .errors import BadInputError


@cache
def registered(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of a kind by name, without those whose package has been removed.

    Raises:
        BadInputError: two packages register the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"outrider.{kind}"):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            raise BadInputError(
                f"two packages register {point.name!r} in outrider.{kind}: {known.value} and {point.value}; uninstall "
                "one of them."
            )
    return {name: point for name, point in found.items() if find_spec(point.module.rpartition(".")[0] or point.module)}


def plugin(kind: str, name: str) -> Any | None:
    """Return the object that is registered under a name; None for an unknown name."""
    point = registered(kind).get(name)
    return None if point is None else point.load()


def plugins(kind: str) -> dict[str, Any]:
    """Return all objects of a kind by name."""
    return {name: point.load() for name, point in registered(kind).items()}
