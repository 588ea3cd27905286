"""The token that stands in place of drafts which are not known yet.

Shapes: H hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ...ground import BadInputError
from ...targets import Target


def unused_token(target: Target) -> int | None:
    """Return the first id that the target embeds and its tokenizer does not have; None if there is none."""
    if target.tokenizer is None:
        return None
    first = max(target.tokenizer.get_vocab().values()) + 1
    return first if first < target.vocab_size else None


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
    return cast(nn.Module, target.model.get_input_embeddings()).weight.float().mean(0)
