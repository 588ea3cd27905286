"""Whether forecasts of a training (`outrider.train.forecast`) cover its end: thirty trainings of the embedded target.

    python -m benchmarks.forecasts --work runs/forecasts --out forecasts-cpu.json data.responses=runs/embedded-eagle1/data

Each recipe is trained for each number of seconds of processor time of one thread. A forecast's interval covers if τ
over the last tenth of the log lies within: by the package's exponents, and by those of all recipes but the one that is
forecast, each counted alike. The exponent of the length is that of trainings of one recipe, of neighbouring lengths.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.costs.timing import threads
from outrider.recipes import load_recipe
from outrider.targets import Target
from outrider.train import forecast as law
from outrider.train import train
from outrider.train.checkpoints import last_complete, state_of
from outrider.train.stopping import TimeBudget

from .report import NOTHING, command, conditions, number, options, publish, table

KINDS = ("eagle1", "eagle3", "medusa", "hydra", "mtp", "dflash", "dspark", "draft-model", "peagle", "self-speculative")
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
Log = list[dict[str, Any]]
Logs = dict[tuple[str, float], Log]  # by kind and seconds


def log_of(kind: str, seconds: float, target: Target, work: Path, changes: Sequence[str]) -> Log:
    """Return the log of a training, which is made unless it is there."""
    output = work / f"{kind}-{seconds:g}"
    settings = ["training.logging_steps=5", "training.num_train_epochs=9", "training.save_total_limit=1"]
    if last_complete(output / "checkpoints") is None or not (output / "drafter").is_dir():
        train(load_recipe(f"embedded-{kind}", [*changes, *settings, f"output={output}"]), target, seconds=seconds)
    checkpoint = last_complete(output / "checkpoints")
    assert checkpoint is not None
    return [entry for entry in state_of(checkpoint).log_history if "alpha_d1" in entry and "loss" in entry]


def log_odds(alpha: float) -> float:
    return math.log(alpha / (1 - alpha))


def mean_within(log: Log, name: str, begin: float, end: float) -> float | None:
    """Return the mean of a figure over the steps from `begin` to `end`; None without any."""
    values = [entry[name] for entry in log if begin < entry["step"] <= end and name in entry]
    return statistics.mean(values) if values else None


def strayed(log: Log, share: float) -> tuple[float, float] | None:
    """Return by what the first depth's log-odds grew from `share` to the end, and the logarithm of the steps' ratio."""
    last = log[-1]["step"]
    now = mean_within(log, "alpha_d1", law.WINDOW * share * last, share * last)
    end = mean_within(log, "alpha_d1", 0.9 * last, last)
    if now is None or end is None or not 0 < now < 1:
        return None
    return log_odds(end) - log_odds(now), -math.log(share * (1 + law.WINDOW) / 2)


def exponents(logs: Logs) -> tuple[float, float]:
    """Return the mean exponent and its standard deviation, over recipes, of trainings that are long enough."""
    by_kind: dict[str, list[float]] = {}
    for (kind, _), log in logs.items():
        found = [strayed(log, share) for share in SHARES] if log[-1]["step"] >= law.LEAST_STEPS else []
        by_kind.setdefault(kind, []).extend(grown / left for grown, left in filter(None, found))
    means = [statistics.mean(values) for values in by_kind.values() if values]
    return statistics.mean(means), statistics.stdev(means)


def covered(logs: Logs, fitted: bool) -> list[dict[str, Any]]:
    """Return, for each share, how many ends the intervals cover, their width, and how far the forecasts are off."""
    rows, kept = [], (law.EXPONENT, law.STRAY)
    for share in SHARES:
        hits, off, widths = [], [], []
        for (kind, _), log in logs.items():
            if fitted:
                law.EXPONENT, law.STRAY = exponents({key: own for key, own in logs.items() if key[0] != kind})
            last = log[-1]["step"]
            found = law.forecast([entry for entry in log if entry["step"] <= share * last], share)
            end = mean_within(log, "tau", 0.9 * last, last)
            law.EXPONENT, law.STRAY = kept
            if found is None or end is None:
                continue
            hits.append(found.low <= end <= found.high)
            off.append(abs(found.end - end))
            widths.append(found.high - found.low)
        row = {"share": share, "trainings": len(hits), "covered": sum(hits)}
        rows.append(row | {"off": number(statistics.median(off)), "width": number(statistics.median(widths))})
    return rows


def longer(logs: Logs) -> list[float]:
    """Return the exponents of the length, over neighbouring lengths of one recipe."""
    found = []
    for (kind, seconds), log in logs.items():
        more = min((other for name, other in logs if name == kind and other > seconds), default=None)
        if more is not None:
            steps = [each[-1]["step"] for each in (log, logs[kind, more])]
            before, after = (
                log_odds(mean_within(each, "alpha_d1", 0.9 * last, last) or math.nan)
                for each, last in zip((log, logs[kind, more]), steps, strict=True)
            )
            found.append((after - before) / math.log(steps[1] / steps[0]))
    return found


def tables(result: dict[str, Any]) -> list[str]:
    head = ["share that is over", "ends covered", "median error of τ", "median width of intervals"]
    each = [
        [
            [f"{r['share']:.0%}", f"{r['covered']} of {r['trainings']}", f"{r['off']:.3f}", f"{r['width']:.3f}"]
            for r in result[key]
        ]
        for key in ("forecasts", "forecasts_by_other_recipes")
    ]
    shown = [[interval_free(row[key]) for key in ("recipe", "seconds", "steps", "tau", "exponent")] for row in result["trainings"]]
    exponent, length = result["exponent"], result["exponent_of_the_length"]
    return [
        f"The exponent over the share that is left: {exponent['mean']:.2f}, standard deviation over recipes "
        f"{exponent['stray']:.2f}; of the length: {length['mean']:.2f}, standard deviation {length['stray']:.2f}.",
        "By the package's exponents:",
        table(head, each[0]),
        "By those of the other recipes:",
        table(head, each[1]),
        table(["recipe", "seconds", "steps", "τ at the end", "exponent from three tenths on"], shown),
    ]


def interval_free(value: Any) -> str:
    """Return a figure for a table."""
    return NOTHING if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "threads")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes of all recipes")
    parser.add_argument("--work", type=Path, default=Path("runs/forecasts"), help="the trainings")
    parser.add_argument("--seconds", nargs="+", type=float, default=[30, 60, 120])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    arguments = parser.parse_args(given)
    TimeBudget.now = time.process_time  # type: ignore[method-assign]
    with threads(arguments.threads):
        target = Target.load("embedded", dtype="float32")
        logs = {}
        for seconds in arguments.seconds:
            for kind in arguments.kinds:
                logs[kind, seconds] = log_of(kind, seconds, target, arguments.work, arguments.changes)
                print(kind, seconds, logs[kind, seconds][-1]["step"], logs[kind, seconds][-1]["tau"], flush=True)
        mean, stray = exponents(logs)
        by_length = longer(logs)
        trainings = [
            {
                "recipe": f"embedded-{kind}",
                "seconds": seconds,
                "steps": log[-1]["step"],
                "tau": number(mean_within(log, "tau", 0.9 * log[-1]["step"], log[-1]["step"]) or math.nan),
                "exponent": number((found[0] / found[1]) if (found := strayed(log, SHARES[2])) else math.nan),
            }
            for (kind, seconds), log in logs.items()
        ]
        result = {
            "conditions": conditions(target, seeds=1, temperature="analytic, T = 1", time="processor seconds of one thread"),
            "exponent": {"mean": number(mean), "stray": number(stray)},
            "exponent_of_the_length": {"mean": number(statistics.mean(by_length)), "stray": number(statistics.stdev(by_length))},
            "forecasts": covered(logs, fitted=False),
            "forecasts_by_other_recipes": covered(logs, fitted=True),
            "trainings": trainings,
        }
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
