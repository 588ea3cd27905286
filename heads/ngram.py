"""Prompt lookup: propose what followed the last occurrence of the current suffix. No weights.

Matches the longest suffix of up to `max_match` tokens that occurred before, and copies what came after it
(prompt-lookup decoding). The proposal is deterministic, so it is accepted with probability p(x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ground import BadInputError
from ..targets import Counts, Target
from .base import Drafter, DrafterConfig
from .session import Abilities, Choose, Proposal


@dataclass
class NgramConfig(DrafterConfig):
    """Lengths of the suffixes that are looked up, longest first."""

    max_match: int = 4
    min_match: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise BadInputError(f"ngram: need 1 <= min_match <= max_match, got {self.min_match} and {self.max_match}.")


@dataclass
class _Row:
    """One sequence and where each of its n-grams last ended."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class Ngram(Drafter):
    name = "ngram"
    config_class = NgramConfig
    trainable = False
    config: NgramConfig

    def __init__(self, config: NgramConfig | None = None):
        super().__init__(config or NgramConfig())

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Ngram:
        assert isinstance(config, NgramConfig)
        return cls(config)

    @property
    def abilities(self) -> Abilities:
        return Abilities(continues=True, deterministic=True)

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> list[_Row]:
        return [_Row() for _ in range(batch_size)]

    def absorb(
        self, state: list[_Row], tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        for row, new, count in zip(state, tokens.tolist(), counts.values, strict=True):
            for token in new[:count]:
                # A suffix is noted only once something follows it, so that a lookup never finds itself.
                for n in range(self.config.min_match, self.config.max_match + 1):
                    if len(row.tokens) >= n:
                        row.ends[tuple(row.tokens[-n:])] = len(row.tokens)
                row.tokens.append(token)

    def propose(
        self, state: list[_Row], root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None = None
    ) -> Proposal:
        found = self.continuations(state, [[last] for last in root.tolist()], depth)
        width = max(map(len, found))
        tokens = torch.tensor(
            [f + [0] * (width - len(f)) for f in found], dtype=torch.long, device=root.device
        ).reshape(len(found), width)
        lengths = torch.tensor([len(f) for f in found], device=root.device)
        return Proposal.chain(tokens, lengths, deterministic=True)

    def continuations(self, state: list[_Row], tails: list[list[int]], depth: int) -> list[list[int]]:
        return [self._lookup(row, tail, depth) for row, tail in zip(state, tails, strict=True)]

    def _lookup(self, row: _Row, tail: list[int], depth: int) -> list[int]:
        known = [*row.tokens[-self.config.max_match :], *tail]
        for n in range(self.config.max_match, self.config.min_match - 1, -1):
            end = row.ends.get(tuple(known[-n:])) if len(known) >= n else None
            if end is not None:
                return self._copy([*row.tokens, *tail], end, depth)
        return []

    @staticmethod
    def _copy(text: list[int], end: int, depth: int) -> list[int]:
        """`depth` tokens from position `end` on; a copy that reaches the end goes on with what it has written itself."""
        for i in range(depth):
            text.append(text[end + i])
        return text[len(text) - depth :]

    def select(self, state: list[_Row], rows: list[int]) -> None:
        state[:] = [state[r] for r in rows]
