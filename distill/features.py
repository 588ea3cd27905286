"""The target's hidden states, computed once and read from disk while training.

A store is a folder named after what decides its contents: target, sequences, taps, dtype. Another key is another
folder, so stale features are never read. Each shard holds whole sequences end to end and appears at once, so that an
interrupted build continues with the first shard that is missing.

Shapes: B rows, T positions, K taps, H hidden size, N tokens of a shard.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..ground import BadInputError, digests
from ..ground.disk import keeping, readable_bytes, require_space, writing
from ..ground.files import read_json, write_atomically
from ..ground.locks import locked
from ..ground.progress import progress
from ..ground.replacing import replacing
from ..targets import Target
from ..targets.fingerprint import digest_json

INDEX = "features.json"
SHARD_BYTES = 128_000_000  # one shard is built in memory; small enough for a laptop, big enough for few files
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """The place of each sequence: `shards` are ranges of sequences, `lengths` their tokens."""

    lengths: list[int]
    shards: list[range]

    @classmethod
    def of(cls, lengths: list[int], bytes_per_token: int, shard_bytes: int) -> _Layout:
        """Fill shards in order; a sequence that is bigger than a shard gets its own."""
        starts, size = [0], 0
        for i, length in enumerate(lengths):
            if size and (size + length) * bytes_per_token > shard_bytes:
                starts.append(i)
                size = 0
            size += length
        return cls(lengths, [range(a, b) for a, b in zip(starts, [*starts[1:], len(lengths)], strict=True)])

    def places(self) -> list[tuple[int, int]]:
        """Return the shard and the first token of every sequence."""
        return [
            (n, first)
            for n, r in enumerate(self.shards)
            for first in [0, *accumulate(self.lengths[r.start : r.stop - 1])]
        ]


class FeatureStore:
    """Hidden states of all sequences of a data set; index i is row i of that data set.

    Attributes:
        taps: HF `hidden_states` indices that are stored; () for none.
        num_bytes: size on disk.
    """

    def __init__(self, folder: str | Path, check: bool = True):
        """Open a finished store.

        Args:
            check: False opens one that was just built or checked, without reading all of it.

        Raises:
            BadInputError: there is none in `folder`, or files are missing, damaged or altered.
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
        self.taps: tuple[int, ...] = tuple(index["taps"])
        self.dtype = DTYPES[index["dtype"]]
        self.hidden_size = int(index["hidden_size"])
        self._layout = _Layout(index["lengths"], [range(a, b) for a, b in index["shards"]])
        self._places = self._layout.places()
        self._open: dict[int, Any] = {}

    @classmethod
    def build(
        cls,
        folder: str | Path,
        target: Target,
        dataset: Dataset,
        taps: Sequence[int],
        dtype: torch.dtype | str | None = None,
        console: Console | None = None,
        batch_size: int = 16,
        shard_bytes: int = SHARD_BYTES,
    ) -> FeatureStore:
        """Return the store for this target, data set (its `input_ids`) and taps under `folder`, opened or made.

        Args:
            dtype: of the stored states; None for the target's own.
            batch_size: sequences per pass of the target.
            shard_bytes: sequences are gathered into files of about this size.

        Raises:
            IncompatibleError: a tap the target does not have.
            BadInputError: no sequences, or too little space on the disk (known before any work).
        """
        if len(dataset) == 0:
            raise BadInputError("there are no sequences to compute hidden states for; the data set is empty.")
        target.check_taps(taps)
        builder = _Builder(Path(folder), target, dataset, tuple(taps), _dtype(dtype, target), shard_bytes)
        with locked(builder.folder), keeping(lambda: "The finished shards are kept there."), writing(builder.folder):
            builder.run(console, batch_size)
        return cls(builder.folder, check=False)

    def __len__(self) -> int:
        return len(self._layout.lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files, for a data loader's worker."""
        return {**self.__dict__, "_open": {}}

    @property
    def num_bytes(self) -> int:
        return sum(f.stat().st_size for f in self._files())

    def __repr__(self) -> str:
        size = readable_bytes(self.num_bytes)
        return f"FeatureStore({str(self.folder)!r}: {len(self)} sequences, taps {self.taps}, {self.dtype}, {size})"

    def batch(self, indices: Sequence[int], length: int | None = None) -> tuple[Tensor | None, Tensor]:
        """Return the states of the sequences `indices`: hidden `[B, T, K, H]` (None without taps) and last `[B, T, H]`.

        They are padded on the right with zeros.

        Args:
            length: T; None for the longest of them. Longer sequences are cut.
        """
        width = length if length is not None else max(self._layout.lengths[i] for i in indices)
        last = torch.zeros(len(indices), width, self.hidden_size, dtype=self.dtype)
        hidden = (
            torch.zeros(len(indices), width, len(self.taps), self.hidden_size, dtype=self.dtype) if self.taps else None
        )
        for row, index in enumerate(indices):
            shard, first = self._places[index]
            count = min(self._layout.lengths[index], width)
            last[row, :count] = self._slice(shard, "last")[first : first + count]
            if hidden is not None:
                hidden[row, :count] = self._slice(shard, "hidden")[first : first + count]
        return hidden, last

    def _slice(self, shard: int, name: str) -> Any:
        """Return a lazy view of one tensor: the file is mapped, and only what is asked for is read."""
        if shard not in self._open:
            file = _shard_file(self.folder, shard)
            try:
                self._open[shard] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise BadInputError(
                    f"{file}: damaged ({error}). Delete it and {INDEX} beside it, and build again; the other files are "
                    "kept."
                ) from error
        return self._open[shard].get_slice(name)

    def _files(self) -> list[Path]:
        return [_shard_file(self.folder, i) for i in range(len(self._layout.shards))]


class _Builder:
    """A maker of the store of one key."""

    def __init__(
        self,
        parent: Path,
        target: Target,
        dataset: Dataset,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        shard_bytes: int,
    ):
        self.target, self.taps, self.dtype = target, taps, dtype
        self.sequences = [torch.tensor(ids, dtype=torch.int32) for ids in dataset["input_ids"]]
        self.bytes_per_token = (len(taps) + 1) * target.hidden_size * dtype.itemsize
        self.layout = _Layout.of([len(s) for s in self.sequences], self.bytes_per_token, shard_bytes)
        self.key = self._key(shard_bytes)
        self.folder = parent / self.key[:16]

    def _key(self, shard_bytes: int) -> str:
        data = hashlib.sha256()
        for sequence in self.sequences:
            data.update(len(sequence).to_bytes(8, "little") + sequence.numpy().tobytes())
        return digest_json(
            [self.target.fingerprint().digest, data.hexdigest(), list(self.taps), str(self.dtype), shard_bytes]
        )

    def run(self, console: Console | None, batch_size: int) -> None:
        """Compute the shards that are missing or damaged; a finished store stays as it is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self._problems()
        if not found and digests.is_sealed(self.folder):
            return
        for line in found:
            _log.warning("%s: %s. It is computed again.", self.folder, line)
        missing = self._missing({line.partition(":")[0] for line in found})
        self._require_space(missing)
        todo = sum(len(self.layout.shards[i]) for i in missing)
        with progress(console, "hidden states", len(self.sequences), len(self.sequences) - todo) as advance:
            for shard in missing:
                self._write(shard, self._states(self.layout.shards[shard], batch_size))
                advance(len(self.layout.shards[shard]), "")
        write_atomically(self.folder / INDEX, json.dumps(self._index()))
        digests.add(self.folder, INDEX)
        digests.seal_grown(self.folder, [INDEX, *(_shard_file(self.folder, i).name for i in self._numbers())])

    def _numbers(self) -> range:
        return range(len(self.layout.shards))

    def _problems(self) -> list[str]:
        """Return what is not as it was written, one line each, with the file's name first."""
        if digests.is_sealed(self.folder):
            return digests.problems(self.folder)
        shards = [_shard_file(self.folder, i) for i in self._numbers()]
        return digests.problems_so_far(self.folder, [f.name for f in shards if f.exists()])

    def _missing(self, damaged: set[str]) -> list[int]:
        """Return the shards that were never finished, and those whose files are `damaged`."""
        kept = digests.listed(self.folder).keys() - damaged
        return [i for i in self._numbers() if _shard_file(self.folder, i).name not in kept]

    def _require_space(self, missing: list[int]) -> None:
        tokens = sum(self.layout.lengths[i] for shard in missing for i in self.layout.shards[shard])
        advice = "Free some, store bfloat16, or compute hidden states while training (data.features=online)."
        require_space(self.folder, tokens * self.bytes_per_token, advice)

    def _index(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "taps": self.taps,
            "dtype": str(self.dtype).removeprefix("torch."),
            "hidden_size": self.target.hidden_size,
            "lengths": self.layout.lengths,
            "shards": [[r.start, r.stop] for r in self.layout.shards],
        }

    @torch.inference_mode()
    def _states(self, members: range, batch_size: int) -> dict[str, Tensor]:
        """Return the states of these sequences, end to end: last `[N, H]` and, with taps, hidden `[N, K, H]`."""
        order = sorted(members, key=lambda i: self.layout.lengths[i])  # equal lengths side by side: little padding
        found: dict[int, tuple[Tensor | None, Tensor]] = {}
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            tokens = torch.nn.utils.rnn.pad_sequence([self.sequences[i].long() for i in batch], batch_first=True)
            out = self.target.forward(tokens.to(self.target.device), taps=self.taps, logits=False)
            for row, i in enumerate(batch):
                found[i] = (
                    None if out.hidden is None else self._kept(out.hidden[row], i),
                    self._kept(out.last[row], i),
                )
        states = {"last": torch.cat([found[i][1] for i in members])}
        hidden = [found[i][0] for i in members]
        return states | ({"hidden": torch.cat([h for h in hidden if h is not None])} if self.taps else {})

    def _kept(self, states: Tensor, sequence: int) -> Tensor:
        return states[: self.layout.lengths[sequence]].to("cpu", self.dtype, copy=True)

    def _write(self, shard: int, states: dict[str, Tensor]) -> None:
        file = _shard_file(self.folder, shard)
        with replacing(file) as temporary:
            save_file(states, temporary)
        digests.add(self.folder, file.name)


def _shard_file(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05d}.safetensors"


def _dtype(dtype: torch.dtype | str | None, target: Target) -> torch.dtype:
    name = str(dtype or target.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise BadInputError(f"features cannot be stored as {name!r}; expected one of {', '.join(DTYPES)}.")
    return DTYPES[name]
