"""Pieces of work, timed in turns, so that whatever else the machine does hits all alike.

Times are medians unless a name says otherwise, in seconds; on a GPU each ends when the device has finished.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..common.machine import clock

_log = logging.getLogger("outrider")
WARM_UP = 2  # turns of each kind before the first one that counts

Key = TypeVar("Key")
T = TypeVar("T")
Pool = Any  # of torch.cuda.graph_pool_handle: memory that CUDA graphs share


def medians(works: Mapping[Key, Callable[[], object]], device: torch.device, repeats: int) -> dict[Key, float]:
    """Return the median seconds of each piece of work, timed in turns."""
    spent: dict[Key, list[float]] = {key: [] for key in works}
    for key, counts in turns(list(works), repeats):
        seconds = timed(works[key], device)
        if counts:
            spent[key].append(seconds)
    return {key: statistics.median(times) for key, times in spent.items()}


def turns(keys: Sequence[Key], repeats: int) -> Iterator[tuple[Key, bool]]:
    """Yield every key once per turn, and whether the turn counts: the first few are a warm-up."""
    for turn in range(-WARM_UP, repeats):
        for key in rotated(keys, turn):
            yield key, turn >= 0


def rotated(entries: Sequence[T], turn: int) -> list[T]:
    """Return the entries in the order of a turn: the first place moves on by one entry with each."""
    first = turn % len(entries) if entries else 0
    return [*entries[first:], *entries[:first]]


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, until `device` has finished."""
    began = clock(device)
    work()
    return clock(device) - began


def least(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the least seconds of `work`, after a warm-up: what else the machine does only adds."""
    for _ in range(WARM_UP):
        work()
    return min(timed(work, device) for _ in range(repeats))


def bfloat16_speedup(device: torch.device, size: int = 1024) -> float:
    """Return how many times as fast a device multiplies large matrices in bfloat16 as in float32."""
    wide = torch.ones(size, size, device=device)
    half = wide.bfloat16()
    return least(lambda: wide @ wide, device, 3) / least(lambda: half @ half, device, 3)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Give torch `count` CPU threads inside; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class CapturedReplay:
    """A captured piece of work, and what it was captured from, whose memory it reads."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def captured(
    work: Callable[[], object], device: torch.device, pool: Pool | None = None, warm: bool = True
) -> Callable[[], object]:
    """Return `work` as a CUDA graph on a GPU; `work` itself elsewhere, and where it cannot be captured (logged).

    What it reads must not be freed as long as the graph lives; what it returns is dropped.

    Args:
        pool: memory that graphs share, of which one runs at a time.
        warm: run it first, since capture must not be the first time.
    """
    if device.type != "cuda":
        return work
    for _ in range(WARM_UP if warm else 0):
        work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        _log.warning("a pass cannot be captured as a CUDA graph here, it is timed as it is: %s", reason)
        return work
    return CapturedReplay(graph, work)
