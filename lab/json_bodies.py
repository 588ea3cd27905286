"""The JSON answers of the lab's verbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..pair.manifest import Figure
from ..scripts.json_schemas import REPORT
from .candidates import CandidateFigures
from .claims import Contradiction
from .fleet import FleetRoutes
from .learning import Event
from .load_simulation import Capacity
from .replay import Replayed
from .vocabulary_pruning import VocabularyReport
from .watching import WatchEvent


@dataclass(frozen=True)
class TrendVersion:
    """One version over time, and what changed since the one before."""

    version: str
    created: str
    tau: Figure
    speedup: Figure
    changes: list[str]


BODIES: dict[str, Any] = {
    "vocab": VocabularyReport,
    "candidates": CandidateFigures,
    "capacity": Capacity,
    "replay": Replayed,
    "search": REPORT,
    "watch": WatchEvent,
    "learn": Event,
    "fleet": FleetRoutes,
    "report-check": {"files": dict[str, list[Contradiction]]},
    "report-forms": {"files": dict[str, str], "conventions": str},
    "report-trend": {"folder": str, "versions": list[TrendVersion]},
}
