"""What a tree from one pass brings over the best chain, for a trained drafter: tokens a round, with intervals.

    python -m outrider.scripts.bench.block_trees runs/embedded-dflash/drafter --out block-trees.json

Chains of every depth, dynamic trees of 16 nodes at temperature 0, and static trees of 16 nodes at temperature 1, which
are the best for the drafter's measured ranks. Differences are over the same prompts (bootstrap over prompts).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.decode import Decoder, Plan, Sampling, best_tree
from outrider.eval.acceptance import measure_acceptance
from outrider.eval.suites import PromptJob, load_suites, make_jobs
from outrider.heads import Drafter, load_drafter
from outrider.targets import Target

from .conditions import command, conditions, write

ROWS = 20  # prompts of one batch: what is counted does not depend on it


def counted(
    target: Target, drafter: Drafter, jobs: list[PromptJob], tokens: int, plan: Plan, heat: float
) -> np.ndarray:
    """Return the emitted tokens and the rounds of each prompt, `[prompts, 2]`."""
    found = []
    for begin in range(0, len(jobs), ROWS):
        part = jobs[begin : begin + ROWS]
        out = Decoder(target, drafter).generate(
            [job.prompt.tokens for job in part],
            tokens,
            Sampling(heat, seed=1),
            plan,
            sequence_ids=list(range(begin, begin + len(part))),
        )
        found += [(sum(r.emitted for r in rounds), len(rounds)) for rounds in out.rounds]
    return np.array(found)


def tau(counts: np.ndarray) -> float:
    return float(counts[:, 0].sum() / counts[:, 1].sum())


def interval(one: np.ndarray, other: np.ndarray, draws: int = 2000) -> list[float]:
    """Return the 95% interval of the ratio of both taus, over prompts drawn together."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, len(one), (draws, len(one)))
    ratios = [tau(one[r]) / tau(other[r]) for r in rows]
    return [round(float(q), 3) for q in np.quantile(ratios, (0.025, 0.975))]


def measure(
    target: Target, drafter: Drafter, jobs: list[PromptJob], tokens: int, nodes: int, heat: float
) -> dict[str, Any]:
    """Return taus of chains and of a tree at one temperature, and the tree's gain over the best chain."""
    most = drafter.max_depth or 8
    chains = {d: counted(target, drafter, jobs, tokens, Plan(d), heat) for d in range(1, most + 1)}
    if heat == 0:
        plan = Plan(most, 4, nodes)
    else:
        seen = measure_acceptance(target, drafter, jobs, tokens, Sampling(heat, seed=2), trees=True)
        plan = Plan(tree=best_tree(seen.ranks, nodes))
    tree = counted(target, drafter, jobs, tokens, plan, heat)
    best = max(chains, key=lambda d: tau(chains[d]))
    return {
        "temperature": heat,
        "chains": {d: round(tau(c), 3) for d, c in chains.items()},
        "best_chain": best,
        "tree": str(plan),
        "tree_tau": round(tau(tree), 3),
        "gain": round(tau(tree) / tau(chains[best]), 3),
        "gain_interval": interval(tree, chains[best]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--suites", nargs="+", default=["code", "docs", "prose"])
    parser.add_argument("--limit", type=int, default=40, help="prompts of each suite")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load("embedded", dtype="float32", device="cpu")
    drafter = load_drafter(arguments.drafter, target)
    jobs = make_jobs(load_suites(arguments.suites, target.require_tokenizer()), arguments.limit)
    settings = {"drafter": drafter.name, "prompts": len(jobs), "tokens": arguments.tokens}
    result: dict[str, Any] = {"conditions": conditions(target, **settings), "trees": []}
    for heat in arguments.temperatures:
        found = measure(target, drafter, jobs, arguments.tokens, arguments.nodes, heat)
        result["trees"].append(found)
        print(found)
        write(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(command(main))
