"""A group of verbs that a package adds to the command, under one word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer

from ..common.plugins import plugins


@dataclass(frozen=True)
class VerbGroup:
    """The verbs of one package, registered under `outrider.verbs`.

    Attributes:
        app: the verbs. Importing it must not import torch.
        examples: command lines of `--help`, by "GROUP VERB".
        bodies: returns the verbs' JSON answers by kind: each a type, or types by the names of fields.
        speaking: verbs whose output appears as it is made.
    """

    app: typer.Typer
    examples: Mapping[str, Sequence[str]]
    bodies: Callable[[], Mapping[str, Any]]
    speaking: Sequence[str] = ()


@cache
def verb_groups() -> dict[str, VerbGroup]:
    """Return the groups of all packages that are installed, by name."""
    return plugins("verbs")
