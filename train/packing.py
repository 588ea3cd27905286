"""Packing: rows of about the same number of tokens, each made of several texts of the data set.

A batch of single texts is padded to its longest one. Packed, hardly anything of it is padding, and a batch has the same
number of tokens at every step. The drafter keeps the texts of a row apart (targets/documents.py). The target reads
each text as a row of its own, texts of about one length together: so its hidden states are those of the text alone,
whatever its layers are, and no mask of a whole row is needed.

Which texts stand together is decided by their lengths alone, once for the whole training.

Shapes: B packs, T tokens of the longest, K taps, H target hidden size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..distill.data_set import DEPTHS
from ..heads import TargetBatch
from ..targets.documents import Documents
from .data import EMPTY, IGNORED, Batches, Rows


def packs_of(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return which texts stand together in packs of up to `size` tokens; a longer text has a pack of its own.

    The longest is placed first, each in the fullest pack that has room for it (best fit decreasing).
    """
    found: list[list[int]] = []
    spaces: list[int] = []  # that there are, ascending
    packs: dict[int, list[int]] = {}  # with so much space
    for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(spaces, lengths[text])
        if place == len(spaces):
            space, pack = size, len(found)
            found.append([])
        else:
            space = spaces[place]
            pack = packs[space].pop()
            if not packs[space]:
                del packs[space], spaces[place]
        found[pack].append(text)
        left = space - lengths[text]
        if left > 0:
            if left not in packs:
                insort(spaces, left)
            packs.setdefault(left, []).append(pack)
    return found


class Packs(Dataset):
    """Packs of rows: `{"index", "lengths", "input_ids", "labels"}`, the first two with an entry for each text.

    If the rows have `depths`, packs have them, too.

    Attributes:
        rows: the single texts. groups: positions of these, of each pack.
        size: tokens of a pack, at most, but for texts that are longer.
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
        found = [self.rows[text] for text in ([EMPTY] if position == EMPTY else self.groups[position])]
        along_tokens = ["input_ids", "labels", *([DEPTHS] if self.rows.depths else [])]
        return {
            "index": [row["index"] for row in found],
            "lengths": [len(row["input_ids"]) for row in found],
            **{name: [value for row in found for value in row[name]] for name in along_tokens},
        }

    @property
    def indices(self) -> list[int]:
        """The rows of the table that are learned."""
        return self.rows.indices

    def names(self, indices: Sequence[int]) -> str:
        """Return the ids of rows of the table, for a sentence."""
        return self.rows.names(indices)

    def summary(self) -> str:
        """Return what became of the rows, as a sentence."""
        full = self.tokens / (len(self) * max(self.size, 1))
        return (
            f"packed {len(self.rows)} rows into {len(self)} of up to {self.size} tokens, which are {full:.0%} full; "
            "per_device_train_batch_size counts packs."
        )


# ------------------------------------------------------------ what the target made of them


class PackedBatches:
    """A maker of batches of packs, by one of batches of single texts."""

    def __init__(self, inner: Batches):
        self.inner, self.target = inner, inner.target

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch:
        """Return the batch; inputs that are not packed are the inner maker's."""
        if "lengths" not in inputs:
            return self.inner.of(inputs)
        tokens, lengths = inputs["input_ids"], [[n for n in row if n] for row in inputs["lengths"].tolist()]
        documents = Documents(lengths, tokens.shape[1])
        hidden, last = self._states(tokens, documents, inputs["index"])
        return TargetBatch(self.target, tokens, inputs["labels"] != IGNORED, hidden, last, documents=documents)

    def _states(self, tokens: Tensor, documents: Documents, index: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the hidden states of packs, `[B, T, K, H]` (None without taps) and `[B, T, H]`; zero in padding."""
        rows = zip(index.tolist(), documents.lengths, strict=True)
        indices = [i for row, lengths in rows for i in row[: len(lengths)]]
        hidden, last = [], []
        # Of a target in parts all processes make equally many passes.
        for part in documents.passes(together=self.target.sharded):
            alone = documents.alone(tokens, part)
            found = self.inner.of(
                {"input_ids": alone, "labels": alone, "index": torch.tensor([indices[number] for number in part])}
            )
            last.append((part, found.last))
            hidden += [] if found.hidden is None else [(part, found.hidden)]
        return documents.packed(hidden) if hidden else None, documents.packed(last)
