"""Draft vocabularies, the part of the target's vocabulary that a head can draft; and mask tokens.

Shapes: V vocabulary, V' draft vocabulary, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..targets import Target
from ..targets.packed_weights import rows_of


def draft_vocabulary(size: int, vocab_size: int, token_counts: Tensor | None, name: str) -> Tensor:
    """Return the target ids of a draft vocabulary, ascending, `[size]`: all, or the most frequent by `token_counts`."""
    if size > vocab_size:
        raise BadInputError(f"{name}: draft_vocab_size {size} exceeds the target's vocabulary of {vocab_size}.")
    return torch.arange(size) if size == vocab_size else most_frequent(token_counts, size, name)


def most_frequent(token_counts: Tensor | None, size: int, name: str) -> Tensor:
    """Return the `size` tokens with the highest counts `[V]`, ascending, `[size]`; `name` is the drafter's."""
    if token_counts is None:
        raise BadInputError(f"{name}: a pruned draft vocabulary needs token counts of the training data.")
    return by_frequency(token_counts)[:size].sort().values


def by_frequency(token_counts: Tensor) -> Tensor:
    """Return all tokens by their counts `[V]`, the most frequent first; of equals the lower id first, `[V]`."""
    return token_counts.cpu().argsort(descending=True, stable=True)


def kept_head(target: Target, token_ids: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return the target's output embedding, or a copy of its rows of a draft vocabulary `[V']`."""
    if token_ids is None:
        return target.lm_head
    head = target.model.get_output_embeddings()
    rows = rows_of(head, token_ids) if target.packed is None else target.packed.rows(head, token_ids)
    return lambda hidden: target.scale(rows(hidden.to(rows.weight.dtype)))


def kept_bytes(target: Target, token_ids: Tensor | None) -> int:
    """Return the bytes that `kept_head` copies."""
    return 0 if token_ids is None else len(token_ids) * target.hidden_size * target.dtype.itemsize


# Names of reserved tokens: Llama 3, Mistral, Gemma, and others.
_RESERVED = re.compile(r"reserved|unused|control_\d", re.IGNORECASE)


def unused_token(target: Target) -> int | None:
    """Return the first id that the tokenizer does not use, else one that it calls reserved; None if there is none."""
    if target.tokenizer is None:
        return None
    vocabulary = target.tokenizer.get_vocab()
    first = max(vocabulary.values()) + 1
    if first < target.vocab_size:
        return first
    added = target.tokenizer.get_added_vocab()
    return min((added[token] for token in added if _RESERVED.search(token)), default=None)


def begin_mask(mask: nn.Parameter | None, token: int | None, target: Target) -> None:
    """Check a mask token, and fill a learned mask with the target's mean embedding."""
    check_mask(token, target)
    if mask is not None:
        mask.data.copy_(cast(nn.Embedding, target.model.get_input_embeddings()).weight.data.float().mean(0))


def check_mask(token: int | None, target: Target) -> None:
    """Raise BadInputError for a mask token that ends or pads texts, or that the target does not have."""
    if token is None:
        return
    if token >= (size := target.vocab_size):
        raise BadInputError(f"drafter: mask_token_id {token} is outside the target's vocabulary of {size}.")
    padding = getattr(target.tokenizer, "pad_token_id", None)
    if token in target.eos_ids or token == padding:
        raise BadInputError(
            f"drafter: mask_token_id {token} ends or pads texts of this target; take a token that no text has."
        )
