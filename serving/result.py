"""What `outrider served` found, as programs and people read it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .comparison import ServedComparison
from .diagnosis import Suspicion

TOLERANCE = 0.02  # of τ: a difference that is certain, but smaller than this, is nobody's concern


class ServedResult(BaseModel):
    """What `outrider served` found.

    Attributes:
        engine: what it is, what it said of itself, and how it was started.
        target, drafter, depth, max_new_tokens: what was compared.
        tolerance: see `ServedComparison.agrees`.
        foreign: new tokens that the engine counted and we did not ask for: traffic of others, in the counts too.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    created: str
    engine: dict[str, Any]
    target: str
    drafter: str
    depth: int
    max_new_tokens: int
    tolerance: float
    comparisons: list[ServedComparison]
    suspicions: list[Suspicion]
    foreign: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the engine does what our decoder does."""
        return not self.suspicions

    @property
    def exit_code(self) -> int:
        return 0 if self.agrees else 1

    def at(self, temperature: float) -> ServedComparison:
        """Return the comparison at a temperature."""
        return next(c for c in self.comparisons if c.temperature == temperature)


# ------------------------------------------------------------ for people


def lines(result: ServedResult) -> list[str]:
    """Return the result in sentences, the verdict first."""
    verdict = "served equals measured" if result.agrees else "served differs from measured"
    found = [f"{verdict}: {result.drafter}, depth {result.depth}, {result.engine.get('name', 'engine')}"]
    for c in result.comparisons:
        found += _figures(c)
    found += _unknown(result)
    if result.foreign:
        found.append(f"{result.foreign} tokens of others were counted too: measure on an engine that nobody else uses")
    return found + [str(s) for s in result.suspicions]


_UNKNOWN = {
    "rounds": "its rounds (its τ is its own average of the latest ones, so only differences above 10% count)",
    "drafted": "its draft tokens (so nobody knows whether it drafts as deep)",
    "by_position": "acceptance by position (so nobody knows where drafts differ)",
}


def _unknown(result: ServedResult) -> list[str]:
    """Return what the engine does not count, so that nothing was compared there."""
    uncounted = sorted({name for c in result.comparisons for name in c.uncounted})
    name = result.engine.get("name", "this engine")
    return [f"{name} does not count {', '.join(_UNKNOWN[u] for u in uncounted)}"] if uncounted else []


def _figures(found: ServedComparison) -> list[str]:
    texts = "" if found.identical is None else f"; {found.identical} of {found.num_prompts} texts identical"
    speed = "" if found.speedup is None else f"; {found.speedup.text(unit='×')} the speed of that engine without drafts"
    first = (
        f"temperature {found.temperature:g}: τ {found.served.text(3)} there, {found.own.text(3)} here, "
        f"difference {found.difference.value:+.3f} {found.difference.bounds(3)}{texts}{speed}"
    )
    positions = ", ".join(
        f"{p.position}: {p.served:.2f} / {p.own:.2f}{' !' if p.parted else ''}" for p in found.positions
    )
    return [first, f"  accepted by position, there / here: {positions}"] if positions else [first]
