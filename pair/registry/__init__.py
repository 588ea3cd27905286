"""Versions of pairs in one place, which several people and machines share.

`open_registry("runs/registry")`, `open_registry("hf://org/pairs")` or `open_registry("wandb://team/project")`, all
with the same layout of files (`layout`).
"""

from __future__ import annotations

import re

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

_NAME = r"[^/\\?#%:@]+"  # no user, password or query, as a URL may have


def open_registry(where: str) -> Registry:
    """Return the registry at `where`: a folder, `hf://ORG/REPOSITORY` or `wandb://[ENTITY/]PROJECT`.

    Raises:
        BadInputError: it is none of these.
    """
    if re.fullmatch(rf"hf://{_NAME}/{_NAME}", where):
        return Registry(HubStore(where.removeprefix("hf://")))
    if re.fullmatch(rf"wandb://({_NAME}/)?{_NAME}", where):
        return Registry(WandbStore(where.removeprefix("wandb://")))
    if not re.match(r"[A-Za-z][\w+.-]+:/", where):
        return Registry(FolderStore(where))
    raise BadInputError(
        f"{where!r} is no registry: expected a folder, hf://ORG/REPOSITORY or wandb://[ENTITY/]PROJECT."
    )
