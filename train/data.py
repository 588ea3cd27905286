"""From the distilled data set to the batches a drafter learns from.

Shapes: B rows, T tokens of the longest row, K taps, H target hidden size, V target vocabulary.

Global batches are the same rows whatever the number of processes, accumulation steps or loader workers: the order is a
function of (seed, epoch) alone, and the last batch of an epoch is filled with empty rows instead of repeated ones.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import datasets
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, get_worker_info

from ..common import BadInputError, IncompatibleError
from ..common.signals import let_parent_decide
from ..distill.engine_live_states import LiveStates
from ..distill.features import FeatureStore
from ..heads import Drafter, TargetBatch
from ..heads.losses import FIRST_LEARNED
from ..heads.session import padded
from ..targets import Target
from ..targets.images import StoredImages

IGNORED = -100  # the label of a token that is not predicted, as in transformers
EMPTY = -1  # the position of an empty row

_log = logging.getLogger(__name__)


class Rows(Dataset):
    """Rows of a distilled data set: `{"index", "input_ids", "labels"}`; `EMPTY` is a row with nothing to learn.

    Labels are the responses' tokens, with `prompts` all of them.
    """

    def __init__(self, table: datasets.Dataset, indices: Sequence[int], prompts: bool = False):
        self.table = table
        self.indices = list(indices)
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position == EMPTY:
            return {"index": EMPTY, "input_ids": [0] * FIRST_LEARNED, "labels": [IGNORED] * FIRST_LEARNED}
        index = self.indices[position]
        row = self.table[index]
        return self.labelled(index, row["input_ids"], row["loss_mask"])

    def labelled(self, index: int, tokens: list[int], mask: Sequence[int]) -> dict[str, Any]:
        """Return a row of these tokens; `mask` is 1 on the response's."""
        labels = [
            t if (m or self.prompts) and i >= FIRST_LEARNED else IGNORED
            for i, (t, m) in enumerate(zip(tokens, mask, strict=True))
        ]
        return {"index": index, "input_ids": tokens, "labels": labels}

    def members(self, position: int) -> list[int]:
        """Return the rows of the table at a position."""
        return [] if position == EMPTY else [self.indices[position]]

    def names(self, indices: Sequence[int]) -> str:
        """Return the ids of rows of the table, for a sentence."""
        ids = [str(self.table[i]["id"]) for i in indices if i != EMPTY]
        return f"the rows {', '.join(ids[:8])}" + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")

    def prompt(self, index: int) -> list[int]:
        """Return the tokens before the first response of row `index` of the table."""
        row = self.table[index]
        return list(row["input_ids"][: row["loss_mask"].index(1)])


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` `[B, T]`, padded on the right, and `index` `[B]`.

    Of packs `index` is that of each text, `[B, D]`, and there are their `lengths`, `[B, D]`.
    """
    if get_worker_info() is not None:  # a loader's worker, whose first work this is
        let_parent_decide()
    batch = {
        "input_ids": padded([row["input_ids"] for row in rows], "cpu"),
        "labels": padded([row["labels"] for row in rows], "cpu", IGNORED),
    }
    if "lengths" not in rows[0]:
        return {**batch, "index": torch.tensor([row["index"] for row in rows])}
    index, lengths = ([row[name] for row in rows] for name in ("index", "lengths"))
    return {**batch, "index": padded(index, "cpu", EMPTY), "lengths": padded(lengths, "cpu")}


Near = Callable[[Sequence[int]], Iterator[int]]


class Order(Sampler[int]):
    """An order of the positions of one epoch, filled up with `EMPTY` to whole global batches of `multiple` rows.

    `multiple` 1 leaves a short last batch as it is, and `seed` None the rows in order. `near` gets each position before
    it is read.
    """

    def __init__(self, length: int, multiple: int, seed: int | None, near: Near | None = None):
        self.length, self.multiple = length, multiple
        self.seed, self.epoch = seed, 0
        self.near = near

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.length // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        order += [EMPTY] * (len(self) - self.length)
        yield from order if self.near is None else self.near(order)


def split(table: datasets.Dataset, holdout: float, prompts: bool = False) -> tuple[Rows, Rows]:
    """Return (training rows, held-out rows): a hash of a row's question decides, whatever its id and place.

    `prompts`: the training rows also teach their prompts' tokens. Rows without a token to learn are left out.

    Raises BadInputError if there is nothing to train on.
    """
    contents = table["content"][:]
    learnable = [i for i, mask in enumerate(table["loss_mask"]) if any(mask[FIRST_LEARNED:])]
    held = {i for i in learnable if is_held_out(contents[i], holdout)}
    training = [i for i in learnable if i not in held]
    if len(learnable) < len(table):
        _log.info("%s of %s rows have no token to learn and are left out.", len(table) - len(learnable), len(table))
    if not training:
        raise BadInputError(
            f"no rows to train on: of {len(table)} rows {len(learnable)} have a response and {len(held)} of those are "
            f"held out (data.holdout {holdout}); use more prompts or a smaller data.holdout."
        )
    return Rows(table, training, prompts), Rows(table, sorted(held))


def check_answers(rows: Rows, drafter: Drafter) -> None:
    """Refuse rows that teach a drafter nothing, since all of their answers are too short; warn if most of them do."""
    least = drafter.learns_as.least_answer
    if least == 1:
        return
    masks = ([label != IGNORED for label in rows[position]["labels"]] for position in range(len(rows)))
    short = sum(max(len(list(run)) for learned, run in groupby(mask) if learned) < least for mask in masks)
    sentence = (
        f"{drafter.name} learns nothing from an answer of fewer than {least} tokens, and of {len(rows)} rows {short} "
        "have no longer one"
    )
    if short == len(rows):
        raise BadInputError(
            f"{sentence}. Take prompts with longer answers, a larger data.max_new_tokens, or data.learn_prompts=true."
        )
    if short > len(rows) / 2:
        _log.warning("%s.", sentence)


def is_held_out(content: str, holdout: float) -> bool:
    share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
    return share < holdout


def token_counts(rows: Rows, vocab_size: int) -> Tensor:
    """Return how often each token is to be predicted in `rows`, `[V]`; refuse those that the target lacks."""
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


class Batches(Protocol):
    """A maker of a TargetBatch from the collator's tensors."""

    target: Target

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch: ...

    def near(self, members: Callable[[int], list[int]]) -> Near | None:
        """Return the prefetch callback, which gets positions before they are read; None without one.

        `members` returns the rows of the table at a position.
        """
        return None


@dataclass
class OnlineBatches(Batches):
    """A maker of batches whose hidden states the frozen target computes in the loop.

    `precision` is that of its matrix products; None, and for its output embedding always, its own dtype. Rows with
    `images` are read one at a time.
    """

    target: Target
    taps: tuple[int, ...]
    precision: torch.dtype | None = None
    images: StoredImages | None = None

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch:
        tokens = inputs["input_ids"]
        with torch.no_grad(), torch.autocast(tokens.device.type, self.precision, enabled=self.precision is not None):
            hidden, last = self._states(inputs)
        return TargetBatch(self.target, tokens, inputs["labels"] != IGNORED, hidden, last)

    def _states(self, inputs: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        """Return the taps `[B, T, K, H]`, if there are any, and the last states `[B, T, H]` of a batch."""
        tokens = inputs["input_ids"]
        if self.images is None:
            out = self.target.forward(tokens, taps=self.taps, logits=False)
            return out.hidden, out.last
        each = [
            self.target.run(one, taps=self.taps, images=None if row == EMPTY else self.images.of(row))
            for one, row in zip(tokens.split(1), inputs["index"].tolist(), strict=True)
        ]
        hidden = [states for _, states in each if states is not None]
        return torch.cat(hidden) if hidden else None, torch.cat([last for last, _ in each])


@dataclass
class CachedBatches(Batches):
    """A maker of batches whose hidden states are read from disk, or were made by an engine meanwhile."""

    target: Target
    taps: tuple[int, ...]
    store: FeatureStore | LiveStates

    def near(self, members: Callable[[int], list[int]]) -> Near | None:
        live = self.store
        if not isinstance(live, LiveStates):
            return None
        return lambda order: live.near((position, members(position)) for position in order)

    def of(self, inputs: dict[str, Tensor]) -> TargetBatch:
        tokens = inputs["input_ids"]
        if indices := [i for i in inputs["index"].tolist() if i != EMPTY]:
            hidden, last = self.store.batch(indices)
        else:
            last = torch.zeros(0, 0, self.target.hidden_size, dtype=self.target.dtype)
            hidden = last[:, :, None].expand(-1, -1, len(self.taps), -1)
        hidden = None if hidden is None or not self.taps else _fitted(hidden, tokens)
        return TargetBatch(self.target, tokens, inputs["labels"] != IGNORED, hidden, _fitted(last, tokens))


def _fitted(stored: Tensor, tokens: Tensor) -> Tensor:
    """Return `stored` `[b, t, ...]` as `[B, T, ...]` on the device of `tokens`, zero where it has nothing."""
    fitted = stored.new_zeros(*tokens.shape, *stored.shape[2:], device=tokens.device)
    fitted[: stored.shape[0], : stored.shape[1]] = stored.to(tokens.device)
    return fitted
