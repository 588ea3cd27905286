"""Pruned draft vocabularies: the tokens that the target says most often, and how much of what it says they cover.

A vocabulary is known by its content: the same counts and size give the same tokens, and the same digest.

Shapes: V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common import BadInputError
from ..heads.vocabulary import by_frequency, most_frequent

NUM_SIZES = 7


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent tokens.

    Attributes:
        token_ids: ascending, `[V']`.
        digest: SHA-256 of the ids.
        coverage: share of the counted tokens that it holds.
    """

    token_ids: Tensor
    digest: str
    coverage: float

    @classmethod
    def of(cls, counts: Tensor, size: int) -> Vocabulary:
        """From counts `[V]`, as every drafter with `draft_vocab_size: <size>` makes it.

        Raises:
            BadInputError: no such size, or nothing was counted.
        """
        total = int(counts.sum())
        check_size(size, len(counts))
        if not total:
            raise BadInputError("a draft vocabulary needs counts, and there is not one token in the responses.")
        ids = most_frequent(counts, size, "vocabulary")
        return cls(ids, digest_tokens(ids), int(counts[ids].sum()) / total)


def check_size(size: int, vocab_size: int) -> None:
    """Raise BadInputError if a target of `vocab_size` tokens has no draft vocabulary of `size`."""
    if not 1 <= size <= vocab_size:
        raise BadInputError(f"a draft vocabulary has between 1 and the target's {vocab_size} tokens, found {size}.")


def digest_tokens(token_ids: Tensor) -> str:
    """SHA-256 of token ids `[V']` in ascending order, eight bytes each, little-endian: equal for equal sets."""
    return hashlib.sha256(token_ids.sort().values.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def ranks(counts: Tensor) -> Tensor:
    """Of each token, its place by frequency, `[V]`: those below n are the vocabulary of size n."""
    order = by_frequency(counts)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def usual_sizes(vocab_size: int, also: Sequence[int] = ()) -> list[int]:
    """The powers of two below the whole vocabulary, the largest few of them, it, and `also`; ascending."""
    powers = [2**k for k in range(vocab_size.bit_length()) if 2**k < vocab_size][-NUM_SIZES:]
    return sorted({*powers, vocab_size, *also})
