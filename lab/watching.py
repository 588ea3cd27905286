"""A running engine's drafting over time: windows of rounds, compared with a baseline."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.http_client import AnswerLimits, BadAnswerError, ask
from ..common.locks import locked
from ..common.untrusted_files import RECORD, parse_json, read_text
from ..common.values import ForeignModel
from ..pair import PairFiles
from ..serving.engine_metrics import Counters, PageCounters
from .changepoint import DEEP, Chart, CusumState, NormalDrafting, WatchLimits

LEARNED = 30  # windows that a baseline is learned from, where no pair has one
ChangeOfLabels = Literal["appeared", "gone", "restart"]
BECAME = {"appeared": "counters appeared", "gone": "counters went", "restart": "started anew"}
WINDOWS = (200, 100, 50, 25, 400)  # rounds of a window, tried in this order
SURE = 3.0  # spreads by which a position must differ to be named
PATIENCE = 120.0  # seconds that a look waits for another one with the same state file


class WatchState(ForeignModel, extra="forbid"):
    """The state of one engine's watch, kept between runs of `outrider lab watch --once`.

    Attributes:
        model: whose counters are read; None for those of all models on the page.
        seen: the counters at the last look. open: those of the window that is not full yet.
        windows: the number of full ones. learned: those that the baseline is learned from.
        sums: of the test. restarts, alarms: the number of each.
        silence: why it did not answer at the last look; "" if it did. is_idle: the last window accepted nothing.
    """

    url: str
    model: str | None = None
    baseline: NormalDrafting | None = None
    seen: PageCounters | None = None
    open: Counters | None = None
    windows: int = 0
    learned: list[Counters] = Field(default=[])
    sums: CusumState = CusumState()
    restarts: int = 0
    alarms: int = 0
    silence: str = ""
    is_idle: bool = False

    @field_validator("seen", mode="before")
    @classmethod
    def _by_label_set(cls, seen: Any) -> Any:
        """Return what was seen; None for sums over labels, as earlier versions kept them: they cannot be parted."""
        return None if isinstance(seen, dict) and "parts" not in seen else seen


class EngineWatch:
    """The watch of one engine: counters in, events out.

    Args:
        state: from earlier looks.
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

    def look(self, now: PageCounters) -> Iterator[WatchEvent]:
        """Update the watch with the counters on the engine's page, and yield its events.

        Raises:
            BadInputError: at its first look, the page has no counters of the model to be watched.
        """
        seen, model = self.state.seen, self.state.model
        if model is not None:
            if seen is None and model not in now.models:
                found = f"those of {', '.join(now.models)}" if now.models else "such that name no model"
                raise BadInputError(f"--model: {self.state.url} has no counters of {model!r}; it has {found}.")
            now = now.of_model(model)
        self.state.seen = now if seen is None else now.after(seen)
        if self.state.silence:
            self.state.silence = ""
            yield self._event("back", now.engine)
        yield from self._label_sets(seen or PageCounters(), self.state.seen)
        if seen is None:
            return  # earlier counts belong to no window
        new = now.since(seen)
        window = new if self.state.open is None else self.state.open.plus(new)
        if window.rounds < self.limits.window:
            self.state.open = window
            return
        self.state.open = None
        self.state.windows += 1
        yield from self._judge(window)

    def _label_sets(self, seen: PageCounters, now: PageCounters) -> Iterator[WatchEvent]:
        """Yield which label sets came, went, and began to count anew."""
        restarted = now.restarted(seen)
        self.state.restarts += len(restarted)
        before, present = seen.present(), now.present()
        changes: dict[ChangeOfLabels, list[str]] = {
            "appeared": [labels for labels in present if labels not in before],
            "gone": [labels for labels in before if labels not in present],
            "restart": restarted,
        }
        for kind, labels in changes.items():
            if labels:
                yield self._event(kind, now.engine, labels=labels)

    def silent(self, reason: str) -> Iterator[WatchEvent]:
        """Yield the event of an engine that does not answer, unless it did not at the last look either."""
        before, self.state.silence = self.state.silence, reason
        if not before:
            yield WatchEvent(kind="silent", url=self.state.url, time=_now(), reason=reason)

    def _judge(self, window: Counters) -> Iterator[WatchEvent]:
        state, chart = self.state, self.chart
        positions = {"rounds": window.rounds, "tau": window.tau, "by_position": conditional(window)}
        if state.baseline is None or chart is None:
            yield self._event("window", window.engine, **positions)
            state.learned.append(window)
            if len(state.learned) >= LEARNED:
                state.baseline, state.learned = learned(state.learned, state.url), []
                yield self._event("learned", window.engine)
            return
        score = state.baseline.score(window.rounds, window.accepted)
        state.sums = sums = state.sums.after(score, window.rounds / self.limits.window, chart.slack)
        figures = positions | {"threshold": chart.threshold, "score": score}
        yield self._event("window", window.engine, **figures, fall=sums.fall, rise=sums.rise)
        change, was_idle = sums.alarm(chart.threshold), state.is_idle
        # After an alarm the sums begin anew; that drafting has ceased altogether is said at once all the same.
        state.is_idle = not window.accepted and score <= -SURE
        if change is not None or (state.is_idle and not was_idle):
            change = change or "fall"
            since = sums.fallen if change == "fall" else sums.risen
            state.sums = CusumState()  # the next alarm is about later windows
            state.alarms += 1
            position = _first_apart(window, state.baseline)
            yield self._event("alarm", window.engine, **figures, change=change, since=since, position=position)

    def _event(
        self, kind: ChangeOfLabels | Literal["window", "learned", "alarm", "back"], engine: str, **figures: Any
    ) -> WatchEvent:
        state, baseline = self.state, self.state.baseline
        return WatchEvent(
            kind=kind,
            url=state.url,
            time=_now(),
            engine=engine,
            window=state.windows,
            baseline=None if baseline is None else baseline.tau,
            **figures,
        )


def conditional(counters: Counters) -> list[float]:
    """Return the acceptance at each position, given that all drafts before it were accepted."""
    pairs = [(kept, counters.reached(i)) for i, kept in enumerate(counters.by_position)]
    return [kept / reached for kept, reached in pairs if reached]


def _first_apart(window: Counters, baseline: NormalDrafting) -> int | None:
    """Return the first position whose conditional acceptance certainly differs from the baseline's."""
    usual = [1.0, *baseline.by_position]
    for i, kept in enumerate(window.by_position):
        reached = window.reached(i)
        if i + 1 >= len(usual) or not usual[i] or reached < 1:
            return None
        expected = usual[i + 1] / usual[i]
        spread = math.sqrt(max(expected * (1 - expected), 1e-6) / reached)
        if abs(kept / reached - expected) > SURE * spread:
            return i + 1
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def learned(windows: Sequence[Counters], url: str) -> NormalDrafting:
    """Return the baseline of an engine's own first windows."""
    source = f"the first {len(windows)} windows of {url}"
    baseline = NormalDrafting.of([w.rounds for w in windows], [w.accepted for w in windows], source)
    total = reduce(Counters.plus, windows)
    return baseline.model_copy(update={"by_position": tuple(kept / total.rounds for kept in total.by_position)})


def baseline_of(pair: PairFiles) -> tuple[NormalDrafting, WatchLimits]:
    """Return the drafting of the pair on its own target, the baseline of its probes, and the limits that it can watch.

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
        if math.isfinite(Chart.calibrated(baseline, limits).delay_in_rounds(baseline, DEEP)):
            return limits
    raise BadInputError(
        f"{baseline.source}: a baseline from {baseline.rounds:.0f} rounds is too uncertain: not even a fall of the "
        f"accepted drafts by {DEEP:.0%} would be found. Let the watch learn a baseline (leave out --pair)."
    )


@contextmanager
def kept_states(
    file: Path, urls: Sequence[str], baseline: NormalDrafting | None, model: str | None = None
) -> Iterator[list[WatchState]]:
    """Yield the state of each engine's model, and write it to `file` at the end, beside those of others.

    Looks with the same file follow one another. A test begins again if another baseline than its own is given.

    Raises:
        BadInputError: the file cannot be understood, or another look does not end.
    """
    with locked(file, PATIENCE):
        known = _known(file)
        states = [known.get((url, model), WatchState(url=url, model=model, baseline=baseline)) for url in urls]
        for i, state in enumerate(states):
            if baseline is not None and state.baseline != baseline:
                kept = {name: getattr(state, name) for name in ("url", "model", "seen", "silence")}
                states[i] = WatchState(**kept, baseline=baseline)
        try:
            yield states
        finally:  # an engine that does not answer takes nothing from the others
            save_states(file, list((known | {(s.url, s.model): s for s in states}).values()))


def _known(file: Path) -> dict[tuple[str, str | None], WatchState]:
    """Return the states in a file, by URL and model."""
    if not file.is_file():
        return {}
    try:
        states = [WatchState.model_validate(s) for s in parse_json(read_text(file), str(file), RECORD)]
        return {(s.url, s.model): s for s in states}
    except (OSError, ValueError, TypeError) as error:  # also pydantic's
        raise BadInputError(f"{file}: cannot be read as the state of a watch ({error}); delete it.") from error


def save_states(file: Path, states: Sequence[WatchState]) -> None:
    """Write the state of each engine, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps([s.model_dump(mode="json") for s in states], indent=1) + "\n")


def require_webhook(webhook: str) -> None:
    """Refuse an address that alarms cannot be sent to, before the watch begins.

    Raises:
        BadInputError: it is no http or https URL. It is not repeated: whoever knows a webhook's URL may post to it.
    """
    try:
        place = urlsplit(webhook)
        is_url = place.scheme in ("http", "https") and bool(place.hostname) and (place.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url or not webhook.isprintable() or " " in webhook:
        raise BadInputError("--webhook: this is no URL to post alarms to; it begins with http:// or https://.")


def post(webhook: str, event: WatchEvent) -> str | None:
    """Send an event as JSON, and return the failure in a sentence, if any; a watch outlives its webhook.

    The sentence names the webhook's host alone: its path is a secret.
    """
    try:
        ask(webhook, event.model_dump_json(exclude_none=True).encode(), limits=AnswerLimits(kinds=()))
    except BadAnswerError as error:
        return f"the webhook at {urlsplit(webhook).hostname} was not reached ({error.reason}); this alarm was not sent"
    return None


class WatchEvent(BaseModel, extra="forbid", ser_json_inf_nan="null"):
    """One line of a watch.

    Attributes:
        kind: window, learned, alarm, silent (the engine does not answer any more), back (it does again), or what became
            of label sets: appeared, gone, restart.
        labels: the label sets, each as the page writes it, "" for one without labels.
        tau, by_position: of the window; positions are conditional on the draft before.
        score: spreads above the baseline. fall, rise: the test's sums, and threshold: their alarm.
        change: "fall" or "rise". since: windows ago that the change began. position: the first that differs.
    """

    kind: Literal["window", "learned", "alarm", "silent", "back", "appeared", "gone", "restart"]
    url: str
    time: str
    engine: str | None = None
    labels: list[str] | None = None
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
        return f"{self.time} {self.url} {self._text()}"

    def _text(self) -> str:
        if self.kind == "silent":
            return f"no answer: {self.reason}"
        if self.kind == "back":
            return f"the engine ({self.engine}) answers again"
        if self.labels is not None:
            of_labels = " and ".join(f"{{{labels}}}" for labels in self.labels if labels)
            return f"{BECAME[self.kind]}: {self.engine} {of_labels}".rstrip()
        if self.kind == "learned":
            return f"baseline learned: τ {self.baseline:.3f}"
        if self.kind == "window":
            score = "learning" if self.score is None else f"{self.score:+.1f} spreads from {self.baseline:.3f}"
            return f"τ {self.tau:.3f} in {self.rounds:.0f} rounds ({score})"
        where = f", from position {self.position} on" if self.position else ""
        if self.tau == 1:
            return f"ALARM: nothing is accepted any more, τ 1.000 instead of {self.baseline:.3f}"
        return (
            f"ALARM: acceptance {'fell' if self.change == 'fall' else 'rose'} {self.since} windows ago, "
            f"τ {self.tau:.3f} instead of {self.baseline:.3f}{where}"
        )
