"""Draft vocabularies, the part of the target's vocabulary that a head can draft; and masks, in place of unknown drafts.

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


def draft_vocabulary(size: int, vocab_size: int, token_counts: Tensor | None, name: str) -> Tensor:
    """Return the target ids of a draft vocabulary, ascending, `[size]`: all tokens, or the most frequent ones.

    Args:
        token_counts: `[V]`; asked for if the vocabulary is pruned.
        name: of the drafter, for the errors.
    """
    if size > vocab_size:
        raise BadInputError(f"{name}: draft_vocab_size {size} exceeds the target's vocabulary of {vocab_size}.")
    return torch.arange(size) if size == vocab_size else most_frequent(token_counts, size, name)


def most_frequent(token_counts: Tensor | None, size: int, name: str) -> Tensor:
    """Return the `size` tokens with the highest counts `[V]`, ascending, `[size]`: a pruned draft vocabulary.

    Args:
        name: of the drafter, for the error.
    """
    if token_counts is None:
        raise BadInputError(f"{name}: a pruned draft vocabulary needs token counts of the training data.")
    return by_frequency(token_counts)[:size].sort().values


def by_frequency(token_counts: Tensor) -> Tensor:
    """Return all tokens by their counts `[V]`, the most frequent first; of equal ones the lower id first, `[V]`."""
    return token_counts.cpu().argsort(descending=True, stable=True)


def kept_head(target: Target, token_ids: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return the target's output embedding, restricted to a draft vocabulary `[V']` whose rows are copied once.

    None is the whole one, as it is.
    """
    if token_ids is None:
        return target.lm_head
    head = target.model.get_output_embeddings()
    weight, bias = head.weight[token_ids], None if head.bias is None else head.bias[token_ids]
    return lambda hidden: target.scale(nn.functional.linear(hidden.to(weight.dtype), weight, bias))


# What tokenizers call tokens that are kept for later: Llama 3, Mistral, Gemma, and others.
_RESERVED = re.compile(r"reserved|unused|control_\d", re.IGNORECASE)


def unused_token(target: Target) -> int | None:
    """Return the first id that the target embeds and no text has; None if there is none.

    That is a row of the embedding that the tokenizer does not use, else a token that it calls reserved.
    """
    if target.tokenizer is None:
        return None
    vocabulary = target.tokenizer.get_vocab()
    first = max(vocabulary.values()) + 1
    if first < target.vocab_size:
        return first
    added = target.tokenizer.get_added_vocab()
    return min((added[token] for token in added if _RESERVED.search(token)), default=None)


def check_mask(token: int | None, target: Target) -> None:
    """Refuse a mask token that ends texts or fills up rows, or that the target does not have."""
    if token is None:
        return
    if token >= target.vocab_size:
        raise BadInputError(
            f"drafter: mask_token_id {token} is outside the target's vocabulary of {target.vocab_size}."
        )
    padding = getattr(target.tokenizer, "pad_token_id", None)
    if token in target.eos_ids or token == padding:
        raise BadInputError(
            f"drafter: mask_token_id {token} ends or pads texts of this target; take a token that no text has."
        )


@torch.no_grad()
def mean_embedding(target: Target) -> Tensor:
    """Return the initial value of a learned mask, `[H]`: the target's mean embedding, which is of the usual size."""
    return cast(nn.Embedding, target.model.get_input_embeddings()).weight.float().mean(0)
