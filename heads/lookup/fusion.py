"""Two drafters in one: a drafter without weights beside a model.

In a fusion a row proposes the statistical drafter's match (n-gram, suffix), and the model's tokens where there is none
or where it ends. A batch of one row does without the model where there is a match; the model reads what was kept later,
in one pass. Matched tokens are not samples, so all of a fusion's proposal is judged by the rule for candidates, and the
model proposes its most probable tokens.

Shapes: B rows, N tokens found, D tokens drafted, Q tokens of one pass, K taps, H target hidden size, V vocabulary,
V' the model's own.
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
