"""Greedy output against `transformers.generate`, token for token, on every prompt of the embedded suites.

    python -m outrider.scripts.bench.identity --drafter eagle3=runs/embedded-eagle3/drafter --drafter ngram

Runs in fp32, where equality is exact: chains, and trees where a drafter grows them, at batch 1 and in ragged batches.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from outrider.common.atomic import write_atomically
from outrider.decode import Decoder, Plan
from outrider.eval.suites import load_suites
from outrider.heads import Drafter, Ngram, load_drafter
from outrider.targets import Target


def load_contestants(names: list[str], target: Target) -> dict[str, Drafter | None]:
    """`name=folder` loads a drafter; `ngram` needs none. The plain target is always there."""
    found: dict[str, Drafter | None] = {"plain": None}
    for entry in names:
        name, _, folder = entry.partition("=")
        found[name] = load_drafter(folder, target) if folder else Ngram()
    return found


def reference(target: Target, prompt: list[int], count: int) -> list[int]:
    """What `transformers.generate` writes, greedily, end-of-sequence included."""
    tokens = torch.tensor([prompt], device=target.device)
    generate: Any = target.model.generate
    out = generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return [int(t) for t in out[0, len(prompt) :]]


def compare(
    target: Target,
    drafter: Drafter | None,
    plan: Plan,
    prompts: list[list[int]],
    suites: list[str],
    wanted: list[list[int]],
    batch: int,
    count: int,
) -> dict[str, Any]:
    decoder, got, emitted = Decoder(target, drafter), [], []
    for start in range(0, len(prompts), batch):
        out = decoder.generate(prompts[start : start + batch], count, plan=plan)
        got += out.tokens
        emitted += [[r.accepted + 1 for r in rounds] for rounds in out.rounds]
    different = [i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
    taus = {
        s: mean([n for suite, rounds in zip(suites, emitted, strict=True) for n in rounds if s in (suite, "all")])
        for s in [*dict.fromkeys(suites), "all"]
    }
    return {"identical": len(prompts) - len(different), "prompts": len(prompts), "different": different, "tau": taus}


def mean(values: list[int]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def plans(drafter: Drafter | None, arguments: argparse.Namespace) -> dict[str, Plan]:
    if drafter is None:
        return {"no drafts": Plan(0)}
    chain, tree = Plan(arguments.depth), Plan(arguments.depth + 1, arguments.width, arguments.nodes)
    return {str(chain): chain} | ({str(tree): tree} if drafter.abilities.reads_nodes else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", action="append", default=[], help="NAME=FOLDER, or ngram; repeatable")
    parser.add_argument("--suites", nargs="+", default=["code", "docs", "prose"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="of chains; trees are one deeper")
    parser.add_argument("--width", type=int, default=4, help="of dynamic trees")
    parser.add_argument("--nodes", type=int, default=16, help="of dynamic trees")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    target = Target.load(arguments.target, dtype="float32")
    asked = [
        (suite.name, list(p.tokens))
        for suite in load_suites(arguments.suites, target.require_tokenizer())
        for p in suite.prompts
    ]
    suites, prompts = [name for name, _ in asked], [tokens for _, tokens in asked]
    wanted = [reference(target, p, arguments.max_new_tokens) for p in prompts]
    found = {}
    for name, drafter in load_contestants(arguments.drafter, target).items():
        for (shape, plan), batch in product(plans(drafter, arguments).items(), (1, 8)):
            found[f"{name}, {shape}, batch {batch}"] = row = compare(
                target, drafter, plan, prompts, suites, wanted, batch, arguments.max_new_tokens
            )
            print(
                f"{name}, {shape}, batch {batch}: {row['identical']}/{row['prompts']} identical, tau {row['tau']}",
                flush=True,
            )
    conditions = {
        "target": target.fingerprint().digest,
        "dtype": "float32",
        "device": str(target.device),
        "temperature": 0,
        "max_new_tokens": arguments.max_new_tokens,
        "suites": arguments.suites,
        "torch": torch.__version__,
    }
    if arguments.out:
        write_atomically(arguments.out, json.dumps({"conditions": conditions, "results": found}, indent=2) + "\n")
    return int(any(row["different"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
