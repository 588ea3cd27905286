"""Anchors: the places of a text from which a block drafter learns to draft, and what it should say after each.

A block drafter proposes k tokens in one pass after a root. In training every text has many roots, its anchors: the
block at anchor a drafts the tokens at a + 1, …, a + k, from what the target knew before a. Draft j counts if the token
at a + j and all that stand between it and the anchor are to be learned, as in decoding it is only looked at if those
before it were right.

Which anchors are drawn depends on the text and on the number of the step alone: not on the batch it stands in, its
padding, or the process that reads it.

Shapes: R rows, T tokens, n anchors of a row, A anchors of a batch, k drafts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST = 1  # an anchor has at least one token before it: a root always follows a prompt


@dataclass(frozen=True)
class Anchors:
    """The anchors of a batch, ascending in each row.

    Attributes:
        places: where each stands in its row, `[R, n]`.
        real: which are anchors at all: rows differ in how many they have, `[R, n]` bool.
        spans: between which places the anchors of each column stand, in all rows together; known without asking the
            device.
    """

    places: Tensor
    real: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, eligible: Tensor, tokens: Tensor, count: int, step: int = 0) -> Anchors:
        """Draw up to `count` anchors of each row from its `eligible` places `[R, T]`, without replacement.

        Args:
            tokens: the rows' texts, which seed the draws, `[R, T]`.
            step: seeds them, too, so that a text that is read again has other anchors.
        """
        if eligible.device.type == "meta":
            return cls._without_contents(eligible, count)
        found = [_drawn(row, text, count, step) for row, text in zip(eligible.cpu(), tokens.cpu(), strict=True)]
        width = max(1, *map(len, found))
        # A row without that many repeats a place: its queries need something that they may attend to.
        fill = min(FIRST, eligible.shape[1] - 1)
        places = [row + [row[-1] if row else fill] * (width - len(row)) for row in found]
        real = [[True] * len(row) + [False] * (width - len(row)) for row in found]
        spans = tuple((min(column), max(column)) for column in zip(*places, strict=True))
        device = eligible.device
        return cls(torch.tensor(places, device=device), torch.tensor(real, device=device), spans)

    @classmethod
    def _without_contents(cls, eligible: Tensor, count: int) -> Anchors:
        """Return as many anchors as there can be, spread evenly: a training is planned on tensors without contents."""
        rows, length = eligible.shape
        width = max(1, min(count, length - 1 - FIRST))
        even = [FIRST + i * (length - 1 - FIRST) // width for i in range(width)]
        places = torch.zeros(rows, width, dtype=torch.long, device="meta")
        return cls(
            places, torch.zeros(rows, width, dtype=torch.bool, device="meta"), tuple(zip(even, even, strict=True))
        )


def eligible_places(supervised: Tensor, strict: bool) -> Tensor:
    """Return at which places an anchor may stand, `[R, T]` bool.

    The token after an anchor is to be learned. In training (`strict`) the anchor itself is, too, since a root is always
    a token that the target wrote; for measuring, every token that is to be learned is somebody's first draft.

    Args:
        supervised: which tokens are to be learned, `[R, T]`.
    """
    found = nn.functional.pad(supervised, (0, 1))[:, 1:]
    if strict:
        found = found & supervised
    return found & (torch.arange(supervised.shape[1], device=supervised.device) >= FIRST)


def _drawn(eligible: Tensor, text: Tensor, count: int, step: int) -> list[int]:
    """Return up to `count` of a row's eligible places `[T]`, ascending."""
    places = eligible.nonzero()[:, 0]
    if len(places) > count:
        content = text[: int(places[-1]) + 2].contiguous().numpy().tobytes()  # without padding
        generator = torch.Generator().manual_seed(zlib.crc32(content + str(step).encode()))
        places = places[torch.randperm(len(places), generator=generator)[:count]].sort().values
    return places.tolist()


@dataclass(frozen=True)
class Lessons:
    """What the drafts after each real anchor should be.

    Attributes:
        rows: the row of each anchor, `[A]`.
        places: where its drafts stand, inside the text, `[A, k]`.
        counts: which drafts are to be learned, `[A, k]` bool.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, anchors: Anchors, supervised: Tensor, drafts: int) -> Lessons:
        """Return the lessons of `drafts` drafts after each real anchor of rows `supervised` `[R, T]`."""
        length = supervised.shape[1]
        rows = torch.arange(len(supervised), device=supervised.device)[:, None].expand_as(anchors.places)
        rows, begins = (kept(values, anchors.real) for values in (rows, anchors.places))
        places = begins[:, None] + torch.arange(1, drafts + 1, device=begins.device)
        inside = places < length
        places = places.clamp(max=length - 1)
        learned = supervised[rows[:, None], places] & inside
        return cls(rows, places, learned.long().cumprod(1).bool())

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the drafts' places, `[A, k, ...]`."""
        return values[self.rows[:, None], self.places]

    def before_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the places before the drafts', `[A, k, ...]`."""
        return values[self.rows[:, None], self.places - 1]

    def per_row(self, weights: Tensor, supervised: Tensor) -> Tensor:
        """Return weights `[A, k]`, divided by their sum in each row, and times the row's tokens to learn.

        So a row's drafts count together what its tokens do, however many anchors were drawn, and a batch can be put
        together, or divided, in any way.

        Args:
            supervised: `[R, T]`.
        """
        sums = weights.new_zeros(len(supervised)).index_add(0, self.rows, weights.sum(1))
        factors = supervised.sum(1) / sums.clamp(min=torch.finfo(sums.dtype).tiny)
        return weights * factors[self.rows][:, None]


def kept(values: Tensor, real: Tensor) -> Tensor:
    """Return `values` `[R, n, ...]` where they are `real` `[R, n]`, as `[A, ...]`."""
    chosen = real.flatten()
    return values.flatten(0, 1)[chosen]
