"""Do the 95% intervals hold the truth as often as they say, and how often does the gate err?

    python -m benchmarks.coverage --out coverage.json             # simulated drafters: their τ and speed are known
    python -m benchmarks.coverage --false-alarms 20000 --out coverage-false-alarms.json
    python -m benchmarks.coverage --real --drafter eagle1=runs/pair-v1/drafter --out coverage-real.json

With `--real` the embedded target decodes: one drafter as two, whose speeds are equal (A/A), and, for the gate, with
another seed, where its τ is the same, and with noise on its weights, where it is lower.

A simulated prompt has its own acceptance (a normal spread of its logit), so that its rounds resemble each other; chains
of 4; a request ends at 96 tokens or, as likely, before. Seconds are work times noise: a drift that all contestants of
a prompt share, noise of each repeat, and in 3% of them a stall; the median of three counts, as in reports.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from os import getloadavg
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.common.machine import cpu_name
from outrider.common.runtime import versions
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan, Sampling
from outrider.eval.interleaved_runs import race
from outrider.eval.measure import Contestant, DecoderRacer, make_records
from outrider.eval.reports.figures import Interval, Ratio, speed_ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import PromptJob, Suite, load_suites, make_jobs
from outrider.eval.summary import bootstrap_of
from outrider.heads import Drafter, Ngram, load_drafter
from outrider.lab.sequential import looks
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .acceptance import rounds_of, tau
from .report import command, conditions, options, publish, shown, table, write

Floats = NDArray[np.float64]
PROMPTS = (12, 24, 60, 120)
DEPTH = 4
TOKENS = 96
STALLS = 0.03
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
    found = np.zeros(4)
    for seed in range(repeats):
        sample = draw(np.random.default_rng((num_prompts, 7, seed)), sizes, 0.5, 0.05)
        new = Ratio(sample.emitted * kept, sample.other)
        old = Ratio(sample.emitted, sample.rounds)
        bootstrap = _bootstrap(tuple(sizes), 2 * CONFIDENCE - 1, seed // _SHARED)
        found += verdicts(new, old, bootstrap, names, [f"{seed}/{i}" for i in range(len(names))], floor)
    return dict(zip(_VERDICTS, map(float, found / repeats), strict=True))


_VERDICTS = ("fixed_failed", "sequential_failed", "sequential_passed", "mean_prompts")


def verdicts(
    new: Ratio, old: Ratio, bootstrap: Bootstrap, suites: Sequence[str], prompts: Sequence[str], floor: float
) -> Floats:
    """Return whether the fixed gate fails, whether the sequential one does, or passes, and the prompts that it took."""
    seen = looks(new, old, suites, prompts, CONFIDENCE)
    first = next((x for x in seen if x.quotient.high < floor or x.quotient.low >= floor), None)
    fails = first is not None and first.quotient.high < floor
    taken = len(prompts) if first is None else first.prompts
    return np.array([bootstrap.quotient(new, old).high < floor, fails, first is not None and not fails, taken])


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
    result, tables = gate_errors(repeats, (TOLERANCE, 0.0, 0.06, 0.1))
    return result | {"coverage": coverage}, [_coverage_table(coverage), *tables]


def gate_errors(repeats: int, drops: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
    """Return the gate's errors at these drops of τ; those at just the tolerance are false alarms."""
    gates = [
        {"suites": shape, "prompts": n, "drop": drop, **gated(n, drop, repeats, shape)}
        for shape in SHARES
        for n in PROMPTS
        for drop in drops
    ]
    return {"conditions": _conditions(repeats), "gate": gates}, [_gate_table(gates)]


def _conditions(repeats: int) -> dict[str, Any]:
    about = {"device": "cpu", "device_name": cpu_name(), "dtype": "float64", "repeats": repeats}
    return about | {"created": datetime.now(UTC).date().isoformat(), "versions": versions()}


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
    about = ["suites", "prompts", "drop of τ"]
    return _verdict_table(about, [[c["suites"], f"{c['prompts']}", f"{c['drop']:.0%}"] for c in cells], cells, ".1%")


def _verdict_table(about: list[str], facts: list[list[str]], cells: Sequence[dict[str, Any]], form: str) -> str:
    """Return what both gates said in some cells, beside the facts about each."""
    head = [*about, "fixed: failed", "sequential: failed", "passed", "prompts it took"]
    said = ([*(f"{c[name]:{form}}" for name in _VERDICTS[:3]), f"{c['mean_prompts']:.0f}"] for c in cells)
    return table(head, [[*own, *verdict] for own, verdict in zip(facts, said, strict=True)])


def real(asked: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return how often the intervals of the ratio of one drafter's speed to its own hold 1, and the gate's verdicts.

    Speed is measured at temperature 0, where both write the same; τ at temperature 1, each time with another seed.
    """
    target, began = Target.load("embedded"), getloadavg()
    name, _, folder = asked.drafter.partition("=")
    drafter = load_drafter(folder, target) if folder else Ngram()
    suites = load_suites(["code", "docs", "prose"], target.require_tokenizer())
    chance = np.random.default_rng(asked.seeds)
    about = {k: v for k, v in vars(asked).items() if k not in ("out", "real", "seeds", "drafter", "threads")}
    tables, speeds = list[str](), list[Interval]()
    with threads(asked.threads):
        result: dict[str, Any] = {"conditions": conditions(target, drafter=name, **about)}
        for _ in range(asked.repeats):
            speeds.append(_speed_of_two(target, drafter, _drawn(chance, suites, asked.limit), asked))
            width = median((i.high - i.low) / 2 for i in speeds)
            held = sum(i.low <= 1 <= i.high for i in speeds)
            cells = [f"{len(speeds)}", f"{3 * asked.limit}", f"{held}", f"±{width:.1%}"]
            tables = [table(["runs", "prompts of each", "held 1", "median interval"], [cells])]
            result["speed"] = {"held": held, "median_half_width": width, "ratios": [shown(i) for i in speeds]}
            loads = [round(load[1], 1) for load in (began, getloadavg())]
            result["conditions"] |= {"repeats": len(speeds), "load_average": loads}
            write(result, asked.out)
        if asked.questions:
            result["gate"] = _real_gates(target, drafter, chance, suites, asked)
            tables.append(_real_gate_table(result["gate"]))
    return result, tables


def _drawn(chance: np.random.Generator, suites: Sequence[Suite], limit: int) -> list[PromptJob]:
    """Return so many prompts of each suite."""
    picked = [chance.choice(len(suite.prompts), limit, replace=False) for suite in suites]
    jobs = [make_jobs([suite]) for suite in suites]
    return [own[i] for own, places in zip(jobs, picked, strict=True) for i in places]


def _speed_of_two(target: Target, drafter: Drafter, jobs: Sequence[PromptJob], asked: Namespace) -> Interval:
    """Return the ratio of one drafter's speed to its own, with the interval that a report would give it."""
    settings, plan = EvalSpec(max_new_tokens=asked.max_new_tokens, repeats=1), Plan(asked.depth)
    racers = [DecoderRacer(target, Contestant(name, drafter, plan), settings) for name in "ab"]
    records = make_records(race(racers, jobs, 0.0, 1), jobs, 0.0, "a")
    own, same = ([r for r in records if r.contestant == name] for name in "ab")
    return bootstrap_of(own, 0).quotient(speed_ratio(own), speed_ratio(same))


def _real_gates(
    target: Target, drafter: Drafter, chance: np.random.Generator, suites: Sequence[Suite], asked: Namespace
) -> list[dict[str, Any]]:
    """Return how often both gates fail the drafter measured again, and its weights with noise, by tolerance."""
    decoders = {"same": Decoder(target, drafter), "worse": Decoder(target, _with_noise(drafter, asked.noise))}
    found = {(kind, tolerance): np.zeros(4) for kind in decoders for tolerance in (0.0, TOLERANCE)}
    sums = {kind: np.zeros(2) for kind in ("old", *decoders)}
    held, plan = dict.fromkeys(decoders, 0), Plan(asked.depth)
    for question in range(asked.questions):
        jobs = _drawn(chance, suites, asked.gate_prompts // 3)
        names, ids = [job.suite for job in jobs], [job.prompt.id for job in jobs]
        strata = [asked.gate_prompts // 3] * 3
        taus = {}
        for turn, (kind, decoder) in enumerate({"old": decoders["same"], **decoders}.items()):
            sampling = Sampling(1.0, seed=3 * question + turn)
            prompts = [job.prompt.tokens for job in jobs]
            taus[kind] = tau(rounds_of(decoder, prompts, asked.max_new_tokens, sampling, plan, asked.batch))
            sums[kind] += [sum(taus[kind].numerators), sum(taus[kind].denominators)]
        for kind, tolerance in found:
            bootstrap = Bootstrap(strata, confidence=2 * CONFIDENCE - 1, seed=question)
            found[kind, tolerance] += verdicts(taus[kind], taus["old"], bootstrap, names, ids, 1 - tolerance)
        for kind in decoders:
            both = Bootstrap(strata, seed=question).quotient(taus[kind], taus["old"])
            held[kind] += both.low <= 1 <= both.high
    mean = {kind: float(emitted / rounds) for kind, (emitted, rounds) in sums.items()}
    return [
        {"drafter": kind, "tolerance": tolerance, "questions": asked.questions, "prompts": asked.gate_prompts}
        | {"tau_old": mean["old"], "tau_new": mean[kind], "two_sided_held_1": held[kind]}
        | dict(zip(_VERDICTS, map(float, [*counts[:3], counts[3] / asked.questions]), strict=True))
        for (kind, tolerance), counts in found.items()
    ]


def _with_noise(drafter: Drafter, noise: float) -> Drafter:
    """Return the drafter with noise on its weights, as a share of each one's own spread."""
    generator, worse = torch.Generator().manual_seed(0), deepcopy(drafter)
    with torch.no_grad():
        for weight in worse.parameters():
            if weight.numel() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
    return worse


def _real_gate_table(cells: Sequence[dict[str, Any]]) -> str:
    facts = [
        [
            c["drafter"],
            f"{c['tolerance']:.0%}",
            f"{c['tau_old']:.3f} → {c['tau_new']:.3f}",
            f"{c['questions']} × {c['prompts']} prompts",
        ]
        for c in cells
    ]
    return _verdict_table(["drafter", "tolerance", "τ", "questions of"], facts, cells, ".0f")


def main() -> int:
    parser = options(__doc__, "threads", "batch", limit=4, max_new_tokens=24, depth=3, seeds=0)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--false-alarms", type=int, metavar="N", help="of the simulated gates alone, N repeats of each")
    parser.add_argument("--real", action="store_true", help="on the embedded target instead")
    parser.add_argument("--drafter", default="ngram", help="NAME=FOLDER, or ngram")
    parser.add_argument("--questions", type=int, default=0, help="to the gate, about a drafter with weights")
    parser.add_argument("--gate-prompts", type=int, default=60, help="of each question")
    parser.add_argument("--noise", type=float, default=0.4, help="of the worse drafter's weights")
    asked = parser.parse_args()
    if asked.real:
        asked.repeats = 100 if asked.repeats is None else asked.repeats
        result, tables = real(asked)
    elif asked.false_alarms:
        result, tables = gate_errors(asked.false_alarms, [TOLERANCE])
    else:
        result, tables = simulated(asked.repeats or 1000)
    publish(result, asked.out, tables)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
