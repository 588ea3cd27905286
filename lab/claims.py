"""What a file says about acceptance, in one convention, and whether it contradicts itself.

Each contradiction has the name of the mistake that it most likely comes from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from .passport import conditional, survival


@dataclass(frozen=True)
class Contradiction:
    """Two statements of one file that cannot both hold; `name` is the mistake, `line` says it in words."""

    name: str
    line: str


_DEEPEST = 1024  # drafts of a round, in files of others
_SHOWN = 16  # values of a list, in a sentence
Depth = Annotated[int, Field(ge=1, le=_DEEPEST)]
Drafts = Annotated[int, Field(ge=0, le=_DEEPEST)]
Rates = Annotated[list[float], Field(max_length=_DEEPEST)]
Counts = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_DEEPEST + 1)]


@checked_dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Claims:
    """The statements of one file, or of one part of it, of the right types; None where it says nothing.

    Attributes:
        where: the file's form, and the part of it.
        k: drafts per round. length: mean tokens per round, with the target's own; `by_k` by K.
        chain: the lengths at all K follow from the rates by depth.
        per_request: the mean of the requests' lengths; `requests` are these, `parts` the means of parts of them.
        marginal, conditional: rates at depth 1, 2, ….
        histogram: rounds that kept 0, 1, … drafts; `empty` emitted nothing, not even the target's token.
        kept, proposed: drafts of each round, in order. by_proposed: the histogram by the drafts of a round.
        rounds, accepted, drafted: sums. rate: accepted ÷ drafted.
        tolerance: what rounding can change.
    """

    where: str
    k: Depth | None = None
    length: float | None = None
    by_k: dict[Depth, float] = field(default_factory=dict)
    chain: bool = False
    per_request: float | None = None
    requests: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    marginal: Rates | None = None
    conditional: Rates | None = None
    histogram: Counts | None = None
    empty: int = 0
    kept: list[Drafts] | None = None
    proposed: list[Drafts] | None = None
    by_proposed: dict[Drafts, Counts] = field(default_factory=dict)
    rounds: float | None = None
    accepted: float | None = None
    drafted: float | None = None
    rate: float | None = None
    tolerance: float = 0.006


def contradictions(claims: Claims) -> list[Contradiction]:
    """Return what in the file cannot hold together; impossible numbers first, and then alone."""
    found = [*_impossible(claims), *_counters(claims)] or [*_rates(claims), *_lengths(claims)]
    return [Contradiction(name, f"{claims.where}: {said}") for name, said in found]


def _near(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=tolerance)


def _alike(one: Sequence[float], other: Sequence[float], *tolerances: float) -> bool:
    """Return whether two lists agree: each number within its tolerance, or all within the only one."""
    within = tolerances if len(tolerances) > 1 else tolerances * len(one)
    return len(one) == len(other) and all(map(_near, one, other, within))


def _impossible(c: Claims) -> Iterator[tuple[str, str]]:
    stated = {"marginal": c.marginal, "conditional": c.conditional, "draft": None if c.rate is None else [c.rate]}
    for name, rates in stated.items():
        listed = rates or []
        if any(not 0 <= rate <= 1 for rate in listed):
            yield "percent", f"{name} rates are shares from 0 to 1, got {max(listed):g}: percent, or counts?"
        if c.k is not None and name != "draft" and listed and len(listed) != c.k:
            yield "truncated rates", f"{len(listed)} {name} rates stand beside K={c.k}"
    if c.k is not None and c.histogram is not None and any(c.histogram[c.k + 1 :]):
        yield "truncated rates", f"the histogram has rounds that kept more than K={c.k} drafts"
    for proposed, counts in c.by_proposed.items():
        if any(counts[proposed + 1 :]):
            yield "more accepted than drafted", f"rounds of {proposed} drafts kept more than these"
    if c.empty:
        yield "histogram by drafts", f"{c.empty} rounds have the length 0, which counts drafts and not tokens"
    lengths = c.by_k | ({c.k: c.length} if c.length is not None and c.k is not None else {})
    for k, length in sorted(lengths.items()):
        if length < 1 - c.tolerance:
            yield "length without the bonus", f"a length of {length:g} at K={k} leaves out the target's own token"
        elif length > k + 1 + c.tolerance:
            yield "length beyond K + 1", f"a length of {length:g} is more than the {k + 1} tokens of a round at K={k}"


def _counters(c: Claims) -> Iterator[tuple[str, str]]:
    if c.histogram is not None:
        sums = {"rounds": sum(c.histogram), "accepted": sum(j * n for j, n in enumerate(c.histogram))}
        for name, number in sums.items():
            said = getattr(c, name)
            if said is not None and said != number:
                shifted = name == "accepted" and c.rounds is not None and said == number + c.rounds
                mistake = "bonus counted as accepted" if shifted else "histogram and counters"
                yield mistake, f"{said:g} {name} stand beside a histogram of {number:g}"
    if c.accepted is not None and c.drafted:
        if c.accepted > c.drafted:
            yield "more accepted than drafted", f"{c.accepted:g} of {c.drafted:g} drafts were accepted"
        elif c.rate is not None and not _near(c.rate, c.accepted / c.drafted, c.tolerance):
            yield "acceptance rate", f"the rate {c.rate:g} is not {c.accepted:g} / {c.drafted:g} = accepted / drafted"
    for name, total, steps in (("accepted", c.accepted, c.kept), ("drafted", c.drafted, c.proposed)):
        if steps is not None and total is not None and sum(steps) != total:
            yield "rounds and counters", f"{total:g} drafts {name} stand beside rounds with {sum(steps)}"
    whole = +Counter(dict(enumerate(c.histogram or [])))
    if c.histogram is not None and c.kept is not None and Counter(c.kept) != whole:
        yield "rounds and histogram", f"the rounds kept {_shown(c.kept)} drafts, the histogram says otherwise"
    split = Counter({n: sum(row) for n, row in enumerate(zip_longest(*c.by_proposed.values(), fillvalue=0))})
    if c.by_proposed and +split != whole:
        yield "histogram by draft length", f"its rows together are {_shown(+split)}, the histogram is {_shown(whole)}"


def _rates(c: Claims) -> Iterator[tuple[str, str]]:
    marginal = None if c.histogram is None or not sum(c.histogram) else survival(c.histogram)
    if marginal is not None and c.k is not None:
        marginal = [*marginal, *[0.0] * c.k][: c.k]
    if c.marginal is not None:
        if marginal is not None and not _alike(c.marginal, marginal, c.tolerance):
            mistaken = _alike(c.marginal, conditional(marginal), c.tolerance)
            name = "conditional read as marginal" if mistaken else "marginal rates and histogram"
            yield name, f"the marginal rates {_shown(c.marginal)} are not the histogram's {_shown(marginal)}"
        elif any(later > before + c.tolerance for before, later in pairwise(c.marginal)):
            yield "rising marginal rates", f"marginal rates cannot rise with depth: {_shown(c.marginal)}"
    known = c.marginal if marginal is None else marginal
    if c.conditional is not None and known is not None:
        expected = conditional(known)
        # Rates that are told were rounded, and a quotient of small ones by more.
        least = c.tolerance if marginal is None else 1.0
        within = [2 * c.tolerance / max(least, min(1.0, before)) for before in [1.0, *known][: len(expected)]]
        if not _alike(c.conditional, expected, *within):
            mistaken = _alike(c.conditional, known, c.tolerance)
            name = "marginal read as conditional" if mistaken else "conditional and marginal rates"
            if c.marginal is not None and marginal is None and _alike(c.marginal, c.conditional, c.tolerance):
                name = "one vector as both rates"
            yield name, f"the conditional rates {_shown(c.conditional)} do not follow from the others"


def _lengths(c: Claims) -> Iterator[tuple[str, str]]:
    expected = None
    if c.histogram is not None and any(c.histogram):
        expected, source = 1 + sum(survival(c.histogram)), "the histogram's mean with the target's token"
    elif c.marginal is not None:
        expected, source = 1 + sum(c.marginal), "1 + the sum of the marginal rates"
    elif c.rounds and c.accepted is not None:
        expected, source = 1 + c.accepted / c.rounds, "1 + accepted / rounds"
    if c.length is not None and expected is not None and not _near(c.length, expected, c.tolerance):
        yield _misread_length(c, expected), f"the length {c.length:g} is not {expected:.4g}, {source}"
    elif c.k in c.by_k and c.length is not None and not _near(c.by_k[c.k], c.length, c.tolerance):
        yield "two lengths", f"a length of {c.by_k[c.k]:g} at K={c.k} stands beside one of {c.length:g}"
    for k, length in sorted(c.by_k.items()) if c.chain and c.marginal else ():
        summed = 1 + sum((c.marginal or [])[:k])
        if k <= len(c.marginal or []) and not _near(length, summed, c.tolerance):
            yield "length and rates", f"the length {length:g} at K={k} is not {summed:.4g}, summed from the rates"
    outside = (
        [f"{n} {v:g}" for n, v in c.parts.items() if not _within(v, c.requests, c.tolerance)] if c.requests else []
    )
    if outside:
        yield "mean of a part", f"no requests have the means of {_shown(outside)}"
    if c.requests and c.per_request is not None:
        mean = sum(c.requests) / len(c.requests)
        if not _near(c.per_request, mean, c.tolerance):
            by_round = expected is not None and _near(c.per_request, expected, c.tolerance)
            name = "mean of rounds as mean of requests" if by_round else "mean of requests"
            yield name, f"the mean of requests {c.per_request:g} is not that of their lengths, {mean:.4g}"
    steps = sorted(c.by_k.items())
    for (k, length), (next_k, longer) in pairwise(steps):
        if longer - length > next_k - k + c.tolerance:
            yield "length beyond one token per draft", f"from K={k} to {next_k} the length grows by {longer - length:g}"


def _within(value: float, values: Sequence[float], tolerance: float) -> bool:
    return min(values) - tolerance <= value <= max(values) + tolerance


def _misread_length(c: Claims, expected: float) -> str:
    """Return the name of the mistake that turns `expected` into the length that is claimed."""
    mistaken = {
        "length without the bonus": expected - 1,
        "bonus counted twice": expected + 1,
        "length summed from conditional rates": 1 + sum(c.conditional or []),
        "mean of requests as mean of rounds": c.per_request,
    }
    said = float(c.length or 0)
    return next((n for n, v in mistaken.items() if v is not None and _near(said, v, c.tolerance)), "length and rates")


def _shown(values: Sequence[float | str] | Counter[int]) -> str:
    """Return the first of the values as text, in brackets."""
    told = [f"{k}: {n}" for k, n in values.items()] if isinstance(values, Counter) else values
    first = [one[:80] if isinstance(one, str) else f"{one:.3g}" for one in told[:_SHOWN]]
    return f"[{', '.join(first + ['…'] * (len(told) > _SHOWN))}]"
