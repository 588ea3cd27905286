"""Names of files that file managers, network disks and git leave in any folder, whoever made it.

They are no part of what was made: nothing lists them, nothing loads them, and a folder with them is still whole.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

HARMLESS = (".DS_Store", "Thumbs.db", ".nfs*", ".gitattributes")


def is_harmless(file: Path) -> bool:
    """Tell whether a file has one of these names."""
    return any(fnmatchcase(file.name, name) for name in HARMLESS)
