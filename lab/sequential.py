"""The gate, decided at the first prompt that allows it: comparisons that may be looked at after every prompt.

A confidence sequence bounds a ratio after every prompt at once, so that a decision may be taken at the first look that
allows one. Its bounds are those of the normal mixture for a mean of influences (Waudby-Smith, Arbour, Sinha, Kennedy
and Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476, its one-sided
form): they are asymptotic, as those of a bootstrap are; `benchmarks.coverage` counts their errors from 12 prompts on.

Every look estimates one quantity, that of all prompts together: suites are weighted by their shares of all prompts.

Shapes: N prompts, S suites, 4 sums of a ratio of ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from scipy.special import ndtr, stdtrit

from ..common import BadInputError
from ..eval.reports.figures import Interval, Ratio
from ..eval.reports.gate import Compared, GateFinding, finding_of, tau_of
from ..eval.reports.statistics import FEWEST, Floats

_TIGHTEST = 60  # prompts at which the bounds are the closest to those of a fixed test
_UNSEEN = 0.3  # influence of one prompt of each suite that is like none before it: equal prompts are no certainty


@dataclass(frozen=True)
class Look:
    """The two ratios after `prompts` of them, and their quotient with one-sided bounds that hold at every look."""

    prompts: int
    above: float
    below: float
    quotient: Interval


def judged_in_turn(compared: Compared, temperature: float, tolerance: float, confidence: float) -> GateFinding:
    """Return the finding of a gate at the first prompt that decides it, else at the last; bounds hold at every prompt.

    It has no smallest drop: its number of prompts is no choice.

    Raises:
        BadInputError: too few prompts, or none that both sides have.
    """
    suites, prompts = [c.suite for c in compared.new], [c.prompt for c in compared.new]
    seen = looks(tau_of(compared.new), tau_of(compared.old), suites, prompts, confidence)
    if not seen:
        raise BadInputError(
            f"a sequential gate needs prompt records of both sides, and at least {FEWEST} prompts; "
            f"there are {len(compared.new)}."
        )
    last, floor = seen[-1], 1 - tolerance
    first = next((look for look in seen if look.quotient.high < floor or look.quotient.low >= floor), last)
    how = f"{compared.how}, bounds for every look"
    if first is not last:
        how = (
            f"{first.prompts} of {compared.num_prompts} prompts decide it, bounds for every look; "
            f"all of them: {last.quotient.text(3)}"
        )
    at_first = replace(
        compared, ratio=first.quotient, how=how, num_prompts=first.prompts, before=first.below, after=first.above
    )

    def needed(half: float, distance: float) -> int:
        return prompts_to_decide(half, first.prompts, distance, confidence)

    return finding_of(at_first, temperature, tolerance, needed)


def looks(above: Ratio, below: Ratio, suites: Sequence[str], prompts: Sequence[str], confidence: float) -> list[Look]:
    """Return `above / below` after every number of prompts from the first look on at which every suite has any.

    Args:
        suites, prompts: of each prompt, its suite and its name, which give the order.
        confidence: of each one-sided bound, at all looks together.
    """
    order, names = looking_order(suites, prompts), np.unique(suites)
    columns = [np.asarray(part, float)[order] for r in (above, below) for part in (r.numerators, r.denominators)]
    values = np.stack(columns, 1)  # [N, 4]
    member = (np.asarray(suites)[order][:, None] == names).astype(float)  # [N, S]
    seen = member.cumsum(0)
    first = max(FEWEST - 1, int((seen == 0).any(1).sum()))
    sums = np.einsum("ns,nc->nsc", member, values).cumsum(0)[first:]
    squares = np.einsum("ns,nc,nd->nscd", member, values, values).cumsum(0)[first:]
    seen, shares = seen[first:], member.mean(0)
    means = sums / seen[..., None]
    total = np.einsum("s,nsc->nc", shares, means)  # of the weighted suites
    usable = (total > 0).all(1)
    slopes = np.array([1, -1, -1, 1]) / np.where(total > 0, total, 1)  # of ln of the quotient
    around = squares - seen[..., None, None] * means[..., None] * means[..., None, :]
    degrees = np.maximum(seen - 1, 1)
    variance = np.maximum(np.einsum("nc,nscd,nd->ns", slopes, around, slopes) / degrees, _UNSEEN**2 / seen)
    parts = shares**2 * variance / seen  # [n, S], of the estimate's variance
    freedom = parts.sum(1) ** 2 / (parts**2 / degrees).sum(1)  # Welch and Satterthwaite's
    counts = np.arange(first + 1, len(values) + 1, dtype=float)
    widths = np.sqrt(parts.sum(1) * counts) * _boundary(counts, 1 - confidence, freedom)
    return [
        _look(int(t), sums_of, float(width))
        for t, sums_of, width, known in zip(counts, total, widths, usable, strict=True)
        if known
    ]


def _look(prompts: int, total: Floats, width: float) -> Look:
    above, below = float(total[0] / total[1]), float(total[2] / total[3])
    value = above / below
    return Look(prompts, above, below, Interval(value, value * math.exp(-width), value * math.exp(width)))


def looking_order(suites: Sequence[str], prompts: Sequence[str]) -> list[int]:
    """Return the places of the prompts: each suite by hashes of their names, suites in proportion to their sizes.

    A file's own order is often that of its topics; every first part of this one is like the whole.
    """
    by_suite: dict[str, list[tuple[bytes, int]]] = {}
    for i, (suite, prompt) in enumerate(zip(suites, prompts, strict=True)):
        by_suite.setdefault(suite, []).append((sha256(prompt.encode()).digest(), i))
    places = [
        ((turn + 0.5) / len(own), suite, i)
        for suite, own in by_suite.items()
        for turn, (_, i) in enumerate(sorted(own))
    ]
    return [i for *_, i in sorted(places)]


def _boundary(prompts: Floats, error: float, freedom: Floats) -> Floats:
    """Return the widths of one-sided bounds after so many prompts, in standard deviations of one.

    They are taken further out by what Student's t makes of the quantile, for the deviation is estimated, too.
    """
    rho = (-2 * math.log(error) + math.log(-2 * math.log(error)) + 1) / _TIGHTEST
    inner = prompts * rho + 1
    quantile = np.sqrt(2 * inner / (prompts * rho) * np.log(1 + np.sqrt(inner) / (2 * error)))
    widths: Floats = -stdtrit(freedom, ndtr(-quantile)) / np.sqrt(prompts)
    return widths


def prompts_to_decide(width: float, num_prompts: int, distance: float, confidence: float) -> int:
    """Return about how many prompts bring the width that a look has after `num_prompts` down to a distance."""

    def narrowed(prompts: int) -> float:
        sizes = np.array([prompts, num_prompts], float)
        now, then = _boundary(sizes, 1 - confidence, sizes)
        return width * float(now / then)

    needed = num_prompts
    while narrowed(needed) > distance:
        needed = math.ceil(1.05 * needed)
    return needed
