"""A search run again, with another rule, beside the grid of the same candidates that `regret.py` had trained.

    python -m benchmarks.archive.searches.again FOLDER --grid search-qwen3-like-cpu.json --work runs/qwen3 \\
        --out qwen3-again.json [key=value …]

Seconds are the process's own on one thread; those of the responses, which both need, are not among them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.common.safe_load import read_json
from outrider.costs.timing import threads
from outrider.recipes import load_recipe
from outrider.targets import Target
from outrider.train.compare import compare
from outrider.lab.recipe_search import Search
from outrider.train.stopping import TimeBudget

from ...report import command, conditions, options, publish, table


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "threads")
    parser.add_argument("target")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of both recipes, beside the grid's")
    parser.add_argument("--grid", type=Path, required=True, help="what regret.py has written")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="the result of the same search, which this one goes on with")
    asked = parser.parse_args(given)
    TimeBudget.now = time.process_time  # type: ignore[method-assign]
    grid = read_json(asked.grid)
    then, rows = grid["conditions"], {row["name"]: row for row in grid["candidates"]}
    words = [f"target.path={asked.target}", *then["changes"], *asked.changes]
    recipes = [load_recipe(name, words) for name in then["recipes"]]
    with threads(asked.threads):
        target = Target.load(**recipes[0].target.to_load())
        began = time.process_time()
        found = compare(recipes, then["seconds"], asked.work, target, search=Search(len(rows)))
        seconds = time.process_time() - began
    seconds += read_json(asked.before)["search_seconds"] if asked.before else 0
    finalists = {c.name: found.headline(c.name).speedup for c in found.contestants if c.training}
    winner, best = max(finalists, key=lambda name: finalists[name].value), max(rows, key=lambda n: rows[n]["speedup"])
    result: dict[str, Any] = {"conditions": conditions(target, target=then["target"], seconds=then["seconds"])}
    result |= {"search_seconds": round(seconds, 1), "grid_seconds": grid["grid_seconds"]}
    result |= {"share": round(seconds / grid["grid_seconds"], 4), "winner": winner, "best": best}
    result["regret"] = round(1 - rows[winner]["speedup"] / rows[best]["speedup"], 4)
    result["finalists"] = {
        name: {"speedup": s.value, "interval": [s.low, s.high], "of_the_grid": rows[name]["speedup"]}
        | {"tau": found.headline(name).tau.value}
        for name, s in finalists.items()
    }
    kept = read_json(asked.work / "search.json")
    result["scores"] = {name: scores for name, scores in kept.items() if name.endswith(" seconds")}
    publish(result, asked.out, tables(result))
    return 0


def tables(result: dict[str, Any]) -> list[str]:
    """Return what the search found beside the grid, and its finalists."""
    head = ["target", "winner", "best of the grid", "regret", "seconds of the search", "of the grid", "share"]
    names = ("winner", "best", "regret", "search_seconds", "grid_seconds", "share")
    one = [result["conditions"]["target"], *(str(result[name]) for name in names)]
    speed = "{speedup:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    finalists = result["finalists"].items()
    rows = [[n, speed.format(**row), f"{row['tau']:.2f}", f"{row['of_the_grid']:.3f}"] for n, row in finalists]
    return [table(head, [one]), table(["finalist", "speedup", "τ", "speedup of the grid's"], rows)]


if __name__ == "__main__":
    sys.exit(command(main))
