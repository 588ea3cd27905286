"""What is predicted of a plan: from the costs of its rounds and from how often drafts are accepted, tokens per second.

Tokens/s of a plan are predicted as

    B N / (prefill + (N − 1) / τ · seconds / running)

with B rows, N new tokens of a mean answer (the first comes from the prefill), τ = 1 + Σ_d P(d drafts are accepted) for
a chain (which is 1 + Σ_d Π_{i≤d} alpha_i where drafts are never missing) and 1 + Σ over nodes of the product of the
rates on the way to it for a tree, seconds of a round of the whole batch, and the share of the batch's rows that are
still running in a mean round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..common import BadInputError
from ..costs.rounds import RoundTimes
from ..decode import Control, Costs, Plan, Tree, best_tree
from .acceptance import Acceptance
from .batches import BatchAnswer
from .tuning import plan_words

TREE_SIZES = (4, 8, 12, 16, 24, 32, 48, 64)
_HOPEFUL = 0.9  # trees that cannot reach this part of the best chain's prediction are not timed
_RACING = 2  # chains, and trees, that are measured
# The rates were measured on many prompts, so that a few unlucky rounds should not outvote them: with less a controller
# falls back too early.
CONTROL_WEIGHT = 16.0


# ------------------------------------------------------------ costs


def round_times(done: Sequence[BatchAnswer]) -> RoundTimes:
    """Return what rounds take: the median over batches that had some."""
    timed = [c for c in done if c.passes]
    if not timed:
        raise BadInputError("the answers to prompts of typical length end with their first token; take other prompts.")
    return RoundTimes(
        prefill=statistics.median(c.prefill for c in timed),
        seconds=statistics.median((c.seconds - c.prefill) / c.passes for c in timed),
        running=sum(c.num_rounds for c in timed) / sum(c.passes * len(c.rounds) for c in timed),
    )


# ------------------------------------------------------------ options


@dataclass(frozen=True)
class Option:
    """A plan and what is predicted of it: tokens per round and sequence, and tokens/s of the whole batch.

    `statistical`: type and settings of the drafter without weights that it is a fusion with; None for no fusion.
    """

    plan: Plan
    tau: float
    loop: RoundTimes
    predicted: float
    statistical: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The plan in words."""
        return plan_words(self.plan, self.statistical)


def option(plan: Plan, tau: float, loop: RoundTimes, tokens: float, batch: int) -> Option:
    """Return a plan with its predicted speed."""
    return Option(plan, tau, loop, loop.tokens_per_second(tau, tokens, batch))


def chain_options(costs: Costs, loops: dict[int, RoundTimes], seen: Acceptance, batch: int) -> list[Option]:
    """Return the plain plan, and chains of every depth up to the deepest that was timed."""
    return [
        option(Plan(d), seen.chain(d), _between(costs, loops, d), seen.tokens, batch) for d in range(max(loops) + 1)
    ]


def _between(costs: Costs, loops: dict[int, RoundTimes], depth: int) -> RoundTimes:
    """Return what rounds of a chain of `depth` take, from those that were timed."""
    if depth == 0:
        return loops[0]
    timed = sorted(d for d in loops if d)
    prefill, running = (
        float(np.interp(depth, timed, [getattr(loops[d], name) for d in timed])) for name in ("prefill", "running")
    )
    return RoundTimes(prefill, costs.round_time(depth), running)


def hopeful_trees(costs: Costs, chains: Sequence[Option], seen: Acceptance, batch: int) -> list[Tree]:
    """Return for each size the tree that is best at the price of a chain's drafting, if it comes near the best chain.

    Nothing without rates of a tree's children.
    """
    wanted = _HOPEFUL * max(o.predicted for o in chains)
    found = []
    for size in TREE_SIZES:
        speeds = {
            tree: _cheap_option(costs, chains, tree, seen, batch).predicted for tree in _trees_of(seen.ranks, size)
        }
        fastest = max(speeds, key=lambda tree: speeds[tree], default=None)
        if fastest is not None and speeds[fastest] >= wanted:
            found.append(fastest)
    return found


def _trees_of(ranks: Sequence[Sequence[float]], size: int) -> list[Tree]:
    """Return the best trees of `size` nodes of every depth that has room for them."""
    found: list[Tree] = []
    for depth in range(1, len(ranks) + 1):
        try:
            found.append(best_tree(ranks[:depth], size))
        except BadInputError:
            continue
    return list(dict.fromkeys(found))


def _cheap_option(costs: Costs, chains: Sequence[Option], tree: Tree, seen: Acceptance, batch: int) -> Option:
    """Return a tree as if its levels were drafted in the time of a chain's."""
    loop = replace(chains[tree.depth].loop, seconds=costs.round_time(tree.depth, len(tree.parents)))
    return option(Plan(tree=tree), tree.value(seen.ranks), loop, seen.tokens, batch)


def best(options: Sequence[Option], count: int = _RACING) -> list[Option]:
    """Return the `count` best predicted."""
    return sorted(options, key=lambda o: -o.predicted)[:count]


def control_option(chains: Sequence[Option], costs: Costs, seen: Acceptance, most: int) -> Option:
    """Return chains whose depth is decided round by round, up to a little deeper than the best one (`most` at most).

    They are predicted as the best fixed depth.
    """
    fixed = best(chains, 1)[0]
    control = Control(costs, seen.rates, CONTROL_WEIGHT)
    return replace(fixed, plan=Plan(min(most, fixed.plan.depth + 2), control=control))
