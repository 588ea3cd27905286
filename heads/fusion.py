"""A drafter without weights where the text repeats, a model's drafts elsewhere.

In each round a row proposes what the statistical drafter (n-gram, suffix) found, and the model's tokens where it found nothing: how
long a match or how good a score is enough, its own `min_match` and `min_score` say. Found tokens are put in the place of the model's
own choices, so that the model reads them, goes on behind them up to the round's depth, and has read what the target may keep. A batch
of one row does without the model where something was found; the model reads what was kept later, in one pass.

Found tokens are no samples, so all of a proposal is judged by the rule for candidates: a token x is accepted with probability p(x).
The model then proposes its most probable tokens. What that costs: at temperature > 0 a token of the model alone would be accepted with
probability Σ_x min(p, q) under rejection, here with p(argmax q), which is less where both distributions are broad.

Shapes: B rows, N tokens found, V vocabulary, V' the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ground import BadInputError
from ..targets import Counts, RaggedCache, Target
from .base import CONFIG, Drafter, DrafterConfig
from .legacy import LegacySession
from .session import Abilities, Choose, Proposal

MODEL = "model"

T = TypeVar("T", bound="TwoDrafters")


@dataclass
class FusionConfig(DrafterConfig):
    """The two drafters.

    Attributes:
        statistical: type and settings of a drafter without weights that proposes chains.
        model: folder of a trained drafter. A saved fusion has its own, beside its config.
    """

    statistical: dict[str, Any] = field(default_factory=lambda: {"type": "suffix", "min_match": 4})
    model: str = MODEL


@dataclass
class State:
    """The states of both."""

    statistical: Any
    model: Any


@dataclass
class _State(State):
    """`vocab`: V. `unread`: tokens `[1, Q]` and hidden states that the model has not absorbed. `alone`: it drafts nothing in this round."""

    vocab: int = 0
    alone: bool = False
    unread: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)


class TwoDrafters(Drafter):
    """A drafter without weights and a model: how both are made, saved, loaded and opened. What they propose together, a subclass says."""

    config_class = FusionConfig
    trainable = False
    config: FusionConfig

    def __init__(self, statistical: Drafter, model: Drafter, config: FusionConfig | None = None):
        if statistical.trainable or model.abilities.deterministic:
            raise BadInputError(
                f"{self.name}: needs a drafter without weights and a model, got {statistical.name} and {model.name}."
            )
        if not statistical.abilities.continues:
            raise BadInputError(
                f"{self.name}: the model goes on behind a chain, {statistical.name} proposes trees; take ngram, or give suffix a width of 1."
            )
        config = config or self.config_class()
        super().__init__(
            replace(config, statistical={"type": statistical.name, **statistical.config.to_dict()}, model=MODEL)
        )
        self.statistical, self.model = statistical, model

    @classmethod
    def build(cls: type[T], config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> T:
        from . import load_drafter

        assert isinstance(config, FusionConfig)
        return cls(
            _statistical(cls.name, config, target), load_drafter(Path(config.model).expanduser(), target), config
        )

    @classmethod
    def from_folder(cls: type[T], folder: Path, values: dict[str, Any], target: Target | None) -> T:
        from . import restore_drafter

        config = cls.config_class.from_dict(values, f"{folder / CONFIG}: drafter")
        assert isinstance(config, FusionConfig)
        return cls(_statistical(cls.name, config, target), restore_drafter(folder / MODEL, target), config)

    def save(self, path: str | Path) -> None:
        """Write config.json, and the model into the folder `model` beside it."""
        folder = Path(path)
        self.model.save(folder / MODEL)
        (folder / CONFIG).write_text(json.dumps({"drafter_type": self.name, **self.config.to_dict()}, indent=2) + "\n")

    def check(self, target: Target) -> None:
        self.statistical.check(target)
        self.model.check(target)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    @property
    def max_depth(self) -> int | None:
        return self.model.max_depth

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> Any:
        return State(
            self.statistical.open(target, batch_size, max_length), self.model.open(target, batch_size, max_length)
        )

    def lend(self, state: Any, cache: RaggedCache) -> None:
        if isinstance(state.model, LegacySession):
            self.model.lend(state.model.state, cache)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.model.state_bytes(target, batch_size, max_length)

    def select(self, state: Any, rows: list[int]) -> None:
        state.statistical.select(rows)
        state.model.select(rows)


def _statistical(name: str, config: FusionConfig, target: Target | None) -> Drafter:
    """The drafter without weights of the drafter `name`."""
    from . import drafter_config

    head, settings = drafter_config(config.statistical, f"{name}.statistical")
    if head.trainable or issubclass(head, TwoDrafters):
        raise BadInputError(
            f"{name}.statistical: {head.name!r} is no drafter without weights; take one such as suffix or ngram."
        )
    return head.build(settings, target)  # type: ignore[arg-type]


class Fusion(TwoDrafters):
    name = "fusion"

    @property
    def abilities(self) -> Abilities:
        return Abilities(deterministic=True)

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        return _State(**vars(super().open_state(target, batch_size, max_length)), vocab=target.vocab_size)

    def absorb(
        self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        state.statistical.absorb(tokens, hidden, counts)
        if state.alone or state.unread:
            kept = counts.values[0]
            state.unread.append((tokens[:, :kept], None if hidden is None else hidden[:, :kept]))
            state.alone = False
        else:
            state.model.absorb(tokens, hidden, counts, path)

    def propose(
        self, state: _State, root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None = None
    ) -> Proposal:
        found = state.statistical.propose(root, depth, choose)
        # In a batch, rows that fell behind by different numbers of tokens would need room for the most of them behind the longest.
        if len(root) == 1 and found.tokens.shape[1]:
            state.alone = True
            return found
        self._catch_up(state)
        proposal = state.model.propose(root, depth, _with(found, choose, state.vocab), ended)
        return replace(proposal, deterministic=True)

    def _catch_up(self, state: _State) -> None:
        """Let the model absorb the rounds in which it drafted nothing."""
        if not state.unread:
            return
        tokens, hidden = zip(*state.unread, strict=True)
        both = torch.cat(tokens, 1)
        known = [h for h in hidden if h is not None]
        state.model.absorb(both, torch.cat(known, 1) if known else None, Counts.of([both.shape[1]], both.device))
        state.unread = []


def _with(found: Proposal, choose: Choose, vocab: int) -> Choose:
    """Chooses token by token what was found `[B, N]`; behind it, and in rows where nothing was, as `choose` does.

    A found token is the choice among logits that give it all probability, so that `choose` knows of it: what follows is processed as behind it.
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
