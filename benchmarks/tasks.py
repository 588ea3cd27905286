"""τ and acceptance by depth for each task of some suites: what drafters find to say about a real model's texts.

    python -m benchmarks.tasks --target smollm2 --drafter eagle3=runs/smollm2-eagle3/drafter --drafter ngram \\
        --suites question.jsonl --limit 52 --max-new-tokens 128 --temperatures 0 1 --out tasks-smollm2.json

Prompts are decoded together, since acceptance does not depend on the batch; nothing is timed. First turns alone are
asked. `--out` holds what is finished, and the same command goes on from there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from outrider.decode import Decoder, Plan, Sampling
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import load_suites
from outrider.eval.summary import MT_BENCH, SPEC_BENCH
from outrider.heads import Drafter
from outrider.targets import Target

from .acceptance import Rounds, alpha, rounds_of, tau
from .grown import Grown
from .report import command, conditions, interval, options, publish, shown, table, write


def task_of(suite: str, category: str | None, categories: set[str]) -> str:
    """Return the task that a prompt belongs to: of Spec-Bench six, as its own evaluation counts them."""
    if "translation" in categories and category in MT_BENCH:
        return "mt_bench"
    return category if category in SPEC_BENCH else suite


def measured(rounds: Rounds, depth: int) -> dict[str, Any]:
    """Return τ and the acceptance at each depth, with intervals over prompts."""
    bootstrap = Bootstrap([len(rounds)])
    by_depth = [shown(bootstrap.ratio(alpha(rounds, place + 1))) for place in range(depth)]
    return {"tau": shown(bootstrap.ratio(tau(rounds))), "alpha": by_depth, "prompts": len(rounds)}


def plans(drafter: Drafter, depth: int, nodes: Sequence[int]) -> list[Plan]:
    trees = [Plan(depth + 2, 4, count) for count in nodes] if drafter.abilities.reads_nodes else []
    return [Plan(depth), *trees]


def tables(result: dict[str, Any]) -> list[str]:
    """Return τ by task."""
    tasks = list(dict.fromkeys(task for row in result["results"].values() for task in row))
    rows = [
        [name, *(interval(row[task]["tau"]) if task in row else "" for task in tasks)]
        for name, row in result["results"].items()
    ]
    return [table(["τ", *tasks], rows)]


def main() -> int:
    parser = options(__doc__, "target", "suites", "depth", "limit", "threads", "batch", max_new_tokens=128)
    parser.add_argument("--drafter", action="append", default=[], help="NAME=FOLDER, or ngram; repeatable")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--nodes", nargs="*", type=int, default=[16], help="of dynamic trees, two deeper than chains")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are left out, and counted")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target, dtype="float32")
    suites = load_suites(arguments.suites, target.require_tokenizer(), arguments.limit)
    prompts = []
    tasks = []
    left_out = 0
    for suite in suites:
        categories = {prompt.category for prompt in suite.prompts if prompt.category}
        for prompt in suite.prompts:
            if len(prompt.tokens) > arguments.max_prompt_tokens:
                left_out += 1
                continue
            prompts.append(list(prompt.tokens))
            tasks.append(task_of(suite.name, prompt.category, categories))
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    told = conditions(
        target,
        suites={suite.name: suite.digest for suite in suites},
        limit=arguments.limit,
        left_out=left_out,
        max_new_tokens=arguments.max_new_tokens,
    )
    known = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    result: dict[str, Any] = {"conditions": told, "results": known.get("results", {})}
    ordered = [prompts[place] for place in order]
    drafters = Grown(target, target).drafters(arguments.drafter)
    for (name, drafter), temperature in product(drafters.items(), arguments.temperatures):
        for plan in plans(drafter, arguments.depth, arguments.nodes):
            key = f"{name}, {plan}, T = {temperature:g}"
            if key in result["results"]:
                continue
            decoder, sampling = Decoder(target, drafter), Sampling(temperature, seed=0)
            found = rounds_of(decoder, ordered, arguments.max_new_tokens, sampling, plan, arguments.batch)
            by_task: dict[str, Rounds] = {"all": []}
            for place, rounds in zip(order, found, strict=True):
                by_task["all"].append(rounds)
                by_task.setdefault(tasks[place], []).append(rounds)
            result["results"][key] = {task: measured(rounds, plan.depth) for task, rounds in by_task.items()}
            write(result, arguments.out)
            print(key, interval(result["results"][key]["all"]["tau"]), flush=True)
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
