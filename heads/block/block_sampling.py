"""Anchors: the places of a text from which a block drafter learns to draft, and what it should say after each.

A block drafter proposes k tokens in one pass after a root. In training every text has many roots, its anchors: the
block at anchor a drafts the tokens at a + 1, …, a + k, from what the target knew before a. Draft j counts if the token
at a + j and all that stand between it and the anchor are to be learned, as in decoding it is only looked at if those
before it were right.

Which anchors are drawn depends on the text and on the number of the step alone: not on the batch it stands in, its
padding, the texts that it is packed with, or the process that reads it. Where a share of the loss lies on what rounds
of decoding reached (verified.py), that share of a text's anchors is drawn from the roots of those rounds.

Shapes: R rows, T tokens, n anchors of a row, A anchors of a batch, k drafts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...targets.documents import Documents
from ..accepted_positions import Verified

FIRST = 1  # an anchor has at least one token before it: a root always follows a prompt


@dataclass(frozen=True)
class Anchors:
    """The anchors of a batch, ascending in each row.

    Attributes:
        places: where each stands in its row, `[R, n]`.
        real: which are anchors at all: rows differ in how many they have, `[R, n]` bool.
        spans: between which places the anchors of each column stand, in all rows together; known without asking the
            device.
        documents: the texts that the rows hold; None where each is one.
        earliest: where the first text of each column begins.
        usual: which were drawn evenly, and not for a round that began there, `[R, n]` bool; None for all of them.
    """

    places: Tensor
    real: Tensor
    spans: tuple[tuple[int, int], ...]
    documents: Documents | None = None
    earliest: tuple[int, ...] = ()
    usual: Tensor | None = None

    @classmethod
    def of(
        cls,
        eligible: Tensor,
        tokens: Tensor,
        count: int,
        step: int = 0,
        documents: Documents | None = None,
        verified: Verified | None = None,
    ) -> Anchors:
        """Draw up to `count` anchors of each text from its `eligible` places `[R, T]`, without replacement.

        Args:
            tokens: the rows' texts, which seed the draws, `[R, T]`.
            step: seeds them, too, so that a text that is read again has other anchors.
            verified: its share of each text's anchors is drawn from the roots of rounds, as far as there are so many.
        """
        if eligible.device.type == "meta":
            return cls._without_contents(eligible, count)
        draw = _Draw(count, step, 0.0 if verified is None else verified.share)
        roots = torch.zeros_like(eligible) if verified is None else eligible & verified.roots()
        rows = eligible.cpu(), roots.cpu(), tokens.cpu()
        found = (
            [draw.of(*row) for row in zip(*rows, strict=True)]
            if documents is None
            else draw.of_documents(documents, *rows)
        )
        return cls._filled(found, eligible, documents)

    @classmethod
    def _filled(cls, found: Sequence[_Drawn], eligible: Tensor, documents: Documents | None) -> Anchors:
        """Return drawn anchors of rows, as many columns as the longest row has."""
        width, device = max(1, *map(len, found)), eligible.device
        # A row without that many repeats a place: its queries need something that they may attend to.
        fill = min(FIRST, eligible.shape[1] - 1)
        rows = [[place for place, _ in row] for row in found]
        places = [row + [row[-1] if row else fill] * (width - len(row)) for row in rows]
        real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
        usual = [[is_usual for _, is_usual in row] + [True] * (width - len(row)) for row in found]
        spans = tuple((min(column), max(column)) for column in zip(*places, strict=True))
        earliest = [0] * width
        if documents is not None:
            earliest = documents.starts(torch.device("cpu")).gather(1, torch.tensor(places)).amin(0).tolist()
        tensors = torch.tensor(places, device=device), torch.tensor(real, device=device)
        drawn_for_rounds = None if all(map(all, usual)) else torch.tensor(usual, device=device)
        return cls(*tensors, spans, documents, tuple(earliest), drawn_for_rounds)

    def starts(self) -> Tensor | None:
        """Return where the text of each anchor begins, `[R, n]`; None where each row is one text."""
        if self.documents is None:
            return None
        return self.documents.starts(self.places.device).gather(1, self.places)

    @classmethod
    def _without_contents(cls, eligible: Tensor, count: int) -> Anchors:
        """Return as many anchors as there can be, spread evenly: a training is planned on tensors without contents."""
        rows, length = eligible.shape
        width = max(1, min(count, length - 1 - FIRST))
        even = [FIRST + i * (length - 1 - FIRST) // width for i in range(width)]
        places = torch.zeros(rows, width, dtype=torch.long, device="meta")
        real = torch.zeros(rows, width, dtype=torch.bool, device="meta")
        return cls(places, real, tuple(zip(even, even, strict=True)), earliest=(0,) * width)


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


_Drawn = list[tuple[int, bool]]  # places, ascending, each with whether it was drawn evenly


@dataclass(frozen=True)
class _Draw:
    """How anchors of a text are drawn: up to `count`, of which `share` are roots of rounds; see `Anchors.of`."""

    count: int
    step: int
    share: float

    def of(self, eligible: Tensor, roots: Tensor, text: Tensor) -> _Drawn:
        """Return anchors of a text from its `eligible` places `[T]`, some of which are `roots` of rounds `[T]`."""
        places = eligible.nonzero()[:, 0]
        if len(places) <= self.count:
            return [(place, True) for place in places.tolist()]
        content = text[: int(places[-1]) + 2].contiguous().numpy().tobytes()  # without padding
        generator = torch.Generator().manual_seed(zlib.crc32(content + str(self.step).encode()))
        begun = roots.nonzero()[:, 0]
        wanted = min(int(self.share * self.count), len(begun))
        evenly = places[torch.randperm(len(places), generator=generator)[: self.count - wanted]]
        others = begun[torch.randperm(len(begun), generator=generator)[:wanted]]
        return sorted((dict.fromkeys(others.tolist(), False) | dict.fromkeys(evenly.tolist(), True)).items())

    def of_documents(self, documents: Documents, eligible: Tensor, roots: Tensor, tokens: Tensor) -> list[_Drawn]:
        """Return anchors of each document, ascending in each row; tensors are of whole rows, `[R, T]`."""
        found: list[_Drawn] = [[] for _ in documents.lengths]
        for document in documents:
            row, places = document.row, slice(document.places.start, document.places.stop)
            drawn = self.of(eligible[row, places], roots[row, places], tokens[row, places])
            found[row] += [(places.start + place, is_usual) for place, is_usual in drawn]
        return found


@dataclass(frozen=True)
class BlockTargets:
    """What the drafts after each real anchor should be.

    Attributes:
        rows: the row of each anchor, `[A]`.
        places: where its drafts stand, inside the text, `[A, k]`.
        counts: which drafts are to be learned, `[A, k]` bool.
        usual: which anchors were drawn evenly, `[A]` bool; None for all of them.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor
    usual: Tensor | None = None

    @classmethod
    def of(cls, anchors: Anchors, supervised: Tensor, drafts: int) -> BlockTargets:
        """Return the lessons of `drafts` drafts after each real anchor of rows `supervised` `[R, T]`."""
        length = supervised.shape[1]
        rows = torch.arange(len(supervised), device=supervised.device)[:, None].expand_as(anchors.places)
        rows, begins = (kept(values, anchors.real) for values in (rows, anchors.places))
        places = begins[:, None] + torch.arange(1, drafts + 1, device=begins.device)
        inside = places < length
        places = places.clamp(max=length - 1)
        learned = supervised[rows[:, None], places] & inside
        usual = None if anchors.usual is None else kept(anchors.usual, anchors.real)
        return cls(rows, places, learned.long().cumprod(1).bool(), usual)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the drafts' places, `[A, k, ...]`."""
        return values[self.rows[:, None], self.places]

    def before_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the places before the drafts', `[A, k, ...]`."""
        return values[self.rows[:, None], self.places - 1]

    def per_row(self, weights: Tensor, supervised: Tensor, documents: Documents | None = None) -> Tensor:
        """Return weights `[A, k]`, divided by their sum in each text, and times the text's tokens to learn.

        So a text's drafts count together what its tokens do, however many anchors were drawn, and a batch can be put
        together, or divided, in any way.

        Args:
            supervised: `[R, T]`.
            documents: the texts that the rows hold; None where each is one.
        """
        texts, learned = self.rows, supervised.sum(1)
        if documents is not None:
            numbers = documents.numbers(weights.device)
            texts = numbers[self.rows, self.places[:, 0] - 1]  # of the anchor
            learned = learned.new_zeros(len(documents) + 1).index_add(0, numbers.flatten(), supervised.flatten().long())
        sums = weights.new_zeros(len(learned)).index_add(0, texts, weights.sum(1))
        factors = learned / sums.clamp(min=torch.finfo(sums.dtype).tiny)
        return weights * factors[texts][:, None]


def kept(values: Tensor, real: Tensor) -> Tensor:
    """Return `values` `[R, n, ...]` where they are `real` `[R, n]`, as `[A, ...]`."""
    chosen = real.flatten()
    return values.flatten(0, 1)[chosen]
