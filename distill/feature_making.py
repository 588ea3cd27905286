"""Making a store of hidden states: by all processes of a launch, shard by shard.

The main process looks at what is there. What is damaged goes; what is missing is claimed and computed by whoever is
free; the main process writes the index and seals the list of digests. A shard's contents depend on its sequences alone,
so that any number of processes leaves the same files, and a run that was killed continues with the shards that are
missing.

    states-00003.safetensors   whole sequences, end to end
    SHA256SUMS                 a line for each shard, once it is whole; sealed at the end
    .00004.claim               a lock: some process is at work on that shard
    features.json              what the store holds; written last

Shapes: N tokens of a shard, K taps, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from ..common import BadInputError, digests
from ..common.atomic import readable_bytes, replacing, require_space, write_atomically
from ..common.locks import claiming
from ..common.process_group import LaunchGroup
from ..common.progress import progress
from ..targets import Target
from ..targets.fingerprint import digest_json
from .launched import one_leads
from .shards import INDEX, PRECISIONS, Precision, ShardIndex, shard_file, shard_size, stored_taps

AT_ONCE = 16  # sequences of a pass of the target

_log = logging.getLogger(__name__)

Tokens = np.ndarray  # int32 [T]


@dataclass(frozen=True)
class FeatureStoreBuilder:
    """A store in the making.

    Attributes:
        folder: of its key.
        sequences: whose `input_ids` come as Arrow, which lie on the disk until they are asked for.
        taps: that are stored beside the last state.
    """

    folder: Path
    key: str
    target: Target
    sequences: Dataset
    taps: tuple[int, ...]
    precision: Precision
    layout: ShardIndex

    @classmethod
    def of(
        cls,
        parent: Path,
        target: Target,
        dataset: Dataset,
        taps: Sequence[int],
        precision: Precision,
        shard_bytes: int | None,
    ) -> FeatureStoreBuilder:
        """Return the making of the store under `parent` that these decide."""
        stored = stored_taps(taps, target.num_layers)
        sequences = dataset.select_columns(["input_ids"]).with_format("arrow")
        digest, lengths = _digest(sequences)
        bytes_per_token = precision.bytes_per_token(len(stored) + 1, target.hidden_size)
        shard_bytes = shard_bytes or shard_size(sum(lengths) * bytes_per_token)
        decides = [target.fingerprint().digest, digest, list(stored), str(precision.dtype), shard_bytes]
        key, layout = digest_json(decides), ShardIndex.of(lengths, bytes_per_token, shard_bytes)
        return cls(parent / key[:16], key, target, sequences, stored, precision, layout)

    def run(self, group: LaunchGroup, console: Console | None) -> None:
        """Compute the shards that are missing or damaged, with the other processes; a finished store stays as it is."""
        topic = f"features-{self.key[:8]}"
        said = json.loads(group.on_main(f"{topic}-opened", self._open))
        if said["key"] != self.key:
            raise BadInputError(
                f"process {group.rank} has other responses, or another target, than process 0: all machines must see "
                "the same files."
            )
        if said["is_finished"]:
            return
        missing = said["missing"]
        ready = len(self.layout.lengths) - self._sequences(missing)
        with (
            one_leads(group, self.target),
            progress(console, "hidden states", len(self.layout.lengths), ready) as advance,
        ):
            if not self.target.sharded or group.is_main:
                self._compute_all(missing, LaunchGroup() if self.target.sharded else group, advance)
        group.barrier(f"{topic}-computed")
        group.on_main(f"{topic}-sealed", self._seal)

    # ------------------------------------------------------------ the main process alone

    def _open(self) -> str:
        """Return what is left to do, once it is known that there is room for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self._problems()
        is_finished = not found and digests.is_sealed(self.folder)
        for line in found:
            _log.warning("%s: %s. It is computed again.", self.folder, line)
        missing = [] if is_finished else self._missing({line.partition(":")[0] for line in found})
        self._require_space(missing)
        for shard in missing:  # from now on one that is there is whole
            shard_file(self.folder, shard).unlink(missing_ok=True)
        return json.dumps({"key": self.key, "is_finished": is_finished, "missing": missing})

    def _problems(self) -> list[str]:
        """Return what is not as it was written, one line each, with the file's name first."""
        if digests.is_sealed(self.folder):
            return digests.problems(self.folder)
        shards = [shard_file(self.folder, i) for i in range(len(self.layout.shards))]
        return digests.problems_so_far(self.folder, [f.name for f in shards if f.exists()])

    def _missing(self, damaged: set[str]) -> list[int]:
        """Return the shards that were never finished, and those whose files are `damaged`."""
        kept = digests.listed(self.folder).keys() - damaged
        return [i for i in range(len(self.layout.shards)) if shard_file(self.folder, i).name not in kept]

    def _require_space(self, missing: list[int]) -> None:
        tokens, vectors, size = self.layout.tokens(missing), len(self.taps) + 1, self.target.hidden_size
        needed = tokens * self.precision.bytes_per_token(vectors, size)
        smaller = {p.name: tokens * p.bytes_per_token(vectors, size) for p in PRECISIONS.values()}
        lines = [f"{name} takes {readable_bytes(count)}" for name, count in smaller.items() if count < needed]
        less = f"store less (data.features_dtype: {', '.join(lines)}), " if lines else ""
        advice = f"Free some, {less}or compute hidden states while training (data.features=online)."
        require_space(self.folder, needed, advice)

    def _seal(self) -> str:
        write_atomically(self.folder / INDEX, json.dumps(self._index()))
        self._note(INDEX)
        names = [shard_file(self.folder, i).name for i in range(len(self.layout.shards))]
        digests.seal_grown(self.folder, [INDEX, *names])
        for claim in self.folder.glob(".*.claim"):  # of processes that were killed
            with claiming(claim):
                pass
        return ""

    def _index(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "taps": self.taps,
            "num_layers": self.target.num_layers,
            "dtype": self.precision.name,
            "given_as": self._given_as(),
            "hidden_size": self.target.hidden_size,
            "lengths": self.layout.lengths,
            "shards": [[r.start, r.stop] for r in self.layout.shards],
        }

    def _given_as(self) -> str:
        dtype = self.target.dtype if self.precision.has_scale else self.precision.dtype
        return str(dtype).removeprefix("torch.")

    # ------------------------------------------------------------ every process

    def _compute_all(self, missing: list[int], group: LaunchGroup, advance: Callable[[int, str], None]) -> None:
        """Compute shards that nobody else computes, until all `missing` ones are there."""
        left = set(missing)
        for shard in group.take(missing, self._has, lambda n: claiming(self.folder / f".{n:05d}.claim")):
            self._compute(shard)
            if group.is_main:  # who shows what all have done
                ended = {n for n in left if self._has(n)}
                left -= ended
                advance(self._sequences(ended), f"{group.size} processes" if group.size > 1 else "")

    def _sequences(self, shards: Sequence[int] | set[int]) -> int:
        return sum(len(self.layout.shards[i]) for i in shards)

    def _has(self, shard: int) -> bool:
        return shard_file(self.folder, shard).exists()

    def _compute(self, shard: int) -> None:
        file, states = shard_file(self.folder, shard), self._states(self.layout.shards[shard])
        with replacing(file) as temporary:
            save_file(states, temporary)
        self._note(file.name)

    def _note(self, name: str) -> None:
        """Add a file to the list of digests, which several processes write."""
        with claiming(self.folder / ".list.claim", wait=-1):
            digests.add(self.folder, name)

    @torch.inference_mode()
    def _states(self, members: range) -> dict[str, Tensor]:
        """Return what a file keeps of these sequences, end to end: last `[N, H]` and, with taps, hidden `[N, K, H]`."""
        tokens_of = dict(zip(members, _rows(self.sequences, members), strict=True))
        order = sorted(members, key=lambda i: len(tokens_of[i]))  # equal lengths side by side: little padding
        found: dict[int, dict[str, Tensor]] = {}
        for begin in range(0, len(order), AT_ONCE):
            batch = order[begin : begin + AT_ONCE]
            rows = [torch.from_numpy(tokens_of[i]).long() for i in batch]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.target.device)
            out = self.target.forward(tokens, taps=self.taps, logits=False)
            for row, i in enumerate(batch):
                count = len(tokens_of[i])
                found[i] = self.precision.kept("last", out.last[row, :count])
                if out.hidden is not None:
                    found[i] |= self.precision.kept("hidden", out.hidden[row, :count])
        return {name: torch.cat([found[i][name] for i in members]) for name in found[members.start]}


def _rows(sequences: Dataset, members: range) -> Iterator[Tokens]:
    """Yield the tokens of these rows, int32 `[T]` each."""
    for chunk in sequences[members.start : members.stop]["input_ids"].chunks:
        for row in chunk:
            yield row.values.to_numpy(zero_copy_only=False).astype(np.int32)


def _digest(sequences: Dataset, at_once: int = 1000) -> tuple[str, list[int]]:
    """Return the digest of all sequences, and their lengths."""
    data, lengths = hashlib.sha256(), []
    for begin in range(0, len(sequences), at_once):
        for tokens in _rows(sequences, range(begin, min(begin + at_once, len(sequences)))):
            data.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            lengths.append(len(tokens))
    return data.hexdigest(), lengths
