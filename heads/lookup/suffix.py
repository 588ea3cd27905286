"""SuffixDecoding: propose what most often followed the text's end, in this text or in earlier ones (arXiv 2411.04975).

No weights. A suffix tree counts every run of up to `tree_depth` tokens. The longest suffix of a row's text that was
seen before gives the context; after it the most frequent token is taken, and again after that. A chain's score is the
number of its tokens that would be accepted if the counts were the target's probabilities:
Σ_i Π_{j<=i} c(x_1..x_j) / c(x_1..x_j-1 and any token) (§4.2 there). Each row has a tree of its own text; one more tree
holds earlier answers, and the proposal with the better score is made. Proposals are not samples.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ..base import Drafter
from ..saved import DrafterConfig
from ..session import Abilities, Proposal, TextSession, padded


@dataclass
class SuffixConfig(DrafterConfig):
    """Settings of suffix decoding: what is looked up, how much is proposed, and what is remembered.

    Attributes:
        max_match, min_match: lengths of the suffixes that are looked up, in tokens.
        tree_depth: longest run that is counted, context and continuation together. A longer one goes on after its last
            `max_match` tokens.
        factor: tokens proposed per token of the match, at most; the round's depth limits them too.
        min_score: proposals that promise fewer accepted tokens are not made.
        width: continuations tried after each token. 1 proposes chains; more proposes trees, of no more tokens than a
            chain would have.
        max_tokens: of earlier answers that are remembered, the oldest dropped first; 0 for none. All requests of one
            drafter share them.
    """

    max_match: int = 16
    min_match: int = 1
    tree_depth: int = 24
    factor: float = 4.0
    min_score: float = 0.0
    width: int = 1
    max_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_match <= self.max_match < self.tree_depth:
            given = f"{self.min_match}, {self.max_match} and {self.tree_depth}"
            raise BadInputError(f"suffix: need 1 <= min_match <= max_match < tree_depth, got {given}.")
        if self.factor <= 0 or self.width < 1 or self.max_tokens < 0:
            given = f"{self.factor}, {self.width} and {self.max_tokens}"
            raise BadInputError(f"suffix: need factor > 0, width >= 1 and max_tokens >= 0, got {given}.")


class Text:
    """A growing text that a tree counts.

    Attributes:
        running: by where they begin, the suffixes of this text whose next token must be counted, and the nodes that
            they have reached.
        dropped: how many of the first tokens begin nothing that is counted any more.
    """

    __slots__ = ("dropped", "running", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.running: dict[int, _SuffixNode] = {}
        self.dropped = 0


class _SuffixNode:
    """A run of tokens that was seen.

    Attributes:
        token: its last one.
        count: how often it was seen.
        counted: whether it is counted what followed; not at the tree's depth, nor if the run was seen only once.
        children: by the token that followed, if that is counted.
        text, at: of a run seen once, where it goes on.
        followed: sum of the children's counts.
        best: the most frequent child, of equal ones the one noted last; None for not known.
        noted: when it was last seen.
    """

    __slots__ = ("at", "best", "children", "count", "counted", "followed", "noted", "text", "token")

    def __init__(self, token: int, text: Text, at: int, noted: int):
        self.token = token
        self.text = text
        self.at = at
        self.noted = noted
        self.count, self.followed = 1, 0
        self.counted, self.children = False, _NO_CHILDREN
        self.best: _SuffixNode | None = None


# What all nodes have that have none of their own; never written to.
_NO_TEXT = Text()
_NO_CHILDREN: dict[int, _SuffixNode] = {}

# Where a context ends: a node, the place in its text (if the run was seen once), and how many tokens lie above.
_Place = tuple[_SuffixNode, int, int]
_RANK = attrgetter("count", "noted")


@dataclass
class SuffixProposal:
    """A proposal: tokens with their parents, and what it promises."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # −1 for the root
    score: float = 0.0  # how many tokens are expected to be accepted
    match: int = 0  # how many tokens the match has


class SuffixTree:
    """A tree that counts all runs of up to `tree_depth` tokens in texts that grow.

    A run that was seen once has no nodes below it, but a place in its text, and gets a child when it is seen again.
    """

    def __init__(self, config: SuffixConfig):
        self.config = config
        self.clock = 0
        self.root = _SuffixNode(-1, _NO_TEXT, 0, 0)
        self.root.counted, self.root.children = True, {}

    def append(self, text: Text, token: int) -> None:
        """Append `token` to `text`, and count it."""
        text.tokens.append(token)
        end = len(text.tokens)
        deepest = self.config.tree_depth
        running = text.running
        running[end - 1] = self.root
        text.running = still = {}
        self.clock = noted = self.clock + 1
        for start, node in running.items():
            node.followed += 1
            child = node.children.get(token)
            if child is None:
                node.children[token] = child = _SuffixNode(token, text, end, noted)
                if node.followed == 1:
                    node.best = child
            else:
                child.count += 1
                child.noted = noted
                if end - start < deepest:
                    if not child.counted:
                        self._open(child, end - start)
                    still[start] = child
                else:
                    child.text = _NO_TEXT
            best = node.best
            if best is not None and child.count >= best.count:
                node.best = child

    @staticmethod
    def _open(node: _SuffixNode, depth: int) -> None:
        """Give a node that was seen once before, `depth` tokens deep, the child of that time."""
        text, at = node.text, node.at
        node.counted = True
        node.children = {}
        node.text = _NO_TEXT
        if at == len(text.tokens):  # that text has not gone on yet
            text.running[at - depth] = node
            return
        token = text.tokens[at]
        node.children[token] = node.best = _SuffixNode(token, text, at + 1, 0)
        node.followed = 1

    def drop(self, text: Text) -> None:
        """No longer count what begins at the oldest token of `text` that is still counted."""
        start, node = text.dropped, self.root
        text.dropped += 1
        text.running.pop(start, None)
        for token in text.tokens[start : start + self.config.tree_depth]:
            if not node.counted:
                break
            child = node.children[token]
            node.followed -= 1
            child.count -= 1
            if node.best is child:
                node.best = None
            if not child.count:
                del node.children[token]
                break
            node = child

    def draft(self, tail: list[int], most: int) -> SuffixProposal:
        """Return up to `most` tokens after a text that ends with `tail`."""
        start = self._match(tail)
        if start is None:
            return SuffixProposal()
        proposal = SuffixProposal(match=start[2])
        budget = min(most, int(self.config.factor * proposal.match))
        # By probability; of equal ones the first that was found.
        queue = [(-share, i, token, -1, place) for i, (share, token, place) in enumerate(self._following(start))]
        count = len(queue)
        while queue and len(proposal.tokens) < budget:
            probability, _, token, parent, place = heapq.heappop(queue)
            proposal.score -= probability
            proposal.tokens.append(token)
            proposal.parents.append(parent)
            node = len(proposal.tokens) - 1
            after = self._following(place) or self._following(self._match(tail + _path(proposal, node)))
            for share, following, there in after:
                heapq.heappush(queue, (probability * share, count, following, node, there))
                count += 1
        return proposal if proposal.score >= self.config.min_score else SuffixProposal()

    def _match(self, tail: list[int]) -> _Place | None:
        """Return the end of the longest suffix of `tail` that something followed; None if none is long enough."""
        # A run that was seen was seen with its own suffixes, so that its length can be found by bisection.
        tail = tail[-self.config.max_match :]
        best = None
        low = self.config.min_match
        high = len(tail)
        while low <= high:
            middle = (low + high + 1) // 2
            place = self._find(tail[-middle:])
            if place is None:
                high = middle - 1
            else:
                best, low = place, middle + 1
        return best

    def _find(self, context: list[int]) -> _Place | None:
        """Return where `context` ends, if something followed it."""
        node = self.root
        for i, token in enumerate(context):
            if not node.counted:
                known, end = node.text.tokens, node.at + len(context) - i
                return (node, end, len(context)) if end < len(known) and known[node.at : end] == context[i:] else None
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        place = node, node.at, len(context)
        return place if node.followed or node.at < len(node.text.tokens) else None

    def _following(self, place: _Place | None) -> list[tuple[float, int, _Place]]:
        """Return what follows at an end, best first: its share, the token, and where that leads; [] for nothing."""
        if place is None or place[2] == self.config.tree_depth:
            return []
        node, at, depth = place
        if not node.counted:
            known = node.text.tokens
            return [(1.0, known[at], (node, at + 1, depth + 1))] if at < len(known) else []
        if not node.followed:
            return []
        return [(child.count / node.followed, child.token, (child, child.at, depth + 1)) for child in self._best(node)]

    def _best(self, node: _SuffixNode) -> list[_SuffixNode]:
        if self.config.width > 1:
            return heapq.nlargest(self.config.width, node.children.values(), key=_RANK)
        if node.best is None:
            node.best = max(node.children.values(), key=_RANK)
        return [node.best]


def _path(draft: SuffixProposal, node: int) -> list[int]:
    """Return the tokens from the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.append(draft.tokens[node])
        node = draft.parents[node]
    return path[::-1]


class History:
    """A tree of the last `max_tokens` tokens of all texts."""

    def __init__(self, config: SuffixConfig):
        self.tree, self.limit = SuffixTree(config), config.max_tokens
        self.order: deque[Text] = deque()  # of each token counted, oldest first, its text

    def append(self, text: Text, token: int) -> None:
        self.tree.append(text, token)
        self.order.append(text)
        if len(self.order) > self.limit:
            self.tree.drop(self.order.popleft())


class Suffix(Drafter[SuffixConfig]):
    """A drafter that counts what followed what, in the text and in earlier answers."""

    name = "suffix"
    config_class = SuffixConfig
    trainable = False

    def __init__(self, config: SuffixConfig | None = None):
        super().__init__(config)
        self.reset_history()

    def reset_history(self) -> None:
        """Forget earlier answers. Running requests keep them."""
        self.history = History(self.config)

    def check(self, target: Target) -> None:
        if self.config.width > 1:
            target.check_trees()

    @property
    def abilities(self) -> Abilities:
        return Abilities(continues=self.config.width == 1, deterministic=True, from_text=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> SuffixSession:
        return SuffixSession(self.config, self.history, batch_size)


@dataclass
class _SuffixRow:
    """One sequence of a batch: a tree of all its text, and what the history holds of its answer."""

    tree: SuffixTree
    text: Text = field(default_factory=Text)
    answer: Text = field(default_factory=Text)


class SuffixSession(TextSession):
    """A session with a tree for each text, beside the history that all requests share."""

    def __init__(self, config: SuffixConfig, history: History, batch_size: int):
        self.config, self.history = config, history
        self.rows = [_SuffixRow(SuffixTree(config)) for _ in range(batch_size)]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        for row, new, count in zip(self.rows, tokens.tolist(), counts.values, strict=True):
            answered = bool(row.text.tokens)  # the prompt comes first; it is not remembered
            for token in new[:count]:
                row.tree.append(row.text, token)
                if answered and self.config.max_tokens:
                    self.history.append(row.answer, token)

    def propose(self, root: Tensor, depth: int) -> Proposal:
        proposals = [self._draft(row, [last], depth) for row, last in zip(self.rows, root.tolist(), strict=True)]
        tokens = padded([f.tokens for f in proposals], root.device)
        lengths = torch.tensor([len(f.tokens) for f in proposals], device=root.device)
        proposal = Proposal.chain(tokens, lengths)
        if all(f.parents == list(range(-1, len(f.parents) - 1)) for f in proposals):
            return proposal
        parents = padded([f.parents for f in proposals], root.device, fill=-1)
        deepest = max(len(_path(f, node)) for f in proposals for node in range(len(f.tokens)))
        return Proposal(tokens, proposal.real, deepest, parents, torch.full_like(parents, -1))

    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        return [self._draft(row, tail, depth).tokens for row, tail in zip(self.rows, tails, strict=True)]

    def _draft(self, row: _SuffixRow, more: list[int], most: int) -> SuffixProposal:
        """Return a proposal after the row's text and `more`: its own, or the history's if that scores better."""
        tail = [*row.text.tokens[-self.config.max_match :], *more]
        own = row.tree.draft(tail, most)
        if not self.config.max_tokens:
            return own
        remembered = self.history.tree.draft(tail, most)
        return remembered if remembered.score > own.score else own

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[r] for r in rows]
