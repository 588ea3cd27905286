"""Layouts that other engines read: drafters written for them, read back as they read them, and read by us."""

from __future__ import annotations

from .arrival import import_drafter, recognised
from .drafter_files import DrafterFiles
from .engines import LAYOUTS, Launch, launch, layout_of, require_served
from .layout import Lack, Layout
from .speculators import load_speculators
from .transfer import Exported, export_drafter

__all__ = [
    "LAYOUTS",
    "DrafterFiles",
    "Exported",
    "Lack",
    "Launch",
    "Layout",
    "export_drafter",
    "import_drafter",
    "launch",
    "layout_of",
    "load_speculators",
    "recognised",
    "require_served",
]
