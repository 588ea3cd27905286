"""Packing: rows of about the same number of tokens, each made of several texts of the data set.

A batch of single texts is padded to its longest one. Packed, hardly anything of it is padding, and a batch has the same
number of tokens at every step. The drafter keeps the texts of a row apart (heads/parts/documents.py). The target reads
each text as a row of its own, texts of about one length together: so its hidden states are those of the text alone,
whatever its layers are, and no mask of a whole row is needed.

Which texts stand together is decided by their lengths alone, once for the whole training.

Shapes: B packs, T tokens of the longest, D texts of a pass, K taps, H target hidden size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..heads import TargetBatch
from ..heads.parts.documents import Document, Documents
from ..targets import Target
from .data import EMPTY, IGNORED, Batches, Rows

# A pass of the target takes shorter texts, too, until it has so many tokens: smaller passes take no less time.
_PASS_TOKENS = 2048
_ALIKE = 0.75  # of the longest text of a pass: shorter ones would be padding for a quarter


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
        return {
            "index": [row["index"] for row in found],
            "lengths": [len(row["input_ids"]) for row in found],
            "input_ids": [token for row in found for token in row["input_ids"]],
            "labels": [label for row in found for label in row["labels"]],
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


@dataclass
class PackedBatches:
    """A maker of batches of packs, by one of batches of single texts."""

    inner: Batches

    @property
    def target(self) -> Target:
        return self.inner.target

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
        indices = [row[: len(lengths)] for row, lengths in zip(index.tolist(), documents.lengths, strict=True)]
        texts = list(zip(documents, (i for row in indices for i in row), strict=True))
        texts.sort(key=lambda text: -len(text[0].places))
        hidden, last = None, torch.zeros(0)
        # Of a target in parts all processes make equally many passes.
        for part in [texts] if self.target.sharded else list(_passes(texts)):
            found = self.inner.of(_alone(tokens, part))
            if hidden is None and found.hidden is not None:
                hidden = found.hidden.new_zeros(*tokens.shape, *found.hidden.shape[2:])
            last = found.last.new_zeros(*tokens.shape, found.last.shape[2]) if not last.numel() else last
            for row, (document, _) in enumerate(part):
                places = slice(document.places.start, document.places.stop)
                last[document.row, places] = found.last[row, : len(document.places)]
                if hidden is not None and found.hidden is not None:
                    hidden[document.row, places] = found.hidden[row, : len(document.places)]
        return hidden, last


Text = tuple[Document, int]  # where a text stands, and its index in the data set


def _passes(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Yield texts, of which the longest come first, in parts of about one length."""
    part: list[Text] = []
    for text in texts:
        length = len(text[0].places)
        is_enough = part and len(part) * len(part[0][0].places) >= _PASS_TOKENS
        if is_enough and length < _ALIKE * len(part[0][0].places):
            yield part
            part = []
        part.append(text)
    if part:
        yield part


def _alone(tokens: Tensor, texts: Sequence[Text]) -> dict[str, Tensor]:
    """Return texts of packs `[B, T]` as rows of their own: what the collator gives of single texts."""
    rows = [tokens[document.row, document.places.start : document.places.stop] for document, _ in texts]
    padded = pad_sequence(rows, batch_first=True)
    return {"input_ids": padded, "labels": padded, "index": torch.tensor([index for _, index in texts])}
