"""The acceptance of a drafter's drafts on prompts: by depth, in trees by rank, and the kinds of tokens that it is of.

Shapes: D levels of a tree, W children of a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..decode import Decoder, Plan, Sampling, Tree, depth_counts
from ..decode.engine import Request
from ..decode.rules import Verdict, VerifyInputs
from ..heads import Drafter
from ..targets import Target
from ..targets.tokenizers import REPLACEMENT
from .suites import PromptJob

DEEPEST = 8
PROBE_DEPTH, PROBE_WIDTH = 6, 6  # of the tree that shows how often which child is accepted
_AT_ONCE = 8  # prompts


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of drafts on the prompts; it depends neither on the batch size nor on the machine.

    Attributes:
        rates: alpha at depth 1, 2, …, of the rounds that drafted so deep and accepted all before; 0 without any.
        kept: share of all rounds, also of those without drafts, that accepted at least 1, 2, … drafts.
        ranks: `[D][W]`, the share of paths through the child of each rank, of those to its parent; () without trees.
        tokens: new tokens of a mean answer.
    """

    rates: tuple[float, ...]
    kept: tuple[float, ...]
    ranks: tuple[tuple[float, ...], ...]
    tokens: float

    def chain(self, depth: int) -> float:
        """Return the predicted tokens per round of a chain."""
        return 1 + sum(self.kept[:depth])


def deepest(drafter: Drafter) -> int:
    """Return the depth of the deepest chain that is tried."""
    return min(DEEPEST, drafter.max_depth or DEEPEST)


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    jobs: Sequence[PromptJob],
    max_new_tokens: int,
    sampling: Sampling,
    trees: bool,
    at_once: int = _AT_ONCE,
    most: int = DEEPEST,
) -> Acceptance:
    """Decode all prompts with the deepest chain, of `most` drafts at most, and with a wide tree if `trees`.

    Args:
        at_once: prompts of a batch, at most: a fusion drafts otherwise for one row than for several.

    Raises:
        BadInputError: every answer ends with its first token.
    """
    decoder = Decoder(target, drafter)
    depth = min(most, deepest(drafter))
    rounds = []
    tokens = 0
    for some in _pieces(jobs, at_once):
        prompts, ids = [j.prompt.tokens for j in some], [j.sequence for j in some]
        out = decoder.generate(prompts, max_new_tokens, sampling, Plan(depth), sequence_ids=ids)
        rounds += [r for sequence in out.rounds for r in sequence]
        tokens += sum(map(len, out.tokens))
    if not rounds:
        raise BadInputError(
            "every answer ended with its first token, so nothing was drafted and there is nothing to tune; "
            "take other prompts."
        )
    counts = [*depth_counts(rounds), *[(0, 0)] * depth][:depth]
    ranks = rank_rates(target, drafter, jobs, max_new_tokens, sampling) if trees else ()
    return Acceptance(
        tuple(round(kept / reached, 6) if reached else 0.0 for reached, kept in counts),
        tuple(kept / len(rounds) for _, kept in counts),
        ranks,
        tokens / len(jobs),
    )


def text_kinds(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str]:
    """Return a function that names the kind of a token by its text: `KINDS` without "copied"."""
    if tokenizer is None:
        return lambda _: "other"
    special = frozenset(tokenizer.all_special_ids)

    @cache
    def kind(token: int) -> str:
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if token in special:
            return "symbol"
        if any(map(str.isdigit, text)):
            return "number"
        if any(letter.isalpha() or letter == REPLACEMENT for letter in text):
            return "word"
        return "symbol" if text.strip() else "blank"

    return kind


def token_kinds(prompt: Sequence[int], answer: Sequence[int], text_kind: Callable[[int], str]) -> list[str]:
    """Return the kind of each new token: "copied" if it ends three tokens that stood before, else by its text."""
    text = [*prompt, *answer]
    seen = set[tuple[int, ...]]()
    kinds = list[str]()
    for end, token in enumerate(text, 1):
        three = tuple(text[max(0, end - 3) : end])
        if end > len(prompt):
            kinds.append("copied" if three in seen else text_kind(token))
        seen.add(three)
    return kinds


def _pieces(jobs: Sequence[PromptJob], at_once: int = _AT_ONCE) -> list[list[PromptJob]]:
    ordered = sorted(jobs, key=lambda j: len(j.prompt.tokens))
    return [ordered[i : i + at_once] for i in range(0, len(ordered), at_once)]


def rank_rates(
    target: Target, drafter: Drafter, jobs: Sequence[PromptJob], max_new_tokens: int, sampling: Sampling
) -> tuple[tuple[float, ...], ...]:
    """Return the share of kept paths that go on through the child of each rank, by depth, `[D][W]`.

    They are measured under one wide tree, in which the nodes of the all-first path have W children each. Other nodes
    are taken to have the same rates, as in Sequoia (arXiv 2402.12374, §4.1); they are a little lower, so that large
    trees are predicted a few percent too well.
    """
    vocabulary = target.vocab_size if drafter.output_ids is None else len(drafter.output_ids)
    tree = wide_tree(min(PROBE_DEPTH, deepest(drafter)), min(PROBE_WIDTH, vocabulary))
    decoder = Decoder(target, drafter, static=False)  # each round is looked at from the host
    ends = [end for some in _pieces(jobs) for end in _kept_ends(decoder, some, max_new_tokens, sampling, tree)]
    return tuple(_share_by_rank(tree, ends, depth) for depth in range(tree.depth))


def wide_tree(depth: int, width: int) -> Tree:
    """Return a path of first children, `depth` deep, in which the root and each node but the last have `width`."""
    return Tree(tuple(-1 if level == 0 else (level - 1) * width for level in range(depth) for _ in range(width)))


def _share_by_rank(tree: Tree, ends: Sequence[int], depth: int) -> tuple[float, ...]:
    """Return the share of paths through each child of the node at `depth` of the all-first path, of those to it."""
    came = [path for path in (_path(tree, end) for end in ends) if path[:depth] == [0] * depth]
    width = len(tree.children[-1])
    return tuple(
        round(sum(len(path) > depth and path[depth] == rank for path in came) / len(came), 6) if came else 0.0
        for rank in range(width)
    )


def _path(tree: Tree, node: int) -> list[int]:
    """Return the ranks on the way from the root to `node` (−1: the root)."""
    ranks: list[int] = []
    while node >= 0:
        ranks.append(tree.ranks[node])
        node = tree.parents[node]
    return ranks[::-1]


def _kept_ends(
    decoder: Decoder, jobs: Sequence[PromptJob], max_new_tokens: int, sampling: Sampling, tree: Tree
) -> list[int]:
    """Return the last node of each round's kept path (−1: the root), of which rounds keep the depth only."""
    ends: list[int] = []

    def note(verdict: Verdict, _: VerifyInputs) -> None:
        if verdict.path is not None:
            end = nn.functional.pad(verdict.path, (1, 0), value=-1).gather(1, verdict.accepted[:, None])
            ends.extend(end[:, 0].tolist())

    prompts, ids = [j.prompt.tokens for j in jobs], [j.sequence for j in jobs]
    _run_watched(decoder, Request(prompts, max_new_tokens, sampling, Plan(tree=tree), sequence_ids=ids), note)
    return ends


def _run_watched(decoder: Decoder, request: Request, note: Callable[[Verdict, VerifyInputs], None]) -> None:
    """Complete the prompts, and call `note` with every verdict and its inputs."""
    run = decoder.run(request)
    run.setup = replace(run.setup, on_verdict=note)
    for _ in run.steps():
        pass


def unexplained_drafts(
    decoder: Decoder, jobs: Sequence[PromptJob], max_new_tokens: int, sampling: Sampling, plan: Plan
) -> str:
    """Return a sentence if rounds keep more or fewer first drafts than p and q say; "" where chance explains it.

    Under the rule `rejection` each is kept with probability Σ min(p, q), given p and q. Under others, and where a
    controller may drop what was drawn, nothing is looked at. Chance alone gives a sentence in at most one of 1,000
    cases (Freedman's inequality, both sides; the text depends on what was kept).
    """
    drawn = decoder.drafter is not None and not decoder.drafter.abilities.deterministic and plan.control is None
    if not drawn or plan.rule(sampling.temperature, False) != "rejection":
        return ""
    seen: list[tuple[bool, float]] = []  # whether it was kept, and with which probability

    def note(verdict: Verdict, inputs: VerifyInputs) -> None:
        if inputs.draft_probs is not None and inputs.draft_probs.shape[1]:
            odds = torch.minimum(inputs.probs[:, 0], inputs.draft_probs[:, 0]).double().sum(-1).clamp(max=1)
            real = inputs.proposal.lengths > 0
            seen.extend(zip((verdict.accepted > 0)[real].tolist(), odds[real].tolist(), strict=True))

    for job in jobs:  # one at a time, as they are measured: more may not fit into memory
        request = Request([job.prompt.tokens], max_new_tokens, sampling, plan, sequence_ids=[job.sequence])
        _run_watched(decoder, request, note)
    kept, expected = sum(kept for kept, _ in seen), sum(chance for _, chance in seen)
    gap, variance = abs(kept - expected), sum(chance * (1 - chance) for _, chance in seen)
    if gap**2 <= 2 * math.log(2000) * (variance + gap / 3):
        return ""
    return (
        f"{kept / len(seen):.3f} of {len(seen)} first drafts were kept, where p and q say {expected / len(seen):.3f}; "
        "chance does not explain that: the text may not be the target's own."
    )
