"""The small world of the command's tests, for benchmarks."""

from __future__ import annotations

from ..scripts.conftest import outrider, recipe_file, target_folder

__all__ = ["outrider", "recipe_file", "target_folder"]
