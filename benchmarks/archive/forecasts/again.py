"""Whether forecasts cover the ends of trainings that the law was not made from.

    python -m benchmarks.archive.forecasts.again RUN … --out forecasts-others-cpu.json

A forecast after a share of the steps covers if τ over the last tenth of the log lies within its interval.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.recipes import load_recipe
from outrider.targets import Target
from outrider.train.checkpoints import last_complete, state_of
from outrider.train.forecast import LEAST_STEPS, SCHEDULES, forecast

from ...report import command, conditions, number, options, publish, table

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)


def log_of(run: Path) -> list[dict[str, Any]]:
    """Return the log of a training; [] of one that is too short, or whose learning rate falls to no zero."""
    checkpoint = last_complete(run / "checkpoints")
    if checkpoint is None or load_recipe(run / "recipe.yaml").training.get("lr_scheduler_type") not in SCHEDULES:
        return []
    log = [entry for entry in state_of(checkpoint).log_history if "alpha_d1" in entry and "loss" in entry]
    return log if log and log[-1]["step"] >= LEAST_STEPS else []


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    asked = parser.parse_args(given)
    logs = {run: log for run in asked.runs if (log := log_of(run))}
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        hits, off, widths = [], [], []
        for log in logs.values():
            last = log[-1]["step"]
            found = forecast([entry for entry in log if entry["step"] <= share * last], share)
            if found is None:
                continue
            end = statistics.mean(entry["tau"] for entry in log if entry["step"] > 0.9 * last)
            hits.append(found.low <= end <= found.high)
            off.append(found.end - end)
            widths.append(found.high - found.low)
        rows.append({"share": share, "trainings": len(hits), "covered": sum(hits)})
        rows[-1] |= {"off": number(statistics.median(map(abs, off))), "bias": number(statistics.median(off))}
        rows[-1] |= {"width": number(statistics.median(widths))}
    trainings = [{"recipe": run.name, "steps": log[-1]["step"]} for run, log in logs.items()]
    head = ["share that is over", "ends covered", "median error of τ", "median of forecast − end", "median width"]
    shown = [
        [f"{r['share']:.0%}", f"{r['covered']} of {r['trainings']}", *(f"{r[k]:.3f}" for k in ("off", "bias", "width"))]
        for r in rows
    ]
    about = conditions(Target.load("embedded", dtype="float32"), logging_steps=10)
    publish({"conditions": about, "forecasts": rows, "trainings": trainings}, asked.out, [table(head, shown)])
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
