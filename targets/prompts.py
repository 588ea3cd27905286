"""Reading prompts of different lengths: in parts of about one length, of which little is padding.

Shapes: B prompts, T tokens of the longest, V vocabulary, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import RaggedCache, RowLengths
from .images import ImageInputs
from .target import Target

# Tokens of a part, with its padding. A CPU takes as long as there are tokens, and what it works on then stays in its
# cache; a GPU needs many at once.
_CPU_TOKENS = 512
_GPU_TOKENS = 16384


def rows_at_once(rows: int, length: int, target: Target) -> int:
    """Return how many of `rows` prompts of one length are read at once."""
    enough = _CPU_TOKENS if target.device.type == "cpu" else _GPU_TOKENS
    return rows if rows * length <= enough or not target.rewinds else max(1, enough // length)


def prompt_parts(lengths: Sequence[int], target: Target) -> list[list[int]]:
    """Return the numbers of prompts in parts to be read one after the other: the longest first, or all in one part."""
    together = list(range(len(lengths)))
    order = sorted(together, key=lambda number: -lengths[number])
    parts = []
    while order:
        count = rows_at_once(len(order), lengths[order[0]], target)
        parts.append(order[:count])
        order = order[count:]
    return parts if len(parts) > 1 else [together]


def read_prompts(
    target: Target,
    tokens: Tensor,
    counts: RowLengths,
    cache: RaggedCache,
    taps: Sequence[int],
    parts: Sequence[int],
    images: ImageInputs | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Read prompts `[B, T]` into an empty cache, so many rows at a time; the caller commits them with `cache.advance`.

    Returns:
        The logits after each prompt, `[B, 1, V]`, and the states at the taps, `[B, T, K, H]`, or None without taps;
        those of padding mean nothing.
    """
    if len(parts) == 1:
        out = target.forward(tokens, cache, taps, counts.tensor[:, None] - 1, images=images)
        return out.logits, out.hidden
    logits = []
    hidden: Tensor | None = None
    begin = 0
    for count in parts:
        rows = slice(begin, begin + count)
        longest = max(counts.values[rows])
        out = target.forward(tokens[rows, :longest], cache.part(rows), taps, counts.tensor[rows, None] - 1)
        assert out.logits is not None
        logits.append(out.logits)
        if out.hidden is not None:
            hidden = out.hidden.new_zeros(*tokens.shape, *out.hidden.shape[2:]) if hidden is None else hidden
            hidden[rows, :longest] = out.hidden
        begin += count
        del out  # it would live beside the next part's
    return torch.cat(logits), hidden
