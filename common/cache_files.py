"""Small files of what was measured on this machine, in the user's cache folder; each is safe to delete."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from .atomic import write_atomically
from .digest_cache import cache_file
from .untrusted_files import read_text

T = TypeVar("T")


class CacheFile(Generic[T]):
    """A JSON file of values that a `TypeAdapter` reads and writes."""

    def __init__(self, name: str, kind: TypeAdapter[T]):
        self.name, self.kind = name, kind

    @property
    def path(self) -> Path:
        return cache_file().with_name(self.name)

    def read(self) -> T | None:
        """Return what the file holds; None if there is none, or it is damaged or foreign."""
        with suppress(OSError, ValueError, RuntimeError):
            return self.kind.validate_json(read_text(self.path))
        return None

    def write(self, values: T) -> None:
        """Write values for later processes; where the folder cannot be written that only costs time."""
        with suppress(OSError, RuntimeError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.kind.dump_json(values, indent=2).decode() + "\n")
