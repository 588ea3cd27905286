"""A key/value cache in which every row has its own length.

Shapes: B rows, H heads, L slots (the longest sequence plus one round), D head size, Q new tokens per row.

The slots of row b below `lengths[b]` are committed. A forward pass writes Q new entries behind them; whether they stay
is decided afterwards, by `advance`: what is not committed is simply overwritten by the next pass. Rejecting draft tokens
therefore costs nothing, and ragged batches need no padding on the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, `[B, H, L, D]`, allocated when the first entry shows their sizes."""

    is_sliding = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros(self.cache.batch_size, heads, self.cache.max_length, size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        used = self.cache.used
        return self.keys[:, :, :used], self.values[:, :, :used]

    def _write(self, store: Tensor, new: Tensor) -> None:
        if self.cache.start is not None:
            store[:, :, self.cache.start : self.cache.start + new.shape[2]] = new
        else:
            store[self.cache.rows, :, self.cache.slots] = new.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.used, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return self.cache.max_length

    def select(self, rows: list[int]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if t is not None)


@dataclass(frozen=True)
class Counts:
    """One number per row, on the device and on the host: the round reads it back anyway, so nobody needs to again."""

    tensor: Tensor  # [B]
    values: list[int]

    @classmethod
    def of(cls, values: list[int], device: torch.device | str) -> Counts:
        return cls(torch.tensor(values, dtype=torch.long, device=device), values)

    def select(self, rows: list[int]) -> Counts:
        return Counts(self.tensor[rows], [self.values[r] for r in rows])


class RaggedCache(Cache):
    """Preallocated cache for `num_layers` layers of a `transformers` model.

    Attributes:
        lengths: committed entries per row, `[B]` (int64, on the device).
        host_lengths: the same on the host.
    """

    def __init__(self, num_layers: int, batch_size: int, max_length: int, device: torch.device | str):
        self.max_length = max_length
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.host_lengths = [0] * batch_size
        self.used = 0
        self.start: int | None = 0
        self.slots = self.lengths[:, None]
        self._stores = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._stores))

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def longest(self) -> int:
        return max(self.host_lengths)

    def place(self, num_new: int, offset: int = 0) -> Tensor:
        """Say where the next pass writes: `num_new` slots from `lengths + offset` on. Returns the slots, `[B, Q]`."""
        start = self.longest + offset
        self.used = start + num_new
        if self.used > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} entries per row, {self.used} are needed")
        self.start = start if self.longest == min(self.host_lengths) else None
        self.rows = torch.arange(self.batch_size, device=self.lengths.device)[:, None]
        self.slots = self.lengths[:, None] + torch.arange(offset, offset + num_new, device=self.lengths.device)
        return self.slots

    def advance(self, counts: Counts) -> None:
        """Commit, of the entries written behind each row's committed ones, the first `counts`."""
        self.lengths = self.lengths + counts.tensor
        self.host_lengths = [a + b for a, b in zip(self.host_lengths, counts.values, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self.lengths = self.lengths[rows]
        self.host_lengths = [self.host_lengths[r] for r in rows]
        for store in self._stores:
            store.select(rows)

    def visible(self) -> Tensor:
        """Which slots each token of the pass may see, `[B, Q, used]` bool: those up to its own."""
        return torch.arange(self.used, device=self.lengths.device) <= self.slots[:, :, None]

    def num_bytes(self) -> int:
        return sum(store.num_bytes() for store in self._stores)
