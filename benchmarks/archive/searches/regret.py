"""What a search loses and what it saves: its winner beside a full grid of the same candidates.

    python -m benchmarks.archive.searches.regret FOLDER --name qwen3 --seconds 40 --work runs/qwen3 --out qwen3.json \\
        [key=value …]

`outrider compare --search` goes over the candidates first. Then each of them is trained for all of the seconds, and
all are measured beside the plain target in one run, each at the depth that is predicted to be its best. Seconds are
the process's own on one thread, as long as whatever else runs on the machine takes nothing but time from it. What the
search trained to the end counts for the grid, too, and is not trained again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.common.safe_load import read_json
from outrider.costs.timing import threads
from outrider.eval.measure import Contestant, measure, plan_of
from outrider.eval.suites import load_suites
from outrider.eval.tuner import best_chain
from outrider.heads import load_drafter
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.compare import compare
from outrider.lab.recipe_search import Search, timing_key
from outrider.train.stopping import TimeBudget

from ...report import command, conditions, options, publish, table

EVAL = [
    "training.bf16=true",
    "eval.suites=[code, docs, prose]",
    "eval.limit=8",
    "eval.max_new_tokens=64",
    "eval.temperatures=[0.0]",
]
EVAL += ["eval.baselines=[]", "eval.repeats=1", "training.logging_steps=1000", "training.save_steps=1000"]
RECIPES = ("embedded-eagle1", "embedded-eagle3")


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "threads")
    parser.add_argument("target")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of both recipes")
    parser.add_argument("--name", required=True, help="of the target in the result")
    parser.add_argument("--seconds", type=float, required=True, help="of each training to the end")
    parser.add_argument("--candidates", type=int, default=36)
    parser.add_argument("--work", type=Path, required=True)
    asked = parser.parse_args(given)
    TimeBudget.now = time.process_time  # type: ignore[method-assign]
    words = [f"target.path={asked.target}", *EVAL, *asked.changes]
    recipes = [load_recipe(name, words) for name in RECIPES]
    with threads(asked.threads):
        target = Target.load(**recipes[0].target.to_load())
        search, work = Search(asked.candidates), asked.work
        began = time.process_time()
        found = compare(recipes, asked.seconds, work, target, search=search)
        told: dict[str, Any] = {"search_seconds": round(time.process_time() - began, 1)}
        winner = max((c for c in found.contestants if c.training), key=lambda c: found.headline(c.name).speedup.value).name
        rows, spent = grid(search.draw(recipes), asked, target)
        told |= {"grid_seconds": round(spent, 1), "share": round(told["search_seconds"] / spent, 4), "winner": winner}
        best = max(rows, key=lambda row: row["speedup"])
        won = next(row["speedup"] for row in rows if row["name"] == winner)
        told |= {"best": best["name"], "regret": round(1 - won / best["speedup"], 4)}
        about = conditions(target, target=asked.name, recipes=RECIPES, seconds=asked.seconds, changes=EVAL)
        result = {"conditions": about, **told, "candidates": rows, "scores": read_json(work / "search.json")}
        publish(result, asked.out, tables(result))
    return 0


def grid(candidates: Sequence[Recipe], asked: argparse.Namespace, target: Target) -> tuple[list[dict[str, Any]], float]:
    """Return each candidate's figures after all of the seconds, and the seconds of all this."""
    entrants, rows, times, spent, began = [], [], {}, 0.0, time.process_time()
    for recipe in candidates:
        data = recipe.data.model_copy(update={"responses": recipe.data.responses or str(asked.work / "data")})
        output = asked.work / recipe.name
        if not (output / "drafter").is_dir():
            output = asked.work / "grid" / recipe.name
        if (output / "drafter").is_dir():
            spent += asked.seconds
        else:
            one = recipe.model_copy(update={"data": data, "output": str(output)})
            train(one, target, seconds=asked.seconds)
        first, suites = candidates[0], load_suites(candidates[0].eval.suites, target.require_tokenizer())
        drafter = load_drafter(output / "drafter", target)
        shape = timing_key(recipe, drafter.max_depth)
        chain, plain, times[shape] = best_chain(target, drafter, suites, first.eval, times.get(shape))
        plan = replace(plan_of(first.eval), depth=chain.plan.depth)
        entrants.append(Contestant.of(recipe.name, drafter, plan))
        rows.append({"name": recipe.name, "drafter": recipe.drafter, "depth": plan.depth})
        rows[-1] |= {"learning_rate": recipe.training["learning_rate"]}
        rows[-1] |= {"predicted": round(chain.predicted / plain.predicted, 4)}
    report = measure(target, entrants, suites, first.eval, generate_baseline=False)
    for row in rows:
        figures = report.headline(row["name"])
        row |= {"speedup": figures.speedup.value, "tau": figures.tau.value}
        row |= {"interval": [figures.speedup.low, figures.speedup.high]}
    return rows, spent + time.process_time() - began


def tables(result: dict[str, Any]) -> list[str]:
    """Return what the search found beside the grid, and all candidates."""
    head = ["target", "winner", "best of the grid", "regret", "seconds of the search", "of the grid", "share"]
    names = ("winner", "best", "regret", "search_seconds", "grid_seconds", "share")
    one = [result["conditions"]["target"], *(str(result[name]) for name in names)]
    order = sorted(result["candidates"], key=lambda row: -row["speedup"])
    speed = "{speedup:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    shown = (speed, "{predicted:.3f}", "{tau:.2f}", "{depth}")
    rows = [[row["name"], *(form.format(**row) for form in shown)] for row in order]
    return [table(head, [one]), table(["candidate", "speedup", "predicted", "τ", "depth"], rows)]


if __name__ == "__main__":
    sys.exit(command(main))
