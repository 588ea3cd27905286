"""The JSON answers of the lab's verbs."""

from __future__ import annotations

from typing import Any

from ..scripts.json_schemas import Body, Measured, ReportBody
from .load_simulation import Capacity
from .replay import Replayed
from .vocabulary_pruning import VocabularyReport
from .watching import WatchEvent


class ContradictionBody(Body):
    """Two statements of a file that cannot both hold: the mistake's name, and what stands there."""

    name: str
    line: str


class ReportCheckBody(Body):
    """The contradictions of each file that was checked."""

    files: dict[str, list[ContradictionBody]]


class ReportFormsBody(Body):
    """The files that were written, by form, and the conventions of what they say."""

    files: dict[str, str]
    conventions: str


class TrendVersionBody(Body):
    """One version over time, and what changed since the one before."""

    version: str
    created: str
    tau: Measured
    speedup: Measured
    changes: list[str]


class ReportTrendBody(Body):
    """The folder of the page, and the versions in their order."""

    folder: str
    versions: list[TrendVersionBody]


BODIES: dict[str, Any] = {
    "vocab": VocabularyReport,
    "capacity": Capacity,
    "replay": Replayed,
    "search": ReportBody,
    "watch": WatchEvent,
    "report-check": ReportCheckBody,
    "report-forms": ReportFormsBody,
    "report-trend": ReportTrendBody,
}
