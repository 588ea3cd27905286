"""Where the steps of a training-time test run: the first over whole rows, later ones where something is learned.

A row is one text (`WholeRows`), or holds several (`PackedRows`), of which none sees another.

Shapes: B rows, T places of a row, T' of them in which later steps run, N heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..targets.documents import Documents
from .unrolled_attention import Entry, Span, attend


class Places(ABC):
    """The places of a batch.

    Attributes:
        width: T'.
        at: where each of the T' stands in its row, `[B, T']`; from T on, it means nothing.
        within: how many of them stand before it in its text, `[B, T']` or `[1, T']`.
        positions: of all places in their texts, `[B, T]` or `[1, T]`.
    """

    width: int
    at: Tensor
    within: Tensor
    positions: Tensor

    @abstractmethod
    def positions_of(self, step: int) -> Tensor:
        """Return the positions of the T' at a later step, `[B, T']`, whose tokens stand `step` places later."""

    @abstractmethod
    def cut(self, x: Tensor, later: int = 0) -> Tensor:
        """Return `x` `[B, T, ...]` at places `later` after the T', `[B, T', ...]`; after T anything."""

    @abstractmethod
    def attend(self, q: Tensor, first: Entry, own: Sequence[Entry], whole: bool) -> Tensor:
        """Return what queries `[B, N, T', D]` gather, in their shape; `whole`: queries `[B, N, T, D]` of all places.

        Args:
            first: the entries of step 0, `[B, N, T, D]`, of which a query sees those of its text up to its place.
            own: those of each later step, `[B, N, T', D]`, of which it sees the one in its place.
        """


def places_of(wanted: Tensor, before: int, documents: Documents | None) -> Places:
    """Return the places of a batch whose later steps begin `before` places before a text's first learned token.

    Args:
        wanted: which tokens are learned, `[B, T]`.
    """
    if documents is not None:
        return PackedRows(documents, wanted, before)
    begins = (wanted.int().argmax(1) - before).clamp(min=0)
    return WholeRows([int(begin) for begin in begins], wanted.shape[1], wanted.device)


class WholeRows(Places):
    """Rows of one text each.

    Args:
        begins: where later steps begin in each row.
        length: T.
    """

    def __init__(self, begins: Sequence[int], length: int, device: torch.device):
        self.begins, self.width = begins, length - min(begins)
        self.positions = torch.arange(length, device=device)[None]
        self.within = self.positions[:, : self.width]
        self.at = torch.tensor(begins, device=device)[:, None] + self.within

    def positions_of(self, step: int) -> Tensor:
        return self.at + step

    def cut(self, x: Tensor, later: int = 0) -> Tensor:
        begins = [begin + later for begin in self.begins]
        if (missing := max(begins) + self.width - x.shape[1]) > 0:
            x = nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])
        if len(set(begins)) == 1:
            return x[:, begins[0] : begins[0] + self.width]
        return torch.stack([row[begin : begin + self.width] for row, begin in zip(x, begins, strict=True)])

    def attend(self, q: Tensor, first: Entry, own: Sequence[Entry], whole: bool) -> Tensor:
        return attend(q, first, [0] * len(self.begins) if whole else self.begins, own)


class PackedRows(Places):
    """Rows that hold several texts each. Texts without a token to learn are only read.

    Args:
        wanted: which tokens are learned, `[B, T]`.
        before: how many places before a text's first learned token later steps begin.
    """

    def __init__(self, documents: Documents, wanted: Tensor, before: int):
        self.whole = [
            Span(d.row, slice(d.places.start, d.places.stop), 0, slice(d.places.start, d.places.stop))
            for d in documents
        ]
        self.spans = _learned(documents, wanted, before)
        rows, device = len(documents.lengths), wanted.device
        self.width = max([1, *(span.queries.stop for span in self.spans)])
        at, within, position = (torch.zeros(rows, self.width, dtype=torch.long) for _ in range(3))
        for span in self.spans:
            count = torch.arange(span.queries.stop - span.queries.start)
            within[span.row, span.queries] = count
            position[span.row, span.queries] = span.begin + count
            at[span.row, span.queries] = span.entries.start + span.begin + count
        self.at, self.within, self._position = at.to(device), within.to(device), position.to(device)
        self.positions = documents.positions(device)

    def positions_of(self, step: int) -> Tensor:
        return self._position + step

    def cut(self, x: Tensor, later: int = 0) -> Tensor:
        index = (self.at + later).clamp(max=x.shape[1] - 1)
        return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))

    def attend(self, q: Tensor, first: Entry, own: Sequence[Entry], whole: bool) -> Tensor:
        return attend(q, first, (), own, self.whole if whole else self.spans)


def _learned(documents: Documents, wanted: Tensor, before: int) -> list[Span]:
    """Return the documents in which something is learned, and the queries of later steps in each."""
    taken, found = [0] * len(documents.lengths), []
    known = None if wanted.device.type == "meta" else wanted.cpu()
    for document in documents:
        row, places = document.row, document.places
        learned = [0] if known is None else known[row, places.start : places.stop].nonzero()[:, 0].tolist()
        if learned:
            begin = max(0, learned[0] - before)
            end = taken[row] + len(places) - begin
            found.append(Span(row, slice(places.start, places.stop), begin, slice(taken[row], end)))
            taken[row] = end
    return found
