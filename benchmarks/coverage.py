"""Do the 95% intervals hold the truth as often as they say, and how often does the gate err?

    python -m benchmarks.coverage --out coverage.json             # simulated drafters: their τ and speed are known
    python -m benchmarks.coverage --real --out coverage-real.json # A/A on the embedded target: one drafter as two

A simulated prompt has its own acceptance (a normal spread of its logit), so that its rounds resemble each other; chains
of 4; a request ends at 96 tokens or, as likely, before. Seconds are work times noise: a drift that all contestants of
a prompt share, noise of each repeat, and in 3% of them a stall; the median of three counts, as in reports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.machine import cpu_name
from outrider.common.runtime import versions
from outrider.eval.reports.figures import Interval, Ratio
from outrider.eval.reports.sequential import looks
from outrider.eval.reports.statistics import Bootstrap

from .report import command, options, publish, table

Floats = NDArray[np.float64]
PROMPTS = (12, 24, 60, 120)
DEPTH, TOKENS, STALLS = 4, 96, 0.03
LEVELS = {1: (0.6,), 3: (1.2, 0.3, -0.2)}  # mean logit of acceptance of each suite, by the number of suites
# Shares of the prompts of the gate's suites. With `uneven`, the first suite and the first quarter of each suite's file
# lose more than the others, so that a first look at either is misleading.
SHARES = {"even": (4, 4, 4), "uneven": (1, 4, 7)}
_LOSES_MORE = 0.1
TOLERANCE, CONFIDENCE = 0.03, 0.95

_SHARED = 20  # repeats that share one set of resamples, which take longer to draw than everything else


@lru_cache(maxsize=4)
def _bootstrap(strata: tuple[int, ...], confidence: float, seed: int) -> Bootstrap:
    return Bootstrap(strata, confidence=confidence, seed=seed)


@dataclass(frozen=True)
class Sample:
    """Prompts as they were measured, `[N]` each: emitted tokens, rounds, seconds with drafts and without, and the
    rounds of a second drafter."""

    emitted: Floats
    rounds: Floats
    seconds: Floats
    plain: Floats
    other: Floats

    def figures(self, bootstrap: Bootstrap) -> dict[str, Interval]:
        """Return τ, the speedup, and the ratio of the two drafters' τ, with their intervals."""
        tokens = self.emitted + 1
        own, alone = Ratio(tokens, self.seconds), Ratio(tokens, self.plain)
        first, second = Ratio(self.emitted, self.rounds), Ratio(self.emitted, self.other)
        return {
            "tau": bootstrap.ratio(first),
            "speedup": bootstrap.quotient(own, alone),
            "ratio": bootstrap.quotient(second, first),
        }


def draw(generator: np.random.Generator, sizes: Sequence[int], spread: float, noise: float) -> Sample:
    """Return so many prompts of each suite."""
    levels = np.repeat(LEVELS[len(sizes)], sizes)  # [N]
    logits = levels + spread * generator.standard_normal(len(levels))
    emitted, rounds = _decoded(generator, 1 / (1 + np.exp(-logits)))
    drift = 0.1 * generator.standard_normal(len(rounds))

    def timed(work: Floats) -> Floats:
        shape = (3, len(work))
        stalled = np.where(generator.random(shape) < STALLS, 1.5, 1.0)
        return np.median(work * stalled * np.exp(drift + noise * generator.standard_normal(shape)), 0)

    other = np.maximum(1, np.round(rounds * np.exp(0.08 * generator.standard_normal(len(rounds)))))
    return Sample(emitted, rounds, timed(8 + 1.5 * rounds), timed(5 + emitted), other)


def _decoded(generator: np.random.Generator, alpha: Floats) -> tuple[Floats, Floats]:
    """Return the tokens that rounds emitted and the rounds, of each prompt."""
    shape = alpha.shape
    wanted = np.where(generator.random(shape) < 0.5, TOKENS, generator.integers(12, TOKENS, shape)) - 1
    emitted, rounds = np.zeros(shape), np.zeros(shape)
    while (going := emitted < wanted).any():
        kept = np.minimum(np.log(1 - generator.random(shape)) // np.log(alpha), DEPTH)
        emitted = np.where(going, np.minimum(emitted + kept + 1, wanted), emitted)
        rounds += going
    return emitted, rounds


@lru_cache
def _many(shares: tuple[int, ...], spread: float, noise: float) -> Sample:
    """Return so many prompts that their figures are the truth."""
    sizes = [600_000 * share // sum(shares) for share in shares]
    return draw(np.random.default_rng(999), sizes, spread, noise)


@lru_cache
def truth(shares: tuple[int, ...], spread: float, noise: float) -> dict[str, float]:
    """Return the figures of suites of these shares."""
    s = _many(shares, spread, noise)
    tau = s.emitted.sum() / s.rounds.sum()
    return {"tau": tau, "speedup": s.plain.sum() / s.seconds.sum(), "ratio": s.rounds.sum() / s.other.sum()}


def covered(num_prompts: int, suites: int, spread: float, noise: float, repeats: int) -> dict[str, dict[str, float]]:
    """Return by figure the shares of repeats whose interval holds the truth, lies above it, lies below it, is unknown.

    The four add up to 1: an interval that is unknown holds nothing.
    """
    sizes = [num_prompts // suites] * suites
    known = dict(truth((1,) * suites, spread, noise))
    known["percentiles"] = known["tau"]
    counts = {name: np.zeros(4) for name in known}
    for seed in range(repeats):
        sample = draw(np.random.default_rng((num_prompts, suites, seed)), sizes, spread, noise)
        bootstrap = _bootstrap(tuple(sizes), 0.95, seed // _SHARED)
        plain = copy(bootstrap)
        plain.tail = 0.025  # percentiles that are not taken further out for few prompts
        found_all = sample.figures(bootstrap) | {"percentiles": plain.ratio(Ratio(sample.emitted, sample.rounds))}
        for name, found in found_all.items():
            counts[name] += (
                found.low <= known[name] <= found.high,
                known[name] < found.low,
                known[name] > found.high,
                not found.known,
            )
    names = ("held", "above", "below", "unknown")
    return {n: dict(zip(names, map(float, c / repeats), strict=True)) for n, c in counts.items()}


def gated(num_prompts: int, drop: float, repeats: int, shape: str = "even") -> dict[str, float]:
    """Return how often either gate fails a second drafter whose τ is lower by `drop`, and the prompts that it took.

    At a drop of the tolerance itself every failure is a false alarm.
    """
    shares, floor = SHARES[shape], 1 - TOLERANCE
    sizes = [num_prompts * share // sum(shares) for share in shares]
    names = [str(suite) for suite, size in enumerate(sizes) for _ in range(size)]
    # A change of the tokens changes the ratio of τ by itself, to what the drop shall be.
    kept = _kept(sizes, shape) * (1 - drop) / truth(shares, 0.5, 0.05)["ratio"]  # [N]
    fixed = sequential = wrong_passes = taken = 0.0
    for seed in range(repeats):
        sample = draw(np.random.default_rng((num_prompts, 7, seed)), sizes, 0.5, 0.05)
        new = Ratio(sample.emitted * kept, sample.other)
        old = Ratio(sample.emitted, sample.rounds)
        bootstrap = _bootstrap(tuple(sizes), 2 * CONFIDENCE - 1, seed // _SHARED)
        fixed += bootstrap.quotient(new, old).high < floor
        seen = looks(new, old, names, [f"{seed}/{i}" for i in range(len(names))], CONFIDENCE)
        first = next((x.quotient for x in seen if x.quotient.high < floor or x.quotient.low >= floor), None)
        sequential += first is not None and first.high < floor
        wrong_passes += first is not None and first.low >= floor
        taken += next((x.prompts for x in seen if x.quotient is first), num_prompts)
    found = {"fixed_failed": fixed, "sequential_failed": sequential, "sequential_passed": wrong_passes}
    return {name: value / repeats for name, value in found.items()} | {"mean_prompts": taken / repeats}


def _kept(sizes: Sequence[int], shape: str) -> Floats:
    """Return the factor of each prompt's tokens, `[N]`, whose mean over all tokens is 1."""
    if shape == "even":
        return np.ones(sum(sizes))
    lost = [np.arange(size) < size / 4 for size in sizes]
    factors = [1 - _LOSES_MORE * (own | (suite == 0)) for suite, own in enumerate(lost)]
    many = _many(SHARES[shape], 0.5, 0.05).emitted
    means = [part.mean() for part in np.split(many, np.cumsum([600_000 * s // 12 for s in SHARES[shape]])[:-1])]
    kept = sum(f.sum() * mean for f, mean in zip(factors, means, strict=True))
    whole = sum(len(f) * mean for f, mean in zip(factors, means, strict=True))
    return np.concatenate(factors) * whole / kept


def simulated(repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Return the coverage of all cells and the gate's errors, and their tables."""
    cells = [
        (spread, noise, s, n)
        for spread, noise in ((0.5, 0.05), (1.2, 0.05), (0.5, 0.25))
        for s in LEVELS
        for n in PROMPTS
    ]
    coverage = [
        {"spread": spread, "noise": noise, "suites": s, "prompts": n, **covered(n, s, spread, noise, repeats)}
        for spread, noise, s, n in cells
    ]
    gates = [
        {"suites": shape, "prompts": n, "drop": drop, **gated(n, drop, repeats, shape)}
        for shape in SHARES
        for n in PROMPTS
        for drop in (TOLERANCE, 0.0, 0.06, 0.1)
    ]
    about = {"device": "cpu", "device_name": cpu_name(), "dtype": "float64", "repeats": repeats}
    about |= {"created": datetime.now(UTC).date().isoformat(), "versions": versions()}
    tables = [_coverage_table(coverage), _gate_table(gates)]
    return {"conditions": about, "coverage": coverage, "gate": gates}, tables


def _coverage_table(cells: Sequence[dict[str, Any]]) -> str:
    figures = ("tau", "speedup", "ratio", "percentiles")
    head = ["spread", "noise", "suites", "prompts", "τ", "speedup", "ratio of two τ", "τ by plain percentiles"]
    rows = [
        [f"{c[name]:g}" for name in ("spread", "noise", "suites", "prompts")]
        + [f"{c[f]['held']:.1%} ({c[f]['above']:.1%} above, {c[f]['below']:.1%} below)" for f in figures]
        for c in cells
    ]
    return table(head, rows)


def _gate_table(cells: Sequence[dict[str, Any]]) -> str:
    head = ["suites", "prompts", "drop of τ", "fixed: failed", "sequential: failed", "passed", "prompts it took"]
    return table(
        head,
        [
            [c["suites"], f"{c['prompts']}", f"{c['drop']:.0%}"]
            + [f"{c[name]:.1%}" for name in ("fixed_failed", "sequential_failed", "sequential_passed")]
            + [f"{c['mean_prompts']:.0f}"]
            for c in cells
        ],
    )


def real(repeats: int, limit: int, tokens: int) -> tuple[dict[str, Any], list[str]]:
    """Return in how many of `repeats` measurements of one drafter as two their ratios hold 1.

    Of speed at temperature 0, where both write the same; of τ at temperature 1, where each has a seed of its own.
    """
    from outrider.decode import Plan
    from outrider.eval.interleaved_runs import race
    from outrider.eval.measure import Contestant, DecoderRacer, make_records
    from outrider.eval.reports.figures import speed_ratio, tau_ratio
    from outrider.eval.reports.statistics import strata_of
    from outrider.eval.suites import load_suites, make_jobs
    from outrider.heads import Ngram
    from outrider.recipes import EvalSpec
    from outrider.targets import Target

    from .report import conditions, shown

    target = Target.load("embedded")
    suites = load_suites(["code", "docs", "prose"], target.require_tokenizer(), limit)
    jobs = make_jobs(suites, limit)
    found: dict[str, list[Interval]] = {"speed": [], "tau": []}
    ratios = {"speed": (speed_ratio, 0.0), "tau": (tau_ratio, 1.0)}
    for repeat in range(repeats):
        racers = []
        for i, name in enumerate("ab"):
            settings = EvalSpec(max_new_tokens=tokens, repeats=1, seed=2 * repeat + i)
            racers.append(DecoderRacer(target, Contestant(name, Ngram(), Plan(depth=4)), settings))
        bootstrap = Bootstrap(strata_of([job.suite for job in jobs]), seed=repeat)
        for figure, (ratio, temperature) in ratios.items():
            records = make_records(race(racers, jobs, temperature, 1), jobs, temperature, "a")
            own, same = ([r for r in records if r.contestant == name] for name in "ab")
            found[figure].append(bootstrap.quotient(ratio(own), ratio(same)))
    about = conditions(target, drafter="ngram", prompts=len(jobs), max_new_tokens=tokens, repeats=repeats)
    result: dict[str, Any] = {"conditions": about}
    for figure, intervals in found.items():
        widths = sorted((i.high - i.low) / 2 for i in intervals if i.known)
        result[figure] = {
            "held": sum(i.low <= 1 <= i.high for i in intervals),
            "unknown": len(intervals) - len(widths),
            "median_half_width": round(widths[len(widths) // 2], 4),
            "ratios": [shown(i) for i in intervals],
        }
    rows = [
        [
            f,
            f"{ratios[f][1]:g}",
            f"{repeats}",
            f"{len(jobs)}",
            f"{result[f]['held']}",
            f"±{result[f]['median_half_width']:.1%}",
        ]
        for f in found
    ]
    return result, [table(["ratio of", "temperature", "runs", "prompts", "held 1", "median interval"], rows)]


def main() -> int:
    parser = options(__doc__, limit=8, max_new_tokens=32)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--real", action="store_true", help="A/A on the embedded target instead")
    asked = parser.parse_args()
    if asked.real:
        result, tables = real(asked.repeats or 100, asked.limit, asked.max_new_tokens)
    else:
        result, tables = simulated(asked.repeats or 1000)
    publish(result, asked.out, tables)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
