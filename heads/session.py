"""How a drafter decodes: a session is one drafter's side of a running batch.

Per batch: `update` once for the prompts; then the session drafts in each round, and `update` brings what the target
accepted. There are two kinds of drafting. A `NodeSession` gives logits after tokens (`prefill`, `decode`), from which
the decoder grows chains and trees. A `TextSession` proposes on the host, without logits. A session may have a part of
each kind (`text`, `model`). After the contract stands what sessions share.

Shapes: B rows, P and Q tokens of one pass, N draft tokens of a proposal, k drafts of one pass, W nodes read at once,
K taps, H target hidden size, V target vocabulary, V' the drafter's own vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..targets import Nodes, RaggedCache, RowLengths


@dataclass(frozen=True)
class Abilities:
    """What decoding with a drafter can do beside proposing chains; every drafter declares it.

    Attributes:
        reads_nodes: its session is a `NodeSession`: the decoder grows chains and trees from its logits.
        fixed_shapes: its rounds can be captured: nothing in them is read back to the host, no shape depends on a
            length.
        continues: its session continues texts that the target has not read (`TextSession.continuations`).
        observes: its session uses the target's most probable tokens after each proposal (`on_target_argmax`).
        confident: its session predicts whether the next draft will be accepted, before it is drawn
            (`NodeSession.confidence`).
        one_pass: one pass makes all drafts of a round, which costs the same at any depth.
        deterministic: its proposals are never samples; the rules then have no distribution to reject against.
        from_text: rounds of fixed shapes begin with the proposals of its `TextSession`, which the host makes.
    """

    reads_nodes: bool = False
    fixed_shapes: bool = False
    continues: bool = False
    observes: bool = False
    confident: bool = False
    one_pass: bool = False
    deterministic: bool = False
    from_text: bool = False


@dataclass
class Proposal:
    """The draft tokens of one round: a chain, or a tree.

    Attributes:
        tokens: `[B, N]`.
        real: which of them are not padding, `[B, N]`; none stands after padding.
        depth: of the deepest node; a chain's is N.
        parents: for a tree, the index of each token's parent, which comes before it; −1 is the root (the last committed
            token), `[B, N]`. None for a chain.
        read: for a tree, when `decode` has read each token, −1 if it has not, `[B, N]`.
    """

    tokens: Tensor
    real: Tensor
    depth: int
    parents: Tensor | None = None
    read: Tensor | None = None

    @classmethod
    def chain(cls, tokens: Tensor, lengths: Tensor | None = None) -> Proposal:
        """Return a chain of tokens `[B, k]`, of which row b proposes the first `lengths[b]` (None: all)."""
        real = torch.ones_like(tokens, dtype=torch.bool)
        if lengths is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return cls(tokens, real, tokens.shape[1])

    def spread(self, rows: list[int], batch_size: int, size: int) -> Proposal:
        """Return this proposal for a batch of `batch_size`, padded to `size` tokens; its own rows become `rows`."""

        def placed(values: Tensor, filled: int) -> Tensor:
            wide = values.new_full((batch_size, size), filled)
            wide[rows, : values.shape[1]] = values
            return wide

        tokens, real = placed(self.tokens, 0), placed(self.real, 0)
        if self.parents is None or self.read is None:
            return Proposal(tokens, real, size)
        return Proposal(tokens, real, self.depth, placed(self.parents, -1), placed(self.read, -1))

    def rebound(self, change: Callable[[Tensor], Tensor]) -> Proposal:
        """Return this proposal with every tensor replaced by what `change` makes of it, in a fixed order."""
        parents = None if self.parents is None else change(self.parents)
        read = None if self.read is None else change(self.read)
        return Proposal(change(self.tokens), change(self.real), self.depth, parents, read)

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens that each row proposes, counting all nodes of a tree, `[B]`."""
        return self.real.sum(1)

    @cached_property
    def nodes(self) -> Nodes:
        """The places of root and tokens, `[B, 1 + N]`; a chain has one row for all."""
        if self.parents is None:
            return Nodes.of_chain(self.depth, self.tokens.device)
        return Nodes.of_tree(self.parents, self.depth)


class Session(ABC):
    """A drafter's side of a running batch: what it has read."""

    @property
    def text(self) -> TextSession | None:
        """The part that proposes on the host; None without one."""
        return None

    @property
    def model(self) -> NodeSession | None:
        """The part that gives logits on the device; None without one."""
        return None

    @abstractmethod
    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        """Take in what the target has processed.

        After rounds without drafts, or with those of another drafter, it is called several times before the session
        drafts again.

        Args:
            tokens: those of the target's last pass in the order of the text, `[B, Q]`.
            hidden: their true tapped hidden states, `[B, Q, K, H]`; None for a drafter without taps.
            counts: how many are kept in each row, the first ones; at least 1.
            path: after a tree, the nodes read by `decode` that the tokens after the first are, `[B, Q − 1]`; −1 for one
                that it has not read. None after a chain.
        """

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order (sequences finish at different times)."""

    def on_target_argmax(self, following: Tensor) -> None:
        """Take in the target's most probable token after the root and after each proposed token, `[B, 1 + N]`.

        Called before `update`, for drafters that declare it (`Abilities.observes`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not observe.")

    # Rounds of fixed shapes (decode/static_batch.py): what such a round reads and the round before wrote.

    def read_ahead(self, keep: int) -> None:
        """Read all but the last `keep` tokens of the prompts, so that the first round has the shapes of those after it.

        By default there is nothing left to read.
        """
        return

    def caches(self) -> list[RaggedCache]:
        """Return the session's own caches, without one that the target has lent it."""
        return []

    def carried(self) -> list[Tensor]:
        """Return the tensors that `update` leaves for the next proposal, caches apart."""
        return []

    def carry(self, tensors: list[Tensor]) -> None:
        """Put the carried tensors back, from other places in memory."""
        if tensors:
            raise NotImplementedError(f"{type(self).__name__} carries nothing from round to round.")

    def reset(self) -> None:
        """Forget everything but keep the memory, for another request."""
        raise NotImplementedError(f"{type(self).__name__} serves one request; open another.")


def handed(session: Session, tensor: Tensor) -> Tensor:
    """Return a tensor for a session to read: a copy if it, or a part of it, is another package's and may write."""
    parts = [part for part in (session, session.text, session.model) if part is not None]
    ours = all(type(part).__module__.startswith("outrider.") for part in parts)
    return tensor if ours else tensor.clone()


def model_drafts(proposal: Proposal | None, rows: int) -> bool:
    """Return whether a session's model drafts beside such a proposal: not for a single row that has tokens."""
    return proposal is None or rows > 1 or not proposal.tokens.shape[1]


class NoDraftSession(Session):
    """A session that never drafts: plain decoding."""

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        """Do nothing."""

    def select(self, rows: list[int]) -> None:
        """Do nothing: there are no rows to keep."""

    def on_target_argmax(self, following: Tensor) -> None:
        """Do nothing: in rounds of fixed shapes the observing session stands outside."""

    def reset(self) -> None:
        """Stay empty."""


class NodeSession(Session):
    """A session that reads nodes and gives logits after them; chains and trees are loops over `prefill` and `decode`.

    Args:
        output_ids: target ids of its logits, `[V']`; None where they are the whole vocabulary.
        caches: its own.
    """

    tree: TreeMask | None = None  # the nodes of this round, once `decode` has read some of a tree
    # The depth of the deepest draft that this round asks for, set before `prefill`; None if it is not known.
    round_depth: int | None = None
    lengths: Tensor | None = None  # the drafts of each row's chain, where the session ends rows itself, `[B]`

    def __init__(self, output_ids: Tensor | None = None, caches: Sequence[RaggedCache] = ()):
        self.output_ids, self._caches = output_ids, list(caches)

    @property
    def model(self) -> NodeSession:
        return self

    @abstractmethod
    def prefill(self, root: Tensor) -> Tensor:
        """Read the last updates and `root` `[B]`; return logits of the first draft, `[B, V']`."""

    @abstractmethod
    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Read the drafted `tokens` `[B, W]`; return logits after each of them, `[B, W, V']`.

        `parents`: indices of nodes in the order of reading, `[B, W]`; −1 is the root. None: a chain, in which this one
        node follows the last.
        """

    def grow(self, parents: Tensor | None, before: int = 0) -> Nodes | None:
        """Return the places of nodes below `parents` in this round's tree; None in a chain. See `TreeMask`."""
        if parents is None:
            return None
        self.tree = self.tree or TreeMask(len(parents), before, parents.device)
        return self.tree.grow(parents)

    def confidence(self) -> Tensor:
        """Return the probability that the next draft of a chain is accepted once those before it are, `[B]`.

        It depends on the tokens before that draft alone. For drafters that declare it (`Abilities.confident`).
        """
        raise NotImplementedError(f"{type(self).__name__} has no confidence in its drafts.")

    def pass_over(self, root: Tensor) -> None:
        """Read up to `root` `[B]` in a round for which the text part alone drafts.

        So the rounds of fixed shapes leave equally much unread, whoever drafts.
        """
        self.round_depth = 1
        self.prefill(root)

    def select(self, rows: list[int]) -> None:
        for cache in self.caches():
            cache.select(rows)
        self.carry([tensor[rows] for tensor in self.carried()])

    def caches(self) -> list[RaggedCache]:
        return self._caches

    def reset(self) -> None:
        self.tree = None
        for cache in self.caches():
            cache.reset()


class TextSession(Session):
    """A session without logits (n-grams, suffixes): its tokens are no samples, so no distribution scores them."""

    @property
    def text(self) -> TextSession:
        return self

    @abstractmethod
    def propose(self, root: Tensor, depth: int) -> Proposal:
        """Draft up to `depth` tokens after `root` `[B]`, the last token, which the target has yet to process."""

    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        """Return its proposals, of up to `depth` tokens, after each row's text and its tail, root first.

        The target has not read the tails. For drafters that declare it (`Abilities.continues`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not continue texts.")


def greedy_chain(session: Session, root: Tensor, depth: int) -> Proposal:
    """Return the chain of most probable tokens that a session drafts after `root` `[B]`.

    This is drafting in its plainest form; the decoder also draws tokens, ends chains early and grows trees.
    """
    copied = None if session.text is None else session.text.propose(root, depth)
    if not isinstance(session, NodeSession):
        assert copied is not None, f"{type(session).__name__} drafts nothing"
        return copied
    if copied is not None and not model_drafts(copied, len(root)):
        session.pass_over(root)
        return copied
    session.round_depth = depth
    logits = session.prefill(root)
    drafted = list[Tensor]()
    while True:
        token = logits.max(-1).indices
        if session.output_ids is not None:
            token = session.output_ids[token]
        if copied is not None and len(drafted) < copied.tokens.shape[1]:
            token = torch.where(copied.lengths > len(drafted), copied.tokens[:, len(drafted)], token)
        drafted.append(token)
        if len(drafted) == depth:
            return Proposal.chain(torch.stack(drafted, 1), session.lengths)
        logits = session.decode(token[:, None])[:, 0]


T = TypeVar("T")


def padded(rows: Sequence[Sequence[int]], device: torch.device | str, fill: int = 0) -> Tensor:
    """Return lists of different lengths as one tensor `[B, W]`, with `fill` after the shorter ones."""
    width = max(map(len, rows))
    filled = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device).reshape(len(rows), width)


def joined(before: Tensor, counts: RowLengths, after: Tensor) -> Tensor:
    """Return each row's first `counts` entries of `before` `[B, P, ...]`, then `after` `[B, Q, ...]`.

    It is `[B, P' + Q, ...]`, P' the largest count; what stands after the end of a shorter row is arbitrary.
    """
    before = before[:, : max(counts.values)]
    both = torch.cat([before, after], 1)
    if min(counts.values) == before.shape[1]:
        return both
    index, own = torch.arange(both.shape[1], device=both.device).expand(len(both), -1), counts.tensor[:, None]
    index = torch.where(index < own, index, index - own + before.shape[1]).clamp(max=both.shape[1] - 1)
    return both.gather(1, index.view(*index.shape, *[1] * (both.dim() - 2)).expand_as(both))


def take_positions(x: Tensor, index: Tensor) -> Tensor:
    """Return `x` `[B, T, H]` at indices `[B or 1, T']`, the nearest one where they leave it: `[B, T', H]`."""
    index = index.clamp(0, x.shape[1] - 1)
    return x.gather(1, index[:, :, None].expand(len(x), -1, x.shape[2]))


def required(value: T | None, missing: str) -> T:
    """Return `value`; raise RuntimeError with the words `missing` where it is None."""
    if value is None:
        raise RuntimeError(missing)
    return value


@dataclass
class PendingInputs:
    """What the target has processed and a head has not: a head reads each token's successor with it."""

    tokens: Tensor  # `[B, Q]`
    hidden: Tensor  # the target's hidden states at them, `[B, Q, ...]`
    counts: RowLengths  # how many of them are each row's

    def then(self, more: PendingInputs) -> PendingInputs:
        """Return these inputs, and after them `more`."""
        return PendingInputs(
            joined(self.tokens, self.counts, more.tokens),
            joined(self.hidden, self.counts, more.hidden),
            self.counts.plus(more.counts),
        )


class DeferredPrefillSession(NodeSession):
    """A session whose caches lack the last updates until `prefill` reads them, with the root."""

    unread: PendingInputs | None = None  # None before the first `update`, and from `prefill` to the next one

    def note(self, tokens: Tensor, hidden: Tensor, counts: RowLengths) -> None:
        """Append new inputs to the unread ones."""
        new = PendingInputs(tokens, hidden, counts)
        self.unread = new if self.unread is None else self.unread.then(new)

    def waiting(self) -> PendingInputs:
        """Return the unread inputs; cut to the longest row, where the host may ask how long that is."""
        unread = self._required()
        if self.caches()[0].window is not None:
            return unread
        longest = max(unread.counts.values)
        return PendingInputs(unread.tokens[:, :longest], unread.hidden[:, :longest], unread.counts)

    def read_ahead(self, keep: int) -> None:
        unread = self._required()
        device, count = unread.tokens.device, unread.counts.values[0]
        if len(unread.tokens) > 1 or count <= keep:
            return  # the first round runs by itself; a part of several rows would be a copy, without memory set aside
        first = count - keep
        tokens = unread.tokens
        hidden = unread.hidden
        self.unread = PendingInputs(tokens[:, :first], hidden[:, :first], RowLengths.of([first], device))
        self.prefill(tokens[:, first])
        self.unread = PendingInputs(tokens[:, first:count], hidden[:, first:count], RowLengths.of([keep], device))

    def _required(self) -> PendingInputs:
        return required(self.unread, "nothing was read since the last round; call update after each of them.")

    def carried(self) -> list[Tensor]:
        unread = self._required()
        return [unread.tokens, unread.hidden, unread.counts.tensor]

    def carry(self, tensors: list[Tensor]) -> None:
        tokens, hidden, counts = tensors
        self.unread = PendingInputs(tokens, hidden, RowLengths(counts))

    def reset(self) -> None:
        super().reset()
        self.unread = None

    def select(self, rows: list[int]) -> None:
        for cache in self.caches():
            cache.select(rows)
        if (unread := self.unread) is not None:
            self.unread = PendingInputs(unread.tokens[rows], unread.hidden[rows], unread.counts.select(rows))


class TreeMask:
    """Depths and attention mask of the drafted nodes that a session has read in this round, in that order.

    `before`: uncommitted entries of the session's cache that lie before the nodes; all nodes attend to them.
    """

    def __init__(self, rows: int, before: int, device: torch.device | str):
        # Index 0 is the root, node i is index i + 1.
        self.depths = torch.full((rows, 1), before - 1, device=device)  # [B, 1 + n]
        self._sees = torch.ones(rows, 1, before, dtype=torch.bool, device=device)  # [B, 1 + n, before + n]

    def grow(self, parents: Tensor) -> Nodes:
        """Add nodes below the nodes `parents` `[B, W]` (−1: the root); return their places."""
        own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
        return self.add(self.depths.gather(1, parents + 1) + 1, parents, own)

    def add(self, depths: Tensor, below: Tensor, own: Tensor) -> Nodes:
        """Add nodes at `depths` `[B, W]` that attend as `below` `[B, W]` do, and to each other by `own` `[W, W]`."""
        rows, width = depths.shape
        inherited = self._sees.gather(1, (below + 1)[:, :, None].expand(-1, -1, self._sees.shape[2]))
        sees = torch.cat([inherited, own.expand(rows, -1, -1)], 2)
        self.depths = torch.cat([self.depths, depths], 1)
        self._sees = torch.cat([nn.functional.pad(self._sees, (0, width)), sees], 1)
        return Nodes(depths, sees)


class NodeDepths:
    """The depths of a round's nodes, for a drafter with a limited number of drafts."""

    def __init__(self, deepest: int, name: str):
        self.deepest, self.name = deepest, name
        self.level = 0  # of the last node of a chain, 0 for the root
        self.tree: Tensor | None = None  # of the root and each read node of a tree, `[B, 1 + n]`; None in a chain

    def begin(self) -> None:
        self.level, self.tree = 0, None

    def descend(self) -> int:
        """Return the depth of the next node of a chain."""
        if self.level + 1 >= self.deepest:
            raise BadInputError(f"this {self.name} drafter drafts {self.deepest} tokens at most; lower the depth.")
        self.level += 1
        return self.level

    def place(self, parents: Tensor) -> Tensor:
        """Return the depths of new nodes below `parents` `[B, W]` (−1: the root), 1 for a child of the root."""
        tree = torch.zeros_like(parents[:, :1]) if self.tree is None else self.tree
        depths = tree.gather(1, parents + 1) + 1
        self.tree = torch.cat([tree, depths], 1)
        return depths


UNBEGUN = "decode: a round begins with the root; call prefill."


class OnePassDrafts(NodeDepths):
    """The logits of all drafts of a round, made by one pass before the first is drawn: `[B, k, V']`."""

    logits: Tensor | None = None

    def start(self, logits: Tensor) -> Tensor:
        """Begin a round; return the logits of the first draft, `[B, V']`."""
        self.begin()
        self.logits = logits
        return logits[:, 0]

    def after(self, parents: Tensor | None) -> Tensor:
        """Return the logits after nodes below `parents` `[B, W]`, `[B, W, V']`; None is the next node of a chain."""
        logits = required(self.logits, UNBEGUN)
        if parents is None:
            return logits[:, self.descend(), None]
        depths = self.place(parents).clamp(max=self.deepest - 1)
        return logits.gather(1, depths[:, :, None].expand(-1, -1, logits.shape[2]))


class OnePassSession(NodeSession):
    """A session that makes all drafts of a round in one pass, in `prefill`."""

    drafts: OnePassDrafts

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.drafts.after(parents)

    def reset(self) -> None:
        super().reset()
        self.drafts.logits = None
