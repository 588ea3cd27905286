"""Layouts that other engines read: drafters written for them, read back as they read them, and read by us."""

from __future__ import annotations

from .base_layout import DrafterFiles, ExportLayout, Unsupported
from .engines import LAYOUTS, EngineLaunch, launch, layout_of, oldest_version, require_served
from .export import Exported, export_drafter, rounded, write_drafter
from .import_ import import_drafter, recognised

__all__ = ["DrafterFiles", "ExportLayout", "Exported", "Unsupported", "export_drafter", "import_drafter", "recognised"]
__all__ += ["rounded", "write_drafter"]
__all__ += ["LAYOUTS", "EngineLaunch", "launch", "layout_of", "oldest_version", "require_served"]
