"""A drafter without weights that drafts for a model, or after it.

A cascade (CS-Drafting, arXiv 2312.11462; staged decoding, arXiv 2308.04623) is vertical, horizontal, or both. Vertical:
the statistical drafter guesses how the model's own chain goes on. The model reads the last token of its chain and the
guesses in one pass, and draws its token after each, from the same pass while that is the guessed one: each token is
what the model alone would have drawn, in fewer passes. Horizontal: the model drafts the first `model_depth` tokens, and
the statistical drafter goes on from there; its tokens are scored as certain.

Shapes: B rows, D tokens drafted, W tokens of one pass, V vocabulary, V' the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..common import BadInputError
from ..heads.base import Drafter
from ..heads.draft_model import DraftModel, DraftModelSession
from ..heads.lookup.fusion import FusionConfig, TwoDrafters
from ..heads.session import NodeSession, TextSession, TreeMask, padded, required
from ..targets import Nodes, RaggedCache, RowLengths, Target

_GUESSES = 64  # that the model reads in a round at most: its cache has memory for so many


@dataclass
class CascadeConfig(FusionConfig):
    """Settings of a cascade: its two drafters, and how they share the work.

    Attributes:
        vertical: the statistical drafter guesses for the model, which must read nothing but tokens.
        model_depth: the depth after which the statistical drafter drafts; None for never.
    """

    statistical: dict[str, Any] = field(default_factory=lambda: {"type": "suffix"})
    vertical: bool = True
    model_depth: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_depth is not None and self.model_depth < 1:
            raise BadInputError(f"cascade: model_depth must be at least 1, got {self.model_depth}.")
        if not self.vertical and self.model_depth is None:
            raise BadInputError(
                "cascade: the statistical drafter has nothing to do; set vertical, or give a model_depth "
                "after which it goes on."
            )


class Cascade(TwoDrafters[CascadeConfig]):
    """A model, and a drafter without weights that guesses for it, or goes on after it."""

    name = "cascade"
    config_class = CascadeConfig

    def __init__(self, statistical: Drafter, model: Drafter, config: CascadeConfig | None = None):
        super().__init__(statistical, model, config)
        if self.config.vertical and not reads_chains(model):
            raise BadInputError(
                f"cascade: {model.name} cannot read guessed tokens in one pass (that needs a draft_model without "
                "recurrent layers, whose next token depends on tokens alone); set vertical: false and a model_depth, "
                "or take another model."
            )

    @property
    def max_depth(self) -> int | None:
        return self.model.max_depth if self.config.model_depth is None else None

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> CascadeSession:
        statistical = self._open_statistical(target, batch_size, max_length)
        model = cast(NodeSession, self.model.open(target, batch_size, max_length, self._spare, cache))
        if self.config.vertical:
            model = GuessedSession(statistical, ChainReader(cast(DraftModelSession, model)))
        deepest = min((d for d in (self.config.model_depth, self.model.max_depth) if d is not None), default=None)
        return CascadeSession(statistical, model, target.vocab_size, deepest)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.model.state_bytes(target, batch_size, max_length, self._spare)

    @property
    def _spare(self) -> int:
        return _GUESSES if self.config.vertical else 0


class CascadeSession(NodeSession):
    """A session that runs those of both drafters of a cascade.

    Args:
        vocab: V.
        deepest: the largest depth of the model's drafts; None for any.
    """

    def __init__(self, statistical: TextSession, model: NodeSession, vocab: int, deepest: int | None):
        super().__init__(model.output_ids if deepest is None else None)
        self.statistical = statistical
        self.drafting = model
        self.vocab = vocab
        self.deepest = deepest
        self.drafted: list[Tensor] = []  # the root and the drafts of this round, `[B]` each
        self.continued: Tensor | None = None  # the statistical drafter's tokens after the model's, `[B, W]`

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.statistical.update(tokens, hidden, counts)
        kept = max(counts.values)  # no more than that: what the model has read of it, it need not read again
        self.drafting.update(tokens[:, :kept], None if hidden is None else hidden[:, :kept], counts)

    def prefill(self, root: Tensor) -> Tensor:
        self.drafted = [root]
        self.continued = None
        self.lengths = None
        depth = required(self.round_depth, "cascade: the decoder sets the round's depth before it drafts.")
        self.drafting.round_depth = depth if self.deepest is None else min(depth, self.deepest)
        return self._whole(self.drafting.prefill(root))

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        assert parents is None, "a cascade drafts chains"
        self.drafted.append(tokens[:, 0])
        count = len(self.drafted) - 1
        if self.deepest is None or count < self.deepest:
            return self._whole(self.drafting.decode(tokens))
        return self._certain(count)

    def _whole(self, logits: Tensor) -> Tensor:
        """Return the model's logits `[..., V']` over the whole vocabulary, where the statistical drafter goes on."""
        ids = self.drafting.output_ids
        if self.deepest is None or ids is None:
            return logits
        nothing = logits.new_full((*logits.shape[:-1], self.vocab), float("-inf"))
        return nothing.scatter(-1, ids.expand_as(logits), logits)

    def _certain(self, count: int) -> Tensor:
        """Return logits `[B, 1, V]` that give all probability to the statistical drafter's token after `count` drafts.

        A row that it cannot continue any more ends there (`lengths`); its later tokens mean nothing.
        """
        root, first = self.drafted[0], required(self.deepest, "the model drafts alone")
        if self.continued is None:
            depth = required(self.round_depth, "prefill begins the round") - first
            tails = torch.stack(self.drafted, 1).tolist()
            continuations = self.statistical.continuations(tails, depth)
            self.lengths = first + torch.tensor([len(row) for row in continuations], device=root.device)
            self.continued = torch.nn.functional.pad(padded(continuations, root.device), (0, depth))
        column = self.continued[:, count - first]
        nothing = torch.full((len(root), 1, self.vocab), float("-inf"), device=root.device)
        return nothing.scatter(2, column[:, None, None], 0.0)

    def select(self, rows: list[int]) -> None:
        self.statistical.select(rows)
        self.drafting.select(rows)


def reads_chains(model: Drafter) -> bool:
    """Return whether a model can read guessed tokens in one pass: its next token depends on tokens alone."""
    return type(model) is DraftModel and model.abilities.reads_nodes


class ChainReader:
    """A draft model's session that reads tokens which another drafter has guessed."""

    def __init__(self, session: DraftModelSession):
        self.session = session

    def read_chain(self, tokens: Tensor, after: Tensor | None = None) -> Tensor:
        """Read the chain `tokens` `[B, W]` in one pass, instead of `prefill` and `decode`; return logits `[B, W, V']`.

        `after`: the node that each row's chain follows, in the order of reading, −1 for the root, `[B]`. None begins a
        round: the first of `tokens` is the root, and the nodes count from the second.
        """
        session, width = self.session, tokens.shape[1]
        if after is None:
            logits = session.begin(tokens)
            session.tree = TreeMask(len(tokens), 1, tokens.device)
            grow_chain(session.tree, torch.full_like(tokens[:, 0], -1), width - 1)
            return logits
        tree = required(session.tree, "read_chain: the first chain of a round begins with the root (after=None).")
        logits = session.read(tokens, offset=session.written, nodes=grow_chain(tree, after, width))
        session.written += width
        return logits

    def forget(self) -> None:
        """Drop what was read in this round: the next `update` brings all that is kept."""
        self.session.written = 0


def grow_chain(tree: TreeMask, after: Tensor, length: int) -> Nodes:
    """Return the places of a chain of `length` nodes, added to a tree below the node `after` `[B]` (−1: the root)."""
    own = torch.ones(length, length, dtype=torch.bool, device=after.device).tril()
    depths = tree.depths.gather(1, after[:, None] + 1) + 1 + torch.arange(length, device=after.device)
    return tree.add(depths, after[:, None].expand(-1, length), own)


class GuessedSession(NodeSession):
    """A session of a model that reads a statistical drafter's guesses of how its own chain goes on."""

    def __init__(self, statistical: TextSession, model: ChainReader):
        super().__init__(model.session.output_ids)
        self.statistical, self.reader = statistical, model
        self.chains: list[_GuessedRow] = []  # of each row in this round; [] between rounds
        self.logits = torch.empty(0)  # after all that the model has read in this round, `[B, R, V']`
        self.room = 0  # guesses that it may still read

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        read = self._places(tokens.device)
        self.chains = []
        if read is not None:
            # The model has read all drafts that are kept, but at most the last; or it reads them anew.
            leading = (read >= 0).cumprod(1).sum(1).tolist()
            kept = [count - 1 for count in counts.values]
            if any(k > min(known + 1, read.shape[1]) for known, k in zip(leading, kept, strict=True)):
                self.reader.forget()
                read = None
        path = None if read is None else read[:, : tokens.shape[1] - 1]
        self.reader.session.update(tokens, hidden, counts, path)

    def _places(self, device: torch.device) -> Tensor | None:
        """Return when the model has read each token that it drafted in this round, −1 for never, `[B, D]`.

        The last one may have been read as a guess; it is read again with the next root. None if it drafted nothing.
        """
        if not self.chains:
            return None
        # Places count from the root, nodes from the token after it.
        nodes = torch.tensor([[*chain.places[1:], -1] for chain in self.chains], device=device) - 1
        return nodes.clamp(min=-1)

    def prefill(self, root: Tensor) -> Tensor:
        self.chains = [_GuessedRow([token]) for token in root.tolist()]
        self.logits = root.new_zeros(len(root), 0, 0)
        self.room = _GUESSES
        return self._next(root.device)[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        assert parents is None, "a cascade drafts chains"
        for chain, token in zip(self.chains, tokens[:, 0].tolist(), strict=True):
            chain.append(token)
        return self._next(tokens.device)

    def _next(self, device: torch.device) -> Tensor:
        """Return the logits after the last token of each chain, `[B, 1, V']`, which the model reads if it has not."""
        if any(chain.place < 0 for chain in self.chains):
            depth = required(self.round_depth, "cascade: the decoder sets the round's depth before it drafts.")
            more = self._read(min(depth - len(self.chains[0].tokens), self.room), device)
            self.room -= more.shape[1] - 1
            self.logits = torch.cat([self.logits, more], 1) if self.logits.shape[1] else more
        places = torch.tensor([chain.place for chain in self.chains], device=device)
        return self.logits.gather(1, places[:, None, None].expand(-1, 1, self.logits.shape[2]))

    def _read(self, most: int, device: torch.device) -> Tensor:
        """Return logits `[B, W, V']` after each chain's last token, if unread, and up to `most` guesses after it."""
        chains = self.chains
        places = self.logits.shape[1]  # how many tokens the model has read in this round
        guesses: list[list[int]] = [[] for _ in chains]
        if most:
            guesses = self.statistical.continuations([chain.tokens for chain in chains], most)
        tokens, after = [], []
        for chain, guess in zip(chains, guesses, strict=True):
            waits = chain.place < 0
            tokens.append([chain.tokens[-1], *guess] if waits else [0])
            after.append(chain.places[-2] - 1 if waits and places else -1)
            if waits:
                chain.places[-1], chain.guesses = places, guess
        return self.reader.read_chain(padded(tokens, device), torch.tensor(after, device=device) if places else None)

    def select(self, rows: list[int]) -> None:
        self.reader.session.select(rows)


@dataclass
class _GuessedRow:
    """One row's root and drafts, and where the model has read each."""

    tokens: list[int]
    places: list[int] = field(default_factory=lambda: [-1])  # in the order of reading, from the root; −1 for not read
    guesses: list[int] = field(default_factory=list)  # the tokens that the model has read after the last one

    @property
    def place(self) -> int:
        """The place at which the model has read the last token."""
        return self.places[-1]

    def append(self, token: int) -> None:
        guessed = bool(self.guesses) and self.guesses[0] == token
        self.places.append(self.place + 1 if guessed else -1)
        self.guesses = self.guesses[1:] if guessed else []
        self.tokens.append(token)
