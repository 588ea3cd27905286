"""Documents: several texts one after the other in a row, each learned as if it stood alone.

A row with one short text would be mostly padding. Positions begin anew with each document, and attention stays inside.

Shapes: B rows, T places of a row, D documents of a batch, d of them in a pass, t tokens of the longest of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# A pass of a model takes shorter texts, too, until it has so many tokens: a GPU takes no less time for fewer, and on
# the meta device trainings on a GPU are planned. A CPU's time is that of the tokens.
_PASS_TOKENS = {"cuda": 2048, "meta": 2048}
_CPU_TOKENS = 256
_ALIKE = 0.75  # of the longest text of a pass: of shorter ones a quarter would be padding


@dataclass(frozen=True)
class Document:
    """The row of a document, and its places there."""

    row: int
    places: range


@dataclass(frozen=True)
class Documents:
    """The documents of a batch; the rest of each row is padding."""

    lengths: Sequence[Sequence[int]]  # of each row's documents, in order
    width: int  # T

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
        numbers = torch.full((len(self.lengths), self.width), len(self), dtype=torch.long)
        for number, document in enumerate(self):
            numbers[document.row, document.places.start : document.places.stop] = number
        return numbers.to(device)

    def starts(self, device: torch.device) -> Tensor:
        """Return where the document of each place begins, `[B, T]`; 0 in the padding."""
        starts = torch.zeros(len(self.lengths), self.width, dtype=torch.long)
        for document in self:
            starts[document.row, document.places.start : document.places.stop] = document.places.start
        return starts.to(device)

    def positions(self, device: torch.device) -> Tensor:
        """Return how many tokens of its document precede each place, `[B, T]`."""
        return torch.arange(self.width, device=device) - self.starts(device)

    def passes(self, device: torch.device, together: bool = False, most: int = 0) -> Iterator[list[int]]:
        """Yield the numbers of the documents in parts of about one length, the longest first, or all `together`.

        A part has as many tokens as make a pass on `device` worth its while, if there are so many; and `most` documents
        (0: any number). A model that reads each part as rows of their own needs no mask, whatever its layers are, and
        little padding.
        """
        sizes, enough = [len(document.places) for document in self], _PASS_TOKENS.get(device.type, _CPU_TOKENS)
        part: list[int] = []
        for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            longest = sizes[part[0]] if part else 0
            is_whole = len(part) * longest >= enough and sizes[number] < _ALIKE * longest
            if part and not together and (is_whole or len(part) == most):
                yield part
                part = []
            part.append(number)
        if part:
            yield part

    def alone(self, tokens: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return documents of rows `[B, T]` as rows of their own, `[d, t]`, padded on the right."""
        every = list(self)
        return pad_sequence(
            [tokens[every[n].row, every[n].places.start : every[n].places.stop] for n in numbers], batch_first=True
        )

    def packed(self, states: Sequence[tuple[list[int], Tensor]]) -> Tensor:
        """Return states of documents at their places in the rows, `[B, T, ...]`; padding is zero.

        `states` are the numbers of each pass's documents, and its result, `[d, t, ...]`.
        """
        every = list(self)
        places = []
        kept = []
        for numbers, given in states:
            for row, number in enumerate(numbers):
                document = every[number]
                begin = document.row * self.width + document.places.start
                places.append(torch.arange(begin, begin + len(document.places)))
                kept.append(given[row, : len(document.places)])
        flat = torch.cat(kept)
        empty = flat.new_zeros(len(self.lengths) * self.width, *flat.shape[1:])
        return empty.index_copy(0, torch.cat(places).to(flat.device), flat).unflatten(0, (-1, self.width))

    def read(self, tokens: Tensor, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a model's outputs `[B, T, ...]` for rows `[B, T]`, whose documents it reads as rows of their own."""
        return self.packed([(part, model(self.alone(tokens, part))) for part in self.passes(tokens.device)])
