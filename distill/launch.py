"""The processes that a launcher started together, as one group, of which one may do the work for all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

from ..common.file_process_group import PREFIX, LaunchGroup, clear_abandoned
from ..targets import Target
from ..targets.sharding import follow, leading, processes, share


@contextmanager
def launch_group(folder: Path) -> Iterator[LaunchGroup]:
    """Yield this process's place among those of its launch, which all see `folder`. All of them call it together."""
    if processes() == 1:
        yield LaunchGroup()
        return
    rank = distributed.get_rank()
    if rank == 0:
        clear_abandoned(folder)
    group = LaunchGroup(folder / f"{PREFIX}{share(uuid.uuid4().hex)}", rank, processes())
    with group.joined(distributed.barrier):
        yield group


@contextmanager
def one_leads(group: LaunchGroup, target: Target) -> Iterator[None]:
    """Let the main process alone run the block's work, while the others take part in passes of a sharded target."""
    if group.size == 1 or not target.sharded:
        yield
    elif group.is_main:
        with leading(target):
            yield
    else:
        with group.watching_peers():
            follow(target)
        yield
