"""Lookahead decoding (arXiv 2402.02057): the target's own Jacobi iterations give n-grams, and n-grams are proposed.

A window of W columns and N − 1 levels lies after the root. Level 0 is a chain: the root, then guesses of the W − 1
tokens that follow. A token of level l stands below that of level l − 1 in its column; so a column is a text that goes
on from a guessed one, and the target's most probable token after its last level completes an n-gram of N tokens. Then
every level takes the place of the one above it, and the window moves by one place. Finished n-grams are kept by their
first token; those that begin with the root are proposed (§3.2 and §3.3 there; as in hao-ai-lab/LookaheadDecoding).

All of this is one tree, which the target reads in one pass: the window, and beside it up to G n-grams. Equal tokens
below one parent are one node. Nodes deeper than a round's depth are read for the window only, and not proposed.

Shapes: B rows, Q tokens of one pass, N nodes of the widest row's tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..common import BadInputError
from ..heads.base import Drafter
from ..heads.saved import DrafterConfig
from ..heads.session import Abilities, Proposal, TextSession, padded
from ..targets import RaggedCache, RowLengths, Target

Ngram = tuple[int, ...]


@dataclass
class LookaheadConfig(DrafterConfig):
    """Settings of lookahead decoding: how far it looks ahead, and what it remembers.

    Attributes:
        window: W, columns of the window.
        ngram: N, tokens of an n-gram: N − 1 are proposed after the root.
        guesses: G, n-grams proposed in a round, the latest first; of each first token so many are remembered.
        from_text: remember the n-grams of prompt and answer too.
        max_ngrams: how many are remembered; those whose first token was seen longest ago are dropped first.
        shared: all requests of one drafter share what they remember.
    """

    window: int = 10
    ngram: int = 4
    guesses: int = 10
    from_text: bool = True
    max_ngrams: int = 16384
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.ngram < 3 or self.guesses < 1:
            given = f"{self.window}, {self.ngram} and {self.guesses}"
            raise BadInputError(f"lookahead: need window >= 1, ngram >= 3 and guesses >= 1, got {given}.")
        if self.max_ngrams < self.guesses:
            raise BadInputError(
                f"lookahead: max_ngrams must be at least guesses ({self.guesses}), got {self.max_ngrams}."
            )

    @property
    def reach(self) -> int:
        """The depth of the deepest node of a window, also while it fills."""
        return self.window + self.ngram - 3


class Pool:
    """A store of n-grams by their first token."""

    def __init__(self, config: LookaheadConfig):
        self.config = config
        self.size = 0
        # Both orders are those of insertion: the first token met longest ago, and its n-gram seen longest ago, come
        # first.
        self.known: dict[int, dict[Ngram, None]] = {}

    def add(self, first: int, rest: Ngram) -> None:
        known = self.known.pop(first, {})
        self.known[first] = known
        if rest in known:
            del known[rest]
        else:
            self.size += 1
        known[rest] = None
        if len(known) > self.config.guesses:
            del known[next(iter(known))]
            self.size -= 1
        while self.size > self.config.max_ngrams:
            self.size -= len(self.known.pop(next(iter(self.known))))

    def latest(self, first: int) -> list[Ngram]:
        """Return what followed `first`, the latest first."""
        return list(reversed(self.known.get(first, {})))


class _DraftTrie:
    """A row's proposal: a trie below the root (−1)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._below: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """Return the new or existing node of `token` below `parent`."""
        node = self._below.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return node


class Lookahead(Drafter[LookaheadConfig]):
    """A drafter that lets the target guess far ahead, in the passes that verify."""

    name = "lookahead"
    config_class = LookaheadConfig
    trainable = False
    abilities = Abilities(observes=True, deterministic=True, from_text=True)

    def __init__(self, config: LookaheadConfig | None = None):
        super().__init__(config)
        self.reset_history()

    def reset_history(self) -> None:
        """Forget what requests share. Running requests keep it."""
        self.pool = Pool(self.config)

    def check(self, target: Target) -> None:
        target.check_trees()

    @property
    def max_depth(self) -> int:
        return self.config.ngram - 1

    def max_nodes(self, depth: int) -> int:
        """Return the nodes of the largest window, full or while it fills, and of all n-grams."""
        reach = self.config.reach
        filling = max(reach - level + level * (reach + 1 - level) for level in range(self.config.ngram - 1))
        return filling + self.config.guesses * min(depth, self.max_depth)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> LookaheadSession:
        pools = [self.pool if self.config.shared else Pool(self.config) for _ in range(batch_size)]
        return LookaheadSession(self.config, pools, target.max_context)


@dataclass
class _LookaheadRow:
    """One sequence of a batch, and its window."""

    pool: Pool
    recent: list[int] = field(default_factory=list)  # the last tokens
    length: int = 0  # how many tokens there were
    # The window, level 0 without the root first; [] until the target has read one. While it fills, there are fewer
    # levels, and longer ones.
    levels: list[list[int]] = field(default_factory=list)
    root: int = -1  # of this round, as are the next two
    proposed: list[list[int]] = field(default_factory=list)  # the window; [] for none
    ends: list[int] = field(default_factory=list)  # the nodes of its last level; [] for no window


class LookaheadSession(TextSession):
    """A session with a window and a pool for each row.

    `limit`: the target's context, in tokens; None for any.
    """

    def __init__(self, config: LookaheadConfig, pools: list[Pool], limit: int | None):
        self.config, self.limit = config, limit
        self.rows = [_LookaheadRow(pool) for pool in pools]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        size = self.config.ngram
        for row, new, count in zip(self.rows, tokens.tolist(), counts.values, strict=True):
            text = row.recent + new[:count]
            row.length += count
            if self.config.from_text:
                for end in range(max(size, len(row.recent) + 1), len(text) + 1):
                    row.pool.add(text[end - size], tuple(text[end - size + 1 : end]))
            row.recent = text[-max(size, self.config.reach) :]

    def propose(self, root: Tensor, depth: int) -> Proposal:
        depth = min(depth, self.config.ngram - 1)
        trees = [self._grow(row, last, depth) for row, last in zip(self.rows, root.tolist(), strict=True)]
        stacked = partial(padded, device=root.device)
        tokens, parents = stacked([t.tokens for t in trees]), stacked([t.parents for t in trees], fill=-1)
        if not tokens.shape[1]:
            return Proposal.chain(tokens)
        real = stacked([t.depths for t in trees], fill=depth + 1) <= depth
        deepest = max(d for t in trees for d in t.depths)
        return Proposal(tokens, real, deepest, parents, torch.full_like(parents, -1))

    def _grow(self, row: _LookaheadRow, root: int, depth: int) -> _DraftTrie:
        tree = _DraftTrie()
        row.root = root
        row.ends = []
        if self.limit is None or row.length + self.config.reach < self.limit:  # nothing is read after the context's end
            row.proposed = row.levels
            if not row.levels:  # the text's last tokens, over and over if it is short (the paper draws at random)
                tail = [*row.recent, root][-self.config.reach :]
                row.proposed = [(tail * self.config.reach)[: self.config.reach]]
            row.ends = _place(tree, row.proposed)
        for rest in row.pool.latest(root):
            node = -1
            for token in rest[:depth]:
                node = tree.add(node, token)
        return tree

    def on_target_argmax(self, following: Tensor) -> None:
        for row, tokens in zip(self.rows, following.tolist(), strict=True):
            if row.ends:
                row.levels = self._moved(row, [tokens[node + 1] for node in row.ends])

    def _moved(self, row: _LookaheadRow, new: list[int]) -> list[list[int]]:
        """Return the next window, with the tokens `new` that the target gave after the last level."""
        levels = row.proposed
        if len(levels) == 1:
            return [levels[0][1:], new]
        if len(levels) < self.config.ngram - 1:
            return [level[1:] for level in [*levels, new]]
        for column, rest in enumerate(zip(*levels[1:], new, strict=True)):
            row.pool.add(levels[0][column - 1] if column else row.root, rest)
        return [levels[1][1:], *levels[2:], new]

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[r] for r in rows]


def _place(tree: _DraftTrie, levels: list[list[int]]) -> list[int]:
    """Put a window into the tree; return the nodes of its last level."""
    nodes: list[int] = []
    for token in levels[0]:
        nodes.append(tree.add(nodes[-1] if nodes else -1, token))
    if len(levels) == 1:
        return nodes
    above = [-1, *nodes]
    for level in levels[1:]:
        above = [tree.add(parent, token) for parent, token in zip(above, level, strict=True)]
    return above
