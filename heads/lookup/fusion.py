"""A drafter without weights where the text repeats, a model's drafts elsewhere.

In each round a row proposes what the statistical drafter (n-gram, suffix) found, and the model's tokens where it found
nothing: how long a match or how good a score is enough, its own `min_match` and `min_score` say. Found tokens are put
in the place of the model's own choices, so that the model reads them, goes on after them up to the round's depth, and
has read what the target may keep. A batch of one row does without the model where something was found; the model
reads what was kept later, in one pass.

Found tokens are not samples, so all of a proposal is judged by the rule for candidates: a token x is accepted with
probability p(x). The model then proposes its most probable tokens. What that costs: at temperature > 0 a token of the
model alone would be accepted with probability Σ_x min(p, q) under rejection, here with p(argmax q), which is less where
both distributions are broad.

Shapes: B rows, N tokens found, Q tokens of one pass, K taps, H target hidden size, V vocabulary, V' the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ..base import Drafter
from ..registry import drafter_config, load_drafter, restore_drafter
from ..saved import CONFIG, DrafterConfig
from ..session import Abilities, Choose, Ended, Proposal, Session, TextSession

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
    """A drafter made of one without weights and of a model: how both are made, saved and loaded.

    How they draft, a subclass says.
    """

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
        """Make the drafter without weights."""
        where = f"{cls.name}.statistical"
        head, settings = drafter_config(config.statistical, where)
        if head.trainable or issubclass(head, TwoDrafters):
            raise BadInputError(
                f"{where}: {head.name!r} is no drafter without weights; take one such as suffix or ngram."
            )
        return head(settings)

    def _open_statistical(self, target: Target, batch_size: int, max_length: int) -> TextSession:
        session = self.statistical.open(target, batch_size, max_length)
        if not isinstance(session, TextSession):
            raise TypeError(
                f"{self.statistical.name} declares that it continues texts; its session must be a TextSession."
            )
        return session

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
    """A drafter that proposes what one without weights finds, and a model's tokens where that finds nothing."""

    name = "fusion"

    @property
    def abilities(self) -> Abilities:
        return Abilities(deterministic=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> FusionSession:
        return FusionSession(
            self._open_statistical(target, batch_size, max_length),
            self.model.open(target, batch_size, max_length, cache=cache),
            target.vocab_size,
        )


class FusionSession(Session):
    """A session that runs those of both drafters of a fusion.

    Attributes:
        vocab: V.
        alone: whether the statistical drafter drafts without the model in this round.
        unread: tokens `[1, Q]` and their hidden states `[1, Q, K, H]` that the model has not absorbed.
    """

    def __init__(self, statistical: TextSession, model: Session, vocab: int):
        self.statistical, self.model, self.vocab = statistical, model, vocab
        self.alone = False
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
        found = self.statistical.propose(root, depth, choose)
        # Rows of a batch that had left the model out for different numbers of tokens would need room for the most of
        # them after the longest.
        if len(root) == 1 and found.tokens.shape[1]:
            self.alone = True
            return found
        self._catch_up()
        proposal = self.model.propose(root, depth, _with(found, choose, self.vocab), ended)
        return replace(proposal, deterministic=True)

    def _catch_up(self) -> None:
        """Let the model absorb the rounds in which it drafted nothing."""
        if not self.unread:
            return
        tokens, hidden = zip(*self.unread, strict=True)
        both = torch.cat(tokens, 1)
        known = [h for h in hidden if h is not None]
        self.model.update(both, torch.cat(known, 1) if known else None, RowLengths.of([both.shape[1]], both.device))
        self.unread = []

    def select(self, rows: list[int]) -> None:
        self.statistical.select(rows)
        self.model.select(rows)


def _with(found: Proposal, choose: Choose, vocab: int) -> Choose:
    """Return a choice that takes what was found `[B, N]` token by token, and then goes on as `choose` does.

    A found token is the choice among logits that give it all probability, so that `choose` knows of it: what follows is
    processed as after that token.
    """
    steps, lengths = count(), found.lengths

    def chosen(logits: Tensor, token_ids: Tensor | None) -> Tensor:
        step = next(steps)
        if step >= found.tokens.shape[1]:
            return choose(logits, token_ids)
        nothing = logits.new_full((len(logits), vocab), float("-inf"))
        own = logits if token_ids is None else nothing.scatter(1, token_ids.expand_as(logits), logits)
        certain = nothing.scatter(1, found.tokens[:, step, None], 0.0)
        return choose(torch.where((step < lengths)[:, None], certain, own), None)

    return chosen


def fuse(statistical: dict[str, Any], model: Drafter) -> Fusion:
    """Return the fusion of a drafter without weights, as a mapping like `{type: ngram}`, with a trained one in memory.

    Raises:
        BadInputError: `statistical` names no drafter without weights that says how a text goes on, or `model` is one.
    """
    config = FusionConfig(statistical=statistical)
    return Fusion(Fusion._statistical(config), model, config)
