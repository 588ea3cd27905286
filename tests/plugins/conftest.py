"""The fixtures that a plugin is tested with, as the command's own verbs are."""

from ..scripts.conftest import outrider, recipe_file, target_folder  # noqa: F401
