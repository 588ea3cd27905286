"""From what happened to each prompt (records) to the figures of a report.

Shapes: N prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..decode import Round, depth_counts
from .reports.figures import (
    ALL,
    PHASES,
    AcceptedFigure,
    Baselines,
    DepthFigure,
    Figures,
    PromptRecord,
    speed_ratio,
    tau_ratio,
)
from .reports.intervals import Interval, Ratio
from .reports.statistics import Bootstrap, Floats, strata_of


def summarise(
    records: Sequence[PromptRecord], rules: dict[tuple[str, float], str], baselines: Baselines, seed: int = 0
) -> list[Figures]:
    """Return figures for every contestant and temperature, on all suites together and on each.

    Args:
        rules: the verification rule by (contestant, temperature).
    """
    suites = list(dict.fromkeys(r.suite for r in records))
    parts = {ALL: list(records)} | {suite: [r for r in records if r.suite == suite] for suite in suites}
    temperatures = dict.fromkeys(r.temperature for r in records)
    return [
        figures
        for suite, part in parts.items()
        for temperature in temperatures
        for figures in _SamePrompts(
            suite, temperature, [r for r in part if r.temperature == temperature], baselines, seed
        ).figures(rules)
    ]


class _SamePrompts:
    """All contestants on the same prompts at one temperature, compared by the same resamples."""

    def __init__(
        self, suite: str, temperature: float, records: Sequence[PromptRecord], baselines: Baselines, seed: int
    ):
        self.suite, self.temperature = suite, temperature
        self.entries: dict[str, list[PromptRecord]] = {}
        for record in sorted(records, key=lambda r: r.suite):  # suite by suite, as the strata are
            self.entries.setdefault(record.contestant, []).append(record)
        self.plain = self.entries[baselines.plain]
        self.generate = self.entries[baselines.generate] if baselines.generate else None
        self.bootstrap = Bootstrap(strata_of([r.suite for r in self.plain]), seed=seed)

    def figures(self, rules: dict[tuple[str, float], str]) -> list[Figures]:
        """Return the figures of every contestant."""
        return [self._figures(name, own, rules[name, self.temperature]) for name, own in self.entries.items()]

    def _figures(self, name: str, own: list[PromptRecord], rule: str) -> Figures:
        drafted = [sum(r.drafted) for r in own]
        num_rounds = sum(len(r.accepted) for r in own)
        judged = [r.identical for r in own if r.identical is not None]
        accepted = Ratio([sum(r.accepted) for r in own], drafted)
        speed, seconds = speed_ratio(own), _seconds_by_phase(own)
        return Figures(
            contestant=name,
            temperature=self.temperature,
            suite=self.suite,
            rule=rule,
            num_prompts=len(own),
            num_rounds=num_rounds,
            num_tokens=sum(r.tokens for r in own),
            tau=self.bootstrap.ratio(tau_ratio(own)) if num_rounds else None,
            acceptance_rate=self.bootstrap.ratio(accepted) if sum(drafted) else None,
            alpha=_alpha(own, self.bootstrap),
            accepted=_histogram(own, self.bootstrap) if sum(drafted) else [],
            tokens_per_second=self.bootstrap.ratio(speed),
            speedup=self.bootstrap.quotient(speed, speed_ratio(self.plain)),
            speedup_generate=self._over_generate(speed),
            seconds={phase: float(np.sum(spent)) for phase, spent in seconds.items()},
            milliseconds_per_token={
                phase: self.bootstrap.ratio(Ratio(1000 * spent, speed.numerators)) for phase, spent in seconds.items()
            },
            identical=sum(judged) if judged else None,
        )

    def _over_generate(self, speed: Ratio) -> Interval | None:
        return None if self.generate is None else self.bootstrap.quotient(speed, speed_ratio(self.generate))


def _seconds_by_phase(records: Sequence[PromptRecord]) -> dict[str, Floats]:
    """Return the seconds of each prompt `[N]`, by the phases that all of them were timed in."""
    timed = [phase for phase in PHASES if all(phase in r.seconds for r in records)]
    return {phase: np.array([r.seconds[phase] for r in records]) for phase in timed}


def _alpha(records: Sequence[PromptRecord], bootstrap: Bootstrap) -> list[DepthFigure]:
    counts = [depth_counts(_rounds(r)) for r in records]
    deepest = max(map(len, counts), default=0)
    table = np.zeros((deepest, 2, len(records)), dtype=np.int64)  # [depth, reached | kept, N]
    for i, per_depth in enumerate(counts):
        if per_depth:
            table[: len(per_depth), :, i] = per_depth
    return [
        DepthFigure(
            depth=d, reached=int(reached.sum()), kept=int(kept.sum()), alpha=bootstrap.ratio(Ratio(kept, reached))
        )
        for d, (reached, kept) in enumerate(table, 1)
        if reached.sum()
    ]


def _rounds(record: PromptRecord) -> list[Round]:
    """Return the rounds that a record tells of."""
    told = zip(record.drafted, record.accepted, record.tried or record.drafted, strict=True)
    return [Round(drafted, accepted, accepted + 1, tried) for drafted, accepted, tried in told]


def _histogram(records: Sequence[PromptRecord], bootstrap: Bootstrap) -> list[AcceptedFigure]:
    most = max((a for r in records for a in r.accepted), default=0)
    counted = [np.bincount(np.asarray(r.accepted, dtype=np.int64), minlength=most + 1) for r in records]
    counts = np.stack(counted, 1)  # [accepted, N]
    rounds = counts.sum(0)
    return [
        AcceptedFigure(accepted=a, rounds=int(row.sum()), share=bootstrap.ratio(Ratio(row, rounds)))
        for a, row in enumerate(counts)
    ]
