"""Prompts of a wanted length for cells of context and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import torch

from outrider.common import BadInputError

from .loops import Texts
from .random_targets import following


def random_prompts(vocab: int, lengths: Sequence[int], ahead: int, seed: int = 0) -> Texts:
    """Make random prompts for a target of `random_targets`; each holds the `ahead` tokens that follow its last token.

    Raises:
        BadInputError: a length that has no room for them.
    """
    if min(lengths) < ahead + 3:
        raise BadInputError(
            f"a context of {min(lengths)} tokens is too short for prompts that hold the {ahead} tokens "
            f"that follow them; "
            f"at least {ahead + 3}."
        )
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length in lengths:
        tokens = torch.randint(vocab, (length,), generator=generator).tolist()
        run = [tokens[-1]]
        for _ in range(ahead):
            run.append(following(run[-1], vocab))
        tokens[1 : 2 + ahead] = run
        prompts.append(tokens)
    return prompts


def joined_prompts(texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Texts:
    """Make prompts of these lengths from texts in a row; prompt i begins with text i, and texts may be used again."""
    prompts = []
    for row, length in enumerate(lengths):
        start = row % len(texts)
        tokens = (token for text in cycle([*texts[start:], *texts[:start]]) for token in text)
        prompts.append(list(islice(tokens, length)))
    return prompts
