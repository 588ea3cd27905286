"""Greedy output against `transformers.generate`, token for token, on every prompt of the embedded suites.

    python -m benchmarks.identity --drafter eagle3=runs/embedded-eagle3/drafter --drafter ngram

Runs in fp32, where equality is exact: chains, and trees where a drafter grows them, at batch 1 and in ragged batches.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from outrider.decode import Decoder, Plan, Sampling
from outrider.eval.suites import load_suites
from outrider.heads import Drafter
from outrider.targets import Target

from .acceptance import outputs_of
from .grown import Grown
from .report import command, conditions, options, publish, table


@dataclass(frozen=True)
class Asked:
    """A prompt, and what `transformers.generate` writes after it, greedily, end-of-sequence included."""

    suite: str
    prompt: list[int]
    wanted: list[int]


def reference(target: Target, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt], device=target.device)
    generate: Any = target.model.generate
    out = generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return [int(t) for t in out[0, len(prompt) :]]


def compare(decoder: Decoder, plan: Plan, asked: list[Asked], batch: int, count: int) -> dict[str, Any]:
    """Return how many texts are the library's, which are not, and τ by suite."""
    outputs = list(outputs_of(decoder, [one.prompt for one in asked], count, Sampling(), plan, batch))
    got = [tokens for out in outputs for tokens in out.tokens]
    emitted: dict[str, list[int]] = {suite: [] for suite in [*(one.suite for one in asked), "all"]}
    for one, rounds in zip(asked, (row for out in outputs for row in out.rounds), strict=True):
        for suite in (one.suite, "all"):
            emitted[suite] += [r.emitted for r in rounds]
    different = [i for i, (tokens, one) in enumerate(zip(got, asked, strict=True)) if tokens != one.wanted]
    taus = {suite: round(sum(tokens) / max(1, len(tokens)), 4) for suite, tokens in emitted.items()}
    return {"identical": len(asked) - len(different), "prompts": len(asked), "different": different, "tau": taus}


def plans(drafter: Drafter | None, arguments: argparse.Namespace) -> dict[str, Plan]:
    if drafter is None:
        return {"no drafts": Plan(0)}
    chain, tree = Plan(arguments.depth), Plan(arguments.depth + 1, arguments.width, arguments.nodes)
    return {str(chain): chain} | ({str(tree): tree} if drafter.abilities.reads_nodes else {})


def tables(result: dict[str, Any]) -> list[str]:
    """Return how many texts are the library's, and τ by suite."""
    suites = list(next(iter(result["results"].values()))["tau"])
    rows = [
        [name, f"{r['identical']} of {r['prompts']}", *(f"{r['tau'][suite]:.2f}" for suite in suites)]
        for name, r in result["results"].items()
    ]
    return [table(["", "tokens equal to `transformers.generate`'s", *(f"τ, {suite}" for suite in suites)], rows)]


def main() -> int:
    parser = options(__doc__, "target", "suites", "depth", "limit", "threads", max_new_tokens=64)
    parser.add_argument("--drafter", action="append", default=[], help="NAME=FOLDER, or ngram; repeatable")
    parser.add_argument("--width", type=int, default=4, help="of dynamic trees, which are one deeper than chains")
    parser.add_argument("--nodes", type=int, default=16, help="of dynamic trees")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target, dtype="float32")
    count = arguments.max_new_tokens
    suites = load_suites(arguments.suites, target.require_tokenizer(), arguments.limit)
    prompts = [(suite.name, list(prompt.tokens)) for suite in suites for prompt in suite.prompts]
    asked = [Asked(suite, prompt, reference(target, prompt, count)) for suite, prompt in prompts]
    results = {}
    drafters = {"plain": None} | Grown(target, target).drafters(arguments.drafter)
    for name, drafter in drafters.items():
        for (shape, plan), batch in product(plans(drafter, arguments).items(), (1, 8)):
            decoder = Decoder(target, drafter)
            results[f"{name}, {shape}, batch {batch}"] = compare(decoder, plan, asked, batch, count)
    told = conditions(target, temperature=0, max_new_tokens=count, suites=arguments.suites)
    result = {"conditions": told, "results": results}
    publish(result, arguments.out, tables(result))
    return int(any(row["different"] for row in results.values()))


if __name__ == "__main__":
    sys.exit(command(main))
