"""Which of the measured plans is kept, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .batches import BatchAnswer, batch_speed, median_repeat
from .prediction import Option
from .reports.intervals import Interval, Ratio
from .reports.statistics import Bootstrap


@dataclass(frozen=True)
class MeasuredOption:
    """An option and what it did: τ, and tokens/s as a ratio over batches, beside the plain target's."""

    option: Option
    tau: float
    speed: Ratio
    plain: Ratio
    bootstrap: Bootstrap

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all batches."""
        return self.bootstrap.ratio(self.speed).value

    def over(self, other: MeasuredOption) -> Interval:
        """Return how many times as fast as `other` it is."""
        return self.bootstrap.quotient(self.speed, other.speed)

    def figures(self) -> dict[str, float | None]:
        """Return the measured fields of a `Candidate`."""
        speedup = self.bootstrap.quotient(self.speed, self.plain)
        low, high = (round(speedup.low, 4), round(speedup.high, 4)) if speedup.known else (None, None)
        return {
            "tau": round(self.tau, 3),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "speedup": round(speedup.value, 4),
            "low": low,
            "high": high,
        }


def measured_options(
    racing: Sequence[Option], answers: dict[str, list[list[BatchAnswer]]], bootstrap: Bootstrap
) -> list[MeasuredOption]:
    """Return what each option did, in their order; the first is plain."""
    done = {name: [median_repeat(repeats) for repeats in per_group] for name, per_group in answers.items()}
    plain = batch_speed(done[racing[0].name])
    return [MeasuredOption(o, _tau(done[o.name]), batch_speed(done[o.name]), plain, bootstrap) for o in racing]


def _tau(done: Sequence[BatchAnswer]) -> float:
    return 1 + sum(c.num_accepted for c in done) / max(1, sum(c.num_rounds for c in done))


def choose(measured: Sequence[MeasuredOption]) -> tuple[MeasuredOption, str]:
    """Return the one to keep, and why.

    The fastest fixed plan; of the drafter's own chain the controlled form, unless it is really slower; plain if nothing
    is faster.

    Args:
        measured: plain first, then the fixed plans, the controlled chain last.
    """
    plain, *fixed, controlled = measured
    fastest = max(fixed, key=lambda m: m.tokens_per_second)
    wanted, reason = _controlled_or_fixed(fastest, controlled)
    if wanted.tokens_per_second > plain.tokens_per_second:
        return wanted, reason
    for other in (fastest, controlled):
        if other.tokens_per_second > plain.tokens_per_second:
            return other, f"{wanted.option.name} is slower than the plain target, this one is not."
    reached = fastest.over(plain).text(unit="×")
    reason = f"Nothing is faster than the plain target here; the best, {fastest.option.name}, reaches {reached} of it."
    return plain, reason


def _controlled_or_fixed(fastest: MeasuredOption, controlled: MeasuredOption) -> tuple[MeasuredOption, str]:
    quotient = controlled.over(fastest)
    found = f"with a controller {quotient.text(unit='×')} the speed of {fastest.option.name}"
    if fastest.option.plan.is_tree or fastest.option.statistical is not None:
        return (controlled, f"The fastest: {found}.") if quotient.value > 1 else (fastest, "The fastest.")
    if quotient.value < 1 and quotient.excludes(1):
        return fastest, f"The fastest: {found}."
    return controlled, f"It falls back where drafts are refused, and what that costs is within the noise: {found}."
