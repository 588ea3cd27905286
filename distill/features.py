"""The target's hidden states, computed once and read from disk while training.

A store is a folder named after what decides its contents: target, sequences, taps, precision. Another key is another
folder, so stale features are never read.

    states-00003.safetensors   a shard: whole sequences, end to end, mapped into memory when they are read
    SHA256SUMS                 a line for each shard, once it is whole; sealed at the end
    .00004.claim               a lock: some process is at work on that shard
    features.json              the index: taps, precision, which sequence is in which shard; written last

Damaged shards go, and any process of a launch that is free computes missing ones. A shard's contents depend on its
sequences alone, so that any number of processes leaves the same files, and a run that was killed goes on.

Shapes: B rows, T positions, N tokens of a shard, K taps, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..common import BadInputError, digests
from ..common.atomic import keeping, readable_bytes, replacing, require_space, write_atomically, writing
from ..common.file_process_group import LaunchGroup
from ..common.locks import claiming, locked
from ..common.progress import Advance, progress
from ..common.runtime import installed_version
from ..common.untrusted_files import read_json
from ..targets import Target
from ..targets.documents import Documents
from ..targets.fingerprint import digest_json
from ..targets.images import StoredImages
from .journal import claim_of, list_file
from .launch import one_leads

INDEX = "features.json"
SCHEMA_VERSION = 1
AT_ONCE = 16  # sequences of a pass of the target
MOST_BYTES = 128_000_000  # one shard is built in memory; small enough for a laptop, big enough for few files
LEAST_BYTES = 4_000_000  # less is not worth a pass of its own
_SHARDS = 64  # that a store should have, for as many processes to share

_SCALE = "_scale"  # ends the name of the factors of a tensor's vectors

_log = logging.getLogger(__name__)


def shard_file(folder: Path, number: int) -> Path:
    """Return where shard `number` of the store in `folder` lies."""
    return folder / f"states-{number:05d}.safetensors"


def shards_of(lengths: Sequence[int], bytes_per_token: int, shard_bytes: int) -> list[range]:
    """Return ranges of sequences of these lengths, filled in order; one that is bigger than a shard gets its own."""
    starts, size = [0], 0
    for i, length in enumerate(lengths):
        if size and (size + length) * bytes_per_token > shard_bytes:
            starts.append(i)
            size = 0
        size += length
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def shard_size(num_bytes: int) -> int:
    """Return the size of the shards of a store of `num_bytes`, however many processes write them."""
    return min(MOST_BYTES, max(LEAST_BYTES, num_bytes // _SHARDS))


@dataclass(frozen=True)
class Precision:
    """The format in which the numbers of a hidden state are kept.

    `float8_e4m3fn` has three bits after the leading one, and keeps each vector with a scale that makes its largest
    number 448, the largest there is. So a number x of a vector whose largest is m comes back within
    max(|x| / 16, m / 2^18): half a step of its own size, or of the smallest one.
    """

    name: str
    dtype: torch.dtype
    has_scale: bool = False

    def bytes_per_token(self, vectors: int, size: int) -> int:
        """Return the bytes of a token's `vectors`, of `size` numbers each."""
        return vectors * (size * self.dtype.itemsize + 4 * self.has_scale)

    def kept(self, name: str, states: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a file keeps of `states` `[N, ..., H]`, by name."""
        if not self.has_scale:
            return {name: states.to("cpu", self.dtype, copy=True)}
        values = states.float()
        largest = values.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / torch.finfo(self.dtype).max, 1.0)
        return {name: (values / scale).to(self.dtype).cpu(), name + _SCALE: scale[..., 0].cpu()}

    def names(self, name: str) -> list[str]:
        """Return the names under which a file keeps a tensor."""
        return [name, name + _SCALE] if self.has_scale else [name]

    def read(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return states as `dtype`, from the tensors that a file has under `names`."""
        if not self.has_scale:
            return parts[0].to(dtype)
        values, scale = parts
        return (values.float() * scale[..., None]).to(dtype)


PRECISIONS = {name: Precision(name, getattr(torch, name)) for name in ("float32", "bfloat16", "float16")}
PRECISIONS["float8_e4m3fn"] = Precision("float8_e4m3fn", torch.float8_e4m3fn, has_scale=True)


def precision_of(name: str, own: torch.dtype) -> Precision:
    """Return the precision of that name; `auto` is that of the target, `own`. BadInputError: there is none."""
    name = (str(own) if name == "auto" else name).removeprefix("torch.")
    if name not in PRECISIONS:
        raise BadInputError(f"features cannot be stored as {name!r}; expected one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def stored_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the taps that are stored beside the last state, which is tap `num_layers`."""
    return tuple(dict.fromkeys(tap for tap in taps if tap != num_layers))


class StatesSource(Protocol):
    """An engine that makes hidden states in the target's place, once `running` has checked it (`engine_states`)."""

    @property
    def identity(self) -> list[Any]: ...
    def running(self, probes: Sequence[Sequence[int]]) -> AbstractContextManager[Any]: ...
    def of(self, rows: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Tensor | None, Tensor]]: ...


@dataclass(frozen=True)
class TargetPasses:
    """Hidden states by passes of a loaded target, `AT_ONCE` rows at a time; `taps` are without the last state.

    Rows with `images` are read one at a time.
    """

    target: Target
    taps: tuple[int, ...]
    images: StoredImages | None = None

    @torch.inference_mode()
    def of(self, rows: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Yield number, taps `[T, K, H]` (None without taps) and last state `[T, H]` of each row."""
        numbers, lengths = list(rows), [[len(row)] for row in rows.values()]
        at_once = AT_ONCE if self.images is None else 1
        for part in Documents(lengths, max(lengths)[0]).passes(self.target.device, most=at_once):
            batch = [numbers[n] for n in part]
            tokens = [torch.from_numpy(rows[i]).long() for i in batch]
            padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(self.target.device)
            images = None if self.images is None else self.images.of(batch[0])
            out = self.target.forward(padded, taps=self.taps, logits=False, images=images)
            for row, i in enumerate(batch):
                count = len(rows[i])
                yield i, None if out.hidden is None else out.hidden[row, :count], out.last[row, :count]


@dataclass(frozen=True)
class FeatureStoreBuilder:
    """A store in the making.

    Attributes:
        sequences: lie on the disk until they are read. lengths: their tokens.
        taps: without the last state.
        shards: ranges of sequences.
        engine: makes the states in the target's place, if there is one.
    """

    folder: Path
    key: str
    target: Target
    sequences: Dataset
    taps: tuple[int, ...]
    precision: Precision
    lengths: list[int]
    shards: list[range]
    engine: StatesSource | None = None
    images: StoredImages | None = None

    def run(self, group: LaunchGroup, console: Console | None) -> None:
        """Compute the shards that are missing or damaged, with the other processes; a finished store stays as it is."""
        topic = f"features-{self.key[:8]}"
        opened = json.loads(group.on_main(f"{topic}-opened", self._open))
        if opened["key"] != self.key:
            raise BadInputError(
                f"process {group.rank} has other responses, or another target, than process 0: all machines must see "
                "the same files."
            )
        if opened["is_finished"]:
            return
        missing = opened["missing"]
        total, left = len(self.lengths), sum(len(self.shards[i]) for i in missing)
        one_computes = self.target.sharded or self.engine is not None
        with one_leads(group, self.target), progress(console, "hidden states", total, total - left) as advance:
            if missing and (not one_computes or group.is_main):
                running = self.engine and self.engine.running(probes_of(self.sequences, self.lengths))
                with running or nullcontext():
                    self._compute_all(missing, LaunchGroup() if one_computes else group, advance)
        group.barrier(f"{topic}-computed")
        group.on_main(f"{topic}-sealed", self._seal)

    def _open(self) -> str:
        """Return the work that is left, once it is known that there is room for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files, is_sealed = self._files(), digests.is_sealed(self.folder)
        there = [file.name for file in files if file.exists()]
        problems = digests.problems(self.folder) if is_sealed else digests.problems_so_far(self.folder, there)
        is_finished = is_sealed and not problems
        for line in problems:
            _log.warning("%s: %s. It is computed again.", self.folder, line)
        kept = digests.listed(self.folder).keys() - {line.partition(":")[0] for line in problems}
        missing = [i for i, file in enumerate(files) if file.name not in kept and not is_finished]
        self._require_space(missing)
        for shard in missing:  # from now on one that is there is whole
            files[shard].unlink(missing_ok=True)
        return json.dumps({"key": self.key, "is_finished": is_finished, "missing": missing})

    def _files(self) -> list[Path]:
        return [shard_file(self.folder, i) for i in range(len(self.shards))]

    def _require_space(self, missing: list[int]) -> None:
        vectors, size = len(self.taps) + 1, self.target.hidden_size
        tokens = sum(self.lengths[i] for shard in missing for i in self.shards[shard])
        needed = tokens * self.precision.bytes_per_token(vectors, size)
        smaller = {p.name: tokens * p.bytes_per_token(vectors, size) for p in PRECISIONS.values()}
        lines = [f"{name} takes {readable_bytes(count)}" for name, count in smaller.items() if count < needed]
        less = f"store less (data.features_dtype: {', '.join(lines)}), " if lines else ""
        advice = f"Free some, {less}or compute hidden states while training (data.features=online)."
        require_space(self.folder, needed, advice)

    def _seal(self) -> str:
        given_as = self.target.dtype if self.precision.has_scale else self.precision.dtype
        index = {
            "schema_version": SCHEMA_VERSION,
            "outrider_version": installed_version("outrider"),
            "key": self.key,
            "taps": self.taps,
            "num_layers": self.target.num_layers,
            "dtype": self.precision.name,
            "given_as": str(given_as).removeprefix("torch."),
            "hidden_size": self.target.hidden_size,
            "lengths": self.lengths,
            "shards": [[r.start, r.stop] for r in self.shards],
        }
        write_atomically(self.folder / INDEX, json.dumps(index))
        list_file(self.folder, INDEX)
        digests.seal_grown(self.folder, [INDEX, *(file.name for file in self._files())])
        for claim in self.folder.glob(".*.claim"):  # of processes that were killed
            with claiming(claim):
                pass
        return ""

    def _compute_all(self, missing: list[int], group: LaunchGroup, advance: Advance) -> None:
        """Compute shards that no other process computes, until all `missing` ones are there."""
        left = set(missing)
        for shard in group.take(missing, self._has, lambda n: claim_of(self.folder, n)):
            self._compute(shard)
            if group.is_main:  # it shows the progress of all
                ended = {n for n in left if self._has(n)}
                left -= ended
                note = f"{group.size} processes" if group.size > 1 else ""
                advance(sum(len(self.shards[i]) for i in ended), note)

    def _has(self, shard: int) -> bool:
        return shard_file(self.folder, shard).exists()

    def _compute(self, shard: int) -> None:
        file, states = shard_file(self.folder, shard), self._states(self.shards[shard])
        with replacing(file, beside=True) as temporary:
            save_file(states, temporary)
        list_file(self.folder, file.name)

    def _states(self, members: range) -> dict[str, Tensor]:
        """Return the states of these sequences, end to end: last `[N, H]` and, with taps, hidden `[N, K, H]`."""
        rows = dict(zip(members, rows_of(self.sequences, members), strict=True))
        source = self.engine or TargetPasses(self.target, self.taps, self.images)
        states: dict[int, dict[str, Tensor]] = {}
        for i, hidden, last in source.of(rows):
            states[i] = self.precision.kept("last", last)
            if hidden is not None:
                states[i] |= self.precision.kept("hidden", hidden)
        return {name: torch.cat([states[i][name] for i in members]) for name in states[members.start]}


def probes_of(sequences: Dataset, lengths: Sequence[int]) -> list[list[int]]:
    """Return the longest row, and the first ones, by which an engine is checked."""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    chosen = dict.fromkeys([longest, *range(min(8, len(lengths)))])
    return [tokens.tolist() for i in chosen for tokens in rows_of(sequences, range(i, i + 1))]


def rows_of(sequences: Dataset, members: range) -> Iterator[np.ndarray]:
    """Yield the tokens of these rows, int32 `[T]` each."""
    for chunk in sequences[members.start : members.stop]["input_ids"].chunks:
        for row in chunk:
            yield row.values.to_numpy(zero_copy_only=False).astype(np.int32)


def digest_of(sequences: Dataset, at_once: int = 1000) -> tuple[str, list[int]]:
    """Return the digest of all sequences, and their lengths."""
    data, lengths = hashlib.sha256(), []
    for begin in range(0, len(sequences), at_once):
        for tokens in rows_of(sequences, range(begin, min(begin + at_once, len(sequences)))):
            data.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            lengths.append(len(tokens))
    return data.hexdigest(), lengths


class FeatureStore:
    """Hidden states of all sequences of a data set; index i is row i of that data set.

    Attributes:
        taps: HF `hidden_states` indices that a batch has; () for none.
        dtype: of a batch. precision: in which it is stored.
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
        if (schema := index.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
            writer = index.get("outrider_version")
            raise BadInputError(
                f"{self.folder / INDEX}: schema version {schema!r}, written by Outrider {writer}; this one reads "
                f"{SCHEMA_VERSION}. Use that Outrider, or delete the store, which is then built again."
            )
        self.taps: tuple[int, ...] = tuple(index["taps"] if taps is None else taps)
        self._columns = [_column(tap, index, self.folder) for tap in self.taps]
        self.precision = PRECISIONS[index["dtype"]]
        self.dtype: torch.dtype = getattr(torch, index.get("given_as", index["dtype"]))
        self.hidden_size = int(index["hidden_size"])
        self._lengths: list[int] = index["lengths"]
        self._places: list[tuple[int, int]] = []  # of each sequence, its shard and its first token there
        for number, (begin, end) in enumerate(index["shards"]):
            firsts = accumulate(self._lengths[begin : end - 1], initial=0)
            self._places += [(number, first) for first in firsts]
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
        engine: StatesSource | None = None,
        images: StoredImages | None = None,
    ) -> FeatureStore:
        """Return the store for this target, data set (its `input_ids`) and taps under `folder`, opened or made.

        Args:
            dtype: of the stored states, a name of `PRECISIONS`; "auto" for the target's own.
            shard_bytes: sequences are gathered into files of about this size; None for one that suits all of them.
            group: the processes that make it, all of which call this together; None for this one alone.
            engine: makes the states in the target's place, for the first process.
            images: those of the data set's rows; None if they have none.

        Raises:
            IncompatibleError: a tap the target does not have, or an engine's states that are not the target's.
            BadInputError: no sequences, or too little space on the disk (known before any work).
            PeerError: another process failed; the message is its own.
        """
        if len(dataset) == 0:
            raise BadInputError("there are no sequences to compute hidden states for; the data set is empty.")
        target.check_taps(taps)
        group = group or LaunchGroup()
        stored, precision = stored_taps(taps, target.num_layers), precision_of(str(dtype), target.dtype)
        sequences = dataset.select_columns(["input_ids"]).with_format("arrow")
        digest, lengths = digest_of(sequences)
        bytes_per_token = precision.bytes_per_token(len(stored) + 1, target.hidden_size)
        shard_bytes = shard_bytes or shard_size(sum(lengths) * bytes_per_token)
        if engine is None:
            identity = target.fingerprint().digest
        else:  # of a target whose files may be too large for each process to read
            identity = group.on_main(f"features-target-{digest[:8]}", lambda: target.fingerprint().digest)
        decides = [identity, digest, list(stored), str(precision.dtype), shard_bytes]
        decides += [] if images is None else [images.identity]
        key = digest_json(decides + ([] if engine is None else engine.identity))
        shards, place = shards_of(lengths, bytes_per_token, shard_bytes), Path(folder) / key[:16]
        builder = FeatureStoreBuilder(place, key, target, sequences, stored, precision, lengths, shards, engine, images)
        alone = locked(place) if group.is_main else nullcontext()
        with alone, keeping(lambda: "The finished shards are kept there."), writing(place):
            builder.run(group, console)
        return cls(place, taps, check=False)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files, for a data loader's worker."""
        return {**self.__dict__, "_open": {}}

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("states-*"))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """Return the states of the sequences `indices`: hidden `[B, T, K, H]` (None without taps) and last `[B, T, H]`.

        They are padded on the right with zeros.
        """
        width = max(self._lengths[i] for i in indices)
        last = torch.zeros(len(indices), width, self.hidden_size, dtype=self.dtype)
        hidden = last.new_zeros(len(indices), width, len(self.taps), self.hidden_size) if self.taps else None
        for row, index in enumerate(indices):
            shard, first = self._places[index]
            count = self._lengths[index]
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
        """Return the states of these tokens of a shard: the file is mapped, and only these are read."""
        if shard not in self._open:
            path = shard_file(self.folder, shard)
            try:
                self._open[shard] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise BadInputError(
                    f"{path}: damaged ({error}). Delete it and {INDEX} beside it, and build again; the other files are "
                    "kept."
                ) from error
        file = self._open[shard]
        return self.precision.read([file.get_slice(part)[tokens] for part in self.precision.names(name)], self.dtype)


def _column(tap: int, index: dict[str, Any], folder: Path) -> int | None:
    """Return the place of a tap among the stored hidden states; None for the last state."""
    if tap in index["taps"]:
        return list(index["taps"]).index(tap)
    if tap == index.get("num_layers"):
        return None
    raise BadInputError(f"{folder}: holds hidden_states{index['taps']} and the last, not [{tap}]; build another store.")
