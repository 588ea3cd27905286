"""What heads share that fit one target: sizes that are its own, and an output over its vocabulary or a part of it.

Shapes: H hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from ..targets import Target
from .base import Drafter
from .saved import DrafterConfig
from .vocabulary import draft_vocabulary


class HeadConfig(DrafterConfig):
    """Sizes of a head; zeros mean "as the target". Each head's config says where they stand in config.json."""

    draft_vocab_size: int
    hidden_size: int
    vocab_size: int
    target_layers: int

    def completed(self, target: Target) -> Self:
        """Return this config with every open size taken from `target`."""
        return type(self)(**(self.to_dict() | self.sizes(target)))

    def sizes(self, target: Target) -> dict[str, Any]:
        """Return all of them, the open ones as the target's."""
        theirs = {name: size for name, _, _, size in self.fixed(target)}
        theirs["draft_vocab_size"] = target.vocab_size
        return {name: getattr(self, name) or size for name, size in theirs.items()}

    def fixed(self, target: Target) -> list[tuple[str, str, int, int]]:
        """Return the sizes that must be the target's: setting, its name in words, what it is here, the target's."""
        return [
            ("hidden_size", "hidden size", self.hidden_size, target.hidden_size),
            ("vocab_size", "vocabulary", self.vocab_size, target.vocab_size),
            ("target_layers", "number of layers", self.target_layers, target.num_layers),
        ]


C = TypeVar("C", bound=HeadConfig)


class HeadDrafter(Drafter[C]):
    """A head on the target's last hidden state, if it does not say otherwise.

    Its output embedding is the target's, or copies of it that are trained.
    """

    token_ids: Tensor  # [V']

    def __init__(self, config: C):
        super().__init__(config)
        # Target id of each draft token, ascending.
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target_layers,)

    @property
    def output_ids(self) -> Tensor | None:
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.token_ids

    @classmethod
    def build(cls, config: C, target: Target, token_counts: Tensor | None = None) -> Self:
        config = cls.fitted(config, target)
        token_ids = draft_vocabulary(config.draft_vocab_size, target.vocab_size, token_counts, cls.name)
        drafter = cls(config)
        drafter.token_ids.copy_(token_ids)
        drafter._copy_output(target)
        return drafter

    @classmethod
    def fitted(cls, config: C, target: Target) -> C:
        """Return the config with every open size taken from `target`; raise BadInputError if another is not its own."""
        config = config.completed(target)
        for name, _, given, theirs in config.fixed(target):
            if given != theirs:
                raise BadInputError(f"{cls.name}: {name} {given} differs from the target's {theirs}; leave it out.")
        return config

    def _own_outputs(self) -> list[nn.Linear]:
        """Return the output embeddings that are trained; [] if the target's is used."""
        return []

    @torch.no_grad()
    def _copy_output(self, target: Target) -> None:
        for own in self._own_outputs():
            weight = target.model.get_output_embeddings().weight
            own.weight.copy_(weight[self.token_ids.to(weight.device)])

    def check(self, target: Target) -> None:
        super().check(target)
        self._check_sizes(target)

    def _check_sizes(self, target: Target) -> None:
        for _, name, own, theirs in self.config.fixed(target):
            if own != theirs:
                raise IncompatibleError(
                    f"this {self.name} drafter was made for a {name} of {own}, the target's is {theirs}."
                )
