"""Prompt lookup: propose what followed the last occurrence of the text's end. No weights.

The longest run of up to `max_match` last tokens that occurred before is looked up, and what came after it is copied
(prompt-lookup decoding). The proposal is deterministic, so a token x is accepted with probability p(x).

Shapes: B rows, Q tokens of one pass, N tokens found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ..base import Drafter
from ..saved import DrafterConfig
from ..session import Abilities, Proposal, TextSession, padded


@dataclass
class NgramConfig(DrafterConfig):
    """Settings of prompt lookup: lengths of the runs of last tokens that are looked up, the longest first."""

    max_match: int = 4
    min_match: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_match <= self.max_match:
            raise BadInputError(f"ngram: need 1 <= min_match <= max_match, got {self.min_match} and {self.max_match}.")


class Ngram(Drafter[NgramConfig]):
    """A drafter that copies from the text itself."""

    name = "ngram"
    config_class = NgramConfig
    trainable = False
    abilities = Abilities(continues=True, deterministic=True, from_text=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NgramSession:
        return NgramSession(self.config, batch_size)


@dataclass
class _NgramRow:
    """One sequence of a batch, and where each of its n-grams last ended."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramSession(TextSession):
    """A session with the texts of a batch and an index of their n-grams."""

    def __init__(self, config: NgramConfig, batch_size: int):
        self.config = config
        self.rows = [_NgramRow() for _ in range(batch_size)]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        for row, new, count in zip(self.rows, tokens.tolist(), counts.values, strict=True):
            for token in new[:count]:
                # An n-gram is noted only once something follows it, so that a lookup never finds itself.
                for n in range(self.config.min_match, self.config.max_match + 1):
                    if len(row.tokens) >= n:
                        row.ends[tuple(row.tokens[-n:])] = len(row.tokens)
                row.tokens.append(token)

    def propose(self, root: Tensor, depth: int) -> Proposal:
        continuations = self.continuations([[last] for last in root.tolist()], depth)
        lengths = torch.tensor([len(f) for f in continuations], device=root.device)
        return Proposal.chain(padded(continuations, root.device), lengths)

    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        return [self._lookup(row, tail, depth) for row, tail in zip(self.rows, tails, strict=True)]

    def _lookup(self, row: _NgramRow, tail: list[int], depth: int) -> list[int]:
        known = [*row.tokens[-self.config.max_match :], *tail]
        for n in range(self.config.max_match, self.config.min_match - 1, -1):
            end = row.ends.get(tuple(known[-n:])) if len(known) >= n else None
            if end is not None:
                return _copied([*row.tokens, *tail], end, depth)
        return []

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[r] for r in rows]


def _copied(text: list[int], end: int, depth: int) -> list[int]:
    """Return `depth` tokens from position `end` on; a copy that reaches the end goes on with what it wrote itself."""
    for i in range(depth):
        text.append(text[end + i])
    return text[len(text) - depth :]
