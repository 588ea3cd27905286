"""Draft vocabularies: the part of the target's vocabulary that a head can say.

Shapes: V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ground import BadInputError


def draft_vocabulary(size: int, vocab_size: int, token_counts: Tensor | None, name: str) -> Tensor:
    """Target ids of a draft vocabulary, ascending, `[size]`: all tokens, or the most frequent ones. `name`: of the drafter, for the errors."""
    if size > vocab_size:
        raise BadInputError(f"{name}: draft_vocab_size {size} exceeds the target's vocabulary of {vocab_size}.")
    return torch.arange(size) if size == vocab_size else most_frequent(token_counts, size, name)


def most_frequent(token_counts: Tensor | None, size: int, name: str) -> Tensor:
    """The `size` tokens with the highest counts `[V]`, ascending, `[size]`: a pruned draft vocabulary. `name`: of the drafter, for the error."""
    if token_counts is None:
        raise BadInputError(f"{name}: a pruned draft vocabulary needs token counts of the training data.")
    return by_frequency(token_counts)[:size].sort().values


def by_frequency(token_counts: Tensor) -> Tensor:
    """All tokens by their counts `[V]`, the most frequent first; of equally frequent ones the lower id first, `[V]`."""
    return token_counts.cpu().argsort(descending=True, stable=True)
