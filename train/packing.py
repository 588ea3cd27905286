"""Packs: rows of about the same number of tokens, each made of several texts, hardly any of it padding.

The drafter keeps the texts of a row apart (`targets/documents.py`). The target reads each text as a row of its own, so
its hidden states are those of the text alone. Which texts share a pack is decided by their lengths, once for the whole
training.

Shapes: B packs, T tokens of the longest of them, K taps, H target hidden size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..heads import TargetBatch
from ..targets.documents import Documents
from .data import EMPTY, IGNORED, Batches, Rows


def packs_of(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the texts of each pack of up to `size` tokens; a longer text has a pack of its own.

    The longest is placed first, each in the fullest pack that has room for it (best fit decreasing).
    """
    packs: list[list[int]] = []
    spaces: list[int] = []  # all there are, ascending
    with_space: dict[int, list[int]] = {}  # packs, by their space
    for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(spaces, lengths[text])
        if place == len(spaces):
            space, pack = size, len(packs)
            packs.append([])
        else:
            space = spaces[place]
            pack = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[place]
        packs[pack].append(text)
        left = space - lengths[text]
        if left > 0:
            if left not in with_space:
                insort(spaces, left)
            with_space.setdefault(left, []).append(pack)
    return packs


class Packs(Dataset):
    """Packs of rows: `{"index", "lengths", "input_ids", "labels"}`, the first two with an entry for each text.

    `groups` are the positions in `rows` of each pack's texts, `size` its tokens, at most, but for longer texts.
    """

    def __init__(self, rows: Rows, size: int | None = None):
        """Pack `rows`; `size` None is the longest of them."""
        lengths = [len(tokens) for tokens in rows.table.select(rows.indices)["input_ids"]]
        self.rows, self.size = rows, size or max(lengths)
        self.groups = packs_of(lengths, self.size)
        self.tokens = sum(lengths)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, position: int) -> dict[str, Any]:
        rows = [self.rows[text] for text in ([EMPTY] if position == EMPTY else self.groups[position])]
        return {
            "index": [row["index"] for row in rows],
            "lengths": [len(row["input_ids"]) for row in rows],
            **{name: [value for row in rows for value in row[name]] for name in ("input_ids", "labels")},
        }

    @property
    def indices(self) -> list[int]:
        return self.rows.indices

    def members(self, position: int) -> list[int]:
        """Return the rows of the table at a position."""
        return [] if position == EMPTY else [self.indices[text] for text in self.groups[position]]

    def names(self, indices: Sequence[int]) -> str:
        return self.rows.names(indices)

    def summary(self) -> str:
        """Return a sentence about the numbers of rows and packs."""
        full = self.tokens / (len(self) * max(self.size, 1))
        return (
            f"packed {len(self.rows)} rows into {len(self)} of up to {self.size} tokens, which are {full:.0%} full; "
            "per_device_train_batch_size counts packs."
        )


class PackedBatches:
    """A maker of batches of packs, by one of batches of single texts.

    A frozen target's states of a pack are the same in every epoch. Those of batches of one pack are kept in memory, as
    long as they take at most `room` bytes, and later epochs go without the target's pass. A target in parts makes it in
    all processes at once, so that none of them may go without.
    """

    def __init__(self, inner: Batches, room: int = 0):
        self.inner = inner
        self.target = inner.target
        self.near = inner.near
        self.room = 0 if inner.target.sharded else room
        self._kept: dict[tuple[int, ...], tuple[Tensor | None, Tensor]] = {}

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch:
        """Return the batch; inputs that are not packed are the inner maker's."""
        if "lengths" not in inputs:
            return self.inner.of(inputs)
        tokens, lengths = inputs["input_ids"], [[n for n in row if n] for row in inputs["lengths"].tolist()]
        documents = Documents(lengths, tokens.shape[1])
        rows = zip(inputs["index"].tolist(), documents.lengths, strict=True)
        indices = tuple(i for row, own in rows for i in row[: len(own)])
        if (states := self._kept.get(indices)) is None:
            states = self._read(tokens, documents, indices)
            size = sum(each.nbytes for each in states if each is not None)
            if len(tokens) == 1 and size <= self.room:
                self._kept[indices], self.room = states, self.room - size
        return TargetBatch(self.target, tokens, inputs["labels"] != IGNORED, *states, documents=documents)

    def _read(self, tokens: Tensor, documents: Documents, indices: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """Return the taps `[B, T, K, H]`, if there are any, and the last states `[B, T, H]` of packs."""
        hidden, last = [], []  # of the passes
        # Of a target in parts all processes make equally many passes.
        for part in documents.passes(tokens.device, together=self.target.sharded):
            alone, index = documents.alone(tokens, part), torch.tensor([indices[number] for number in part])
            read = self.inner.of({"input_ids": alone, "labels": alone, "index": index})
            last.append((part, read.last))
            hidden += [] if read.hidden is None else [(part, read.hidden)]
        return documents.packed(hidden) if hidden else None, documents.packed(last)
