"""The target's hidden states, computed once and read from disk while training.

A store is a folder named after what decides its contents: target, sequences, taps, precision. Another key is another
folder, so stale features are never read. All processes of a launch write it (`feature_making`); whole sequences lie end
to end in files that are mapped into memory (`shards`).

Shapes: B rows, T positions, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common import BadInputError, digests
from ..common.atomic import keeping, readable_bytes, writing
from ..common.locks import locked
from ..common.process_group import LaunchGroup
from ..common.safe_load import read_json
from ..targets import Target
from .feature_making import FeatureStoreBuilder
from .shards import INDEX, PRECISIONS, ShardIndex, precision_of, shard_file


class FeatureStore:
    """Hidden states of all sequences of a data set; index i is row i of that data set.

    Attributes:
        taps: HF `hidden_states` indices that a batch has; () for none.
        dtype: of what a batch holds. precision: in which it is stored.
        num_bytes: size on disk.
    """

    def __init__(self, folder: str | Path, taps: Sequence[int] | None = None, check: bool = True):
        """Open a finished store.

        Args:
            taps: those that a batch should have; None for those that are stored beside the last state.
            check: False opens one that was just built or checked, without reading all of it.

        Raises:
            BadInputError: there is none in `folder`, files are missing, damaged or altered, or a tap is not stored.
        """
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise BadInputError(
                f"{folder}: holds no finished feature store ({INDEX} is missing); build it again, the finished part is "
                "kept."
            )
        if check:
            digests.require_whole(self.folder, "Build it again: only what is damaged is computed anew.")
        index = read_json(self.folder / INDEX)
        self.taps: tuple[int, ...] = tuple(index["taps"] if taps is None else taps)
        self._columns = [_column(tap, index, self.folder) for tap in self.taps]
        self.precision = PRECISIONS[index["dtype"]]
        self.dtype: torch.dtype = getattr(torch, index.get("given_as", index["dtype"]))
        self.hidden_size = int(index["hidden_size"])
        self._layout = ShardIndex(index["lengths"], [range(a, b) for a, b in index["shards"]])
        self._places = self._layout.places()
        self._open: dict[int, Any] = {}

    @classmethod
    def build(
        cls,
        folder: str | Path,
        target: Target,
        dataset: Dataset,
        taps: Sequence[int],
        dtype: torch.dtype | str = "auto",
        console: Console | None = None,
        shard_bytes: int | None = None,
        group: LaunchGroup | None = None,
    ) -> FeatureStore:
        """Return the store for this target, data set (its `input_ids`) and taps under `folder`, opened or made.

        Args:
            dtype: of the stored states, a name of `shards.PRECISIONS`; "auto" for the target's own.
            shard_bytes: sequences are gathered into files of about this size; None for one that suits all of them.
            group: the processes that make it, all of which call this together; None for this one alone.

        Raises:
            IncompatibleError: a tap the target does not have.
            BadInputError: no sequences, or too little space on the disk (known before any work).
            PeerError: another process failed; it says why.
        """
        if len(dataset) == 0:
            raise BadInputError("there are no sequences to compute hidden states for; the data set is empty.")
        target.check_taps(taps)
        group = group or LaunchGroup()
        precision = precision_of(str(dtype), target.dtype)
        making = FeatureStoreBuilder.of(Path(folder), target, dataset, taps, precision, shard_bytes)
        alone = locked(making.folder) if group.is_main else nullcontext()
        with alone, keeping(lambda: "The finished shards are kept there."), writing(making.folder):
            making.run(group, console)
        return cls(making.folder, taps, check=False)

    def __len__(self) -> int:
        return len(self._layout.lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files, for a data loader's worker."""
        return {**self.__dict__, "_open": {}}

    @property
    def num_bytes(self) -> int:
        return sum(shard_file(self.folder, i).stat().st_size for i in range(len(self._layout.shards)))

    def __repr__(self) -> str:
        size, kind = readable_bytes(self.num_bytes), self.precision.name
        return f"FeatureStore({str(self.folder)!r}: {len(self)} sequences, taps {self.taps}, {kind}, {size})"

    def batch(self, indices: Sequence[int], length: int | None = None) -> tuple[Tensor | None, Tensor]:
        """Return the states of the sequences `indices`: hidden `[B, T, K, H]` (None without taps) and last `[B, T, H]`.

        They are padded on the right with zeros.

        Args:
            length: T; None for the longest of them. Longer sequences are cut.
        """
        width = length if length is not None else max(self._layout.lengths[i] for i in indices)
        last = torch.zeros(len(indices), width, self.hidden_size, dtype=self.dtype)
        hidden = last.new_zeros(len(indices), width, len(self.taps), self.hidden_size) if self.taps else None
        for row, index in enumerate(indices):
            shard, first = self._places[index]
            count = min(self._layout.lengths[index], width)
            last[row, :count] = self._read(shard, "last", slice(first, first + count))
            if hidden is not None:
                self._fill(hidden[row, :count], last[row, :count], shard, first)
        return hidden, last

    def _fill(self, hidden: Tensor, last: Tensor, shard: int, first: int) -> None:
        """Write the taps of a sequence into `hidden` `[n, K, H]`; `last` `[n, H]` is its last state."""
        stored = None
        for k, column in enumerate(self._columns):
            if column is None:
                hidden[:, k] = last
                continue
            stored = self._read(shard, "hidden", slice(first, first + len(hidden))) if stored is None else stored
            hidden[:, k] = stored[:, column]

    def _read(self, shard: int, name: str, tokens: slice) -> Tensor:
        """Return the states of these tokens of a shard: the file is mapped, and only what is asked for is read."""
        file = self._file(shard)
        return self.precision.read([file.get_slice(part)[tokens] for part in self.precision.names(name)], self.dtype)

    def _file(self, shard: int) -> Any:
        if shard not in self._open:
            file = shard_file(self.folder, shard)
            try:
                self._open[shard] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise BadInputError(
                    f"{file}: damaged ({error}). Delete it and {INDEX} beside it, and build again; the other files are "
                    "kept."
                ) from error
        return self._open[shard]


def _column(tap: int, index: dict[str, Any], folder: Path) -> int | None:
    """Return which of the stored hidden states a tap is; None for the last one."""
    if tap in index["taps"]:
        return list(index["taps"]).index(tap)
    if tap == index.get("num_layers"):
        return None
    raise BadInputError(f"{folder}: holds hidden_states{index['taps']} and the last, not [{tap}]; build another store.")
