"""The rules, enumerated exactly: the law of what is emitted is the target's, to rounding.

No statistics. Every chain and tree that a drafter can draw is weighted by its probability. A uniform matters only by
the side of a threshold that it falls on: the thresholds are found in the rule itself, by bisection, and all
combinations of sides are run and weighted by their size; the law of the token that follows is measured in the same way.
The joint law of D + 1 tokens is compared with the target's own in fp64. Faults planted in the rules themselves
(`tests/mutation/planted.yaml`) are caught.

Shapes: M drafted trees, N nodes, D levels, V symbols, K outcomes. A first-order source is a tensor `[V + 1, V]`: the
law of the next token after each symbol and, as the last row, of the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.decode import LOSSLESS, LOSSY
from outrider.decode.rules import Walk, block, match, match_tree, rejection, traversal, typical, without_replacement
from outrider.decode.sampling import draw

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Walk]
ChainRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

EXACT = 1e-12
ALWAYS, NEVER = 2.0**-60, 1 - 2.0**-53  # uniforms that pass every test that can be passed, and none that can be failed

SHAPES: dict[str, list[int]] = {
    "chain of 0": [],
    "chain of 1": [-1],
    "chain of 2": [-1, 0],
    "chain of 3": [-1, 0, 1],
    "2 siblings": [-1, -1],
    "3 siblings": [-1, -1, -1],
    "3 siblings below": [-1, 0, 0, 0],
    "2 x 2": [-1, -1, 0, 0, 1, 1],
    "unbalanced": [-1, 0, 1, 0, -1],
    "mixed order": [-1, -1, 1, 0, 1],
}
CHAINS = [name for name in SHAPES if name.startswith("chain")]


def source(*rows: list) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def random_source(vocab: int, seed: int, sharpness: float = 1.5) -> Tensor:
    noise = torch.randn(vocab + 1, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (sharpness * noise).softmax(-1)


SOURCES = {  # target, drafter
    "two symbols": (source([0.9, 0.1], [0.35, 0.65], [0.4, 0.6]), source([0.5, 0.5], [0.8, 0.2], [0.7, 0.3])),
    "three symbols": (
        source([0.3, 0.5, 0.2], [0.5, 0.4, 0.1], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]),
        source([0.5, 0.3, 0.2], [0.3, 0.2, 0.5], [0.4, 0.4, 0.2], [0.2, 0.3, 0.5]),
    ),
    "p(x) = 0": (
        source([0, 0.6, 0.4], [0.5, 0.5, 0], [1, 0, 0], [0.6, 0.4, 0]),
        source([0.2, 0.4, 0.4], [0.5, 0, 0.5], [0.5, 0.5, 0], [0.2, 0.4, 0.4]),
    ),
    "q(x) = 0": (
        source([0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.4, 0.6, 0], [0.5, 0.5, 0]),
        source([0, 0.5, 0.5], [0.3, 0.2, 0.5], [0, 1, 0], [0.5, 0, 0.5]),
    ),
    "four symbols": (random_source(4, 0), random_source(4, 1)),
}


def paths(symbols: int, length: int) -> Tensor:
    """All sequences over `symbols` symbols, `[symbols ** length, length]`."""
    return torch.tensor(list(product(range(symbols), repeat=length)), dtype=torch.long).reshape(symbols**length, length)


def grid(count: int, size: int = 10) -> Tensor:
    """All combinations of `count` uniforms on the midpoints of `size` equal cells, `[size ** count, count]`."""
    return (paths(size, count).double() + 0.5) / size


def ancestors(parents: list[int]) -> list[list[int]]:
    """Of every node, from the root down, itself included."""
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


def depth_of(parents: list[int]) -> int:
    return max(map(len, ancestors(parents)), default=0)


def places_of(tokens: Tensor) -> Tensor:
    """The symbol at each place of trees `[M, N]`; -1 for the root, `[M, N + 1]`."""
    return torch.nn.functional.pad(tokens, (1, 0), value=-1)


def after(target: Tensor, length: int) -> Tensor:
    """The law of the next `length` tokens given the last one, or (last row) none: `[V + 1, V ** length]`."""
    law = torch.ones(len(target), 1, dtype=torch.float64)
    for _ in range(length):
        law = (target[:, :, None] * law[None, :-1]).flatten(1)
    return law


@dataclass(frozen=True)
class Trees:
    """All trees of one shape that a drafter can draw.

    Tokens `[M, N]`, weights `[M]` that sum to 1, probabilities `[M, N + 1, V]`.
    """

    parents: list[int]
    tokens: Tensor
    weights: Tensor
    target_probs: Tensor
    draft_probs: Tensor

    @classmethod
    def drawn(cls, parents: list[int], target: Tensor, drafter: Tensor) -> Trees:
        """Draw siblings without replacement; where nothing is left of q, any token may stand, a repeated one too."""
        tokens = paths(target.shape[1], len(parents))
        nodes = places_of(tokens)
        left, weights = drafter[nodes], torch.ones(len(tokens), dtype=torch.float64)
        for i, parent in enumerate(parents):
            token, here = tokens[:, i : i + 1], left[:, parent + 1]
            law = torch.where(here.sum(1, keepdim=True) > 0, here, 1)
            weights *= (law / law.sum(1, keepdim=True)).gather(1, token)[:, 0]
            left[:, parent + 1] = here.scatter(1, token, 0)
        kept = weights > 0
        return cls(parents, tokens[kept], weights[kept], target[nodes[kept]], drafter[nodes[kept]])

    def told(self, target: Tensor, drafter: Tensor) -> Trees:
        """The same drafts, verified with other laws than they were drawn with."""
        nodes = places_of(self.tokens)
        return replace(self, target_probs=target[nodes], draft_probs=drafter[nodes])

    @property
    def depth(self) -> int:
        return depth_of(self.parents)

    def verify(self, rule: Rule, trees: Tensor, accept: Tensor, correct: Tensor | None = None) -> Walk:
        """One case per entry of `trees` (indices); accept `[cases, N]`."""
        parents = torch.tensor(self.parents, dtype=torch.long).expand(len(trees), -1)
        correct = torch.full((len(trees),), 0.5, dtype=torch.float64) if correct is None else correct
        real, probs = torch.ones_like(parents, dtype=torch.bool), (self.target_probs[trees], self.draft_probs[trees])
        return rule(self.tokens[trees], parents, real, *probs, accept, correct, self.depth)


@dataclass(frozen=True)
class Outcomes:
    """What one round can lead to: a tree, the place where its path ends, and the law of what follows.

    The weights `[K]` sum to 1.
    """

    paths: list[list[int]]  # [K] tokens that are kept
    weights: Tensor  # [K]
    following: Tensor  # [K, V]

    def mean_accepted(self) -> float:
        return sum(len(path) * weight for path, weight in zip(self.paths, self.weights.tolist(), strict=True))

    def law(self, target: Tensor, length: int) -> Tensor:
        """Of `length` tokens: what was emitted, then what the target alone would say, `[V ** length]`."""
        vocab = target.shape[1]
        law = torch.zeros(vocab**length, dtype=torch.float64)
        rests = [after(target, n)[:-1] for n in range(length)]
        for path, weight, following in zip(self.paths, self.weights, self.following, strict=True):
            code, rest = sum(x * vocab**i for i, x in enumerate(reversed(path))), rests[length - 1 - len(path)]
            law.view(vocab ** len(path), -1)[code] += weight * (following[:, None] * rest).flatten()
        return law


def bisect(passes: Callable[[Tensor], Tensor], count: int, steps: int = 46) -> Tensor:
    """Where each of `count` conditions on a uniform turns from true to false."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(steps):
        middle = (low + high) / 2
        true = passes(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return (low + high) / 2


def thresholds(rule: Rule, trees: Trees, steps: int = 46) -> Tensor:
    """Below which uniform each node is kept when its turn comes, `[M, N]`: those above it pass, all others fail."""
    size = len(trees.parents)
    if not size:
        return torch.zeros(len(trees.tokens), 0, dtype=torch.float64)
    rows, nodes = torch.arange(len(trees.tokens)).repeat_interleave(size), torch.arange(size).repeat(len(trees.tokens))
    others = torch.full((size, size), NEVER, dtype=torch.float64)
    for i, above in enumerate(ancestors(trees.parents)):
        others[i, above] = ALWAYS

    def kept(uniform: Tensor) -> Tensor:
        _, path, _ = trees.verify(rule, rows, others[nodes].scatter(1, nodes[:, None], uniform[:, None]))
        return (path == nodes[:, None]).any(1)

    return bisect(kept, len(rows), steps).view(-1, size)


def enumerate_round(rule: Rule, trees: Trees, steps: int = 46) -> Outcomes:
    """Every tree, every side of every threshold, and the law of what follows."""
    size, vocab = len(trees.parents), trees.target_probs.shape[2]
    limits, sides = thresholds(rule, trees, steps), paths(2, size).bool()
    rows, sides = torch.arange(len(trees.tokens)).repeat_interleave(len(sides)), sides.repeat(len(trees.tokens), 1)
    limits = limits[rows]
    weights = trees.weights[rows] * torch.where(sides, 1 - limits, limits).prod(1)
    accept = torch.where(sides, 1 + limits, limits) / 2
    accepted, path, _ = trees.verify(rule, rows, accept)
    place = torch.nn.functional.pad(path, (1, 0), value=-1).gather(1, accepted[:, None])[:, 0] + 1
    # What follows depends on the tree and the place alone (`test_the_sides_of_the_thresholds_decide`): one case of each
    # is enough.
    keys, which = torch.unique(rows * (size + 1) + place, return_inverse=True)
    case = torch.empty_like(keys).scatter(0, which, torch.arange(len(which)))
    rows = rows[case]
    path = path[case]
    accept = accept[case]
    texts = [
        [tokens[node] for node in nodes if node >= 0]
        for tokens, nodes in zip(trees.tokens[rows].tolist(), path.tolist(), strict=True)
    ]
    merged = torch.zeros(len(keys), dtype=torch.float64).index_add_(0, which, weights)
    assert float(merged.sum()) == pytest.approx(1, abs=EXACT)
    return Outcomes(texts, merged, following_law(rule, trees, rows, accept, vocab, steps))


def following_law(rule: Rule, trees: Trees, rows: Tensor, accept: Tensor, vocab: int, steps: int) -> Tensor:
    """`[cases, V]`, from where the token that follows steps past each symbol as the uniform grows."""
    symbols = torch.arange(vocab - 1).repeat(len(rows))
    rows, accept = rows.repeat_interleave(vocab - 1), accept.repeat_interleave(vocab - 1, 0)
    limits = bisect(lambda uniform: trees.verify(rule, rows, accept, uniform)[2] <= symbols, len(rows), steps)
    limits = torch.nn.functional.pad(limits.view(-1, vocab - 1), (1, 1))
    return limits.index_fill(1, torch.tensor(vocab), 1).diff(dim=1)


def distance(law: Tensor, expected: Tensor) -> float:
    """Total variation."""
    return float((law - expected).abs().sum() / 2)


def bias(rule: Rule, trees: Trees, target: Tensor, steps: int = 46) -> float:
    """How far the law of what a round emits is from the target's."""
    found = enumerate_round(rule, trees, steps)
    return distance(found.law(target, trees.depth + 1), after(target, trees.depth + 1)[-1])


def joint(target: Tensor, chains: Tensor, accepted: Tensor, following: Tensor, weights: Tensor) -> Tensor:
    """The law of D + 1 tokens: what was emitted of `chains` `[K, D]`, then what the target alone would say."""
    length, vocab = chains.shape[1] + 1, target.shape[1]
    law = torch.zeros(vocab**length, dtype=torch.float64)
    for count in range(length):
        here = accepted == count
        emitted = torch.cat([chains[here, :count], following[here, None]], 1)
        code = (emitted * vocab ** torch.arange(count, -1, -1)).sum(1)
        rest = after(target, length - 1 - count)[following[here]] * weights[here, None]
        law.view(vocab ** (count + 1), -1).index_add_(0, code, rest)
    return law


def on_chain(rule: ChainRule) -> Rule:
    """A rule for chains as one for trees of that shape."""

    def verify(tokens, parents, real, p, q, accept, correct, depth):
        accepted, following = rule(tokens, real.sum(1), p, q[:, :-1], accept, correct)
        nodes = torch.arange(depth, device=tokens.device)
        return accepted, nodes.where(nodes < accepted[:, None], -1), following

    return verify


def cut_to(lengths: Callable[[Tensor, Tensor], Tensor], rule: ChainRule) -> Rule:
    """`rule` on chains of which a row proposes `lengths(drafts, lengths)`."""
    return on_chain(lambda drafts, whole, *rest: rule(drafts, lengths(drafts, whole), *rest))


CHAIN_RULES: dict[str, Rule] = {"rejection": on_chain(rejection), "block": on_chain(block)}
TREE_RULES: dict[str, Rule] = {"without_replacement": without_replacement, "traversal": traversal}
SAMPLED = CHAIN_RULES | TREE_RULES


def shape_for(name: str, tree: str) -> list[int]:
    return SHAPES["chain of 3" if name in CHAIN_RULES else tree]


LARGE = [("four symbols", shape) for shape in SHAPES if len(SHAPES[shape]) > 4]  # hundreds of trees


@pytest.mark.parametrize(
    ("symbols", "shape", "name"),
    [
        pytest.param(symbols, shape, name, marks=[pytest.mark.slow] if (symbols, shape) in LARGE else [])
        for symbols, shape, name in product(SOURCES, SHAPES, SAMPLED)
        if shape in CHAINS or name in TREE_RULES
    ],
)
def test_a_sampled_proposal_emits_the_targets_law(name, shape, symbols):
    target, drafter = SOURCES[symbols]
    assert bias(SAMPLED[name], Trees.drawn(SHAPES[shape], target, drafter), target) < EXACT


@pytest.mark.parametrize(
    ("symbols", "shape"),
    [
        *product(["two symbols"], SHAPES),
        *product(["three symbols", "p(x) = 0", "q(x) = 0"], [*CHAINS, "3 siblings"]),
    ],
)
def test_a_proposal_of_candidates_emits_the_targets_law_whatever_stands_in_it(symbols, shape):
    """`match_tree`, and `match` on chains, with a sample of p at every node, for each proposal on its own.

    Repeated siblings are included.
    """
    target, parents = SOURCES[symbols][0], SHAPES[shape]
    vocab, size = target.shape[1], len(parents)
    wanted = paths(vocab, size + 1)
    for tokens in paths(vocab, size).expand(len(wanted), -1, -1).unbind(1):
        p = target[places_of(tokens)]
        weights = p.gather(2, wanted[:, :, None])[:, :, 0].prod(1)
        real, above = torch.ones_like(tokens, dtype=torch.bool), torch.tensor(parents, dtype=torch.long)
        accepted, path, following = match_tree(tokens, above.expand_as(tokens), real, wanted, depth_of(parents))
        if shape in CHAINS:
            assert same((accepted, following), match(tokens, real.sum(1), wanted))
        law = joint(target, tokens.gather(1, path.clamp(min=0)), accepted, following, weights)
        assert distance(law, after(target, depth_of(parents) + 1)[-1]) < EXACT


@pytest.mark.parametrize("name", TREE_RULES)
def test_a_candidate_that_q_excludes_may_stand_before_samples(name):
    """As from an n-gram: the second symbol always comes first, then one that is drawn from q = (1/2, 0, 1/2)."""
    target, drafter = SOURCES["three symbols"][0], SOURCES["q(x) = 0"][1]
    tokens = torch.tensor([[1, 0], [1, 2]])
    nodes = places_of(tokens)
    trees = Trees([-1, -1], tokens, source([0.5, 0.5])[0], target[nodes], drafter[nodes])
    assert bias(TREE_RULES[name], trees, target) < EXACT
    # More than either alone could give: p of the candidate, and what q covers of the rest.
    assert enumerate_round(TREE_RULES[name], trees).mean_accepted() > 0.3 + 0.5


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("symbols", SOURCES)
@pytest.mark.parametrize("rule", [rejection, block])
def test_a_row_that_proposes_fewer_tokens_gets_its_bonus_from_p(rule, symbols, length):
    """Entries after `lengths` mean nothing, and the token after the last proposed one is no correction."""
    target, drafter = SOURCES[symbols]
    trees = Trees.drawn(SHAPES["chain of 3"], target, drafter)
    shortened = cut_to(lambda drafts, lengths: lengths.clamp(max=length), rule)
    assert max(map(len, enumerate_round(shortened, trees).paths)) <= length
    assert bias(shortened, trees, target) < EXACT


@pytest.mark.parametrize("name", SAMPLED)
def test_a_token_that_the_target_excludes_is_never_emitted(name):
    """p(x) = 0 with q(x) > 0: not as a draft and not as a correction."""
    target, drafter = source(*[[0.6, 0.4, 0]] * 4), source(*[[0.2, 0.4, 0.4]] * 4)
    found = enumerate_round(SAMPLED[name], Trees.drawn(shape_for(name, "2 x 2"), target, drafter))
    possible = found.weights > EXACT
    assert float(found.following[possible, 2].max()) < EXACT
    assert all(2 not in path for path, may in zip(found.paths, possible.tolist(), strict=True) if may)


@pytest.mark.parametrize("name", SAMPLED)
def test_q_equal_to_p_accepts_a_whole_path(name):
    target = SOURCES["three symbols"][0]
    found = enumerate_round(SAMPLED[name], Trees.drawn(shape_for(name, "unbalanced"), target, target))
    assert found.mean_accepted() == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.parametrize(("uniform", "expected"), [(0.01, [0, 0]), (0.6, [1, 0]), (0.99, [2, 0])])
def test_a_refusal_that_only_rounding_explains_is_followed_by_a_draw_from_p(rule, uniform, expected):
    """Where p <= q everywhere, a refusal leaves no residual, and the draw is from p.

    That is so in the first row; the second row's residual has nothing to do with it.
    """
    p = source([0.5, 0.25, 0.25 - 1e-7], [0.5, 0.25, 0.25])
    q = source([0.5, 0.25, 0.25], [0.25, 0.25, 0.5])
    high, correct = source([NEVER], [NEVER]), source([uniform, uniform])[0]
    laws = p[:, None].expand(-1, 2, -1), q[:, None]
    accepted, following = rule(torch.tensor([[2], [2]]), torch.ones(2, dtype=torch.long), *laws, high, correct)
    assert (accepted.tolist(), following.tolist()) == ([0, 0], expected)


@pytest.mark.parametrize("rule", [on_chain(block), traversal])
def test_a_certain_draft_stays_where_rounding_leaves_no_residual_behind_it(rule):
    """Where p <= q everywhere, nothing can stand in for the draft.

    That is so at the second place; the first one is worth 1 and is kept.
    """
    drafter = source([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    target, nodes = source([0.5, 0.5 - 1e-7], [0.5, 0.5], [0.5, 0.5]), torch.tensor([[-1, 0, 1]])
    trees = Trees([-1, 0], nodes[:, 1:], torch.ones(1), target[nodes], drafter[nodes])
    accepted, _, _ = trees.verify(rule, torch.tensor([0]), torch.full((1, 2), 1 - 1e-9, dtype=torch.float64))
    assert accepted.tolist() == [1]


def staying(tokens: Tensor, parents: Tensor, q: Tensor, threshold: float, dropped: bool = False) -> Tensor:
    """Which nodes have no draft above them that the drafter gives less than `threshold`, `[N, nodes]`.

    `dropped` leaves such a draft out, too.
    """
    law = q.gather(1, (parents + 1)[:, :, None].expand(-1, -1, q.shape[2]))
    certain = law.gather(2, tokens[:, :, None])[:, :, 0] >= threshold
    stays = certain if dropped else torch.ones_like(certain)
    for _ in range(parents.shape[1]):
        stays = stays & torch.nn.functional.pad(certain & stays, (1, 0), value=True).gather(1, parents + 1)
    return stays


def ending(rule: Rule, threshold: float, dropped: bool = False) -> Rule:
    """Return `rule` for trees in which nothing stands below an unconfident draft, see `staying`."""

    def verify(tokens, parents, real, p, q, *rest):
        return rule(tokens, parents, real & staying(tokens, parents, q, threshold, dropped), p, q, *rest)

    return verify


@pytest.mark.parametrize("threshold", [0.25, 0.35, 0.45])
@pytest.mark.parametrize("symbols", SOURCES)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_chain_that_ends_after_an_unconfident_draft_emits_the_targets_law(name, symbols, threshold):
    """A chain whose length depends on the drafts is judged losslessly; the one that ends it is verified like any other.

    For a block the last place of a shorter row passes with P there, like that of a whole one.
    """
    target, drafter = SOURCES[symbols]
    trees = Trees.drawn(SHAPES["chain of 3"], target, drafter)
    assert bias(ending(SAMPLED[name], threshold), trees, target) < EXACT


def test_the_thresholds_above_end_chains_at_every_place():
    """Where p = q nothing is refused, so as many drafts are accepted as there are."""
    lengths: set[int] = set()
    for symbols, threshold in product(SOURCES, [0.25, 0.35, 0.45]):
        drafter = SOURCES[symbols][1]
        trees = Trees.drawn(SHAPES["chain of 3"], drafter, drafter)
        found = enumerate_round(ending(on_chain(block), threshold), trees, steps=20)
        lengths |= {len(path) for path, weight in zip(found.paths, found.weights, strict=True) if weight > 1e-3}
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize("threshold", [0.25, 0.35, 0.45])
@pytest.mark.parametrize("name", SAMPLED)
def test_leaving_the_unconfident_draft_out_is_caught(name, threshold):
    target, drafter = SOURCES["three symbols"]
    trees = Trees.drawn(SHAPES["chain of 3"], target, drafter)
    assert bias(ending(SAMPLED[name], threshold, dropped=True), trees, target, steps=20) > 0.01


def test_a_block_that_ends_early_but_is_judged_otherwise_is_caught():
    """Two wrong ways to judge a row that ends early are caught.

    One is as if more drafts came, then cut where the row ends; the other with a residual at its last place, where there
    is no draft to make up for.
    """
    target, drafter = SOURCES["three symbols"]
    trees = Trees.drawn(SHAPES["chain of 3"], target, drafter)

    def cut(drafts, lengths, *rest):
        accepted, following = block(drafts, torch.full_like(lengths, 3), *rest)
        at_end = drafts.gather(1, lengths.clamp(max=2)[:, None])[:, 0]
        return torch.minimum(accepted, lengths), torch.where(accepted > lengths, at_end, following)

    def residual_at_the_end(drafts, lengths, p, q, accept, correct):
        accepted, following = block(drafts, lengths, p, q, accept, correct)
        rest = (p[torch.arange(len(p)), accepted] - q[torch.arange(len(q)), accepted.clamp(max=2)]).clamp(min=0)
        ends = (accepted == lengths) & (lengths < 3) & (rest.sum(1) > 0)
        return accepted, torch.where(ends, draw(rest, correct), following)

    for bug in (cut, residual_at_the_end):
        assert bias(ending(on_chain(bug), 0.35), trees, target, steps=20) > 0.01


def test_dropping_an_unconfident_token_that_was_sampled_is_caught():
    """Dropping the second symbol gives (.85, .15) for p = (.7, .3), q = (.5, .5).

    Stopping after it instead is lossless.
    """
    target, drafter = source(*[[0.7, 0.3]] * 3), source(*[[0.5, 0.5]] * 3)
    dropping = cut_to(lambda drafts, lengths: (drafts[:, 0] != 1).long(), rejection)
    law = enumerate_round(dropping, Trees.drawn([-1], target, drafter)).law(target, 2)
    assert law.view(2, 2).sum(1).tolist() == pytest.approx([0.85, 0.15], abs=EXACT)
    stopping = cut_to(lambda drafts, lengths: 1 + (drafts[:, 0] != 1).long(), rejection)
    assert bias(stopping, Trees.drawn([-1, 0], target, drafter), target) < EXACT


Shape = tuple[int, ...]


def starting(symbols: str, last: int) -> tuple[Tensor, Tensor]:
    """Target and drafter after the symbol `last`; -1 for the beginning."""
    target, drafter = SOURCES[symbols]
    return torch.cat([target[:-1], target[last][None]]), torch.cat([drafter[:-1], drafter[last][None]])


@cache
def round_from(rule: Rule, symbols: str, shape: Shape, last: int) -> Outcomes:
    return enumerate_round(rule, Trees.drawn(list(shape), *starting(symbols, last)))


def law_of_two_rounds(rules: tuple[Rule, Rule], symbols: str, first: Shape, second: list[Shape], length: int) -> Tensor:
    """Return the law of `length` tokens: of a round of the shape `first`, one of `second`, then the target alone.

    The second round's shape is `second[accepted in the first]`.
    """
    vocab = SOURCES[symbols][0].shape[1]
    found, law = round_from(rules[0], symbols, first, -1), torch.zeros(vocab**length, dtype=torch.float64)
    for path, weight, following in zip(found.paths, found.weights, found.following, strict=True):
        shape, left = second[len(path)], length - 1 - len(path)
        for symbol, chance in enumerate(following):
            target, _ = starting(symbols, symbol)
            rest = round_from(rules[1], symbols, shape, symbol).law(target, left) if shape else after(target, left)[-1]
            code = sum(x * vocab**i for i, x in enumerate(reversed([*path, symbol])))
            law.view(vocab ** (len(path) + 1), -1)[code] += weight * chance * rest
    return law


DEPTHS: dict[str, list[Shape]] = {
    "deeper after success": [(-1,), (-1, 0), (-1, 0, 1)],
    "deeper after failure": [(-1, 0, 1), (-1, 0), (-1,)],
    "plain after failure": [(), (-1,), (-1, 0)],
    "plain after success": [(-1, 0), (-1,), ()],
}


@pytest.mark.parametrize("then", DEPTHS)
@pytest.mark.parametrize("symbols", ["two symbols", "q(x) = 0"])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_depth_that_depends_on_the_round_before_changes_no_law(name, symbols, then):
    """All tokens of both rounds, whatever either accepted, and what the target alone would say after them."""
    length = max(accepted + 2 + len(shape) for accepted, shape in enumerate(DEPTHS[then]))
    law = law_of_two_rounds((SAMPLED[name],) * 2, symbols, (-1, 0), DEPTHS[then], length)
    assert distance(law, after(SOURCES[symbols][0], length)[-1]) < EXACT


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_depth_from_the_round_before_and_from_the_drafts_together_change_no_law(name):
    rules = ending(SAMPLED[name], 0.35), ending(SAMPLED[name], 0.25)
    law = law_of_two_rounds(rules, "three symbols", (-1, 0, 1), [(-1, 0, 1), (), (-1,), (-1, 0, 1)], 8)
    assert distance(law, after(SOURCES["three symbols"][0], 8)[-1]) < EXACT


@pytest.mark.parametrize("name", TREE_RULES)
def test_a_tree_that_depends_on_the_round_before_changes_no_law(name):
    law = law_of_two_rounds((SAMPLED[name],) * 2, "three symbols", (-1, -1, 0), [(-1, -1, -1), (), (-1, 0, 0)], 6)
    assert distance(law, after(SOURCES["three symbols"][0], 6)[-1]) < EXACT


@pytest.mark.parametrize("name", SAMPLED)
def test_a_depth_that_looks_at_the_drafts_it_leaves_out_is_caught(name):
    """In the second round, which drops its own tokens."""
    rules = SAMPLED[name], ending(SAMPLED[name], 0.35, dropped=True)
    law = law_of_two_rounds(rules, "three symbols", (-1,), [(-1, 0)] * 2, 5)
    assert distance(law, after(SOURCES["three symbols"][0], 5)[-1]) > 0.01


def texts_by_matching(
    target: Tensor, drafter: Tensor | None, parents: list[int], coupled: bool = False, threshold: float = 0.0
) -> tuple[Tensor, set[int]]:
    """Return whole generations of 4 tokens by `match_tree`, `[10 ** 4, 4]`, and how many drafts rows proposed.

    There is one per cell of the uniforms that are keyed by position. Of the tree stays in each round what is no deeper
    than one more than was accepted before, and has no draft above it that the drafter gives less than `threshold`.
    Without a drafter it is one token a round.
    """
    length, levels = 4, torch.tensor([len(path) for path in ancestors(parents)])
    depth = int(levels.max())
    uniforms = torch.nn.functional.pad(grid(length), (0, depth + 1), value=0.5)
    rows, above = torch.arange(len(uniforms)), torch.tensor(parents).expand(len(uniforms), -1)
    text = torch.full((len(uniforms), length + depth + 1), -1)
    done = torch.zeros_like(rows)
    accepted = torch.zeros_like(rows)
    proposed = set()
    while int(done.min()) < length:
        last = text[rows, (done - 1).clamp(min=0)]
        here = uniforms.gather(1, (done[:, None] + torch.arange(depth + 1)).clamp(max=uniforms.shape[1] - 1))
        tokens, real = torch.zeros_like(above), torch.zeros_like(above, dtype=torch.bool)
        if drafter is not None:
            tokens = grown(drafter, parents, coupled, last, here)
            law = drafter[torch.cat([last[:, None], tokens], 1)]
            real = (levels <= 1 + accepted[:, None]) & staying(tokens, above, law, threshold)
        proposed |= set(real[done < length].sum(1).tolist())
        wanted = draw(target[torch.cat([last[:, None], tokens], 1)], here[:, [0, *levels.tolist()]])
        accepted, path, following = match_tree(tokens, above, real, wanted, depth)
        emitted = torch.cat([tokens.gather(1, path.clamp(min=0)), following[:, None]], 1)
        emitted = emitted.scatter(1, accepted[:, None], following[:, None])
        for j in range(depth + 1):
            keep = (j <= accepted) & (done + j < length)
            text[keep, done[keep] + j] = emitted[keep, j]
        done = torch.minimum(done + accepted + 1, torch.tensor(length))
    return text[:, :length], proposed


def grown(drafter: Tensor, parents: list[int], coupled: bool, last: Tensor, uniforms: Tensor) -> Tensor:
    """Return children `[N, nodes]` of `last` `[N]` in the order in which the drafter wants them.

    They are drawn one after the other with the uniform of their place, which the target draws with, too; or they are
    the most probable.
    """
    tokens = torch.zeros(len(last), len(parents), dtype=torch.long)
    left = {-1: drafter[last]}
    for i, path in enumerate(ancestors(parents)):
        law = left[parents[i]]
        law = torch.where(law.sum(1, keepdim=True) > 0, law, 1)
        tokens[:, i] = draw(law, uniforms[:, len(path) - 1]) if coupled else law.argmax(1)
        left[parents[i]] = left[parents[i]].scatter(1, tokens[:, i : i + 1], 0)
        left[i] = drafter[tokens[:, i]]
    return tokens


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.45])
@pytest.mark.parametrize("shape", ["chain of 1", "chain of 2", "chain of 3", "3 siblings", "2 x 2", "mixed order"])
@pytest.mark.parametrize("symbols", ["three symbols", "p(x) = 0", "q(x) = 0"])
@pytest.mark.parametrize("coupled", [False, True])
def test_matched_trees_write_the_same_text_as_no_drafts_and_that_follows_the_targets_law(
    coupled, symbols, shape, threshold
):
    """The text is the target's, round after round, with trees that shrink and grow with what was accepted.

    Drafts may see the noise that the target draws with, and a uniform that a round did not reach is met again in the
    next one.
    """
    (target, drafter), parents = SOURCES[symbols], SHAPES[shape]
    plain, _ = texts_by_matching(target, None, parents)
    texts, proposed = texts_by_matching(target, drafter, parents, coupled, threshold)
    assert torch.equal(texts, plain)
    assert depth_of(parents) == 1 or len(proposed) > 1, "sizes differ"
    code = (plain * 3 ** torch.arange(3, -1, -1)).sum(1)
    assert distance(torch.bincount(code, minlength=81).double() / len(plain), after(target, 4)[-1]) < EXACT


def test_greedy_match_keeps_the_targets_own_tokens():
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 6]])
    accepted, following = match(drafts, torch.tensor([3, 3, 3, 1]), torch.tensor([[4, 5, 6, 7]] * 4))
    assert accepted.tolist() == [3, 1, 0, 1]
    assert following.tolist() == [7, 5, 4, 5]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_greedy_rule_keeps_exactly_the_targets_own_path(shape):
    """What is emitted is what argmax after argmax gives, and as much of it as the tree holds.

    This is so for all trees of that shape with different siblings.
    """
    target, parents = SOURCES["three symbols"][0], SHAPES[shape]
    tokens = Trees.drawn(parents, target, torch.ones(4, 3, dtype=torch.float64) / 3).tokens
    best = target.argmax(1)
    wanted = best[places_of(tokens)]
    here, depth = torch.tensor(parents, dtype=torch.long).expand(len(tokens), -1), depth_of(parents)
    accepted, path, following = match_tree(tokens, here, torch.ones_like(here, dtype=torch.bool), wanted, depth)
    text = [int(best[-1])]
    while len(text) < depth + 1:
        text.append(int(best[text[-1]]))
    for row, count in enumerate(accepted.tolist()):
        assert [*tokens[row, path[row, :count]].tolist(), int(following[row])] == text[: count + 1]
        held = [[int(tokens[row, i]) for i in nodes] for nodes in ancestors(parents)]
        assert count == max((len(nodes) for nodes in held if nodes == text[: len(nodes)]), default=0)


def mean_accepted(rule: Rule, parents: list[int], target: Tensor, drafter: Tensor) -> float:
    return enumerate_round(rule, Trees.drawn(parents, target, drafter)).mean_accepted()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(on_chain(rejection), 10 / 9), (without_replacement, 10 / 9), (on_chain(block), 11 / 9), (traversal, 11 / 9)],
)
def test_expected_accepted_of_the_two_symbol_example(rule, expected):
    """The mean is 10/9 token by token, 11/9 for whole blocks, for p = (1/3, 2/3), q = (2/3, 1/3), k = 2.

    The law of 3 tokens is p's in both.
    """
    target, drafter = source(*[[1 / 3, 2 / 3]] * 3), source(*[[2 / 3, 1 / 3]] * 3)
    trees = Trees.drawn([-1, 0], target, drafter)
    assert enumerate_round(rule, trees).mean_accepted() == pytest.approx(expected, abs=EXACT)
    assert bias(rule, trees, target) < EXACT


f = Fraction
# A first-order target and drafter whose thresholds share no grid.
FIRST_ORDER = (
    source(
        [f(2, 9), f(2, 3), f(1, 9)],
        [f(1, 8), f(7, 16), f(7, 16)],
        [f(9, 17), f(7, 17), f(1, 17)],
        [f(3, 8), f(3, 16), f(7, 16)],
    ),
    source(
        [f(9, 14), f(2, 7), f(1, 14)],
        [f(1, 4), f(1, 2), f(1, 4)],
        [f(2, 7), f(4, 7), f(1, 7)],
        [f(1, 12), f(1, 6), f(3, 4)],
    ),
)


@pytest.mark.parametrize(("rule", "expected"), [(rejection, 1.57773675521), (block, 1.77597349704)])
def test_expected_accepted_of_the_first_order_chain(rule, expected):
    assert mean_accepted(on_chain(rule), [-1, 0, 1], *FIRST_ORDER) == pytest.approx(expected, abs=1e-11)


SIBLINGS = source(*[[0.5, 0.3, 0.2]] * 4), source(*[[0.2, 0.3, 0.5]] * 4)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tokens_per_round_at_constant_alpha(k):
    """(1 − a^{k+1}) / (1 − a) with a = Σ min(p, q) = 7/10."""
    accepted = mean_accepted(on_chain(rejection), list(range(-1, k - 1)), *SIBLINGS)
    assert 1 + accepted == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3, abs=EXACT)


@pytest.mark.parametrize(("count", "distinct", "candidates"), [(1, 7 / 10, 1 / 5), (2, 41 / 50, 1 / 2), (3, 1, 1)])
def test_acceptance_of_siblings(count, distinct, candidates):
    """Here p = (.5, .3, .2) and q = (.2, .3, .5)."""
    target, drafter = SIBLINGS
    parents = [-1] * count
    for rule in TREE_RULES.values():
        assert mean_accepted(rule, parents, target, drafter) == pytest.approx(distinct, abs=EXACT)
    best = drafter[-1].topk(count).indices.expand(3, -1)
    real, wanted = torch.ones(3, count, dtype=torch.bool), torch.arange(3)[:, None].expand(-1, count + 1)
    accepted, _, _ = match_tree(best, torch.tensor(parents).expand(3, -1), real, wanted, 1)
    assert float((accepted * target[-1]).sum()) == pytest.approx(candidates, abs=EXACT)


@pytest.mark.parametrize("seed", range(8))
def test_a_block_accepts_no_less_than_token_by_token(seed):
    target, drafter = random_source(3, seed), random_source(3, 100 + seed)
    for shape in CHAINS:
        trees, rules = Trees.drawn(SHAPES[shape], target, drafter), (on_chain(block), on_chain(rejection))
        blocks, tokens = (enumerate_round(rule, trees, steps=24).mean_accepted() for rule in rules)
        assert blocks >= tokens - 1e-6
        assert len(SHAPES[shape]) < 2 or blocks > tokens + 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_traversal_accepts_no_less_than_level_by_level(seed):
    target, drafter = random_source(3, seed), random_source(3, 100 + seed)
    for parents in [[-1, -1, 0, 1], [-1, 0, 0, 1], SHAPES["unbalanced"], SHAPES["mixed order"]]:
        trees, rules = Trees.drawn(parents, target, drafter), (traversal, without_replacement)
        whole, levels = (enumerate_round(rule, trees, steps=24).mean_accepted() for rule in rules)
        assert whole > levels + 1e-4


def test_traversal_may_accept_less_where_siblings_stand_below_the_first_level():
    """No theorem holds there, and this tree shows why.

    A lesser claim on the place can leave less to the second sibling than its share.

    The first draft is worth 7/10. Its children, p = (0, .5, .1, .4) and q = (.8, .1, .1, 0): level by level one of them
    stays with 1/5 + 4/5 · 1/2 = 3/5. With w = 7/10 p, the first stays with 17/100, and the second with 4/5 · 25/83 +
    3/100 · 1/9 instead of 7/10 · 3/5 altogether.
    """
    target = source([0, 0.5, 0.1, 0.4], *[[0.25] * 4] * 3, [0.7, 0.3, 0, 0])
    drafter = source([0.8, 0.1, 0.1, 0], *[[0.25] * 4] * 3, [1, 0, 0, 0])
    levels, whole = (mean_accepted(rule, [-1, 0, 0], target, drafter) for rule in (without_replacement, traversal))
    assert levels == pytest.approx(0.7 + 0.42, abs=EXACT)
    assert whole == pytest.approx(0.7 + 0.17 + 0.8 * 25 / 83 + 0.03 / 9, abs=EXACT)


@pytest.mark.parametrize("rule", SAMPLED.values(), ids=SAMPLED)
def test_not_even_a_uniform_of_zero_keeps_a_token_that_the_target_excludes(rule):
    target, drafter = source([0.5, 0.5], [0.5, 0.5], [0, 1]), source([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    nodes = torch.tensor([[-1, 0]])
    trees = Trees([-1], nodes[:, 1:], torch.ones(1), target[nodes], drafter[nodes])
    accepted, _, following = trees.verify(rule, torch.tensor([0]), torch.zeros(1, 1, dtype=torch.float64))
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


@dataclass(frozen=True)
class Batch:
    """Random rows, each with a tree of its own."""

    tokens: Tensor
    parents: Tensor
    real: Tensor
    target_probs: Tensor
    draft_probs: Tensor
    accept: Tensor
    correct: Tensor
    depth: int

    @classmethod
    def random(cls, rows: int, size: int, vocab: int = 4, chain: bool = False, seed: int = 0) -> Batch:
        g = torch.Generator().manual_seed(seed)
        parents = torch.stack([torch.randint(-1, i, (rows,), generator=g) for i in range(size)], 1)
        real = torch.rand(rows, size, generator=g) < 0.8
        if chain:
            parents = torch.arange(-1, size - 1).expand(rows, -1)
        for i in range(size):
            real[:, i] &= torch.nn.functional.pad(real, (1, 0), value=True).gather(1, parents[:, i : i + 1] + 1)[:, 0]
        noise = 2 * torch.randn(2, rows, size + 1, vocab, dtype=torch.float64, generator=g)
        p, q = noise.softmax(-1)
        tokens = torch.multinomial(q.view(-1, vocab), 1, generator=g).view(rows, size + 1)[:, 1:]
        uniforms = torch.rand(rows, size + 1, dtype=torch.float64, generator=g)
        return cls(tokens, parents, real, p, q, uniforms[:, 1:], uniforms[:, 0], size)

    @property
    def arguments(self) -> tuple:
        return self.tokens, self.parents, self.real, self.target_probs, self.draft_probs, self.accept, self.correct

    def verify(self, rule: Rule) -> Walk:
        return rule(*self.arguments, self.depth)


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def matching(tokens, parents, real, p, q, accept, correct, depth):
    """`match_tree` with a sample of p at every place."""
    wanted = draw(p, torch.nn.functional.pad(accept, (1, 0)) + correct[:, None] / 2**20)
    return match_tree(tokens, parents, real, wanted, depth)


def in_medusas_way(tokens, parents, real, p, q, accept, correct, depth):
    return typical(tokens, parents, real, p, depth)


ANY_TREE = {**TREE_RULES, "match_tree": matching, "typical": in_medusas_way}
EVERY_RULE = CHAIN_RULES | ANY_TREE


def batch_for(name: str, rows: int, size: int) -> Batch:
    return Batch.random(rows, size, chain=name in CHAIN_RULES)


@pytest.mark.parametrize("name", EVERY_RULE)
def test_rows_of_one_batch_are_verified_independently(name):
    batch = batch_for(name, 200, 6)
    alone = [EVERY_RULE[name](*(a[i : i + 1] for a in batch.arguments), batch.depth) for i in range(200)]
    assert same(batch.verify(EVERY_RULE[name]), tuple(map(torch.cat, zip(*alone, strict=True))))


@pytest.mark.parametrize("name", ANY_TREE)
def test_what_is_not_real_means_nothing(name):
    """Other tokens, parents and distributions at missing nodes change nothing, and no path goes through one."""
    batch, other = Batch.random(400, 6), Batch.random(400, 6, seed=1)
    below = torch.nn.functional.pad(batch.real, (1, 0), value=True)[:, :, None]
    changed = replace(
        batch,
        tokens=torch.where(batch.real, batch.tokens, other.tokens),
        parents=torch.where(batch.real, batch.parents, other.parents),
        target_probs=torch.where(below, batch.target_probs, other.target_probs),
        draft_probs=torch.where(below, batch.draft_probs, other.draft_probs),
    )
    outcome = changed.verify(EVERY_RULE[name])
    assert same(outcome, batch.verify(EVERY_RULE[name]))
    accepted, path, _ = outcome
    assert batch.real.gather(1, path.clamp(min=0))[path >= 0].all()
    assert torch.equal((path >= 0).sum(1), accepted)


def test_on_a_chain_match_tree_is_match():
    batch = Batch.random(500, 4, chain=True)
    right = torch.rand(500, 5, generator=torch.Generator().manual_seed(2)) < 0.7
    wanted = torch.where(right, torch.nn.functional.pad(batch.tokens, (0, 1)), 3)
    accepted, path, following = match_tree(batch.tokens, batch.parents, batch.real, wanted, 4)
    assert same((accepted, following, accepted), (*match(batch.tokens, batch.real.sum(1), wanted), (path >= 0).sum(1)))
    assert set(accepted.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("rule", "chain_rule"), [(without_replacement, rejection), (traversal, block)])
def test_on_a_chain_the_rule_for_trees_is_the_one_for_chains(rule, chain_rule):
    """With the same uniforms, not only on average."""
    batch = Batch.random(2000, 4, chain=True)
    assert same(batch.verify(rule), batch.verify(on_chain(chain_rule)))


@pytest.mark.parametrize("name", SAMPLED)
def test_the_sides_of_the_thresholds_decide(name):
    """What the enumeration rests on: any uniform does what the middle of its side does.

    And what follows depends on the path alone.
    """
    rule, g = SAMPLED[name], torch.Generator().manual_seed(0)
    trees = Trees.drawn(shape_for(name, "unbalanced"), *SOURCES["three symbols"])
    rows = torch.randint(len(trees.tokens), (5000,), generator=g)
    accept, again = torch.rand(2, 5000, len(trees.parents), dtype=torch.float64, generator=g)
    correct = torch.rand(5000, dtype=torch.float64, generator=g)
    limits = thresholds(rule, trees)[rows]
    middles = torch.where(accept < limits, limits, 1 + limits) / 2
    found = trees.verify(rule, rows, accept, correct)
    assert same(found, trees.verify(rule, rows, middles, correct))
    other = trees.verify(rule, rows, again, correct)
    alike = (found[1] == other[1]).all(1)
    assert 1000 < int(alike.sum()) < 5000
    assert torch.equal(found[2][alike], other[2][alike])


@pytest.mark.parametrize("name", ANY_TREE)
def test_single_precision_decides_alike(name):
    batch = Batch.random(500, 6)
    single = [a.float() if a.ndim == 3 else a for a in batch.arguments]
    assert same(batch.verify(EVERY_RULE[name]), EVERY_RULE[name](*single, batch.depth))


@pytest.mark.parametrize("name", EVERY_RULE)
def test_a_rule_is_a_pure_function_of_its_arguments(name):
    """The same twice, in any state of torch's own generator, and what it was given is as it was."""
    batch, rule = batch_for(name, 50, 5), EVERY_RULE[name]
    before = [a.clone() for a in batch.arguments]
    first, state = batch.verify(rule), torch.random.get_rng_state()
    torch.rand(3)
    assert same(first, batch.verify(rule))
    torch.random.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(batch.arguments, before, strict=True))


@pytest.mark.parametrize("name", EVERY_RULE)
def test_no_rule_waits_for_the_host(name):
    """Tensors without values, on the meta device: whoever looked at one would fail."""
    batch, rule = batch_for(name, 3, 4), EVERY_RULE[name]
    accepted, path, following = rule(*(a.to("meta") for a in batch.arguments), batch.depth)
    assert (accepted.shape, path.shape, following.shape) == ((3,), (3, 4), (3,))


@pytest.mark.parametrize("name", EVERY_RULE)
def test_a_proposal_without_drafts_emits_one_token_of_the_target(name):
    nothing, places = torch.zeros(2, 0, dtype=torch.long), source([0, 1, 0], [0, 0, 1])[:, None]
    uniforms = nothing.double(), torch.full((2,), 0.5).double()
    accepted, path, following = EVERY_RULE[name](nothing, nothing, nothing.bool(), places, places, *uniforms, 0)
    assert (accepted.tolist(), path.shape, following.tolist()) == ([0, 0], (2, 0), [1, 2])


def test_typical_acceptance_is_known_to_be_lossy():
    assert "typical" in LOSSY
    assert not set(LOSSY) & set(LOSSLESS)
    target, drafter = SOURCES["three symbols"]
    assert bias(in_medusas_way, Trees.drawn([-1, 0], target, drafter), target) > 0.1


@pytest.mark.parametrize(("chance", "accepted"), [(0.05, 0), (0.1, 1), (0.2, 1)])
def test_a_typical_token_has_more_than_epsilon_or_what_the_entropy_asks(chance, accepted):
    """Beside x there are two likely tokens: p = (x, rest/2, rest/2).

    At x = .1 the entropy asks for .3 · exp(−.949) = .116, epsilon for .09.
    """
    places = source([chance, (1 - chance) / 2, (1 - chance) / 2])[:, None].expand(1, 2, 3)
    node = torch.zeros(1, 1, dtype=torch.long)
    assert typical(node, node - 1, node == 0, places, 1)[0].tolist() == [accepted]
    assert typical(node, node - 1, node == 0, places, 1, epsilon=1.0)[0].tolist() == [int(chance > 0.15)]


def test_a_token_with_exactly_epsilon_is_not_typical():
    node, places = torch.zeros(1, 1, dtype=torch.long), source([0.25, 0.375, 0.375])[:, None].expand(1, 2, 3)
    for epsilon, accepted in ((0.25, 0), (0.2499, 1)):
        assert typical(node, node - 1, node == 0, places, 1, epsilon, delta=9.0)[0].item() == accepted


def test_the_most_probable_path_is_the_one_of_the_highest_product():
    """Two paths of two: .6 · .5 against .4 · .7. The second one gains most on its way, and is the less probable one."""
    tokens, parents = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[-1, -1, 0, 1]])
    places = source([0.6, 0.4, 0], [0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0, 0, 1], [0, 1, 0])[None]
    accepted, path, following = typical(tokens, parents, torch.ones(1, 4, dtype=torch.bool), places, 2)
    assert (accepted.tolist(), path.tolist(), following.tolist()) == ([2], [[0, 2]], [2])


def test_the_longest_typical_path_wins_and_of_those_the_most_probable():
    """0 → 2 and 1 → 3 are both two long; 1 → 3 is the more probable (.4 · .9 > .6 · .5); 4 is likely, but short."""
    tokens, parents = torch.tensor([[0, 1, 0, 1, 2]]), torch.tensor([[-1, -1, 0, 1, -1]])
    places = source(
        [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.1, 0.9, 0, 0], [0, 0, 1, 0], [0, 0, 0.4, 0.6], [1, 0, 0, 0]
    )[None]
    accepted, path, following = typical(tokens, parents, torch.ones(1, 5, dtype=torch.bool), places, 3)
    assert (accepted.tolist(), path.tolist(), following.tolist()) == ([2], [[1, 3, -1]], [3])
    accepted, path, following = typical(tokens, parents, torch.tensor([[True, True, True, False, True]]), places, 3)
    assert (accepted.tolist(), path.tolist(), following.tolist()) == ([2], [[0, 2, -1]], [2])


@pytest.mark.parametrize("k", [1, 2])
def test_drawing_and_accepting_with_the_same_uniforms_is_caught(k):
    """One stream of randomness for both; with two the law is the target's."""
    target, drafter = SOURCES["three symbols"]
    for shared, uniforms in ((False, grid(2 * k + 1)), (True, grid(k + 1))):
        nodes = torch.full((len(uniforms), 1), -1)
        for j in range(k):
            nodes = torch.cat([nodes, draw(drafter[nodes[:, -1]], uniforms[:, j])[:, None]], 1)
        accept, chains = uniforms[:, :k] if shared else uniforms[:, k : 2 * k], nodes[:, 1:]
        laws = target[nodes], drafter[nodes[:, :-1]]
        accepted, following = rejection(chains, torch.full((len(chains),), k), *laws, accept, uniforms[:, -1])
        law = joint(target, chains, accepted, following, torch.ones(len(chains)).double() / len(chains))
        found = distance(law, after(target, k + 1)[-1])
        assert found > 0.01 if shared else found < EXACT


def at_temperature(law: Tensor, temperature: float) -> Tensor:
    law = law ** (1 / temperature)
    return law / law.sum(1, keepdim=True)


def narrow(law: Tensor) -> Tensor:
    """As after top-k."""
    law = torch.zeros_like(law).scatter(1, law.topk(2).indices, law.topk(2).values)
    return law / law.sum(1, keepdim=True)


def certain(law: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(law.argmax(1), law.shape[1]).double()


def in_bf16(law: Tensor) -> Tensor:
    law = law.bfloat16().double()
    return law / law.sum(1, keepdim=True)


Change = Callable[[Tensor], Tensor]


def as_it_is(law: Tensor) -> Tensor:
    return law


def cold(law: Tensor) -> Tensor:
    return at_temperature(law, 0.8)


# What the text should follow, the p that the rule is told, the q that is drawn from, and the q that the rule is told.
UNTRUE: dict[str, tuple[Change, Change, Change, Change]] = {
    "target temperature off by 2%": (as_it_is, lambda p: at_temperature(p, 1.02), as_it_is, as_it_is),
    "draft at T = .8, ratio at T = 1": (as_it_is, as_it_is, cold, as_it_is),
    "argmax draft scored with full q": (as_it_is, as_it_is, certain, as_it_is),
    "the draft ignores the temperature": (cold, cold, as_it_is, cold),
    "q drawn in bf16, scored in full": (as_it_is, as_it_is, in_bf16, as_it_is),
    "q drawn in full, scored in bf16": (as_it_is, as_it_is, as_it_is, in_bf16),
    "top-k for what is drawn only": (narrow, narrow, narrow, as_it_is),
    "top-k for what is scored only": (narrow, narrow, as_it_is, narrow),
    "top-k for the drafter only": (narrow, as_it_is, narrow, narrow),
}
LEAST = {
    "q drawn in bf16, scored in full": 1e-5,
    "q drawn in full, scored in bf16": 1e-5,
    "target temperature off by 2%": 1e-3,
}


def biased(name: str, laws: tuple[Change, Change, Change, Change]) -> float:
    """How far one round's text is from what it should follow."""
    target, drafter = SOURCES["three symbols"]
    wanted = laws[0](target)
    p = laws[1](target)
    drawn = laws[2](drafter)
    q = laws[3](drafter)
    shape = [-1, 0] if name in CHAIN_RULES else [-1, 0, 0, -1]
    return bias(SAMPLED[name], Trees.drawn(shape, wanted, drawn).told(p, q), wanted)


@pytest.mark.parametrize("bug", UNTRUE)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_rule_that_is_told_another_law_than_was_used_is_caught(name, bug):
    # Rules for trees take a token that q cannot draw as a candidate, so for them that is no bug.
    if name in TREE_RULES and bug == "top-k for what is scored only":
        assert biased(name, UNTRUE[bug]) < EXACT
    else:
        assert biased(name, UNTRUE[bug]) > LEAST.get(bug, 0.01)


@pytest.mark.parametrize(
    "laws",
    [
        (cold, cold, cold, cold),
        (narrow, narrow, narrow, narrow),
        (narrow, narrow, as_it_is, as_it_is),
        (as_it_is, as_it_is, in_bf16, in_bf16),
    ],
)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_rule_that_is_told_what_was_used_takes_no_bias(name, laws):
    """The law is the target's at any temperature, under any filter, in any precision.

    So it is with filters for the target alone: that costs acceptance only.
    """
    assert biased(name, laws) < EXACT
