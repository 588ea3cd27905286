"""The answers whose fields are those of rooms that need torch; see `json_schemas`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ..costs.training import Needs
from ..eval.load_simulation import Capacity
from ..eval.pruning import VocabularyReport
from ..eval.replay import Replayed
from ..formats.lint_context import LintFinding
from ..serving.diagnosis import ServedResult
from ..serving.watching import WatchEvent


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
    "vocab": VocabularyReport,
    "capacity": Capacity,
    "replay": Replayed,
    "plan": PlanBody,
    "lint": LintBody,
    "served": ServedResult,
    "watch": WatchEvent,
}
