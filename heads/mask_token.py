"""The token that stands in place of drafts which are not known yet.

Shapes: H hidden size.
"""

from __future__ import annotations

import re
from typing import cast

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..targets import Target

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
    """Return where a learned mask begins, `[H]`: at the target's mean embedding, which is of the usual size."""
    return cast(nn.Embedding, target.model.get_input_embeddings()).weight.float().mean(0)
