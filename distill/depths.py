"""Depths: which token of an answer a round of decoding reached, and at which depth.

A round emits the drafts that were accepted, and the target's own token after them. So the tokens of a round have the
depths 1, 2, … of a proposal; the first token of an answer, which no round emits, has 0, and so has what the target only
read.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain


def depths_of(emitted: Sequence[int]) -> Iterator[int]:
    """Yield the depth of each token of an answer, from how many tokens each of its rounds emitted."""
    yield 0
    for count in emitted:
        yield from range(1, count + 1)


def along(masks: Sequence[Sequence[int]], rounds: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the depths of rows, `[T]` each, whose loss masks `[T]` are 1 on the answers, each once and in order.

    Args:
        rounds: how many tokens each round emitted, of each answer.

    Raises:
        ValueError: there are more tokens than the rounds emitted, or fewer.
    """
    waiting = list(chain.from_iterable(map(depths_of, rounds)))
    if len(waiting) != (count := sum(map(sum, masks))):
        raise ValueError(f"{count} tokens were answered, and rounds emitted {len(waiting)}.")
    left = iter(waiting)
    return [[next(left) if answered else 0 for answered in mask] for mask in masks]
