"""Versions of pairs in one place, which several people and machines share.

`open_registry("runs/registry")`, `open_registry("hf://org/pairs")` or `open_registry("wandb://team/project")`, all
with the same layout of files (`layout`).
"""

from __future__ import annotations

from ...common import BadInputError
from .folder import FolderStore
from .hub import HubStore
from .layout import Entry, PairReference, RegistryStore
from .registry import Registry, Version
from .wandb_store import WandbStore

__all__ = [
    "Entry",
    "FolderStore",
    "HubStore",
    "PairReference",
    "Registry",
    "RegistryStore",
    "Version",
    "WandbStore",
    "open_registry",
]


def open_registry(where: str) -> Registry:
    """Return the registry at `where`: a folder, `hf://ORG/REPOSITORY` or `wandb://[ENTITY/]PROJECT`.

    Raises:
        BadInputError: it is none of these.
    """
    kind, separator, name = where.partition("://")
    if not separator:
        return Registry(FolderStore(where))
    if kind == "hf" and name.count("/") == 1:
        return Registry(HubStore(name))
    if kind == "wandb" and name and name.count("/") <= 1:
        return Registry(WandbStore(name))
    raise BadInputError(
        f"{where!r} is no registry: expected a folder, hf://ORG/REPOSITORY or wandb://[ENTITY/]PROJECT."
    )
