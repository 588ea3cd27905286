"""Which versions of the software are installed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

# What a measurement or a training depends on.
PACKAGES = ("outrider", "torch", "transformers", "accelerate", "datasets")


def installed_version(name: str) -> str | None:
    """Return the installed version of the package `name`; None where it is not installed, as in a bare checkout."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions(*names: str) -> dict[str, str]:
    """Return the versions of Python and of the packages `names` (by default `PACKAGES`), as far as installed."""
    found = {name: installed_version(name) for name in names or PACKAGES}
    return {"python": platform.python_version()} | {
        name: number for name, number in found.items() if number is not None
    }
