"""The processes that a launcher started together, as a crew; and the work that one of them does for all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

from ..common.process_group import PREFIX, Crew, clear_crews
from ..targets import Target
from ..targets.sharding import follow, leading, processes, share


@contextmanager
def crew_in(folder: Path) -> Iterator[Crew]:
    """Yield this process's place among those of its launch, which all see `folder`. All of them call it together."""
    if processes() == 1:
        yield Crew()
        return
    rank = distributed.get_rank()
    if rank == 0:
        clear_crews(folder)
    crew = Crew(folder / f"{PREFIX}{share(uuid.uuid4().hex)}", rank, processes())
    with crew.working(distributed.barrier):
        yield crew


@contextmanager
def one_leads(crew: Crew, target: Target) -> Iterator[None]:
    """Run the block on the main process alone, while the others take part in the passes of a sharded target.

    In the others the block must do nothing.
    """
    if crew.size == 1 or not target.sharded:
        yield
    elif crew.is_main:
        with leading(target):
            yield
    else:
        with crew.watched():
            follow(target)
        yield
