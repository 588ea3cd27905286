"""Two drafters in one: a drafter without weights beside a model (`Fusion`), or drafting for it (`Cascade`).

In a fusion a row proposes the statistical drafter's match (n-gram, suffix), and the model's tokens where there is none
or where it ends. A batch of one row does without the model where there is a match; the model reads what was kept later,
in one pass. Matched tokens are not samples, so all of a fusion's proposal is judged by the rule for candidates, and the
model proposes its most probable tokens.

A cascade (CS-Drafting, arXiv 2312.11462; staged decoding, arXiv 2308.04623) is vertical, horizontal, or both. Vertical:
the statistical drafter guesses how the model's own chain goes on. The model reads the last token of its chain and the
guesses in one pass, and draws its token after each, from the same pass while that is the guessed one: each token is
what the model alone would have drawn, in fewer passes. Horizontal: the model drafts the first `model_depth` tokens, and
the statistical drafter goes on from there; its tokens are scored as certain.

Shapes: B rows, N tokens found, D tokens drafted, Q and W tokens of one pass, K taps, H target hidden size,
V vocabulary, V' the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ..base import Drafter
from ..registry import drafter_config, load_drafter, restore_drafter
from ..saved import CONFIG, DrafterConfig
from ..session import Abilities, ChainSession, Choose, Ended, Proposal, Session, TextSession, padded

MODEL = "model"


@dataclass
class FusionConfig(DrafterConfig):
    """Settings of a fusion: its two drafters.

    Attributes:
        statistical: type and settings of a drafter without weights that proposes chains.
        model: folder of a trained drafter. A saved fusion has its own, beside its config.
    """

    statistical: dict[str, Any] = field(default_factory=lambda: {"type": "suffix", "min_match": 4})
    model: str = MODEL


F = TypeVar("F", bound=FusionConfig)


class TwoDrafters(Drafter[F]):
    """A drafter made of one without weights and of a model; subclasses define how they draft."""

    config_class = FusionConfig
    trainable = False

    def __init__(self, statistical: Drafter, model: Drafter, config: F | None = None):
        if statistical.trainable or model.abilities.deterministic:
            raise BadInputError(
                f"{self.name}: needs a drafter without weights and a model, got {statistical.name} and {model.name}."
            )
        if not statistical.abilities.continues:
            raise BadInputError(
                f"{self.name}: the model goes on after what the other drafter found, and {statistical.name} as it is "
                "set here cannot say how a text goes on; take ngram, or suffix with a width of 1."
            )
        config = config or self.configured({}, self.name)
        super().__init__(
            replace(config, statistical={"type": statistical.name, **statistical.config.to_dict()}, model=MODEL)
        )
        self.statistical, self.model = statistical, model

    @classmethod
    def build(cls, config: F, target: Target, token_counts: Tensor | None = None) -> Self:
        return cls(cls._statistical(config), load_drafter(Path(config.model).expanduser(), target), config)

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Self:
        config = cls.configured(values, f"{folder / CONFIG}: drafter")
        return cls(cls._statistical(config), restore_drafter(folder / MODEL, target), config)

    @classmethod
    def _statistical(cls, config: F) -> Drafter:
        where = f"{cls.name}.statistical"
        head, settings = drafter_config(config.statistical, where)
        if head.trainable or issubclass(head, TwoDrafters):
            raise BadInputError(
                f"{where}: {head.name!r} is no drafter without weights; take one such as suffix or ngram."
            )
        return head(settings)

    def _open_statistical(self, target: Target, batch_size: int, max_length: int) -> TextSession:
        return cast(TextSession, self.statistical.open(target, batch_size, max_length))

    def save(self, path: str | Path) -> None:
        """Write config.json, and the model into the folder `model` beside it."""
        folder = Path(path)
        self.model.save(folder / MODEL)
        self.save_config(folder)

    def check(self, target: Target) -> None:
        self.statistical.check(target)
        self.model.check(target)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    @property
    def max_depth(self) -> int | None:
        return self.model.max_depth

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.model.state_bytes(target, batch_size, max_length)


class Fusion(TwoDrafters[FusionConfig]):
    """A drafter that proposes the matches of one without weights, and a model's tokens elsewhere."""

    name = "fusion"

    @property
    def abilities(self) -> Abilities:
        fixed = self.model.abilities.fixed_shapes
        return Abilities(deterministic=True, from_text=fixed, fixed_shapes=fixed)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> FusionSession:
        model = self.model.open(target, batch_size, max_length, cache=cache)
        open_statistical = partial(self._open_statistical, target, batch_size, max_length)
        return FusionSession(open_statistical, model, target.vocab_size)


class FusionSession(Session):
    """A session that runs those of both drafters of a fusion.

    In rounds of fixed shapes the decoder runs the two itself, and the model reads what was kept after every round.
    """

    def __init__(self, open_statistical: Callable[[], TextSession], model: Session, vocab: int):
        self._open_statistical, self.statistical = open_statistical, open_statistical()
        self.model, self.vocab = model, vocab
        self.alone = False  # whether the statistical drafter drafts without the model in this round
        # Tokens `[1, Q]` and their hidden states `[1, Q, K, H]` that the model has not read.
        self.unread: list[tuple[Tensor, Tensor | None]] = []

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.statistical.update(tokens, hidden, counts)
        if self.alone or self.unread:
            kept = counts.values[0]
            self.unread.append((tokens[:, :kept], None if hidden is None else hidden[:, :kept]))
            self.alone = False
        else:
            self.model.update(tokens, hidden, counts, path)

    def propose(self, root: Tensor, depth: int, choose: Choose, ended: Ended | None = None) -> Proposal:
        copied = self.statistical.propose(root, depth, choose)
        # Rows of a batch that had left the model out for different numbers of tokens would need room for the most of
        # them after the longest.
        if len(root) == 1 and copied.tokens.shape[1]:
            self.alone = True
            return copied
        if self.unread:
            tokens, hidden = zip(*self.unread, strict=True)
            both, known = torch.cat(tokens, 1), [h for h in hidden if h is not None]
            self.model.update(both, torch.cat(known, 1) if known else None, RowLengths.of([both.shape[1]], both.device))
            self.unread = []
        return propose_after(copied, self.model, root, depth, choose, self.vocab, ended)

    def select(self, rows: list[int]) -> None:
        self.statistical.select(rows)
        self.model.select(rows)

    def read_ahead(self, keep: int) -> None:
        self.model.read_ahead(keep)

    def caches(self) -> list[RaggedCache]:
        return self.model.caches()

    def carried(self) -> list[Tensor]:
        return self.model.carried()

    def carry(self, tensors: list[Tensor]) -> None:
        self.model.carry(tensors)

    def reset(self) -> None:
        self.statistical = self._open_statistical()
        self.model.reset()


def propose_after(
    copied: Proposal,
    model: Session,
    root: Tensor,
    depth: int,
    choose: Choose,
    vocab: int,
    ended: Ended | None = None,
) -> Proposal:
    """Return each row's matched tokens, and a model's after them."""
    proposal = model.propose(root, depth, _with(copied, choose, vocab), ended)
    return replace(proposal, deterministic=True)


def _with(copied: Proposal, choose: Choose, vocab: int) -> Choose:
    """Return a choice that takes the matched tokens `[B, N]` one by one, and then goes on as `choose` does.

    A matched token is chosen from logits that give it all probability, so that `choose` processes later ones after it.
    """
    steps, lengths = count(), copied.lengths

    def chosen(logits: Tensor, token_ids: Tensor | None) -> Tensor:
        step = next(steps)
        if step >= copied.tokens.shape[1]:
            return choose(logits, token_ids)
        nothing = logits.new_full((len(logits), vocab), float("-inf"))
        own = logits if token_ids is None else nothing.scatter(1, token_ids.expand_as(logits), logits)
        certain = nothing.scatter(1, copied.tokens[:, step, None], 0.0)
        return choose(torch.where((step < lengths)[:, None], certain, own), None)

    return chosen


def fuse(statistical: dict[str, Any], model: Drafter) -> Fusion:
    """Return the fusion of a drafter without weights, as a mapping like `{type: ngram}`, with a trained one in memory.

    Raises BadInputError if `statistical` is no drafter without weights that continues texts, or `model` is one.
    """
    config = FusionConfig(statistical=statistical)
    return Fusion(Fusion._statistical(config), model, config)


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
