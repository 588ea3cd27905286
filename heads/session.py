"""How a drafter decodes: a session is one drafter's side of a running batch.

A session remembers what its rows' texts were, proposes what follows, and is told what the target made of it. Per batch:
`update` once for the prompts; then per round `propose`, and `update` again. A session that reads nodes gives logits
after them instead (`prefill`, `decode`), from which the decoder grows chains and trees of any shape.

Shapes: B rows, Q tokens of one pass, N draft tokens of a proposal, W nodes read at once, K taps, H target hidden size,
V target vocabulary, V' the drafter's own vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..targets import Nodes, RaggedCache, RowLengths

# Picks the draft token of each row from logits: (logits [B, V'], token_ids [V'] or None) -> target ids [B].
# The decoder supplies it: temperature, filters and penalties are applied there, once, for drafter and target alike.
Choose = Callable[[Tensor, Tensor | None], Tensor]

# Asked after each token of a chain; True ends the chain there, for all rows.
Ended = Callable[[], bool]


@dataclass(frozen=True)
class Abilities:
    """What decoding with a drafter can do beside proposing chains; every drafter declares it.

    Attributes:
        reads_nodes: its session is a `NodeSession`: the decoder grows chains and trees from its logits.
        fixed_shapes: its rounds can be captured: nothing in them is read back to the host, no shape depends on a
            length.
        reads_chains: its session reads tokens that it has not chosen yet (`read_chain`), so that another may guess for
            it.
        continues: its session says how texts go on that the target has not seen (`continuations`).
        observes: its session wants the target's most probable tokens after each of its proposals (`on_target_argmax`).
        confident: its session says how probable the next draft of a chain is to be accepted, before that is drawn
            (`NodeSession.confidence`).
        one_pass: a round's drafting costs the same however deep it drafts: one pass says all drafts.
        deterministic: its proposals are never samples; the rules then have no distribution to reject against.
        from_text: the host makes its proposals, of the text alone: rounds of fixed shapes begin with them.
    """

    reads_nodes: bool = False
    fixed_shapes: bool = False
    reads_chains: bool = False
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
        real: which of them each row really proposes, `[B, N]`; none of them stands after one that is not.
        depth: the depth of the deepest node; a chain's is N.
        parents: for a tree, the index of each token's parent, which comes before it; −1 is the root (the last committed
            token), `[B, N]`. None for a chain.
        read: for a tree, when `decode` has read each token, −1 if it has not, `[B, N]`.
        deterministic: True if the tokens are not samples (so that there is no distribution q to score them with).
    """

    tokens: Tensor
    real: Tensor
    depth: int
    parents: Tensor | None = None
    read: Tensor | None = None
    deterministic: bool = False

    @classmethod
    def chain(cls, tokens: Tensor, lengths: Tensor | None = None, deterministic: bool = False) -> Proposal:
        """Make a chain of tokens `[B, k]`, of which row b proposes the first `lengths[b]` (None: all)."""
        real = torch.ones_like(tokens, dtype=torch.bool)
        if lengths is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return cls(tokens, real, tokens.shape[1], deterministic=deterministic)

    @classmethod
    def tree(cls, tokens: Tensor, parents: Tensor, real: Tensor, read: Tensor, depth: int) -> Proposal:
        """Make a tree that was grown from a session's logits."""
        return cls(tokens, real, depth, parents, read)

    def spread(self, rows: list[int], batch_size: int, size: int) -> Proposal:
        """Return it as that of a batch in which its own rows are `rows`, filled up to `size` tokens that are not real.

        So proposals of all lengths, for whichever rows are left, have one shape.
        """

        def placed(values: Tensor, filled: int) -> Tensor:
            wide = values.new_full((batch_size, size), filled)
            wide[rows, : values.shape[1]] = values
            return wide

        tokens, real = placed(self.tokens, 0), placed(self.real, 0)
        if self.parents is None or self.read is None:
            return Proposal(tokens, real, size, deterministic=self.deterministic)
        parents, read = placed(self.parents, -1), placed(self.read, -1)
        return Proposal(tokens, real, self.depth, parents, read, self.deterministic)

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens that each row really proposes, counting all nodes of a tree, `[B]`."""
        return self.real.sum(1)

    @cached_property
    def nodes(self) -> Nodes:
        """The places of root and tokens, `[B, 1 + N]`; a chain has one row for all."""
        if self.parents is None:
            return Nodes.of_chain(self.depth, self.tokens.device)
        return Nodes.of_tree(self.parents, self.depth)


class Session(ABC):
    """A drafter's side of a running batch: what it has read, and how it proposes."""

    @abstractmethod
    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        """Take note of what the target has processed.

        After rounds without drafts this is called several times before the next proposal; after rounds in which another
        drafter proposed, too: then with more than the root.

        Args:
            tokens: the tokens of the target's last pass in the order of the text, `[B, Q]`; row b keeps the first
                `counts.values[b]`.
            hidden: their true tapped hidden states, `[B, Q, K, H]`; None for a drafter without taps.
            counts: how many stay in each row, at least 1.
            path: after a tree, which of the nodes that `decode` has read the tokens after the first are, `[B, Q − 1]`;
                −1 for one that it has not read. None after a chain.
        """

    @abstractmethod
    def propose(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None = None) -> Proposal:
        """Draft up to `depth` tokens after `root` `[B]`, the last committed token.

        The target has not processed the root yet.
        """

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order (sequences finish at different times)."""

    def on_target_argmax(self, following: Tensor) -> None:
        """Take note of the target's most probable token at each place, `[B, 1 + N]`.

        The places are after the root and after each proposed token, kept or not. Called before `update`, for drafters
        that declare it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not observe.")

    # Rounds of fixed shapes (decode/static_batch.py): what such a round reads and the round before wrote.

    def caches(self) -> list[RaggedCache]:
        """Return the session's own caches; the target's, which it may have been lent, is not among them."""
        return []

    def carried(self) -> list[Tensor]:
        """Return what `update` leaves for the next proposal, caches apart."""
        return []

    def carry(self, tensors: list[Tensor]) -> None:
        """Put the carried tensors back, from other places in memory."""
        if tensors:
            raise NotImplementedError(f"{type(self).__name__} carries nothing from round to round.")

    def reset(self) -> None:
        """Forget everything, and keep the room, for another request."""
        raise NotImplementedError(f"{type(self).__name__} serves one request; open another.")


class NoDraftSession(Session):
    """A session that never drafts: plain decoding."""

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        """Take note of nothing."""

    def propose(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None = None) -> Proposal:
        """Return a proposal without tokens."""
        return Proposal.chain(root[:, None][:, :0])

    def select(self, rows: list[int]) -> None:
        """Do nothing: there are no rows to keep."""

    def reset(self) -> None:
        """Stay empty."""


class NodeSession(Session):
    """A session that reads nodes and gives logits after them; chains and trees are loops over `prefill` and `decode`.

    Args:
        output_ids: target ids of its logits, `[V']`; None where they are the whole vocabulary.
        max_depth: the deepest it drafts; None for as deep as anyone asks.
    """

    def __init__(self, output_ids: Tensor | None = None, max_depth: int | None = None):
        self.output_ids, self.max_depth = output_ids, max_depth

    @abstractmethod
    def prefill(self, root: Tensor) -> Tensor:
        """Read what was absorbed and `root` `[B]`; return logits of the first draft, `[B, V']`."""

    @abstractmethod
    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Read the drafted `tokens` `[B, W]`; return logits after each of them, `[B, W, V']`.

        Args:
            parents: indices of nodes that were read before, in the order of reading, `[B, W]`; −1 is the root. None: a
                chain, in which this one node follows the last.
        """

    def confidence(self) -> Tensor:
        """Return how probable the next draft of a chain is to be accepted if it is looked at, `[B]`.

        It knows the tokens before that draft and nothing of the draft itself. For drafters that declare it.
        """
        raise NotImplementedError(f"{type(self).__name__} says nothing of how sure it is.")

    def propose(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None = None) -> Proposal:
        """Draft a chain, token by token."""
        depth = min(depth, self.max_depth or depth)
        drafted = [choose(self.prefill(root), self.output_ids)]
        while len(drafted) < depth and not (ended is not None and ended()):
            logits = self.decode(drafted[-1][:, None])
            drafted.append(choose(logits[:, 0], self.output_ids))
        return Proposal.chain(torch.stack(drafted, 1))

    def reset(self) -> None:
        """Forget everything, and keep the room, for another request."""
        for cache in self.caches():
            cache.reset()


class ChainSession(NodeSession):
    """A session that can also read tokens it has not chosen, so that another drafter may guess for it.

    See heads/lookup/cascade.py.
    """

    @abstractmethod
    def read_chain(self, tokens: Tensor, after: Tensor | None = None) -> Tensor:
        """Read the chain `tokens` `[B, W]` in one pass; return logits after each, `[B, W, V']`.

        This takes the place of `prefill` and `decode`.

        Args:
            after: the node that each row's chain follows, in the order of reading, −1 for the root, `[B]`. None begins
                a round: the first of `tokens` is the root, and the nodes count from the second.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop what was read in this round: the next `update` brings all that is kept."""


class TextSession(Session):
    """A session without a model that can say how a text goes on that the target has not seen (n-grams, suffixes)."""

    @abstractmethod
    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        """Return what it would propose if each row's text went on with its tail, root first.

        Each row gets up to `depth` tokens.
        """
