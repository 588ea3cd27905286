"""How hidden states lie on the disk: which sequence is in which file, and in which precision.

Shapes: N tokens of a shard, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..common import BadInputError

INDEX = "features.json"
MOST_BYTES = 128_000_000  # one shard is built in memory; small enough for a laptop, big enough for few files
LEAST_BYTES = 4_000_000  # less is not worth a pass of its own
_SHARDS = 64  # that a store should have, for as many processes to share

_SCALE = "_scale"  # ends the name of what a tensor's vectors are multiplied by


def shard_file(folder: Path, number: int) -> Path:
    """Return where shard `number` of the store in `folder` lies."""
    return folder / f"states-{number:05d}.safetensors"


# ------------------------------------------------------------ places


@dataclass(frozen=True)
class ShardIndex:
    """The place of each sequence: `shards` are ranges of sequences, `lengths` their tokens."""

    lengths: list[int]
    shards: list[range]

    @classmethod
    def of(cls, lengths: list[int], bytes_per_token: int, shard_bytes: int) -> ShardIndex:
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

    def tokens(self, shards: Sequence[int]) -> int:
        """Return how many tokens these shards hold."""
        return sum(self.lengths[i] for shard in shards for i in self.shards[shard])


def shard_size(num_bytes: int) -> int:
    """Return how large the shards of a store of `num_bytes` should be, however many processes write them."""
    return min(MOST_BYTES, max(LEAST_BYTES, num_bytes // _SHARDS))


# ------------------------------------------------------------ precision


@dataclass(frozen=True)
class Precision:
    """How the numbers of a hidden state are kept.

    `float8_e4m3fn` has three bits after the leading one, and keeps each vector with a scale that makes its largest
    number 448, the largest there is. So a number x of a vector whose largest is m comes back within
    max(|x| / 16, m / 2^18): half a step of its own size, or of the smallest one.

    Attributes:
        name: torch's, as a recipe says it.
        has_scale: whether each vector is kept with its own scale, in float32.
    """

    name: str
    dtype: torch.dtype
    has_scale: bool = False

    def bytes_per_token(self, vectors: int, size: int) -> int:
        """Return the bytes of a token's `vectors`, of `size` numbers each."""
        return vectors * (size * self.dtype.itemsize + 4 * self.has_scale)

    def kept(self, name: str, states: Tensor) -> dict[str, Tensor]:
        """Return what a file keeps of `states` `[N, ..., H]`, by name."""
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
        """Return states as `dtype`, of what a file has under `names`."""
        if not self.has_scale:
            return parts[0].to(dtype)
        values, scale = parts
        return (values.float() * scale[..., None]).to(dtype)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", torch.float32),
        Precision("bfloat16", torch.bfloat16),
        Precision("float16", torch.float16),
        Precision("float8_e4m3fn", torch.float8_e4m3fn, has_scale=True),
    )
}


def precision_of(name: str, own: torch.dtype) -> Precision:
    """Return the precision of that name; `auto` is that of the target, `own`.

    Raises:
        BadInputError: there is none of that name.
    """
    name = (str(own) if name == "auto" else name).removeprefix("torch.")
    if name not in PRECISIONS:
        raise BadInputError(f"features cannot be stored as {name!r}; expected one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def stored_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the taps that are stored beside the last state, which is tap `num_layers`."""
    return tuple(dict.fromkeys(tap for tap in taps if tap != num_layers))
