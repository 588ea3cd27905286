"""From the distilled data set to the batches a drafter learns from.

Shapes: B rows, T tokens of the longest row, K taps, H target hidden size, V target vocabulary.

Global batches are the same rows whatever the number of processes, accumulation steps or loader workers: the order is a
function of (seed, epoch) alone, and the last batch of an epoch is filled with empty rows instead of repeated ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import datasets
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, get_worker_info

from ..common import BadInputError, IncompatibleError
from ..common.signals import let_parent_decide
from ..distill.data_set import DEPTHS
from ..distill.features import FeatureStore
from ..heads import TargetBatch
from ..targets import Target

IGNORED = -100  # the label of a token nobody has to predict, as in transformers
EMPTY = -1  # the position of an empty row

# A head predicts x_{t+2} from the features at t and the token x_{t+1}; so no drafter learns the first two tokens of a
# row, and all of them count the same positions.
FIRST_LEARNED = 2


class Rows(Dataset):
    """Rows of a distilled data set: `{"index", "input_ids", "labels"}`; `EMPTY` is a row with nothing to learn.

    Labels are the responses' tokens, with `prompts` all of them. With `depths` rows also have these: at which depth a
    round of decoding reached each token, 0 where none did.
    """

    def __init__(self, table: datasets.Dataset, indices: Sequence[int], prompts: bool = False, depths: bool = False):
        self.table, self.indices, self.prompts, self.depths = table, list(indices), prompts, depths

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position == EMPTY:
            found = {"index": EMPTY, "input_ids": [0] * FIRST_LEARNED, "labels": [IGNORED] * FIRST_LEARNED}
            return found | ({DEPTHS: [0] * FIRST_LEARNED} if self.depths else {})
        index = self.indices[position]
        row = self.table[index]
        found = self.labelled(index, row["input_ids"], row["loss_mask"])
        return found | ({DEPTHS: row[DEPTHS] or [0] * len(row["input_ids"])} if self.depths else {})

    def labelled(self, index: int, tokens: list[int], mask: Sequence[int]) -> dict[str, Any]:
        """Return a row of these tokens; `mask` is 1 on the response's."""
        labels = [
            t if (m or self.prompts) and i >= FIRST_LEARNED else IGNORED
            for i, (t, m) in enumerate(zip(tokens, mask, strict=True))
        ]
        return {"index": index, "input_ids": tokens, "labels": labels}

    def names(self, indices: Sequence[int]) -> str:
        """Return the ids of rows of the table, for a sentence."""
        ids = [str(self.table[i]["id"]) for i in indices if i != EMPTY]
        return f"the rows {', '.join(ids[:8])}" + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")

    def prompt(self, index: int) -> list[int]:
        """Return what stands before the first response of row `index` of the table."""
        row = self.table[index]
        return list(row["input_ids"][: row["loss_mask"].index(1)])


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` `[B, T]`, padded on the right, and `index` `[B]`.

    Of packs (see `train.packing`) `index` is that of each text, `[B, D]`, and there are their `lengths`, `[B, D]`. If
    rows have `depths`, there are these, `[B, T]`.
    """
    if get_worker_info() is not None:  # a loader's worker, whose first work this is
        let_parent_decide()
    found = {
        "input_ids": _padded([row["input_ids"] for row in rows], 0),
        "labels": _padded([row["labels"] for row in rows], IGNORED),
    }
    if DEPTHS in rows[0]:
        found[DEPTHS] = _padded([row[DEPTHS] for row in rows], 0)
    if "lengths" not in rows[0]:
        return {**found, "index": torch.tensor([row["index"] for row in rows])}
    index, lengths = (_padded([row[name] for row in rows], fill) for name, fill in (("index", EMPTY), ("lengths", 0)))
    return {**found, "index": index, "lengths": lengths}


def _padded(rows: Sequence[list[int]], fill: int) -> Tensor:
    """Return lists as the rows of a tensor, filled up on the right."""
    length = max(map(len, rows))
    return torch.tensor([row + [fill] * (length - len(row)) for row in rows])


class Order(Sampler[int]):
    """An order of the positions of one epoch, filled up with `EMPTY` to whole global batches.

    Args:
        length: number of rows.
        multiple: rows of all processes in one micro-batch; 1 leaves a short last batch as it is.
        seed: of the shuffling; None keeps the rows in order.
    """

    def __init__(self, length: int, multiple: int, seed: int | None):
        self.length, self.multiple, self.seed, self.epoch = length, multiple, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.length // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        yield from self._positions()
        yield from [EMPTY] * (len(self) - self.length)

    def _positions(self) -> list[int]:
        if self.seed is None:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()


# ------------------------------------------------------------ which rows


def split(table: datasets.Dataset, holdout: float, prompts: bool = False, depths: bool = False) -> tuple[Rows, Rows]:
    """Return (training rows, held-out rows): a hash of what a row asks decides, whatever its id and place.

    (In data of older versions, the hash of its id.)

    `prompts`: the training rows also teach their prompts' tokens. `depths`: they also have those. Rows without a token
    to learn are left out.

    Raises:
        BadInputError: nothing to train on.
    """
    asked = table["content" if "content" in table.column_names else "id"]
    learnable = [i for i, mask in enumerate(table["loss_mask"]) if any(mask[FIRST_LEARNED:])]
    held = {i for i in learnable if is_held_out(asked[i], holdout)}
    training = [i for i in learnable if i not in held]
    if not training:
        raise BadInputError(
            f"no rows to train on: of {len(table)} rows {len(learnable)} have a response and {len(held)} of those are "
            "held out "
            f"(data.holdout {holdout}); use more prompts or a smaller data.holdout."
        )
    return Rows(table, training, prompts, depths), Rows(table, sorted(held))


def is_held_out(asked: str, holdout: float) -> bool:
    share = int.from_bytes(hashlib.sha256(asked.encode()).digest()[:8], "big") / 2**64
    return share < holdout


def token_counts(rows: Rows, vocab_size: int) -> Tensor:
    """Return how often each token is to be predicted in `rows`, `[V]`.

    Raises:
        IncompatibleError: a token id that the target does not have.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for position in range(len(rows)):
        labels = torch.tensor(rows[position]["labels"])
        learned = labels[labels != IGNORED]
        if int(learned.max()) >= vocab_size:
            raise IncompatibleError(
                f"the data holds token {int(learned.max())}, the target's vocabulary has {vocab_size}; distill it with "
                "this target."
            )
        counts += torch.bincount(learned, minlength=vocab_size)
    return counts


# ------------------------------------------------------------ what the target made of them


class Batches(Protocol):
    """A maker of a TargetBatch of what the collator gives."""

    target: Target

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch: ...


@dataclass
class OnlineBatches:
    """A maker of batches whose hidden states the frozen target computes in the loop.

    Attributes:
        precision: of the target's matrix products; None for its own dtype. Its output embedding always runs in its own.
    """

    target: Target
    taps: tuple[int, ...]
    precision: torch.dtype | None = None

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch:
        tokens = inputs["input_ids"]
        with torch.no_grad(), torch.autocast(tokens.device.type, self.precision, enabled=self.precision is not None):
            out = self.target.forward(tokens, taps=self.taps, logits=False)
        return TargetBatch(self.target, tokens, inputs["labels"] != IGNORED, out.hidden, out.last)


@dataclass
class CachedBatches:
    """A maker of batches whose hidden states are read from disk."""

    target: Target
    taps: tuple[int, ...]
    store: FeatureStore

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch:
        tokens = inputs["input_ids"]
        hidden, last = self._read([i for i in inputs["index"].tolist() if i != EMPTY])
        hidden = None if hidden is None else _fitted(hidden, tokens)
        return TargetBatch(self.target, tokens, inputs["labels"] != IGNORED, hidden, _fitted(last, tokens))

    def _read(self, indices: list[int]) -> tuple[Tensor | None, Tensor]:
        if indices:
            hidden, last = self.store.batch(indices)
        else:
            size, dtype = self.target.hidden_size, self.target.dtype
            hidden, last = torch.zeros(0, 0, len(self.taps), size, dtype=dtype), torch.zeros(0, 0, size, dtype=dtype)
        return (hidden if self.taps else None), last


def _fitted(stored: Tensor, tokens: Tensor) -> Tensor:
    """Return `stored` `[b, t, ...]` as `[B, T, ...]` on the device of `tokens`, zero where it has nothing."""
    fitted = stored.new_zeros(*tokens.shape, *stored.shape[2:], device=tokens.device)
    fitted[: stored.shape[0], : stored.shape[1]] = stored.to(tokens.device)
    return fitted
