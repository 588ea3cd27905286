"""What a setting of a recipe is worth: variants trained alike over several seeds, and how much τ and acceptance differ.

    python -m benchmarks.ablation embedded-eagle3 --out lk.json \\
        --vary drafter.loss=soft_ce --vary drafter.loss=lk_nla
    python -m benchmarks.ablation embedded-eagle3 data.limit=400 --out ttt.json \\
        --vary drafter.steps=4 --vary drafter.steps=1

Each --vary is one variant, one or more settings; the first is what the others are compared with. All learn the same
responses for the same number of steps: seed s sets the first weights and the order of the rows, and is also the seed
of sampling at temperature 1. Prompts run in batches, nothing is timed. What is trained in --work is not trained again.

    python -m benchmarks.ablation embedded-eagle3 --seconds 180 --nodes 16 --vary … --vary recipe=embedded-eagle1

With --seconds they learn for the same *processor* time of the training process instead, which other work on the machine
does not change much; `recipe=NAME` in a variant is another recipe. Drafts are chains, and with --nodes trees, too.
--contexts 256 1024 4000 fills every prompt up to so many tokens with the suite's others: τ by context.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outrider.common import BadInputError
from outrider.common.untrusted_files import read_json
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan, Sampling
from outrider.distill.responses import distill
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import Suite, filled, load_suites, make_suite
from outrider.heads import Drafter, load_drafter
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.provenance import PROVENANCE, check_same_run
from outrider.train.stopping import TimeBudget

from .acceptance import Rounds, alpha, over_seeds, pooled, rounds_of, tau
from .report import command, conditions, interval, number, options, publish, shown, table, write

_RECIPE = "recipe="
TREE_DEPTH, TREE_WIDTH = 7, 4
Runs = dict[str, list[Rounds]]  # of each variant, seed by seed


def _answered(recipe: Recipe) -> object:
    """Return the settings that decide the responses of a recipe."""
    return recipe.target, recipe.data.model_copy(update={"features": "online", "features_dtype": "auto"})


def recipes_of(arguments: argparse.Namespace) -> dict[str, Recipe]:
    """Return the recipe of each variant, all on one folder of responses."""
    found = {" ".join(vary): _recipe(arguments, vary) for vary in arguments.vary}
    if len(found) < 2:
        raise BadInputError("there is nothing to compare: give two or more different variants, --vary key=value each.")
    first, *others = found.values()
    if any(_answered(first) != _answered(other) for other in others):
        raise BadInputError(
            "all variants learn the same responses of one target: "
            "--vary changes drafter or training, not target or data."
        )
    responses = first.data.responses or str(arguments.work / "data")
    return {
        name: recipe.model_copy(update={"data": recipe.data.model_copy(update={"responses": responses})})
        for name, recipe in found.items()
    }


def _recipe(arguments: argparse.Namespace, vary: Sequence[str]) -> Recipe:
    """Return the recipe of one variant."""
    named = [change.removeprefix(_RECIPE) for change in vary if change.startswith(_RECIPE)]
    changes = [change for change in vary if not change.startswith(_RECIPE)]
    return load_recipe((named or [arguments.recipe])[-1], [*arguments.changes, *changes])


def suites_of(arguments: argparse.Namespace, target: Target) -> list[Suite]:
    """Return the suites, at each of the contexts if there are any, with their first prompts."""
    tokenizer, limit = target.require_tokenizer(), arguments.limit
    if not arguments.contexts:
        return load_suites(arguments.suites, tokenizer, limit)
    whole = load_suites(arguments.suites, tokenizer)  # other prompts fill a context
    return [make_suite(s.name, s.prompts[:limit]) for n in arguments.contexts for s in (filled(w, n) for w in whole)]


def trained(
    recipe: Recipe, variant: str, seed: int, target: Target, work: Path, seconds: float | None
) -> tuple[Drafter, dict[str, Any]]:
    """Return a variant of that seed, and the facts of its training."""
    output = work / f"{recipe.name}-{re.sub(r'[^A-Za-z0-9.=_-]+', '-', variant)}-seed-{seed}"
    one = recipe.model_copy(update={"training": recipe.training | {"seed": seed}, "output": str(output)})
    check_same_run(one, output)
    if not ((output / PROVENANCE).is_file() and (output / "drafter").is_dir()):
        train(one, target, seconds=seconds)
    return load_drafter(output / "drafter", target), read_json(output / PROVENANCE)["training"]


def compare(runs: Runs, suites: dict[str, int], depth: int) -> dict[str, Any]:
    """Return τ, of each suite, too, and alpha by depth of each variant over all seeds, and how much more than the
    first one's. `suites`: how many prompts each has."""
    bootstrap, (base, *others) = Bootstrap(list(suites.values())), runs
    figures: dict[str, Callable[[Rounds], Ratio]] = {"tau": tau}
    begin = 0
    for name, count in suites.items():
        figures[f"tau {name}"] = partial(_tau_within, prompts=range(begin, begin := begin + count))
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


def _tau_within(rounds: Rounds, prompts: range) -> Ratio:
    """Return τ of those prompts alone."""
    return tau([each if number in prompts else [] for number, each in enumerate(rounds)])


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
    parser.add_argument("--seconds", type=float, help="processor time of each training, instead of the recipe's steps")
    parser.add_argument("--contexts", nargs="*", type=int, default=[], help="tokens that each prompt is filled up to")
    parser.add_argument("--nodes", type=int, default=0, help="of dynamic trees at temperature 0, four wide")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    recipes = recipes_of(arguments)
    first = next(iter(recipes.values()))
    with threads(arguments.threads):
        target = Target.load(**first.target.to_load())
        suites = suites_of(arguments, target)
        prompts = [list(p.tokens) for s in suites for p in s.prompts]
        counts = {s.name: len(s.prompts) for s in suites}
        if first.data.responses == str(arguments.work / "data"):
            unanswered = first.data.model_copy(update={"responses": None})
            distill(first.model_copy(update={"output": str(arguments.work), "data": unanswered}), target)
        if arguments.seconds is not None:
            TimeBudget.now = time.process_time  # type: ignore[method-assign]
        shapes: list[tuple[float, Plan]] = [(t, Plan(arguments.depth)) for t in arguments.temperatures]
        if arguments.nodes:
            shapes.append((0.0, Plan(TREE_DEPTH, TREE_WIDTH, arguments.nodes)))
        runs: list[Runs] = [{name: [] for name in recipes} for _ in shapes]
        steps: dict[str, list[int]] = {name: [] for name in recipes}
        for seed in range(arguments.seeds):
            for name, recipe in recipes.items():
                drafter, facts = trained(recipe, name, seed, target, arguments.work, arguments.seconds)
                steps[name].append(facts["steps"])
                decoder, count = Decoder(target, drafter), arguments.max_new_tokens
                for (t, plan), by_name in zip(shapes, runs, strict=True):
                    sampling = Sampling(t, seed=seed)
                    by_name[name].append(rounds_of(decoder, prompts, count, sampling, plan, arguments.batch))
            # Where the responses lie is a place on this machine.
            changes = [change for change in arguments.changes if not change.startswith("data.responses=")]
            told = conditions(
                target,
                recipe=first.name,
                changes=changes,
                variants=list(recipes),
                training_steps=steps,
                processor_seconds=arguments.seconds,
                seeds=seed + 1,
                depth=arguments.depth,
                batch=arguments.batch,
                max_new_tokens=arguments.max_new_tokens,
                suites=arguments.suites,
                contexts=arguments.contexts,
                prompts=len(prompts),
                intervals="95%, bootstrap over prompts within suites, rounds of all seeds; "
                "differences on the same prompts and seeds; over_seeds: Student's t",
            )
            result: dict[str, Any] = {"conditions": told}
            for (t, plan), by_name in zip(shapes, runs, strict=True):
                shape = f", tree of {plan.nodes}" if plan.nodes else ""
                result[f"temperature {t:g}{shape}"] = compare(by_name, counts, 0 if shape else arguments.depth)
            write(result, arguments.out)
        publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
