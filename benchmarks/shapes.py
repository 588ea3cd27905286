"""τ of shapes and rules on the embedded suites, on the same prompts: trees against chains, rule against rule.

    python -m benchmarks.shapes --drafter runs/embedded-eagle3/drafter \\
        --out benchmarks/results/shapes-cpu-fp32.json

At temperature 0 chains of every depth up to --deepest and dynamic trees; at temperature 1 block against token by
token on a chain, and traversal against without replacement on the best static tree for the acceptance rates of a
first run, over several seeds. Nothing is timed: τ does not depend on the machine, and prompts run in batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan, Sampling, best_tree, depth_counts
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import load_suites
from outrider.heads import load_drafter
from outrider.targets import Target

from .acceptance import Rounds, pooled, rounds_of, tau
from .report import command, conditions, interval, options, publish, shown, table, write


def run(
    decoder: Decoder,
    prompts: list[list[int]],
    plan: Plan,
    temperature: float,
    seeds: Sequence[int],
    arguments: argparse.Namespace,
) -> Rounds:
    """Return all rounds of each prompt, over the seeds."""
    count, batch = arguments.max_new_tokens, arguments.batch
    return pooled([rounds_of(decoder, prompts, count, Sampling(temperature, seed=s), plan, batch) for s in seeds])


def rates_of(rounds: Rounds, width: int) -> list[list[float]]:
    """Return acceptance by depth from a chain's rounds; a sibling is guessed at a quarter of the one before it."""
    counts = depth_counts([r for each in rounds for r in each])
    rates = [kept / reached for reached, kept in counts if reached]
    return [[rate * (1 - rate) ** i * 0.5**i for i in range(width)] for rate in rates]


def compare(bootstrap: Bootstrap, measured: dict[str, Rounds], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    taus = {name: tau(rounds) for name, rounds in measured.items()}
    quotients = {f"{above} / {below}": bootstrap.quotient(taus[above], taus[below]) for above, below in pairs}
    found = {"tau": {name: bootstrap.ratio(each) for name, each in taus.items()}, "quotients": quotients}
    return {part: {name: shown(figure) for name, figure in figures.items()} for part, figures in found.items()}


def greedy(
    decoder: Decoder, prompts: list[list[int]], bootstrap: Bootstrap, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Compare trees with the best chain."""
    plans = {f"chain, depth {d}": Plan(d) for d in range(1, arguments.deepest + 1)}
    trees = (Plan(5, width=4, nodes=16), Plan(6, width=4, nodes=24), Plan(6, width=6, nodes=32))
    plans |= {str(plan): plan for plan in trees}
    measured = {name: run(decoder, prompts, plan, 0.0, [0], arguments) for name, plan in plans.items()}
    chains = [name for name in measured if name.startswith("chain")]
    best = max(chains, key=lambda name: bootstrap.ratio(tau(measured[name])).value)
    return compare(bootstrap, measured, [(name, best) for name in measured if name not in chains])


def sampled(
    decoder: Decoder, prompts: list[list[int]], bootstrap: Bootstrap, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Compare rules with each other, on a chain and on a static tree."""
    seeds = range(arguments.seeds)
    chain = {f"chain, {rule}": Plan(arguments.depth, verify=rule) for rule in ("rejection", "block")}
    measured = {name: run(decoder, prompts, plan, 1.0, seeds, arguments) for name, plan in chain.items()}
    tree = best_tree(rates_of(measured["chain, rejection"], 4), arguments.nodes)
    for rule in ("without_replacement", "traversal", "candidates"):
        measured[f"static tree, {rule}"] = run(decoder, prompts, Plan(tree=tree, verify=rule), 1.0, seeds, arguments)
    pairs = [
        ("chain, block", "chain, rejection"),
        ("static tree, traversal", "static tree, without_replacement"),
        ("static tree, candidates", "static tree, without_replacement"),
        ("static tree, without_replacement", "chain, rejection"),
    ]
    return compare(bootstrap, measured, pairs) | {"depth": arguments.depth, "tree": list(tree.parents)}


def tables(result: dict[str, Any]) -> list[str]:
    """Return τ of each shape and the quotients, at each temperature."""
    texts = []
    for key in (key for key in result if key.startswith("temperature ")):
        title, rows = key.replace("temperature", "T ="), result[key]
        texts.append(table([title, "τ"], ([name, interval(t)] for name, t in rows["tau"].items())))
        quotients = ([name, interval(q, 3)] for name, q in rows["quotients"].items())
        texts.append(table([f"{title}: τ over τ", "quotient"], quotients))
        texts += [f"The static tree: {rows['tree']}."] if "tree" in rows else []
    return texts


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "target", "suites", "limit", "batch", "depth", "seeds", "threads", max_new_tokens=64)
    parser.add_argument("--drafter", required=True, help="folder of a drafter that grows trees")
    parser.add_argument("--deepest", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=16, help="of the static tree at temperature 1")
    parser.add_argument("--temperatures", type=int, nargs="+", choices=[0, 1], default=[0, 1])
    arguments = parser.parse_args(given)

    with threads(arguments.threads):
        target = Target.load(arguments.target, dtype="float32")
        decoder = Decoder(target, load_drafter(arguments.drafter, target))
        suites = load_suites(arguments.suites, target.require_tokenizer(), arguments.limit)
        prompts = [list(p.tokens) for s in suites for p in s.prompts]
        bootstrap = Bootstrap([len(s.prompts) for s in suites])
        result: dict[str, Any] = {}
        result["conditions"] = conditions(
            target,
            batch=arguments.batch,
            seeds=arguments.seeds,
            max_new_tokens=arguments.max_new_tokens,
            suites=arguments.suites,
            prompts=len(prompts),
            intervals="95%, bootstrap over prompts within suites; quotients on the same prompts and seeds",
        )
        if 0 in arguments.temperatures:
            result["temperature 0"] = greedy(decoder, prompts, bootstrap, arguments)
            write(result, arguments.out)
        if 1 in arguments.temperatures:
            result["temperature 1"] = sampled(decoder, prompts, bootstrap, arguments)
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
