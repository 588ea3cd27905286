"""A drafter that drafts for a drafter, and a cheaper one for later depths (CS-Drafting, arXiv 2312.11462; staged decoding, arXiv 2308.04623).

Vertical: a statistical drafter (n-gram, suffix) guesses how the model's own chain goes on. The model reads the last token of its chain and the guesses
in one pass, and draws its token behind each: while that is the guessed one, the next is drawn from the same pass. Else the
model's token stands, the rest of the pass is never seen again, and another pass begins. So each token is what the model alone would
have drawn, with the same distribution; only its passes are fewer.

Horizontal: the model drafts the first `model_depth` tokens, and from there the statistical drafter goes on to the round's depth, where it
finds something. What it finds was drawn from a distribution that gives that token all probability, which is what every rule is told.

Shapes: B rows, D tokens drafted, W tokens of one pass, V vocabulary, V' the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ground import BadInputError
from ..targets import Counts, Target
from .base import Drafter
from .fusion import FusionConfig, State, TwoDrafters
from .session import Choose, Proposal

# Most guesses of a round that the model reads: its cache has room for so many tokens that may be dead.
_GUESSES = 64


@dataclass
class CascadeConfig(FusionConfig):
    """The two drafters, and how they share the work.

    Attributes:
        vertical: the statistical drafter guesses for the model. Needs a model that reads nothing but tokens, such as a draft model.
        model_depth: up to which depth the model drafts; behind it the statistical drafter does. None: the model drafts all.
    """

    statistical: dict[str, Any] = field(default_factory=lambda: {"type": "suffix"})
    vertical: bool = True
    model_depth: int | None = None

    def __post_init__(self) -> None:
        if self.model_depth is not None and self.model_depth < 1:
            raise BadInputError(f"cascade: model_depth must be at least 1, got {self.model_depth}.")
        if not self.vertical and self.model_depth is None:
            raise BadInputError(
                "cascade: the statistical drafter has nothing to do; set vertical, or give a model_depth behind which it goes on."
            )


@dataclass
class _State(State):
    """`vocab`: V. `read`: when the model has read each token that it drafted in this round, −1 for never, `[B, D]`; None if in their order, or if there are none."""

    vocab: int = 0
    read: Tensor | None = None


class Cascade(TwoDrafters):
    name = "cascade"
    config_class = CascadeConfig
    config: CascadeConfig

    def __init__(self, statistical: Drafter, model: Drafter, config: CascadeConfig | None = None):
        super().__init__(statistical, model, config)
        if self.config.vertical and not model.abilities.reads_chains:
            raise BadInputError(
                f"cascade: {model.name} cannot read guessed tokens in one pass (that needs a draft_model without recurrent layers, whose next token "
                "depends on tokens alone); set vertical: false and a model_depth, or take another model."
            )

    @property
    def max_depth(self) -> int | None:
        return self.model.max_depth if self.config.model_depth is None else None

    # ------------------------------------------------------------ decoding

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        model = self.model.open(target, batch_size, max_length, self._spare)
        return _State(self.statistical.open(target, batch_size, max_length), model, target.vocab_size)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.model.state_bytes(target, batch_size, max_length, self._spare)

    @property
    def _spare(self) -> int:
        return _GUESSES if self.config.vertical else 0

    def absorb(
        self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        state.statistical.absorb(tokens, hidden, counts)
        kept = max(counts.values)  # no more than that: what the model has read of it, it need not read again
        tokens, hidden = tokens[:, :kept], None if hidden is None else hidden[:, :kept]
        read, state.read = state.read, None
        if read is not None and not _has_read(read, counts):
            state.model.forget()
            read = None
        state.model.absorb(tokens, hidden, counts, None if read is None else read[:, : kept - 1])

    def propose(
        self, state: _State, root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None = None
    ) -> Proposal:
        first = min(depth, self.config.model_depth or depth, self.model.max_depth or depth)
        if self.config.vertical:
            proposal = self._guessed(state, root, first, choose, ended)
        else:
            proposal = state.model.propose(root, first, choose, ended)
        if first == depth or proposal.tokens.shape[1] < first:
            return proposal
        return self._continued(state, root, proposal.tokens, depth - first, choose)

    def _continued(self, state: _State, root: Tensor, drafts: Tensor, depth: int, choose: Choose) -> Proposal:
        """The model's `drafts` `[B, D]`, and behind them what the statistical drafter finds."""
        found = state.statistical.continuations(torch.cat([root[:, None], drafts], 1).tolist(), depth)
        tokens = _padded(found, root.device)
        for column in tokens.unbind(1):
            certain = torch.full((len(root), state.vocab), float("-inf"), device=root.device).scatter(
                1, column[:, None], 0.0
            )
            choose(certain, None)
        lengths = drafts.shape[1] + torch.tensor([len(f) for f in found], device=root.device)
        return Proposal.chain(torch.cat([drafts, tokens], 1), lengths)

    def _guessed(
        self, state: _State, root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None
    ) -> Proposal:
        """The model's chain, in as few passes as the guesses allow."""
        chains = [_Chain([token]) for token in root.tolist()]
        drafted: list[Tensor] = []
        logits = root.new_zeros(len(root), 0, 0)
        room = _GUESSES
        while len(drafted) < depth and not (drafted and ended is not None and ended()):
            if any(chain.place < 0 for chain in chains):
                more = self._read(state, chains, logits.shape[1], min(depth - 1 - len(drafted), room), root.device)
                room -= more.shape[1] - 1
                logits = torch.cat([logits, more], 1) if logits.shape[1] else more
            places = torch.tensor([chain.place for chain in chains], device=root.device)
            here = logits.gather(1, places[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]
            drafted.append(choose(here, self.model.output_ids))
            for chain, token in zip(chains, drafted[-1].tolist(), strict=True):
                chain.append(token)
        # Places count from the root, nodes from the token behind it.
        state.read = torch.tensor([chain.places[1:] for chain in chains], device=root.device) - 1
        state.read = state.read.clamp(min=-1)
        return Proposal.chain(torch.stack(drafted, 1))

    def _read(self, state: _State, chains: list[_Chain], places: int, most: int, device: torch.device) -> Tensor:
        """Let the model read, where it has to, the last token of a row's chain and up to `most` guesses behind it; logits `[B, W, V']`.

        `places`: how many tokens it has read in this round.
        """
        guesses = (
            state.statistical.continuations([chain.tokens for chain in chains], most) if most else [[] for _ in chains]
        )
        waiting = [chain.place < 0 for chain in chains]
        rows = [
            [chain.tokens[-1], *guess] if waits else [0]
            for chain, guess, waits in zip(chains, guesses, waiting, strict=True)
        ]
        tokens = _padded(rows, device)
        after = None
        if places:
            after = torch.tensor(
                [chain.places[-2] - 1 if waits else -1 for chain, waits in zip(chains, waiting, strict=True)],
                device=device,
            )
        for chain, row, waits in zip(chains, rows, waiting, strict=True):
            if waits:
                chain.read(places, row[1:])
        return state.model.read_chain(tokens, after)


@dataclass
class _Chain:
    """A row's root and drafts, and where the model has read each: places count from the root's in the order of reading, −1 for not read.

    `guesses`: what it has read behind the last token, which nobody has drafted yet.
    """

    tokens: list[int]
    places: list[int] = field(default_factory=lambda: [-1])
    guesses: list[int] = field(default_factory=list)

    @property
    def place(self) -> int:
        """Of the last token."""
        return self.places[-1]

    def read(self, place: int, guesses: list[int]) -> None:
        """The last token is read at `place`, the guesses behind it."""
        self.places[-1], self.guesses = place, guesses

    def append(self, token: int) -> None:
        """The model has drafted `token`."""
        guessed = bool(self.guesses) and self.guesses[0] == token
        self.places.append(self.place + 1 if guessed else -1)
        self.guesses = self.guesses[1:] if guessed else []
        self.tokens.append(token)


def _padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """`[B, W]`, zeros behind the shorter ones."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long, device=device).reshape(
        len(rows), width
    )


def _has_read(read: Tensor, counts: Counts) -> bool:
    """Whether all drafts that are kept, but at most the last, were read by the model."""
    leading = (read >= 0).cumprod(1).sum(1).tolist()
    return all(
        count - 1 <= known + 1 and count - 1 <= read.shape[1]
        for known, count in zip(leading, counts.values, strict=True)
    )
