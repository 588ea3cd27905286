"""What a profiler sees of a loop: how long the device waits for the host, in all and between two rounds.

Read from the profiler's own trace. On a GPU the device is busy while a kernel or a copy runs; on a CPU while an
operator runs, so that there the rest is Python. A profiler slows the host down: the share of idle time that it sees
is the most there is. Beside it stands what follows from its busy time and from the time of a round without it.
"""

from __future__ import annotations

import bisect
import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from .loops import Loop

MARK = "outrider.read_back"
BUSY = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}

Span = tuple[float, float]


@dataclass(frozen=True)
class Gaps:
    """Seconds per round, from the first round on.

    Attributes:
        window: all of it, with the profiler running. busy: of which the device worked.
        idle_share: 1 − busy ÷ window.
        between: median wait around the moment at which the host has read a round back; None if it never did so with
            the device at rest.
        rounds: how many.
    """

    window: float
    busy: float
    idle_share: float
    between: float | None
    rounds: int

    def to_dict(self, round_seconds: float | None = None) -> dict[str, Any]:
        """With `round_seconds`, the time of a round without the profiler: what of it the device was not busy."""
        found = asdict(self) | {"round_seconds_without_profiler": round_seconds}
        return found | {
            "idle_seconds_without_profiler": None if round_seconds is None else max(0.0, round_seconds - self.busy)
        }


def profile(loop: Loop, prompts: Sequence[Sequence[int]], device: str) -> Gaps | None:
    """Complete `prompts` under the profiler, after a warm-up; None if it saw nothing of the device."""
    loop(prompts)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    profiler = torch.profiler.profile(activities=activities)
    running = False

    def mark(_: int) -> None:
        nonlocal running
        if not running:
            running = True
            profiler.start()
        with record_function(MARK):
            pass

    try:
        done = loop(prompts, mark)
    finally:
        if running:
            profiler.stop()
    if not running:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    rounds = (
        done.rounds - 1 if done.accepted is None else done.rounds
    )  # their first step is over when the prompts were read
    return read_trace(trace, device, rounds)


def read_trace(trace: dict[str, Any], device: str, rounds: int) -> Gaps | None:
    """Gaps of a trace of `rounds` rounds, whose times are in microseconds."""
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    busy = merged((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in BUSY[device])
    if not busy or rounds < 1:
        return None
    marks = [e["ts"] for e in events if e.get("name") == MARK and e.get("cat") != "gpu_user_annotation"]
    window, worked = busy[-1][1] - busy[0][0], sum(end - begin for begin, end in busy)
    between = waits(busy, marks)
    return Gaps(
        window=window / rounds / 1e6,
        busy=worked / rounds / 1e6,
        idle_share=1 - worked / window,
        between=statistics.median(between) / 1e6 if between else None,
        rounds=rounds,
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def waits(busy: Sequence[Span], marks: Iterable[float]) -> list[float]:
    """Return the lengths of the waits between `busy` spans in which a mark stands; no mark elsewhere counts."""
    begins = [begin for begin, _ in busy]
    ends = {bisect.bisect_right(begins, mark) for mark in marks if _waiting(busy, begins, mark)}
    return [busy[i][0] - busy[i - 1][1] for i in sorted(ends)]


def _waiting(busy: Sequence[Span], begins: Sequence[float], mark: float) -> bool:
    i = bisect.bisect_right(begins, mark)
    return 0 < i < len(busy) and mark >= busy[i - 1][1]
