"""What a setting of a recipe is worth: variants trained alike over several seeds, and how much τ and acceptance differ.

    python -m benchmarks.ablation embedded-eagle3 --out lk.json \\
        --vary drafter.loss=soft_ce --vary drafter.loss=lk_nla
    python -m benchmarks.ablation embedded-eagle3 data.limit=400 --out ttt.json \\
        --vary drafter.steps=4 --vary drafter.steps=1

Each --vary is one variant, one or more settings; the first is what the others are compared with. All learn the same
responses for the same number of steps: seed s sets the first weights and the order of the rows, and is also the seed
of sampling at temperature 1. Drafts are chains; prompts run in batches, nothing is timed. What is trained in --work
is not trained again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outrider.common import BadInputError
from outrider.common.safe_load import read_json
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan, Sampling
from outrider.distill.responses import distill
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import load_suites
from outrider.heads import Drafter, load_drafter
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.provenance import PROVENANCE, check_same_run

from .acceptance import Rounds, alpha, over_seeds, pooled, rounds_of, tau
from .report import command, conditions, interval, number, options, publish, shown, table, write

Runs = dict[str, list[Rounds]]  # of each variant, seed by seed


def _answered(recipe: Recipe) -> object:
    """Return the settings that decide the responses of a recipe: not how much of the loss follows their rounds."""
    return recipe.target, recipe.data.model_copy(update={"verified": 0.0})


def recipes_of(arguments: argparse.Namespace) -> dict[str, Recipe]:
    """Return the recipe of each variant, all on one folder of responses."""
    found = {" ".join(vary): load_recipe(arguments.recipe, [*arguments.changes, *vary]) for vary in arguments.vary}
    if len(found) < 2:
        raise BadInputError("there is nothing to compare: give two or more different variants, --vary key=value each.")
    first, *others = found.values()
    if any(_answered(first) != _answered(other) for other in others):
        raise BadInputError(
            "all variants learn the same responses of one target: "
            "--vary changes drafter, training or data.verified, not target or other data."
        )
    responses = first.data.responses or str(arguments.work / "data")
    return {
        name: recipe.model_copy(update={"data": recipe.data.model_copy(update={"responses": responses})})
        for name, recipe in found.items()
    }


def trained(recipe: Recipe, variant: str, seed: int, target: Target, work: Path) -> tuple[Drafter, int]:
    """Return a variant of that seed, and the number of steps it took."""
    output = work / f"{recipe.name}-{re.sub(r'[^A-Za-z0-9.=_-]+', '-', variant)}-seed-{seed}"
    one = recipe.model_copy(update={"training": recipe.training | {"seed": seed}, "output": str(output)})
    check_same_run(one, output)
    if not ((output / PROVENANCE).is_file() and (output / "drafter").is_dir()):
        train(one, target)
    return load_drafter(output / "drafter", target), read_json(output / PROVENANCE)["training"]["steps"]


def compare(runs: Runs, strata: Sequence[int], depth: int) -> dict[str, Any]:
    """Return τ and alpha by depth of each variant over all seeds, and how much more they are than the first one's."""
    bootstrap, (base, *others) = Bootstrap(strata), runs
    figures: dict[str, Callable[[Rounds], Ratio]] = {"tau": tau}
    figures |= {f"alpha_d{d}": partial(alpha, depth=d) for d in range(1, depth + 1)}
    together = {name: pooled(each) for name, each in runs.items()}
    found: dict[str, Any] = {
        name: {key: shown(bootstrap.ratio(figure(rounds))) for key, figure in figures.items()}
        for name, rounds in together.items()
    }
    for name in others:
        more = found[name]["more_than_first"] = {}
        for key, figure in figures.items():
            pairs = zip(runs[name], runs[base], strict=True)
            by_seed = [bootstrap.difference(figure(a), figure(b)).value for a, b in pairs]
            mean = over_seeds(by_seed)
            more[key] = {
                **shown(bootstrap.difference(figure(together[name]), figure(together[base]))),
                "by_seed": [number(value) for value in by_seed],
                "over_seeds": None if mean is None else {side: number(value) for side, value in mean.items()},
            }
    return found


def tables(result: dict[str, Any]) -> list[str]:
    """Return the figures of all variants, and how much more each has than the first, at each temperature."""
    texts = []
    for key in (key for key in result if key.startswith("temperature ")):
        title, variants = key.replace("temperature", "T ="), result[key]
        first, measures = next(iter(variants)), list(next(iter(variants.values())))
        words = [m.replace("alpha_d", "alpha at depth ").replace("tau", "τ") for m in measures]
        rows = [[name, *(interval(v[m]) for m in measures)] for name, v in variants.items()]
        texts.append(table([f"`{title}`", *words], rows))
        others = {name: v["more_than_first"] for name, v in variants.items() if "more_than_first" in v}
        rows = [[name, *(interval(v[m], sign="+") for m in measures)] for name, v in others.items()]
        texts.append(table([f"{title}: more than `{first}`", *words], rows))
    return texts


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, "suites", "limit", "batch", "depth", "seeds", "threads", max_new_tokens=64)
    parser.add_argument("recipe", help="a YAML file, or the name of a packaged recipe")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes for all variants")
    variant: dict[str, Any] = {"nargs": "+", "action": "append", "required": True, "metavar": "KEY=VALUE"}
    parser.add_argument("--vary", **variant, help="a variant; the first one is the reference")
    parser.add_argument("--work", type=Path, default=Path("runs/ablation"), help="responses and trainings")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    recipes = recipes_of(arguments)
    first = next(iter(recipes.values()))
    with threads(arguments.threads):
        target = Target.load(**first.target.to_load())
        suites = load_suites(arguments.suites, target.require_tokenizer(), arguments.limit)
        prompts = [list(p.tokens) for s in suites for p in s.prompts]
        strata = [len(s.prompts) for s in suites]
        if first.data.responses == str(arguments.work / "data"):
            unanswered = first.data.model_copy(update={"responses": None})
            distill(first.model_copy(update={"output": str(arguments.work), "data": unanswered}), target)
        runs: dict[float, Runs] = {t: {name: [] for name in recipes} for t in arguments.temperatures}
        steps: set[int] = set()
        for seed in range(arguments.seeds):
            for name, recipe in recipes.items():
                drafter, taken = trained(recipe, name, seed, target, arguments.work)
                steps.add(taken)
                decoder = Decoder(target, drafter)
                plan, count = Plan(arguments.depth), arguments.max_new_tokens
                for t, by_name in runs.items():
                    sampling = Sampling(t, seed=seed)
                    by_name[name].append(rounds_of(decoder, prompts, count, sampling, plan, arguments.batch))
            # Where the responses lie is a place on this machine.
            changes = [change for change in arguments.changes if not change.startswith("data.responses=")]
            told = conditions(
                target,
                recipe=first.name,
                changes=changes,
                variants=list(recipes),
                training_steps=sorted(steps),
                seeds=seed + 1,
                depth=arguments.depth,
                batch=arguments.batch,
                max_new_tokens=arguments.max_new_tokens,
                suites=arguments.suites,
                prompts=len(prompts),
                intervals="95%, bootstrap over prompts within suites, rounds of all seeds; "
                "differences on the same prompts and seeds; over_seeds: Student's t",
            )
            result = {f"temperature {t:g}": compare(by_name, strata, arguments.depth) for t, by_name in runs.items()}
            result = {"conditions": told} | result
            write(result, arguments.out)
        publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
