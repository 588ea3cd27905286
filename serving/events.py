"""What a watch says: one event a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict


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
