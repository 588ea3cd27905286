"""From what happened to each prompt to the figures of a report.

Torch-free: a saved report can be read, compared and printed without loading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from .statistics import Bootstrap, Floats, Interval, Ratio

ALL = "all"
PHASES = ("prefill", "draft", "verify", "host", "total")


class Model(BaseModel):
    """A part of report.json. Unknown keys are kept out, nan is written as null."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Record(Model):
    """One prompt, one contestant, one temperature.

    Attributes:
        prompt: its id in the suite. prompt_tokens: its length.
        tokens: new tokens. drafted, accepted: draft tokens of each round, and how many of them were kept.
        tried: how deep there were drafts behind what was kept; None where that is `drafted` (chains).
        seconds: wall time by phase, of the median repeat; `total` is the whole request, both prefills included.
        repeats: total seconds of every repeat, in the order they ran.
        identical: whether the tokens equal the plain target's (temperature 0 only).
        diverges_at: index of the first new token that differs from the plain target's; None if none does.
    """

    contestant: str
    temperature: float
    suite: str
    prompt: str
    prompt_tokens: int
    tokens: int
    drafted: list[int]
    accepted: list[int]
    tried: list[int] | None = None
    seconds: dict[str, float]
    repeats: list[float]
    identical: bool | None = None
    diverges_at: int | None = None


class DepthFigure(Model):
    """alpha_d: of `reached` rounds whose first d − 1 drafts were accepted and that drafted a d-th, `kept` accepted it too."""

    depth: int
    reached: int
    kept: int
    alpha: Interval


class AcceptedFigure(Model):
    """In how many rounds exactly `accepted` drafts were kept, and which share of all rounds that is."""

    accepted: int
    rounds: int
    share: Interval


class Figures(Model):
    """What one contestant achieved on one suite (or on `all` of them) at one temperature.

    Attributes:
        rule: the verification rule; "none" where nothing is drafted.
        tau, acceptance_rate: None where there are no rounds, or no drafts.
        speedup: tokens/s ÷ tokens/s of the plain target in the same engine and run. speedup_generate: the same against
            `transformers.generate`; None if it did not run.
        seconds: summed over prompts, by phase. milliseconds_per_token: the same per new token.
        identical: prompts whose tokens equal the plain target's (temperature 0 only).
    """

    contestant: str
    temperature: float
    suite: str
    rule: str
    num_prompts: int
    num_rounds: int
    num_tokens: int
    tau: Interval | None
    acceptance_rate: Interval | None
    alpha: list[DepthFigure]
    accepted: list[AcceptedFigure]
    tokens_per_second: Interval
    speedup: Interval
    speedup_generate: Interval | None
    seconds: dict[str, float]
    milliseconds_per_token: dict[str, Interval]
    identical: int | None


class Baselines(Model):
    """The names of the contestants that others are compared with."""

    plain: str
    generate: str | None


def summarise(
    records: Sequence[Record], rules: dict[tuple[str, float], str], baselines: Baselines, seed: int = 0
) -> list[Figures]:
    """Figures for every contestant and temperature, on each suite and on all of them.

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
        for figures in _heat(
            suite, temperature, [r for r in part if r.temperature == temperature], rules, baselines, seed
        )
    ]


def _heat(
    suite: str,
    temperature: float,
    records: Sequence[Record],
    rules: dict[tuple[str, float], str],
    baselines: Baselines,
    seed: int,
) -> list[Figures]:
    """Figures of all contestants on the same prompts, from the same resamples."""
    by_contestant: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.suite):  # suite by suite, as the strata are
        by_contestant.setdefault(record.contestant, []).append(record)
    plain = by_contestant[baselines.plain]
    strata = [sum(r.suite == s for r in plain) for s in dict.fromkeys(r.suite for r in plain)]
    bootstrap = Bootstrap(strata, seed=seed)
    versus = {"speedup": plain, "speedup_generate": by_contestant[baselines.generate] if baselines.generate else None}
    return [
        Figures.model_validate(
            {"contestant": name, "temperature": temperature, "suite": suite, "rule": rules[name, temperature]}
            | _acceptance(own, bootstrap)
            | _speed(own, bootstrap, versus)
        )
        for name, own in by_contestant.items()
    ]


def _acceptance(records: list[Record], bootstrap: Bootstrap) -> dict[str, Any]:
    rounds = [len(r.accepted) for r in records]
    drafted = [sum(r.drafted) for r in records]
    accepted = [sum(r.accepted) for r in records]
    judged = [r.identical for r in records if r.identical is not None]
    return {
        "num_prompts": len(records),
        "num_rounds": sum(rounds),
        "num_tokens": sum(r.tokens for r in records),
        "tau": bootstrap.ratio(tau_ratio(records)) if sum(rounds) else None,
        "acceptance_rate": bootstrap.ratio(Ratio(accepted, drafted)) if sum(drafted) else None,
        "alpha": _alpha(records, bootstrap),
        "accepted": _histogram(records, bootstrap) if sum(drafted) else [],
        "identical": sum(judged) if judged else None,
    }


def tau_ratio(records: Sequence[Record]) -> Ratio:
    """τ = 1 + Σ accepted / Σ rounds."""
    return Ratio([sum(r.accepted) for r in records], [len(r.accepted) for r in records], offset=1.0)


def _alpha(records: list[Record], bootstrap: Bootstrap) -> list[DepthFigure]:
    from ..decode import Round, depth_counts

    counts = [
        depth_counts(
            [Round(d, a, a + 1, t) for d, a, t in zip(r.drafted, r.accepted, r.tried or r.drafted, strict=True)]
        )
        for r in records
    ]
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


def _histogram(records: list[Record], bootstrap: Bootstrap) -> list[AcceptedFigure]:
    most = max((a for r in records for a in r.accepted), default=0)
    counts = np.stack(
        [np.bincount(np.asarray(r.accepted, dtype=np.int64), minlength=most + 1) for r in records], 1
    )  # [accepted, N]
    rounds = counts.sum(0)
    return [
        AcceptedFigure(accepted=a, rounds=int(row.sum()), share=bootstrap.ratio(Ratio(row, rounds)))
        for a, row in enumerate(counts)
    ]


def _speed(records: list[Record], bootstrap: Bootstrap, versus: dict[str, list[Record] | None]) -> dict[str, Any]:
    own = tokens_per_second(records)
    seconds = {
        phase: np.array([r.seconds[phase] for r in records])
        for phase in PHASES
        if all(phase in r.seconds for r in records)
    }
    compared = {
        name: None if other is None else bootstrap.quotient(own, tokens_per_second(other))
        for name, other in versus.items()
    }
    return {
        "tokens_per_second": bootstrap.ratio(own),
        "seconds": {phase: float(spent.sum()) for phase, spent in seconds.items()},
        "milliseconds_per_token": {
            phase: bootstrap.ratio(Ratio(1000 * spent, own.numerators)) for phase, spent in seconds.items()
        },
        **compared,
    }


def tokens_per_second(records: Sequence[Record]) -> Ratio:
    """Σ tokens / Σ seconds of whole requests."""
    seconds: Floats = np.array([r.seconds["total"] for r in records])
    return Ratio([r.tokens for r in records], seconds)
