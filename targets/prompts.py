"""Reading prompts: what all begin with once, and the rest in parts of about one length, of which little is padding.

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
_LEAST_SHARED = 16  # tokens that all prompts begin with, such as a template's, from which reading them once pays
_MOST_MASKED = 2**22  # pairs of a part's tokens and entries: what follows a beginning needs a mask


def rows_at_once(rows: int, length: int, target: Target) -> int:
    """Return how many of `rows` prompts of one length are read at once."""
    enough = _enough(target)
    return rows if rows * length <= enough or not target.reads_in_parts else max(1, enough // length)


def _enough(target: Target) -> int:
    return _CPU_TOKENS if target.device.type == "cpu" else _GPU_TOKENS


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


def shared_tokens(rows: Sequence[Tensor], target: Target) -> int:
    """Return how many tokens of all prompts, `[T]` each, are read once: each has another one after them."""
    longest = max(map(len, rows))
    if len(rows) == 1 or not target.reads_in_parts or max(_enough(target), longest) * longest > _MOST_MASKED:
        return 0
    most = min(map(len, rows)) - 1
    begins = torch.stack([row[:most] for row in rows])
    count = int((begins == begins[:1]).all(0).long().cumprod(0).sum())
    return count if count >= _LEAST_SHARED else 0


def read_prompts(
    target: Target,
    tokens: Tensor,
    counts: RowLengths,
    cache: RaggedCache,
    taps: Sequence[int],
    parts: Sequence[int],
    shared: int = 0,
    images: ImageInputs | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Read prompts `[B, T]` into an empty cache, so many rows at a time, and their `shared` first tokens once.

    Returns:
        The logits after each prompt, `[B, 1, V]`, and the states at the taps, `[B, T, K, H]`, or None without taps;
        those of padding mean nothing.
    """
    left = RowLengths.of([count - shared for count in counts.values], tokens.device)
    if len(parts) == 1 and not shared:
        out = target.forward(tokens, cache, taps=taps, at=counts.tensor[:, None] - 1, images=images)
        cache.advance(counts)
        return out.logits, out.hidden
    hidden: Tensor | None = None
    if taps:
        shape = (*tokens.shape, len(taps), target.hidden_size)
        hidden = torch.zeros(shape, dtype=target.dtype, device=tokens.device)
    if shared:
        out = target.forward(tokens[:1, :shared], cache.part(slice(0, 1)), taps=taps, logits=False)
        cache.share(shared)
        if hidden is not None and out.hidden is not None:
            hidden[:, :shared] = out.hidden
    logits = []
    begin = 0
    for count in parts:
        rows = slice(begin, begin + count)
        end = shared + max(left.values[rows])
        at = left.tensor[rows, None] - 1
        out = target.forward(tokens[rows, shared:end], cache.part(rows), taps=taps, at=at)
        assert out.logits is not None
        logits.append(out.logits)
        if hidden is not None and out.hidden is not None:
            hidden[rows, shared:end] = out.hidden
        begin += count
        del out  # it would live beside the next part's
    cache.advance(left)
    return torch.cat(logits), hidden
