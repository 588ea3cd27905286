"""The answers whose fields are those of rooms that need torch; see `json_schemas`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ..costs.training import Needs
from ..formats.lint import LintFinding
from ..serving.diagnosis import ServedResult


@dataclass(frozen=True)
class PlanBody(Needs):
    """What a training will need, and the most memory that one process uses at one time."""

    peak_memory: int = 0


class LintBody(BaseModel, extra="forbid"):
    """What lint found in a drafter's files; a fault is surely wrong, anything else unusual."""

    folder: str
    findings: list[LintFinding]


# By the verb that gives it, as in `json_schemas`.
MEASURED: dict[str, Any] = {
    "plan": PlanBody,
    "lint": LintBody,
    "served": ServedResult,
}
