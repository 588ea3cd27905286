"""Who wins after how many seconds of training: drafters that go token by token, or those that say whole blocks?

    python -m benchmarks.budgets --work build/budgets --out budgets.json

For each budget `outrider compare` trains all recipes on the same responses and measures chains of depth 4. Then chains
as deep as each drafter goes, and trees of 16 nodes, are measured beside the plain target: dynamic trees at temperature
0, and at temperature 1 the static trees that are best for the ranks that each drafter shows on other prompts. What is
finished in --work is not done again. Beside the file, its drawings: speedup by budget at each temperature.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.common.atomic import write_atomically
from outrider.costs.timing import threads
from outrider.decode import Plan, Sampling, best_tree
from outrider.eval import Report
from outrider.eval.acceptance import measure_acceptance
from outrider.eval.measure import Contestant, measure
from outrider.eval.reports.figures import Interval
from outrider.eval.reports.plots import speedup_by_size, standalone
from outrider.eval.suites import PromptJob, load_suites, make_jobs, make_suite
from outrider.heads import Drafter, load_drafter
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train.compare import compare

from .acceptance import shown
from .report import NOTHING, command, conditions, interval, options, publish, table, write

RECIPES = ("eagle3", "eagle1", "mtp", "dflash", "dspark", "peagle", "pard")
DEEPEST, NODES, WIDTH = 7, 16, 4


def recipes(asked: argparse.Namespace) -> list[Recipe]:
    """Return the embedded recipes, on responses that all budgets share once the first has made them."""
    changes = [f"eval.limit={asked.limit}", f"eval.max_new_tokens={asked.tokens}", "eval.depth=4", "eval.repeats=1"]
    if (data := _folder(asked, asked.seconds[0]) / "data").is_dir():
        changes.append(f"data.responses={data}")
    return [load_recipe(f"embedded-{name}", changes) for name in RECIPES]


def _folder(asked: argparse.Namespace, seconds: int) -> Path:
    return Path(asked.work / f"{seconds}")


def reports(seconds: int, asked: argparse.Namespace) -> Iterator[tuple[str, Report]]:
    """Yield what was measured after `seconds` of training each: chains of depth 4, deepest chains, trees."""
    made, folder = recipes(asked), _folder(asked, seconds)
    yield "depth 4", compare(made, seconds, folder)
    settings = made[0].eval
    target = Target.load(**made[0].target.model_dump())
    suites = load_suites(settings.suites, target.require_tokenizer())
    drafters = {r.name: load_drafter(folder / r.name / "drafter", target) for r in made}
    deepest = [Contestant.of(name, d, Plan(DEEPEST)) for name, d in drafters.items()]
    yield "deepest", measure(target, deepest, suites, settings, generate_baseline=False)
    others = make_jobs([make_suite(s.name, s.prompts[asked.limit : 2 * asked.limit]) for s in suites], None)
    for heat in settings.temperatures:
        with threads(1):
            trees = [Contestant.of(n, d, _tree(target, d, others, asked.tokens, heat)) for n, d in drafters.items()]
        at_heat = settings.model_copy(update={"temperatures": [heat]})
        yield "tree", measure(target, trees, suites, at_heat, generate_baseline=False)


def _tree(target: Target, drafter: Drafter, others: Sequence[PromptJob], tokens: int, heat: float) -> Plan:
    if heat == 0:
        return Plan(DEEPEST, WIDTH, NODES)
    seen = measure_acceptance(target, drafter, others, tokens, Sampling(heat, seed=2), trees=True)
    return Plan(tree=best_tree(seen.ranks, NODES))


def rows(seconds: int, shape: str, report: Report) -> Iterator[dict[str, Any]]:
    """Yield τ and speedup of each drafter, at each temperature."""
    steps = {c.name: c.training.steps for c in report.contestants if c.training is not None}
    shapes = {c.name: c.shape for c in report.contestants}
    for heat in report.conditions.temperatures:
        for found in report.overall(heat):
            if found.tau is None or found.speedup is None or found.contestant not in {f"embedded-{r}" for r in RECIPES}:
                continue
            yield {
                "seconds": seconds,
                "steps": steps.get(found.contestant),
                "drafter": found.contestant.removeprefix("embedded-"),
                "shape": shape,
                "plan": shapes[found.contestant],
                "temperature": heat,
                "tau": shown(found.tau),
                "speedup": shown(found.speedup),
            }


def plot(found: Sequence[dict[str, Any]], heat: float) -> str:
    """Return a drawing of the speedup of each drafter's fastest shape, by seconds of training."""
    lines = {}
    for name in RECIPES:
        mine = [row for row in found if row["drafter"] == name and row["temperature"] == heat]
        budgets = sorted({row["seconds"] for row in mine})
        speedups = [[Interval(**row["speedup"]) for row in mine if row["seconds"] == s] for s in budgets]
        lines[name] = [(s, max(each, key=lambda i: i.value)) for s, each in zip(budgets, speedups, strict=True)]
    return standalone(speedup_by_size(lines, "seconds of training", f", temperature {heat:g}, each in its best shape"))


def tables(result: dict[str, Any]) -> list[str]:
    """Return a table for each temperature: τ and speedup of each drafter's best shape, by seconds of training."""
    rows = result["found"]
    budgets, drafters = sorted({row["seconds"] for row in rows}), dict.fromkeys(row["drafter"] for row in rows)
    texts = []
    for heat in sorted({row["temperature"] for row in rows}):
        head = [f"T = {heat:g}", *(f"{figure} after {s} s" for s in budgets for figure in ("τ", "speedup"))]
        cells = []
        for name in drafters:
            mine = [r for r in rows if r["drafter"] == name and r["temperature"] == heat]
            by_budget = [[r for r in mine if r["seconds"] == s] for s in budgets]
            cells.append([name, *(_best(each, figure) for each in by_budget for figure in ("tau", "speedup"))])
        texts.append(table(head, cells))
    return texts


def _best(rows: Sequence[dict[str, Any]], figure: str) -> str:
    if not rows:
        return NOTHING
    best = max(rows, key=lambda row: row[figure]["value"])
    value, _, bounds = interval(best[figure]).partition(" ")
    return f"{value}{'×' if figure == 'speedup' else ''} {bounds}, {best['plan']}"


def main() -> int:
    asked = _arguments()
    target = Target.load("embedded", dtype="float32", device="cpu")
    with threads(1):
        settings = conditions(target, prompts=2 * asked.limit, suites=["code", "docs"], max_new_tokens=asked.tokens)
    result: dict[str, Any] = {"conditions": settings, "found": []}
    for seconds in asked.seconds:
        for shape, report in reports(seconds, asked):
            result["found"] += rows(seconds, shape, report)
            write(result, asked.out)
        for heat in {row["temperature"] for row in result["found"]} if asked.out else ():
            write_atomically(asked.out.with_name(f"{asked.out.stem}-t{heat:g}.svg"), plot(result["found"], heat))
    publish(result, asked.out, tables(result))
    return 0


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=int, nargs="+", default=[60, 120, 240])
    parser.add_argument("--limit", type=int, default=12, help="prompts of each suite")
    parser.add_argument("--tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(command(main))
