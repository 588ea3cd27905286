"""Two drafters in one: a drafter without weights beside a model.

In a fusion a row proposes the statistical drafter's match (n-gram, suffix), and the model's tokens where there is none
or where it ends: the match is a prefix that the decoder gives to drafting. A batch of one row does without the model
where there is a match. Matched tokens are not samples, so all of a fusion's proposal is judged by the rule for
candidates, and the model proposes its most probable tokens.

Shapes: B rows, Q tokens of one pass, K taps, H target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ..base import Drafter
from ..registry import drafter_config, load_drafter, restore_drafter
from ..saved import CONFIG, DrafterConfig
from ..session import Abilities, NodeSession, TextSession

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
        model = cast(NodeSession, self.model.open(target, batch_size, max_length, cache=cache))
        return FusionSession(partial(self._open_statistical, target, batch_size, max_length), model)


class FusionSession(NodeSession):
    """A session of both drafters of a fusion: its logits are the model's, which follow what the text part proposes.

    A model that is passed over reads what the target kept later, at once, before it drafts again. In rounds of fixed
    shapes the decoder runs the two parts itself.
    """

    def __init__(self, open_statistical: Callable[[], TextSession], model: NodeSession):
        super().__init__(model.output_ids)
        self._open_statistical = open_statistical
        self._statistical = open_statistical()
        self._model = model
        self._passed_over = False  # whether the text part drafts without the model in this round
        # Tokens `[1, Q]` and their hidden states `[1, Q, K, H]` that the model has not read.
        self._unread: list[tuple[Tensor, Tensor | None]] = []

    @property
    def text(self) -> TextSession:
        return self._statistical

    @property
    def model(self) -> NodeSession:
        return self._model

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.text.update(tokens, hidden, counts)
        if self._passed_over or self._unread:
            kept = counts.values[0]
            self._unread.append((tokens[:, :kept], None if hidden is None else hidden[:, :kept]))
            self._passed_over = False
        else:
            self.model.update(tokens, hidden, counts, path)

    def pass_over(self, root: Tensor) -> None:
        """Leave the model out of this round, for a batch of one row.

        Rows that had left it out for different numbers of tokens would need room for the most of them after the
        longest.
        """
        assert len(root) == 1, "only a single row leaves the model out"
        self._passed_over = True

    def prefill(self, root: Tensor) -> Tensor:
        if self._unread:
            tokens, hidden = zip(*self._unread, strict=True)
            both = torch.cat(tokens, 1)
            known = [states for states in hidden if states is not None]
            counts = RowLengths.of([both.shape[1]], both.device)
            self.model.update(both, torch.cat(known, 1) if known else None, counts)
            self._unread = []
        self.model.round_depth = self.round_depth
        return self.model.prefill(root)

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.model.decode(tokens, parents)

    def select(self, rows: list[int]) -> None:
        self.text.select(list(rows))
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
        self._statistical = self._open_statistical()
        self.model.reset()


def fuse(statistical: dict[str, Any], model: Drafter) -> Fusion:
    """Return the fusion of a drafter without weights, as a mapping like `{type: ngram}`, with a trained one in memory.

    Raises BadInputError if `statistical` is no drafter without weights that continues texts, or `model` is one.
    """
    config = FusionConfig(statistical=statistical)
    return Fusion(Fusion._statistical(config), model, config)
