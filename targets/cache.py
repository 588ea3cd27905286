"""A key/value cache in which every row has its own length.

Shapes: B rows, H heads, L slots (the longest sequence plus one round), D head size, Q new tokens per row.

The slots of row b below `lengths[b]` are committed. A pass writes Q new entries after them, and `advance` decides
afterwards which of them stay: the next pass overwrites the others. Rejecting draft tokens therefore costs nothing, and
ragged batches need no padding on the left. The entries of a tree follow the committed ones, in any order in which
parents come before their children; `keep` then moves one path of them to the front.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache_slots import Nodes, Placement


@dataclass(frozen=True)
class TensorShape:
    """The shape of one tensor of a layer, for a row, or for each entry of a row."""

    size: tuple[int, ...]  # of keys or values [H, D], of a state without the rows
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerShape:
    """The tensors that a layer keeps of a text: keys and values, which may differ, and the states of recurrent layers.

    Each is None where there is none.
    """

    keys: TensorShape | None = None
    values: TensorShape | None = None
    conv: TensorShape | None = None
    recurrent: TensorShape | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes, however long it is: two of each state."""
        return sum(2 * state.num_bytes for state in (self.conv, self.recurrent) if state is not None)

    @property
    def entry_bytes(self) -> int:
        """Bytes that each entry of a row takes."""
        return sum(tensor.num_bytes for tensor in (self.keys, self.values) if tensor is not None)


class LayerStore(Protocol):
    """The entries or states of one layer of a model in a cache; `shape` is None until they are allocated."""

    cache: RaggedCache

    @property
    def shape(self) -> LayerShape | None: ...
    def move(self, source: Tensor, destination: Tensor) -> None: ...
    def select(self, rows: list[int]) -> None: ...


class AttentionStore(CacheLayerMixin):
    """The keys and values of one attention layer, `[B, H, L, D]`."""

    is_sliding = False

    def __init__(self, cache: RaggedCache, shape: LayerShape | None = None):
        super().__init__()
        # The cache holds this layer: as a cycle both would outlive a request until Python collects cycles.
        self.cache = weakref.proxy(cache)
        if shape is not None and shape.keys is not None:
            self.entries(shape)

    @property
    def shape(self) -> LayerShape | None:
        return shape_of(self.keys, self.values)

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Keep entries in memory that the cache has allocated for all layers."""
        self.keys = keys
        self.values = values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.entries(cast(LayerShape, shape_of(key_states, value_states)))

    def entries(self, shape: LayerShape) -> tuple[Tensor, Tensor]:
        """Return all keys and values, `[B, H, L, D]`; allocated in this shape if they are not yet."""
        if self.keys is None or self.values is None:
            self.take(self._blank(shape.keys), self._blank(shape.values))
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _blank(self, shape: TensorShape | None) -> Tensor:
        assert shape is not None
        heads, size = shape.size
        room = (self.cache.batch_size, heads, self.cache.max_length, size)
        return torch.zeros(room, dtype=shape.dtype, device=shape.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's entries `[B, H, Q, D]`, and return all that the pass reads, `[B, H, used, D]`."""
        keys, values = self.keys, self.values
        if keys is None or values is None:
            keys, values = self.entries(cast(LayerShape, shape_of(key_states, value_states)))
        placed = self.cache.placed
        for store, new in ((keys, key_states), (values, value_states)):
            if isinstance(placed.index, slice):
                store[:, :, placed.index] = new
            else:
                rows, slots = placed.index
                store[rows, :, slots] = new.transpose(1, 2)
        return keys[:, :, : placed.used], values[:, :, : placed.used]

    def move(self, source: Tensor, destination: Tensor) -> None:
        for store in (self.keys, self.values):
            if store is not None:
                _move(store, source, destination)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.used, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return self.cache.max_length

    def select(self, rows: list[int]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _selected(self.keys, rows), _selected(self.values, rows)

    def part(self, cache: RaggedCache, rows: slice) -> AttentionStore:
        """Return the entries of some rows in the same memory, as a layer of `cache`."""
        store = AttentionStore(cache)
        if self.keys is not None and self.values is not None:
            store.take(self.keys[rows], self.values[rows])
        return store

    def share(self, count: int) -> None:
        """Copy the first `count` entries of the first row into all rows."""
        for store in (self.keys, self.values):
            if store is not None:
                store[1:, :, :count] = store[:1, :, :count]


def shape_of(
    keys: Tensor | None, values: Tensor | None, conv: Tensor | None = None, recurrent: Tensor | None = None
) -> LayerShape | None:
    """Return the shape of a layer's keys and values `[B, H, *, D]` and states `[B, …]`; None if it has none of them."""
    entries = [None if t is None else TensorShape((t.shape[1], t.shape[3]), t.dtype, t.device) for t in (keys, values)]
    states = [None if t is None else TensorShape(tuple(t.shape[1:]), t.dtype, t.device) for t in (conv, recurrent)]
    shapes = [*entries, *states]
    return LayerShape(*shapes) if any(shapes) else None


def _move(entries: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy the entries `[..., B, H, L, D]` at slots `source` `[B, N]` to `destination` `[B, N]`."""
    shape = (*entries.shape[:-2], source.shape[1], entries.shape[-1])
    moved = entries.gather(-2, source[:, None, :, None].expand(shape))
    entries.scatter_(-2, destination[:, None, :, None].expand(shape), moved)


def _selected(store: Tensor, rows: list[int]) -> Tensor:
    """Return these rows of `store` `[B, H, L, D]`, in this order, in its own memory while more than half of it is used.

    Then only the rows that take the places of others are copied.
    """
    moved = [(place, row) for place, row in enumerate(rows) if place != row]
    in_place = all(place < row for place, row in moved)  # nothing is overwritten that is still to be read
    if not in_place or 2 * len(rows) <= store.untyped_storage().nbytes() // (store[:1].nbytes or 1):
        return store[rows]
    for place, row in moved:
        store[place] = store[row]
    return store[: len(rows)]


class RowLengths:
    """One number per row, `[B]`: on the device, and on the host, where unknown `values` are read back once."""

    def __init__(self, tensor: Tensor, values: list[int] | None = None):
        self.tensor = tensor  # [B]
        self._values = values

    @property
    def values(self) -> list[int]:
        if self._values is None:
            self._values = self.tensor.tolist()
        return self._values

    @classmethod
    def of(cls, values: list[int], device: torch.device | str) -> RowLengths:
        """Return numbers of the host, on the device as well."""
        return cls(torch.tensor(values, dtype=torch.long, device=device), values)

    def plus(self, other: RowLengths) -> RowLengths:
        return RowLengths(self.tensor + other.tensor)

    def select(self, rows: list[int]) -> RowLengths:
        return RowLengths(self.tensor[rows], None if self._values is None else [self._values[r] for r in rows])


class RaggedCache(Cache):
    """A cache for the layers of a `transformers` model, in which every row has its own length.

    Args:
        shapes: of each layer; all are then allocated at once. A layer without one is allocated when its first entries
            come.
        joined: keep the entries of all layers in one tensor, where they have one shape, so that `keep` moves them all
            in two steps. For rows that stay: `select` would free nothing of it.

    Attributes:
        lengths, host_lengths: committed entries per row, `[B]`, on the device and on the host. With a window the code
            that reads the counts back from the device keeps the host's up to date, not the cache.
        window: how many slots every pass reads, whatever the lengths; None for as many as are used. With a window no
            shape and no address depends on the lengths, so that a pass can be captured.
        first: entries before this place in the text are visible to themselves only: they mean nothing.
        shift: by how much the model's positions are more than places in the text, after images, `[B]`; None for not.
        placed: the slots of the next pass, or of the last one.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        device: torch.device | str,
        shapes: Sequence[LayerShape | None] = (),
        joined: bool = False,
    ):
        self.max_length = max_length
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.host_lengths = [0] * batch_size
        self.window: int | None = None
        self.first = 0
        self.shift: Tensor | None = None
        self.placed = Placement(self.lengths, 0, self.lengths[:, None], self.lengths[:, None], slice(0, 0))
        self._all: Tensor | None = None  # of joined layers, [layers, 2, B, H, L, D]
        self._stores = self._joined(shapes) if joined else []
        self._stores = self._stores or [
            self.new_layer(index, shape) for index, shape in enumerate(shapes or (None,) * num_layers)
        ]
        super().__init__(layers=[cast(CacheLayerMixin, store) for store in self._stores])

    def _joined(self, shapes: Sequence[LayerShape | None]) -> list[LayerStore]:
        """Allocate all layers in one tensor; nothing, if they or their keys and values differ in shape."""
        first = shapes[0] if shapes else None
        if first is None or first.keys is None or first.keys != first.values or len(set(shapes)) > 1:
            return []
        heads, size = first.keys.size
        room = (len(shapes), 2, self.batch_size, heads, self.max_length, size)
        self._all = torch.zeros(room, dtype=first.keys.dtype, device=first.keys.device)
        stores: list[LayerStore] = []
        for keys, values in self._all:
            store = AttentionStore(self)
            store.take(keys, values)
            stores.append(store)
        return stores

    def new_layer(self, index: int, shape: LayerShape | None) -> LayerStore:
        """Return a new layer for `index`; without a shape it is allocated when its first entries come."""
        return AttentionStore(self, shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedCache:
        """Copy the cache, with layers of the copy: each holds a weak reference to its cache."""
        if id(self) not in memo:  # the layers' references ask again
            memo[id(self)] = copied = self.__class__.__new__(self.__class__)
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
            for store in copied._stores:
                store.cache = weakref.proxy(copied)
        return memo[id(self)]

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def longest(self) -> int:
        return max(self.host_lengths)

    @property
    def shapes(self) -> tuple[LayerShape | None, ...]:
        """The shape of each layer; None for those that are not allocated."""
        return tuple(store.shape for store in self._stores)

    def num_bytes(self) -> int:
        """Return the bytes that the layers have allocated."""
        shapes = [shape for shape in self.shapes if shape is not None]
        return sum(self.batch_size * (shape.row_bytes + shape.entry_bytes * self.max_length) for shape in shapes)

    def place(self, num_new: int, offset: int = 0, nodes: Nodes | None = None, beyond: int = 0) -> Tensor:
        """Place the next pass in `num_new` slots of each row after `lengths + offset`; return its positions, `[B, Q]`.

        `nodes` are the tokens' places in a tree; None is a chain, in which each token follows the one before it. With a
        window the pass also reads so many slots `beyond` it: a round's margin there is for what the decoder reads.
        """
        start, device = self.longest + offset, self.lengths.device
        used = self.room_for(start + num_new if self.window is None else self.window + beyond)
        if self.window is None and self.longest == min(self.host_lengths):
            slots = torch.arange(start, used, device=device).expand(self.batch_size, -1)
            index: slice | tuple[Tensor, Tensor] = slice(start, used)
        else:
            slots = self.lengths[:, None] + torch.arange(offset, offset + num_new, device=device)
            index = self._rows(), slots
        # An idle row of a window may read before its beginning: the result is ignored.
        positions = slots if self.window is None else slots.clamp(min=0)
        if nodes is not None:
            positions = self.lengths[:, None] + nodes.depths
            nodes = Nodes(torch.cat([self._earlier_depths(offset), nodes.depths], 1), nodes.sees)
        self.placed = Placement(self.lengths, used, slots, positions, index, nodes)
        return positions

    def _earlier_depths(self, offset: int) -> Tensor:
        """Return the depths of the first `offset` uncommitted entries, `[B, offset]`: of nodes, or of a chain."""
        if offset and self.placed.nodes is not None:
            return self.placed.nodes.depths[:, :offset]
        return torch.arange(offset, device=self.lengths.device).expand(self.batch_size, -1)

    def _rows(self) -> Tensor:  # [B, 1]
        return torch.arange(self.batch_size, device=self.lengths.device)[:, None]

    def room_for(self, used: int) -> int:
        """Return `used` if there are as many slots, and raise ValueError if there are not."""
        if used > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} entries per row, {used} are needed")
        return used

    @property
    def used(self) -> int:
        """How many slots the placed pass reads."""
        return self.placed.used

    def visible(self) -> Tensor:
        """Return the slots that each token of the placed pass may see, `[B, Q, used]` bool."""
        return self.placed.visible(self.first)

    def keep(self, path: Tensor) -> None:
        """Move the uncommitted entries `path` `[B, N]` to the front of their row, in this order; −1 moves none.

        Entries after them then mean nothing; `advance` decides how many of them stay.
        """
        wanted = torch.arange(path.shape[1], device=path.device)
        source = self.lengths[:, None] + torch.where(path < 0, wanted, path)
        destination = self.lengths[:, None] + wanted
        if self._all is not None:
            _move(self._all, source, destination)
            return
        for store in self._stores:
            store.move(source, destination)

    def advance(self, counts: RowLengths) -> None:
        """Commit the first `counts` of each row's uncommitted entries."""
        self.lengths = self.lengths + counts.tensor
        if self.window is None:
            self.host_lengths = [a + b for a, b in zip(self.host_lengths, counts.values, strict=True)]

    def skip(self, count: int) -> None:
        """Commit `count` entries of every row, whatever is in them: passes then cost as after a text of that length."""
        self.advance(RowLengths.of([count] * self.batch_size, self.lengths.device))

    def part(self, rows: slice) -> RaggedCache:
        """Return a cache of some rows in the same memory. `advance` on one leaves the other as it is.

        Unless `rows` are all rows, every layer must be attention's, and allocated.
        """
        if rows == slice(0, self.batch_size):
            return self
        part = copy.copy(self)
        part.lengths = self.lengths[rows]
        part.host_lengths = self.host_lengths[rows]
        part._all = None
        part._stores = [cast(AttentionStore, store).part(part, rows) for store in self._stores]
        part.layers = [cast(CacheLayerMixin, store) for store in part._stores]
        return part

    def share(self, count: int) -> None:
        """Commit the first `count` entries of the first row in every row. All layers must be attention's."""
        for store in self._stores:
            cast(AttentionStore, store).share(count)
        self.skip(count)

    def reset(self) -> None:
        """Forget everything, and keep the memory."""
        self.lengths = torch.zeros_like(self.lengths)
        self.host_lengths = [0] * self.batch_size
        self.window = None
        self.shift = None

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self.lengths = self.lengths[rows]
        self.host_lengths = [self.host_lengths[r] for r in rows]
        self.shift = None if self.shift is None else self.shift[rows]
        self._all = None  # each layer goes on alone
        for store in self._stores:
            store.select(rows)
