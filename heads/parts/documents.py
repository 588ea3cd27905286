"""Documents: several texts that stand one after the other in a row, each learned as if it stood alone.

Rows of a batch are as long as the longest of them; short ones are mostly padding. Packed, a row holds as many texts as
fit. A document sees nothing of the others: positions begin anew with each, and attention stays inside.

Shapes: B rows, T places of a row, D documents of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """Where a document stands.

    Attributes:
        places: in its row.
    """

    row: int
    places: range


@dataclass(frozen=True)
class Documents:
    """The documents of a batch.

    Attributes:
        lengths: of each row's documents, in order. What is left of a row is padding.
        width: T.
    """

    lengths: Sequence[Sequence[int]]
    width: int

    def __iter__(self) -> Iterator[Document]:
        for row, lengths in enumerate(self.lengths):
            begin = 0
            for length in lengths:
                yield Document(row, range(begin, begin + length))
                begin += length

    def __len__(self) -> int:
        return sum(map(len, self.lengths))

    def numbers(self, device: torch.device) -> Tensor:
        """Return the number of the document that each place belongs to, `[B, T]`; D in the padding."""
        found = torch.full((len(self.lengths), self.width), len(self), dtype=torch.long)
        for number, document in enumerate(self):
            found[document.row, document.places.start : document.places.stop] = number
        return found.to(device)

    def starts(self, device: torch.device) -> Tensor:
        """Return where the document of each place begins, `[B, T]`; 0 in the padding."""
        found = torch.zeros(len(self.lengths), self.width, dtype=torch.long)
        for document in self:
            found[document.row, document.places.start : document.places.stop] = document.places.start
        return found.to(device)

    def positions(self, device: torch.device) -> Tensor:
        """Return how many tokens of its document stand before each place, `[B, T]`."""
        return torch.arange(self.width, device=device) - self.starts(device)
