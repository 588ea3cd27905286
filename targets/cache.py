"""A key/value cache in which every row has its own length.

Shapes: B rows, H heads, L slots (the longest sequence plus one round), D head size, Q new tokens per row.

The slots of row b below `lengths[b]` are committed. A forward pass writes Q new entries behind them; whether they stay
is decided afterwards, by `advance`: what is not committed is simply overwritten by the next pass. Rejecting draft tokens
therefore costs nothing, and ragged batches need no padding on the left.

A cache that is told its layers' shapes is allocated whole before the first pass; without them, a layer is when its first entry comes.

Entries of a tree lie behind the committed ones in any order that has parents first. Where each stands in its text and
whom it sees is said when it is placed (`Nodes`); `keep` then moves one path of them to the front.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Store:
    """One tensor of a layer: keys, or values."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Store:
        """Of keys or values `[B, H, *, D]`."""
        return cls(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)

    @property
    def bytes_per_entry(self) -> int:
        return self.heads * self.size * self.dtype.itemsize

    def allocate(self, rows: int, length: int) -> Tensor:
        return torch.zeros(rows, self.heads, length, self.size, dtype=self.dtype, device=self.device)


class Shape(Protocol):
    """What a layer keeps of a text."""

    @property
    def bytes_per_row(self) -> tuple[int, int]:
        """Of a row, and of each of its entries."""


@dataclass(frozen=True)
class LayerShape:
    """Of attention: keys and values, which may differ."""

    keys: Store
    values: Store

    @property
    def bytes_per_row(self) -> tuple[int, int]:
        return 0, self.keys.bytes_per_entry + self.values.bytes_per_entry

    def num_bytes(self, rows: int, length: int) -> int:
        return rows * length * self.bytes_per_row[1]


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, `[B, H, L, D]`."""

    is_sliding = False

    def __init__(self, cache: RaggedCache, shape: LayerShape | None = None):
        super().__init__()
        self.cache = weakref.proxy(
            cache
        )  # which holds this layer: as a cycle both would outlive a request until Python looks for such
        if shape is not None:
            self._allocate(shape)

    @property
    def shape(self) -> LayerShape | None:
        return (
            None if self.keys is None or self.values is None else LayerShape(Store.of(self.keys), Store.of(self.values))
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(LayerShape(Store.of(key_states), Store.of(value_states)))

    def _allocate(self, shape: LayerShape) -> None:
        self.keys, self.values = (
            store.allocate(self.cache.batch_size, self.cache.max_length) for store in (shape.keys, shape.values)
        )
        self.is_initialized = True

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

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the entries at slots `source` `[B, D]` to `destination` `[B, D]`."""
        if self.keys is not None and self.values is not None:
            for store in (self.keys, self.values):
                moved = store.gather(2, source[:, None, :, None].expand(-1, store.shape[1], -1, store.shape[3]))
                store.scatter_(2, destination[:, None, :, None].expand_as(moved), moved)

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


class Counts:
    """One number per row, on the device, and on the host if it is known there; else asking for it reads it back, once."""

    def __init__(self, tensor: Tensor, values: list[int] | None = None):
        self.tensor = tensor  # [B]
        self._values = values

    @property
    def values(self) -> list[int]:
        if self._values is None:
            self._values = self.tensor.tolist()
        return self._values

    @classmethod
    def of(cls, values: list[int], device: torch.device | str) -> Counts:
        return cls(torch.tensor(values, dtype=torch.long, device=device), values)

    def plus(self, other: Counts) -> Counts:
        return Counts(self.tensor + other.tensor)

    def select(self, rows: list[int]) -> Counts:
        return Counts(self.tensor[rows], None if self._values is None else [self._values[r] for r in rows])


@dataclass(frozen=True)
class Nodes:
    """The tokens of a pass as nodes of a tree that grows behind the committed entries.

    Attributes:
        depths: place in the text, counted from the first uncommitted token, `[B, Q]`.
        sees: which uncommitted entries each token sees, those of earlier passes first, itself included, `[B, Q, offset + Q]` bool.
    """

    depths: Tensor
    sees: Tensor

    @classmethod
    def of_tree(cls, parents: Tensor, depth: int) -> Nodes:
        """A root and the nodes behind it, `parents` `[B, N]` (−1: the root), of which none lies deeper than `depth`; `[B, 1 + N]` tokens."""
        rows, count = parents.shape[0], parents.shape[1] + 1
        above = torch.nn.functional.pad(parents + 1, (1, 0))  # the root is its own parent
        here = torch.arange(count, device=parents.device).expand(rows, -1)
        sees = torch.zeros(rows, count, count, dtype=torch.bool, device=parents.device)
        depths = torch.zeros_like(here)
        for _ in range(depth + 1):
            sees.scatter_(2, here[:, :, None], True)
            depths = depths + (here > 0)
            here = above.gather(1, here)
        return cls(depths, sees)

    @classmethod
    def of_chain(cls, length: int, device: torch.device | str) -> Nodes:
        """A root and a chain of `length` behind it, one row for all."""
        return cls(
            torch.arange(length + 1, device=device)[None],
            torch.ones(1, length + 1, length + 1, dtype=torch.bool, device=device).tril(),
        )


class RaggedCache(Cache):
    """Cache for `num_layers` layers of a `transformers` model.

    Args:
        shapes: of all layers, which are then allocated at once. A layer without one is allocated when its first entry comes.

    Attributes:
        lengths: committed entries per row, `[B]` (int64, on the device).
        host_lengths: the same on the host. With a window the cache does not keep them: whoever reads the counts back does.
        window: how many slots every pass reads, whatever the lengths; None for as many as are used. With a window no shape and
            no address depends on the lengths, so that a pass can be captured.
        first: entries before this place in the text are seen by nobody but themselves: they mean nothing.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        device: torch.device | str,
        shapes: Sequence[Shape | None] = (),
    ):
        self.max_length = max_length
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.host_lengths = [0] * batch_size
        self.used = 0
        self.window: int | None = None
        self.first = 0
        self.start: int | None = 0
        self.slots = self.positions = self.lengths[:, None]
        self._sees: Tensor | None = None
        self._depths: Tensor | None = None  # [B, offset + Q], of all uncommitted entries
        self._stores = [self._layer(index, shape) for index, shape in enumerate(shapes or (None,) * num_layers)]
        super().__init__(layers=list(self._stores))

    def _layer(self, index: int, shape: Any) -> Any:
        return _Layer(self, shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedCache:
        """With layers that know the copy: what they hold of their cache is only its name, which copying would turn into a cache of its own."""
        if id(self) not in memo:
            memo[id(self)] = copied = self.__class__.__new__(self.__class__)
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
            for store in copied._stores:
                store.cache = weakref.proxy(copied)
        found: RaggedCache = memo[id(self)]
        return found

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def longest(self) -> int:
        return max(self.host_lengths)

    def place(self, num_new: int, offset: int = 0, nodes: Nodes | None = None) -> Tensor:
        """Say where the next pass writes: `num_new` slots from `lengths + offset` on. Returns the positions of its tokens, `[B, Q]`.

        Args:
            nodes: None for a chain, in which each token follows the one before it.
        """
        start = self.longest + offset
        self.used = start + num_new if self.window is None else self.window
        if self.used > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} entries per row, {self.used} are needed")
        self.start = start if self.window is None and self.longest == min(self.host_lengths) else None
        device = self.lengths.device
        if self.start is None:
            self.rows = torch.arange(self.batch_size, device=device)[:, None]
            self.slots = self.lengths[:, None] + torch.arange(offset, offset + num_new, device=device)
        else:
            self.slots = torch.arange(start, self.used, device=device).expand(self.batch_size, -1)
        # An idle row of a window may be asked to read before its begin: nobody looks at what it reads there.
        self.positions = self.slots if self.window is None else self.slots.clamp(min=0)
        earlier, self._depths, self._sees = self._depths if offset else None, None, None
        if nodes is not None:
            # Entries that were not placed as nodes are a chain.
            before = (
                torch.arange(offset, device=self.lengths.device).expand(self.batch_size, -1)
                if earlier is None
                else earlier[:, :offset]
            )
            self._depths, self._sees = torch.cat([before, nodes.depths], 1), nodes.sees
            self.positions = self.lengths[:, None] + nodes.depths
        return self.positions

    def keep(self, path: Tensor) -> None:
        """Move the uncommitted entries `path` `[B, D]` (counted from the first of them) to the front, in this order; −1 moves none.

        What lies behind them then means nothing; how many of them stay, `advance` says.
        """
        wanted = torch.arange(path.shape[1], device=path.device)
        source = self.lengths[:, None] + torch.where(path < 0, wanted, path)
        for store in self._stores:
            store.move(source, self.lengths[:, None] + wanted)

    def advance(self, counts: Counts) -> None:
        """Commit, of the entries written behind each row's committed ones, the first `counts`."""
        self.lengths = self.lengths + counts.tensor
        if self.window is None:
            self.host_lengths = [a + b for a, b in zip(self.host_lengths, counts.values, strict=True)]

    def skip(self, count: int) -> None:
        """Commit `count` entries of every row as they are: passes behind them cost what they cost behind a text."""
        self.advance(Counts.of([count] * self.batch_size, self.lengths.device))

    def reset(self) -> None:
        """Forget everything, and keep the room."""
        self.lengths, self.host_lengths, self.window = torch.zeros_like(self.lengths), [0] * self.batch_size, None

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self.lengths = self.lengths[rows]
        self.host_lengths = [self.host_lengths[r] for r in rows]
        for store in self._stores:
            store.select(rows)

    def visible(self) -> Tensor:
        """Which slots each token of the pass may see, `[B, Q, used]` bool."""
        slots = torch.arange(self.used, device=self.lengths.device)
        seen = slots <= self.slots[:, :, None] if self._sees is None else self._seen_by(self._sees)
        return (
            seen
            if not self.first
            else (seen & (self._places() >= self.first)[:, None]) | (slots == self.slots[:, :, None])
        )

    def _seen_by(self, sees: Tensor) -> Tensor:
        """Which slots nodes see that see the uncommitted entries `sees` `[B, Q, n]`: `[B, Q, used]`."""
        behind, count = self._behind(), sees.shape[2]
        own = sees.gather(2, behind.clamp(0, count - 1)[:, None].expand(-1, sees.shape[1], -1))
        return (behind < 0)[:, None] | (own & (behind < count)[:, None])

    def within(self, window: int) -> Tensor:
        """Which slots lie at most `window` − 1 places before each token of the pass, `[B, Q, used]` bool."""
        return self._places()[:, None] > self.positions[:, :, None] - window

    def _places(self) -> Tensor:
        """Where each slot's token stands in its text, `[B or 1, used]`: nodes of a tree stand in other places than their slots."""
        places = torch.arange(self.used, device=self.lengths.device)[None]
        if self._sees is None or self._depths is None:
            return places
        behind = self._behind()
        depths = self._depths.gather(1, behind.clamp(0, self._depths.shape[1] - 1))
        return torch.where(behind < 0, places, self.lengths[:, None] + depths)

    def _behind(self) -> Tensor:
        """How far each slot lies behind the first uncommitted one, `[B, used]`."""
        return torch.arange(self.used, device=self.lengths.device) - self.lengths[:, None]

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        """Of the layers that are allocated; None for the others."""
        return tuple(store.shape for store in self._stores)

    def num_bytes(self) -> int:
        return sum(store.num_bytes() for store in self._stores)
