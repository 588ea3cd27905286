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
from ..heads.lookup.fusion import FusionConfig, TwoDrafters
from ..heads.session import ChainSession, Choose, Ended, Proposal, Session, TextSession, padded
from ..targets import RaggedCache, RowLengths, Target

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
        if self.config.vertical and not model.abilities.reads_chains:
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
        model = self.model.open(target, batch_size, max_length, self._spare, cache)
        deepest = min((d for d in (self.config.model_depth, self.model.max_depth) if d is not None), default=None)
        if not self.config.vertical:
            return CascadeSession(statistical, model, target.vocab_size, deepest)
        return GuessedSession(statistical, cast(ChainSession, model), target.vocab_size, deepest)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.model.state_bytes(target, batch_size, max_length, self._spare)

    @property
    def _spare(self) -> int:
        return _GUESSES if self.config.vertical else 0


class CascadeSession(Session):
    """A session that runs those of both drafters of a cascade.

    Args:
        vocab: V.
        deepest: the largest depth of the model's drafts; None for any.
    """

    def __init__(self, statistical: TextSession, model: Session, vocab: int, deepest: int | None):
        self.statistical, self.model, self.vocab, self.deepest = statistical, model, vocab, deepest

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.statistical.update(tokens, hidden, counts)
        kept = max(counts.values)  # no more than that: what the model has read of it, it need not read again
        self._update_model(tokens[:, :kept], None if hidden is None else hidden[:, :kept], counts)

    def _update_model(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths) -> None:
        self.model.update(tokens, hidden, counts)

    def propose(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None = None) -> Proposal:
        first = depth if self.deepest is None else min(depth, self.deepest)
        proposal = self._draft(root, first, choose, ended)
        if first == depth or proposal.tokens.shape[1] < first:
            return proposal
        return self._continued(root, proposal.tokens, depth - first, choose)

    def _draft(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None) -> Proposal:
        return self.model.propose(root, depth, choose, ended)

    def _continued(self, root: Tensor, drafts: Tensor, depth: int, choose: Choose) -> Proposal:
        """Return the model's `drafts` `[B, D]`, and after them the statistical drafter's."""
        continuations = self.statistical.continuations(torch.cat([root[:, None], drafts], 1).tolist(), depth)
        tokens = padded(continuations, root.device)
        for column in tokens.unbind(1):
            nothing = torch.full((len(root), self.vocab), float("-inf"), device=root.device)
            choose(nothing.scatter(1, column[:, None], 0.0), None)
        lengths = drafts.shape[1] + torch.tensor([len(f) for f in continuations], device=root.device)
        return Proposal.chain(torch.cat([drafts, tokens], 1), lengths)

    def select(self, rows: list[int]) -> None:
        self.statistical.select(rows)
        self.model.select(rows)


class GuessedSession(CascadeSession):
    """A session in which the statistical drafter guesses for the model."""

    model: ChainSession

    def __init__(self, statistical: TextSession, model: ChainSession, vocab: int, deepest: int | None):
        super().__init__(statistical, model, vocab, deepest)
        # When the model has read each token that it drafted in this round, −1 for never, `[B, D]`; None for none.
        self.read: Tensor | None = None

    def _update_model(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths) -> None:
        read, self.read = self.read, None
        if read is not None:
            # The model has read all drafts that are kept, but at most the last; or it reads them anew.
            leading = (read >= 0).cumprod(1).sum(1).tolist()
            kept = [count - 1 for count in counts.values]
            if any(k > min(known + 1, read.shape[1]) for known, k in zip(leading, kept, strict=True)):
                self.model.forget()
                read = None
        self.model.update(tokens, hidden, counts, None if read is None else read[:, : tokens.shape[1] - 1])

    def _draft(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None) -> Proposal:
        chains = [_Chain([token]) for token in root.tolist()]
        drafted: list[Tensor] = []
        logits = root.new_zeros(len(root), 0, 0)
        room = _GUESSES
        while len(drafted) < depth and not (drafted and ended is not None and ended()):
            if any(chain.place < 0 for chain in chains):
                more = self._read(chains, logits.shape[1], min(depth - 1 - len(drafted), room), root.device)
                room -= more.shape[1] - 1
                logits = torch.cat([logits, more], 1) if logits.shape[1] else more
            places = torch.tensor([chain.place for chain in chains], device=root.device)
            here = logits.gather(1, places[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]
            drafted.append(choose(here, self.model.output_ids))
            for chain, token in zip(chains, drafted[-1].tolist(), strict=True):
                chain.append(token)
        # Places count from the root, nodes from the token after it.
        self.read = torch.tensor([chain.places[1:] for chain in chains], device=root.device) - 1
        self.read = self.read.clamp(min=-1)
        return Proposal.chain(torch.stack(drafted, 1))

    def _read(self, chains: list[_Chain], places: int, most: int, device: torch.device) -> Tensor:
        """Return logits `[B, W, V']` after the last token of each chain, if unread, and up to `most` guesses after it.

        `places`: how many tokens the model has read in this round.
        """
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
        return self.model.read_chain(padded(tokens, device), torch.tensor(after, device=device) if places else None)


@dataclass
class _Chain:
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
