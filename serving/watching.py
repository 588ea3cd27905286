"""A running engine's drafting over time: windows of rounds, compared with how it goes when all is well."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.locks import locked
from ..pair import Pair
from .changepoint import DEEP, Chart, CusumState, NormalDrafting, WatchLimits
from .engine import Counters

LEARNED = 30  # windows that a baseline is learned from, where no pair gives one
WINDOWS = (200, 100, 50, 25, 400)  # rounds of a window, tried in this order
SURE = 3.0  # spreads by which a position must differ to be named
PATIENCE = 120.0  # seconds that a look waits for another one with the same state file


class WatchState(BaseModel):
    """What a watch of one engine knows; it is kept between runs of `outrider watch --once`.

    Attributes:
        seen: the counters at the last look. open: what the window that is not full yet has counted.
        windows: how many were full. learned: those that the baseline is learned from.
        sums: where the test stands. restarts, alarms: how many there were.
    """

    model_config = ConfigDict(extra="forbid")

    url: str
    baseline: NormalDrafting | None = None
    seen: dict[str, Any] | None = None
    open: dict[str, Any] | None = None
    windows: int = 0
    learned: list[dict[str, Any]] = []
    sums: CusumState = CusumState()
    restarts: int = 0
    alarms: int = 0


class EngineWatch:
    """The watch of one engine: counters in, events out.

    Args:
        state: what is known already.
        limits: of the test.
    """

    def __init__(self, state: WatchState, limits: WatchLimits):
        self.state, self.limits = state, limits
        self._chart: Chart | None = None

    @property
    def chart(self) -> Chart | None:
        """The test; None while the baseline is still learned."""
        if self._chart is None and self.state.baseline is not None:
            self._chart = Chart.calibrated(self.state.baseline, self.limits)
        return self._chart

    def look(self, now: Counters) -> Iterator[WatchEvent]:
        """Take in what the engine counts now, and yield what is to be said about it."""
        seen = None if self.state.seen is None else _counters(self.state.seen)
        self.state.seen = asdict(now)
        if seen is None:
            return  # what was counted before the watch began is nobody's window
        if now.restarted(seen):
            self.state.restarts += 1
            yield self._event("restart", now)
        new = now.since(seen)
        gathered = new if self.state.open is None else _counters(self.state.open).plus(new)
        if gathered.rounds < self.limits.window:
            self.state.open = asdict(gathered)
            return
        self.state.open = None
        self.state.windows += 1
        yield from self._judge(gathered)

    def silent(self, reason: str) -> WatchEvent:
        """Return the event of an engine that does not answer."""
        return WatchEvent(kind="silent", url=self.state.url, time=_now(), reason=reason)

    def _judge(self, window: Counters) -> Iterator[WatchEvent]:
        baseline, chart = self.state.baseline, self.chart
        if baseline is None or chart is None:
            yield self._window(window)
            yield from self._learn(window)
            return
        score = baseline.score(window.rounds, window.accepted)
        self.state.sums = sums = self.state.sums.after(score, window.rounds / self.limits.window, chart.slack)
        yield self._window(window, score=score, fall=sums.fall, rise=sums.rise)
        change = sums.alarm(chart.threshold)
        if change is not None:
            since = sums.fallen if change == "fall" else sums.risen
            self.state.sums = CusumState()  # the next alarm is about what comes now
            self.state.alarms += 1
            told = {"change": change, "since": since, "position": _first_apart(window, baseline)}
            yield self._window(window, "alarm", score=score, **told)

    def _learn(self, window: Counters) -> Iterator[WatchEvent]:
        self.state.learned.append(asdict(window))
        if len(self.state.learned) >= LEARNED:
            windows = [_counters(values) for values in self.state.learned]
            self.state.baseline, self.state.learned = learned(windows, self.state.url), []
            yield self._event("learned", window)

    def _window(self, window: Counters, kind: Literal["window", "alarm"] = "window", **told: Any) -> WatchEvent:
        found = self._event(kind, window)
        return found.model_copy(
            update={
                "rounds": window.rounds,
                "tau": window.tau,
                "by_position": conditional(window),
                "threshold": None if self.chart is None else self.chart.threshold,
                **told,
            }
        )

    def _event(self, kind: Literal["window", "learned", "alarm", "restart"], counters: Counters) -> WatchEvent:
        tau = None if self.state.baseline is None else self.state.baseline.tau
        return WatchEvent(
            kind=kind,
            url=self.state.url,
            time=_now(),
            engine=counters.engine,
            window=self.state.windows,
            baseline=tau,
        )


def conditional(counters: Counters) -> list[float]:
    """Return the acceptance at each position, given that all drafts before it were accepted."""
    reached = [counters.rounds, *counters.by_position]
    return [kept / before for kept, before in zip(counters.by_position, reached, strict=False) if before]


def _first_apart(window: Counters, baseline: NormalDrafting) -> int | None:
    """Return the first position whose conditional acceptance certainly differs from the baseline's."""
    usual = [1.0, *baseline.by_position]
    reached = [window.rounds, *window.by_position]
    for i, (kept, before) in enumerate(zip(window.by_position, reached, strict=False)):
        if i + 1 >= len(usual) or not usual[i] or before < 1:
            return None
        expected = usual[i + 1] / usual[i]
        spread = math.sqrt(max(expected * (1 - expected), 1e-6) / before)
        if abs(kept / before - expected) > SURE * spread:
            return i + 1
    return None


def _counters(values: dict[str, Any]) -> Counters:
    found = Counters(**values)
    return replace(found, by_position=tuple(found.by_position), uncounted=tuple(found.uncounted))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------ baselines


def learned(windows: Sequence[Counters], url: str) -> NormalDrafting:
    """Return the baseline of an engine's own first windows."""
    source = f"the first {len(windows)} windows of {url}"
    found = NormalDrafting.of([w.rounds for w in windows], [w.accepted for w in windows], source)
    everything = reduce(Counters.plus, windows)
    return found.model_copy(update={"by_position": tuple(k / everything.rounds for k in everything.by_position)})


def baseline_of(pair: Pair) -> tuple[NormalDrafting, WatchLimits]:
    """Return how the pair drafted on its own target, which its probes compare with, and the limits that it can watch.

    Raises:
        BadInputError: the pair has no such prompts, or too few of them.
    """
    measured = pair.manifest.measurements.baseline
    if measured is None or not measured.prompts:
        raise BadInputError(f"{pair.folder}: this pair has no baseline; let the watch learn one (leave out --pair).")
    drafting = [p for p in measured.prompts if p.rounds]
    source = f"{pair.name} version {pair.version}, temperature {measured.temperature:g}"
    baseline = NormalDrafting.of([p.rounds for p in drafting], [p.accepted for p in drafting], source)
    return baseline, limits_for(baseline)


def limits_for(baseline: NormalDrafting) -> WatchLimits:
    """Return the limits with the first of `WINDOWS` in which a deep fall would be found.

    Raises:
        BadInputError: the baseline is from so few rounds that it would be found in none.
    """
    for size in WINDOWS:
        limits = WatchLimits(window=size)
        if _sees(baseline, limits):
            return limits
    raise BadInputError(
        f"{baseline.source}: a baseline from {baseline.rounds:.0f} rounds is too uncertain: not even a fall of the "
        f"accepted drafts by {DEEP:.0%} would be found. Let the watch learn a baseline (leave out --pair)."
    )


def _sees(baseline: NormalDrafting, limits: WatchLimits) -> bool:
    return math.isfinite(Chart.calibrated(baseline, limits).delay_in_rounds(baseline, DEEP))


# ------------------------------------------------------------ between runs, and elsewhere


@contextmanager
def kept_states(file: Path, urls: Sequence[str], baseline: NormalDrafting | None) -> Iterator[list[WatchState]]:
    """Yield what is known of each engine, and write it to `file` at the end, beside what others keep there.

    Nobody else looks with the same file meanwhile: looks of several cron jobs follow one another.

    Raises:
        BadInputError: the file cannot be understood, or another look does not end.
    """
    with locked(file, PATIENCE):
        known = _known(file)
        states = [_continued(known.get(url), url, baseline) for url in urls]
        try:
            yield states
        finally:  # an engine that does not answer takes nothing from the others
            save_states(file, list((known | {s.url: s for s in states}).values()))


def _known(file: Path) -> dict[str, WatchState]:
    if not file.is_file():
        return {}
    try:
        return {s["url"]: WatchState.model_validate(s) for s in json.loads(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise BadInputError(f"{file}: cannot be read as the state of a watch ({error}); delete it.") from error


def _continued(known: WatchState | None, url: str, baseline: NormalDrafting | None) -> WatchState:
    """Return what is known of an engine; the test begins again if a pair's baseline is given that is another one."""
    if known is None or (baseline is not None and known.baseline != baseline):
        return WatchState(url=url, baseline=baseline, seen=None if known is None else known.seen)
    return known


def save_states(file: Path, states: Sequence[WatchState]) -> None:
    """Write what is known of each engine, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps([s.model_dump(mode="json") for s in states], indent=1) + "\n")


def require_webhook(webhook: str) -> None:
    """Refuse what is no address to send alarms to, before anybody relies on it.

    Raises:
        BadInputError: it is no http or https URL. It is not repeated: whoever knows a webhook's URL may post to it.
    """
    try:
        place = urlsplit(webhook)
        is_url = place.scheme in ("http", "https") and bool(place.hostname) and (place.port or 1) > 0
        urllib.request.Request(webhook)
    except ValueError:
        is_url = False
    if not is_url or not webhook.isprintable() or " " in webhook:
        raise BadInputError("--webhook: this is no URL to post alarms to; it begins with http:// or https://.")


def post(webhook: str, event: WatchEvent, timeout: float = 10.0) -> str | None:
    """Send an event as JSON; return what went wrong, if anything did. A watch outlives its webhook.

    The answer names the webhook's host alone: its path is a secret.
    """
    body = (event.model_dump_json(exclude_none=True)).encode()
    request = urllib.request.Request(webhook, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout):
            return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"HTTP status {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
        return f"the webhook at {urlsplit(webhook).hostname} was not reached ({reason}); this alarm was not sent"


class WatchEvent(BaseModel):
    """One line of a watch.

    Attributes:
        kind: window, learned, alarm, restart or silent (the engine did not answer).
        tau, by_position: of the window; positions are conditional on the draft before.
        score: spreads above the baseline. sums: where the test stands.
        change: "fall" or "rise". since: windows ago that the change began. position: the first that differs.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")

    kind: Literal["window", "learned", "alarm", "restart", "silent"]
    url: str
    time: str
    engine: str | None = None
    window: int | None = None
    rounds: float | None = None
    tau: float | None = None
    baseline: float | None = None
    by_position: list[float] | None = None
    score: float | None = None
    fall: float | None = None
    rise: float | None = None
    threshold: float | None = None
    change: str | None = None
    since: int | None = None
    position: int | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.time} {self.url} {_SAID[self.kind](self)}"


_SAID: dict[str, Callable[[WatchEvent], str]] = {
    "window": lambda e: f"τ {e.tau:.3f} in {e.rounds:.0f} rounds ({_scored(e)})",
    "learned": lambda e: f"baseline learned: τ {e.baseline:.3f}",
    "alarm": lambda e: (
        f"ALARM: acceptance {'fell' if e.change == 'fall' else 'rose'} {e.since} windows ago, τ {e.tau:.3f} instead of "
        f"{e.baseline:.3f}{f', from position {e.position} on' if e.position else ''}"
    ),
    "restart": lambda e: f"the engine ({e.engine}) was started anew",
    "silent": lambda e: f"no answer: {e.reason}",
}


def _scored(event: WatchEvent) -> str:
    return "learning" if event.score is None else f"{event.score:+.1f} spreads from {event.baseline:.3f}"
