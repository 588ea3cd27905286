"""The figures of a measurement, made of its records: every ratio with an interval over prompts.

Shapes: N prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..decode import Round, depth_counts
from .reports.figures import (
    ALL,
    KINDS,
    PHASES,
    AcceptedFigure,
    Baselines,
    DepthFigure,
    Figures,
    GroupFigures,
    Interval,
    PlaceFigure,
    PromptRecord,
    Ratio,
    speed_ratio,
    tau_ratio,
)
from .reports.statistics import Bootstrap, strata_of

Part = TypeVar("Part")


def summarise(
    records: Sequence[PromptRecord],
    rules: dict[tuple[str, float], str],
    baselines: Baselines,
    seed: int = 0,
    floor: float | None = None,
) -> list[Figures]:
    """Return figures for every contestant and temperature, on all suites together and on each.

    Args:
        rules: the verification rule by (contestant, temperature).
        floor: the least seconds of a plain round (`Conditions.floor`); None where that is not known.
    """
    figures = []
    for suite in (ALL, *dict.fromkeys(r.suite for r in records)):
        for temperature in dict.fromkeys(r.temperature for r in records):
            own = [r for r in records if r.temperature == temperature and suite in (ALL, r.suite)]
            figures += _figures_of(own, suite, rules, baselines, seed, floor)
    return figures


def _figures_of(
    records: Sequence[PromptRecord],
    suite: str,
    rules: dict[tuple[str, float], str],
    baselines: Baselines,
    seed: int,
    floor: float | None,
) -> list[Figures]:
    """Return the figures of all contestants on the same prompts, compared by the same resamples."""
    entries = _by_contestant(records)
    plain = entries[baselines.plain]
    generate = speed_ratio(entries[baselines.generate]) if baselines.generate else None
    bootstrap = bootstrap_of(plain, seed)
    found = []
    for name, own in entries.items():
        figures = Figures(
            **_of_requests(own, plain, bootstrap) | {"suite": suite},
            **_of_drafts(own, bootstrap),
            **_of_phases(own, bootstrap),
            rule=rules[name, own[0].temperature],
            speedup_generate=None if generate is None else bootstrap.quotient(speed_ratio(own), generate),
        )
        if own is plain and "verify" in figures.seconds:
            figures.floor_share = _floor_share(own, floor, bootstrap)
        found.append(figures)
    return found


def _of_requests(own: Sequence[PromptRecord], plain: Sequence[PromptRecord], bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the fields of `RequestFigures`, of one contestant's requests beside the plain target's."""
    judged = [r.identical for r in own if r.identical is not None]
    rounds = sum(len(r.accepted) for r in own)
    speed = speed_ratio(own)
    return {
        "contestant": own[0].contestant,
        "temperature": own[0].temperature,
        "suite": own[0].suite,
        "num_prompts": len(own),
        "num_rounds": rounds,
        "num_tokens": sum(r.tokens for r in own),
        "tau": bootstrap.ratio(tau_ratio(own)) if rounds else None,
        "tokens_per_second": bootstrap.ratio(speed),
        "speedup": bootstrap.quotient(speed, speed_ratio(plain)),
        "identical": sum(judged) if judged else None,
    }


def _of_drafts(own: Sequence[PromptRecord], bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the fields of `Figures` about accepted drafts; empty where nothing is drafted."""
    drafted = [sum(r.drafted) for r in own]
    fields: dict[str, Any] = {"acceptance_rate": None, "alpha": _alpha(own, bootstrap), "accepted": []}
    if sum(drafted) == 0:
        return fields
    longest = max(r.tokens for r in own)
    ranges = dict.fromkeys(map(position_range, range(1, longest + 1)))
    return fields | {
        "acceptance_rate": bootstrap.ratio(Ratio([sum(r.accepted) for r in own], drafted)),
        "accepted": _histogram(own, bootstrap),
        "positions": _by_place([r.places(position_range) for r in own], ranges, bootstrap),
        "kinds": _by_place([r.kinds or {} for r in own], KINDS, bootstrap),
    }


def _of_phases(own: Sequence[PromptRecord], bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the fields of `Figures` about seconds and joules."""
    tokens = speed_ratio(own).numerators
    timed = [phase for phase in PHASES if all(phase in r.seconds for r in own)]
    seconds = {phase: np.array([r.seconds[phase] for r in own]) for phase in timed}  # [N] each
    joules = [r.joules for r in own if r.joules is not None]
    return {
        "seconds": {phase: float(np.sum(spent)) for phase, spent in seconds.items()},
        "milliseconds_per_token": {
            phase: bootstrap.ratio(Ratio(1000 * spent, tokens)) for phase, spent in seconds.items()
        },
        "joules_per_token": bootstrap.ratio(Ratio(joules, tokens)) if len(joules) == len(own) else None,
    }


def _by_contestant(records: Sequence[PromptRecord]) -> dict[str, list[PromptRecord]]:
    """Return each contestant's records, suite by suite, as strata are."""
    entries: dict[str, list[PromptRecord]] = {}
    for record in sorted(records, key=lambda r: r.suite):
        entries.setdefault(record.contestant, []).append(record)
    return entries


def bootstrap_of(records: Sequence[PromptRecord], seed: int) -> Bootstrap:
    """Return resamples of prompts, suite by suite; the turns and contexts of a conversation are drawn together."""
    places = {one: place for place, one in enumerate(dict.fromkeys(r.drawn for r in records))}
    return Bootstrap(strata_of([suite for suite, _ in places]), seed=seed, clusters=[places[r.drawn] for r in records])


MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}  # its tasks beside MT-Bench
_ONLY_SPEC_BENCH = {"translation", "math_reasoning"}
_MOST_GROUPS = 40  # more are no categories, but labels of single rows


def groups_of(record: PromptRecord, categories: set[str]) -> dict[str, str]:
    """Return the groups that a record belongs to, by kind, in a suite of these categories.

    In Spec-Bench a category of MT-Bench's is a part of the task "mt_bench": so it counts its six tasks (arXiv
    2401.07851, its own evaluation). It is recognised by a task that other suites with such categories do not have.
    """
    found, turn = {}, {"turn": f"turn {record.turn}"}
    if record.category is not None:
        is_spec_bench = categories <= MT_BENCH | SPEC_BENCH and not categories.isdisjoint(_ONLY_SPEC_BENCH)
        if is_spec_bench and categories & MT_BENCH:
            found["task"] = "mt_bench" if record.category in MT_BENCH else record.category
        if found.get("task") != record.category:
            found["category"] = record.category
    return found | turn


def summarise_groups(records: Sequence[PromptRecord], baselines: Baselines, seed: int = 0) -> list[GroupFigures]:
    """Return the figures by task, category and turn, of suites that have several, and no more than `_MOST_GROUPS`."""
    categories: dict[str, set[str]] = {}
    for record in records:
        categories.setdefault(record.suite, set()).update([record.category] if record.category else [])
    parts: dict[tuple[str, float, str], dict[str, list[PromptRecord]]] = {}
    for record in records:
        for by, group in groups_of(record, categories[record.suite]).items():
            parts.setdefault((record.suite, record.temperature, by), {}).setdefault(group, []).append(record)
    found = []
    for (_, _, by), groups in parts.items():
        for group, part in groups.items() if 1 < len(groups) <= _MOST_GROUPS else ():
            entries = _by_contestant(part)
            plain = entries[baselines.plain]
            bootstrap = bootstrap_of(plain, seed)
            found += [
                GroupFigures(**_of_requests(own, plain, bootstrap), by=by, group=group) for own in entries.values()
            ]
    return found


def _alpha(records: Sequence[PromptRecord], bootstrap: Bootstrap) -> list[DepthFigure]:
    counts = []
    for record in records:
        rounds = zip(record.drafted, record.accepted, record.tried or record.drafted, strict=True)
        found = depth_counts([Round(drafted, kept, kept + 1, tried) for drafted, kept, tried in rounds])
        counts.append(dict(enumerate(found, 1)))
    depths = range(1, max(map(len, counts), default=0) + 1)
    return [DepthFigure(depth=d, **found) for d, found in _alphas(counts, depths, bootstrap) if found["reached"]]


def _alphas(
    counts: Sequence[Mapping[Part, tuple[int, int]]], parts: Iterable[Part], bootstrap: Bootstrap
) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Yield how often each part was reached and kept, by the counts of each record, and alpha with its interval."""
    for part in parts:
        reached, kept = np.array([of.get(part, (0, 0)) for of in counts]).T  # [N] each
        alpha = bootstrap.ratio(Ratio(kept, reached))
        yield part, {"reached": int(reached.sum()), "kept": int(kept.sum()), "alpha": alpha}


def _floor_share(records: Sequence[PromptRecord], floor: float | None, bootstrap: Bootstrap) -> Interval | None:
    if floor is None or not any(r.accepted for r in records):
        return None
    least = np.array([floor * len(r.accepted) for r in records])
    return bootstrap.ratio(Ratio(least, [r.seconds["verify"] for r in records]))


def position_range(place: int) -> str:
    """Return the name of the range of a place in an answer, counted from 1: `1–16`, `17–32`, `33–64` and so on."""
    last = max(16, 1 << (place - 1).bit_length())
    return f"{last // 2 + 1 if last > 16 else 1}–{last}"


def _by_place(
    counts: Sequence[Mapping[str, tuple[int, int]]], parts: Iterable[str], bootstrap: Bootstrap
) -> list[PlaceFigure]:
    return [PlaceFigure(part=part, **found) for part, found in _alphas(counts, parts, bootstrap)]


def _histogram(records: Sequence[PromptRecord], bootstrap: Bootstrap) -> list[AcceptedFigure]:
    most = max((a for r in records for a in r.accepted), default=0)
    counts = np.array([[r.accepted.count(a) for r in records] for a in range(most + 1)])  # [accepted, N]
    rounds = counts.sum(0)
    return [
        AcceptedFigure(accepted=a, rounds=int(row.sum()), share=bootstrap.ratio(Ratio(row, rounds)))
        for a, row in enumerate(counts)
    ]
