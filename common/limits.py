"""A limit of time and memory around work that a stranger's text decides about, such as rendering a template.

It stops what Python runs, in this thread: each line of the watched code, and each call in it, looks at how long the
thread has worked. One long call into a library is not stopped, but cannot take more memory than is left.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

try:
    import resource
except ImportError:  # Windows, whose limits are set from outside
    resource = None  # type: ignore[assignment]

_one_at_a_time = threading.RLock()
_OWN_SIZES = Path("/proc/self/statm")


class OverBudgetError(Exception):
    """Work that took longer than it may."""


@contextmanager
def limited(seconds: float, num_bytes: int, code: str) -> Iterator[None]:
    """Run the block with at most so much of the processor's time and so much more memory than the process has now.

    Args:
        code: the file name of code whose lines look at the clock, too; of other code only calls do.

    Raises:
        OverBudgetError: it took longer.
        MemoryError: it asked for more.
    """
    tracing = sys.gettrace()
    with _limited_memory(num_bytes):
        sys.settrace(_watch(time.thread_time() + seconds, seconds, code))
        try:
            yield
        finally:
            sys.settrace(tracing)


def _watch(until: float, seconds: float, code: str) -> Any:
    def look(frame: FrameType, *_: object) -> Any:
        if time.thread_time() > until:
            raise OverBudgetError(f"it takes longer than {seconds:g} seconds")
        return look if frame.f_code.co_filename == code else None

    return look


@contextmanager
def _limited_memory(num_bytes: int) -> Iterator[None]:
    """Let the process allocate at most `num_bytes` more inside; no limit where the system knows none."""
    if resource is None or not _OWN_SIZES.exists():
        yield
        return
    with _one_at_a_time:  # the limit is the process's: of two that overlap the later would leave the other's behind
        yield from _with_limit(num_bytes)


def _with_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(_OWN_SIZES.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([now + num_bytes, *most]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
