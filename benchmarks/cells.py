"""Everything that one context length and one batch size show: parts of a round, whole loops in turns, overhead, gaps.

All rows are ragged by up to 3 tokens, and all loops write the same tokens: the plain target's own. What does not fit in
memory is written down as that, and the rest goes on.
"""

from __future__ import annotations

import bisect
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, record_function

from outrider.common import BadInputError
from outrider.costs.counting import pass_bytes
from outrider.costs.round_timing import draft_times, verify_times
from outrider.costs.timing import rotated
from outrider.decode import Decoder, Plan
from outrider.heads import Drafter, DraftModel, Ngram
from outrider.targets import Target

from .ceilings import Bandwidth, Floor
from .loops import Loop, Ours, Texts, Theirs, Timed, assist
from .overhead import Overhead, loop_overhead

Result = TypeVar("Result")
MARK = "outrider.read_back"
BUSY = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
Span = tuple[float, float]


@dataclass(frozen=True)
class CellSettings:
    """Settings of the measurement in every cell.

    Attributes:
        depth: of chains.
        new_tokens: of each row; one from the prompt, and 13 full rounds of depth 4. repeats: turns of the loops.
            cost_repeats: turns of single passes.
        widths: drafts beside the root in a pass of the target.
        gaps: whether loops run under the profiler, too, which takes longest.
    """

    depth: int = 4
    new_tokens: int = 66
    repeats: int = 3
    cost_repeats: int = 20
    widths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)
    gaps: bool = True


@dataclass(frozen=True)
class Cell:
    """One context length and batch size.

    Attributes:
        prompts: of the rows.
        drafters: that grow, by name; n-grams and prompt lookup take part beside them.
    """

    target: Target
    drafters: dict[str, Drafter]
    prompts: Texts
    settings: CellSettings
    bandwidth: Bandwidth

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def context(self) -> int:
        return max(map(len, self.prompts))

    def measure(self) -> dict[str, Any]:
        """Return all figures of the cell, as JSON holds them."""
        found: dict[str, Any] = {"context": self.context, "batch": self.batch}
        found["verify"] = guarded(self._verify)
        found["draft_seconds"] = {name: guarded(partial(self._draft, each)) for name, each in self.drafters.items()}
        loops = list(self._loops())
        found |= self._race(loops)
        found["floor"] = self._floor(found["loops"]["plain"].get("seconds_per_round"))
        found["loop_overhead"] = self._overheads(loops, found)
        profiled = loops if self.settings.gaps else []
        found["gaps"] = {loop.name: self._gaps(loop, found["loops"][loop.name]) for loop in profiled}
        release(loops)
        return found

    def _verify(self) -> list[dict[str, Any]]:
        """Return T_verify(n) / T_verify(1), n tokens per row: the root and n − 1 drafts."""
        widths = sorted({0, self.settings.depth, *self.settings.widths})
        taps = next((d.taps for d in self.drafters.values() if d.taps), ())
        times = verify_times(self.target, widths, self.batch, self.context, self.settings.cost_repeats, taps)
        return [
            {"tokens": n + 1, "seconds": seconds, "over_one_token": seconds / times[0]} for n, seconds in times.items()
        ]

    def _draft(self, drafter: Drafter) -> list[float]:
        return draft_times(
            self.target, drafter, self.settings.depth, self.batch, self.context, self.settings.cost_repeats
        )

    def _floor(self, round_seconds: float | None) -> dict[str, Any]:
        """Return the floor of a plain step, and its share of the step's time."""
        floor = Floor(pass_bytes(self.target), self.target.cache_bytes(self.batch, self.context), self.bandwidth)
        if not round_seconds:
            return floor.to_dict()
        shares = {"at_copy": floor.at_copy, "at_read": floor.at_read, "with_cache_at_read": floor.with_cache}
        return floor.to_dict() | {f"share_{name}": seconds / round_seconds for name, seconds in shares.items()}

    def _loops(self) -> Iterator[Loop]:
        """Yield all contestants, the plain target first."""
        target = self.target
        new = self.settings.new_tokens
        plan = Plan(self.settings.depth)
        yield Ours("plain", Decoder(target, fast=False), Plan(0), new)
        for name, drafter in self.drafters.items():
            yield Ours(name, Decoder(target, drafter, fast=False), plan, new)
        yield Ours("ngram", Decoder(target, Ngram(), fast=False), plan, new)
        yield Theirs("transformers.generate", target, new)
        if self.batch > 1:
            return  # transformers drafts for one row only
        for drafter in self.drafters.values():
            if isinstance(drafter, DraftModel):
                yield Theirs("transformers.assisted", target, new, assist(drafter.model, self.settings.depth))
        yield Theirs("transformers.prompt_lookup", target, new, lookup=self.settings.depth)

    def _race(self, loops: Sequence[Loop]) -> dict[str, Any]:
        """Return figures by loop; all take turns if there is memory for what each keeps, else one after the other."""
        tried = [guarded(partial(loop, self.prompts)) for loop in loops]
        if together := not any(isinstance(t, dict) for t in tried):
            runs: dict[str, list[Timed]] = {loop.name: [] for loop in loops}
            for turn in range(self.settings.repeats):
                for loop in rotated(loops, turn):
                    runs[loop.name].append(loop(self.prompts))
            plain = runs["plain"][0].tokens
            found = {loop.name: _figures(runs[loop.name], plain) for loop in loops}
        else:
            release(loops)
            plain = next((t.tokens for t in tried if not isinstance(t, dict)), [])
            found = {loop.name: self._alone(loop, plain) for loop in loops}
        return {"interleaved": together, "loops": found}

    def _alone(self, loop: Loop, plain: Texts) -> dict[str, Any]:
        runs = guarded(lambda: [loop(self.prompts) for _ in range(1 + self.settings.repeats)])
        release([loop])
        return runs if isinstance(runs, dict) else _figures(runs[1:], plain)

    def _overheads(self, loops: Sequence[Loop], found: dict[str, Any]) -> dict[str, Any]:
        """Return the overhead of loops whose passes can be told: plain, and drafters that read nodes."""
        alike = [loop for loop in loops if isinstance(loop, Ours) and loop.name != "ngram"]
        if self.target.device.type == "cuda":
            return {loop.name: self._of_parts(loop, found) for loop in alike}
        return {loop.name: guarded(partial(self._overhead, loop)) for loop in alike}

    def _overhead(self, loop: Ours) -> dict[str, Any]:
        return loop_overhead(loop, [self.prompts], self.settings.repeats).to_dict()

    def _of_parts(self, loop: Ours, found: dict[str, Any]) -> dict[str, Any] | None:
        depth, seconds = loop.plan.depth, found["loops"][loop.name].get("seconds_per_round")
        drafts = found["draft_seconds"].get(loop.name, [0.0])
        passes = {row["tokens"]: row["seconds"] for row in found["verify"]} if isinstance(found["verify"], list) else {}
        if seconds is None or isinstance(drafts, dict) or 1 + depth not in passes:
            return None
        return Overhead.of_parts(seconds, [drafts[depth], passes[1 + depth]]).to_dict()

    def _gaps(self, loop: Loop, figures: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in figures:
            return None
        gaps = guarded(partial(profile, loop, self.prompts, self.target.device.type))
        loop.release()
        return gaps if gaps is None or isinstance(gaps, dict) else gaps.to_dict(figures["seconds_per_round"])


def _figures(runs: Sequence[Timed], plain: Texts) -> dict[str, Any]:
    """Return medians over the repeats. Steady: all steps but the first, which read the prompt."""
    first = runs[0]
    total, steady = statistics.median([r.seconds for r in runs]), statistics.median([r.steady_seconds for r in runs])
    useful = first.steady_rounds > 0
    return {
        "tokens_per_second": sum(map(len, first.tokens)) / total,
        "steady_tokens_per_second": first.steady_tokens / steady if useful else None,
        "seconds_per_round": steady / first.steady_rounds if useful else None,
        "tau": first.tau if useful else None,
        "rounds": first.rounds,
        "seconds": [round(r.seconds, 6) for r in runs],
        "steady_seconds": [round(r.steady_seconds, 6) for r in runs] if useful else None,
        "identical_to_plain": sum(a == b for a, b in zip(first.tokens, plain, strict=True)),
    }


def guarded(work: Callable[[], Result]) -> Result | dict[str, str]:
    """Return the result of `work`, or what was missing: too little memory, as the decoder says before it begins."""
    try:
        return work()
    except (torch.OutOfMemoryError, BadInputError) as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        free_memory()


def release(loops: Sequence[Loop]) -> None:
    """Free what loops keep from call to call."""
    for loop in loops:
        loop.release()
    free_memory()


def free_memory() -> None:
    """Give unused memory back to the GPU, where the next part may need all of it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Gaps:
    """Seconds per round, from the first round on, read from the profiler's own trace.

    On a GPU the device is busy while a kernel or a copy runs; on a CPU while an operator runs, so that there the rest
    is Python. A profiler slows the host down: the share of idle time that it sees is the most there is. Beside it
    stands what follows from its busy time and from the time of a round without it.

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
        """Return the figures, with the idle part of `round_seconds`, the time of a round without the profiler."""
        idle = None if round_seconds is None else max(0.0, round_seconds - self.busy)
        without = {"round_seconds_without_profiler": round_seconds, "idle_seconds_without_profiler": idle}
        return asdict(self) | without


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
    # The first step of transformers' loops is over when the prompts were read.
    return read_trace(trace, device, done.rounds - (done.accepted is None))


def read_trace(trace: dict[str, Any], device: str, rounds: int) -> Gaps | None:
    """Return the gaps of a trace of `rounds` rounds, whose times are in microseconds."""
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
    """Return the same time as spans that do not overlap, in order."""
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
    after = ((bisect.bisect_right(begins, mark), mark) for mark in marks)
    ends = {i for i, mark in after if 0 < i < len(busy) and mark >= busy[i - 1][1]}
    return [busy[i][0] - busy[i - 1][1] for i in sorted(ends)]
