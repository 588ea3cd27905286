"""A cache for models whose layers keep a state that no position rewinds: linear attention, short convolutions.

The library's cache for them cannot take drafts back: its `crop` restores convolutions, but leaves recurrent states as the
rejected tokens made them. So a state here moves only over tokens that stay. A pass starts from each row's state, reads
what the state has not read yet in front of the new tokens, and leaves a second state behind itself. `advance` makes that one the
row's state if all of what it has read is committed; else the row's old state stays, and the next pass reads the committed
tokens again. When a row has too many of them, they get a pass of their own.

Shapes as in `cache.py`; C channels of a convolution, W its width.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..ground.errors import IncompatibleError
from .cache import Counts, Nodes, RaggedCache, Shape, _Layer

# Layer kinds, and the models they were tried in. Others update their states in ways of their own.
KINDS = frozenset({"linear_attention", "conv"})
MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe")

# A pass reads up to so many committed tokens again before they get a pass of their own. Where weights are what a pass
# waits for, reading them along is free; linear attention works in chunks of 64 in any case.
UNREAD = 16


@dataclass(frozen=True)
class StateShape:
    """What a layer keeps of a row, twice: the row's state, and the one behind the last pass. Either part may be missing."""

    conv: tuple[int, ...] | None
    conv_dtype: torch.dtype
    recurrent: tuple[int, ...] | None
    recurrent_dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_row(self) -> tuple[int, int]:
        parts = ((self.conv, self.conv_dtype), (self.recurrent, self.recurrent_dtype))
        return sum(2 * torch.Size(size).numel() * dtype.itemsize for size, dtype in parts if size is not None), 0


class _States(LinearAttentionLayer):
    """The states of one layer: convolution inputs `[B, C, W]`, and a recurrent state `[B, heads, D, D']`."""

    def __init__(self, cache: RecurrentCache, shape: StateShape | None = None):
        super().__init__()
        self.cache = weakref.proxy(cache)
        # Makes the layer ask for states, and never write into them.
        self.record_past, self.has_previous_state = True, {0: True}
        self.new_conv: Tensor | None = None
        self.new_recurrent: Tensor | None = None
        if shape is not None:
            self._allocate(shape)

    def _allocate(self, shape: StateShape) -> None:
        rows, device = self.cache.batch_size, shape.device
        if shape.conv is not None:
            self.conv_states[0], self.new_conv = (
                torch.zeros(rows, *shape.conv, dtype=shape.conv_dtype, device=device) for _ in range(2)
            )
        if shape.recurrent is not None:
            self.recurrent_states[0], self.new_recurrent = (
                torch.zeros(rows, *shape.recurrent, dtype=shape.recurrent_dtype, device=device) for _ in range(2)
            )

    @property
    def shape(self) -> StateShape | None:
        conv, recurrent = self.new_conv, self.new_recurrent
        one = conv if conv is not None else recurrent
        if one is None:
            return None
        sizes = [None if t is None else tuple(t.shape[1:]) for t in (conv, recurrent)]
        dtypes = [one.dtype if t is None else t.dtype for t in (conv, recurrent)]
        return StateShape(sizes[0], dtypes[0], sizes[1], dtypes[1], one.device)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """What a convolution reads: the row's state, and behind it the new inputs `[B, C, Q]`."""
        width = conv_kernel_size or conv_states.shape[-1]
        if self.new_conv is None:
            size = (*conv_states.shape[1:-1], width)
            self._allocate(StateShape(size, conv_states.dtype, None, conv_states.dtype, conv_states.device))
        before = self.conv_states[0]
        assert before is not None
        assert self.new_conv is not None
        whole = torch.cat([before, conv_states], -1)
        self.new_conv.copy_(whole[..., -width:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.new_recurrent is None:
            size, dtype = tuple(recurrent_states.shape[1:]), recurrent_states.dtype
            self._allocate(StateShape(None, dtype, size, dtype, recurrent_states.device))
        assert self.new_recurrent is not None
        return self.new_recurrent.copy_(recurrent_states)

    def adopt(self, rows: list[int]) -> None:
        """Make the states behind the last pass the states of these rows."""
        if len(rows) == self.cache.batch_size:
            self.conv_states[0], self.new_conv = self.new_conv, self.conv_states[0]
            self.recurrent_states[0], self.new_recurrent = self.new_recurrent, self.recurrent_states[0]
            return
        for own, new in ((self.conv_states[0], self.new_conv), (self.recurrent_states[0], self.new_recurrent)):
            if own is not None and new is not None:
                own[rows] = new[rows]

    def clear(self) -> None:
        for state in (self.conv_states[0], self.recurrent_states[0]):
            if state is not None:
                state.zero_()

    def move(self, source: Tensor, destination: Tensor) -> None:
        raise AssertionError("a state keeps no entries that could be moved")

    def select(self, rows: list[int]) -> None:
        self.conv_states[0], self.new_conv, self.recurrent_states[0], self.new_recurrent = (
            None if t is None else t[rows]
            for t in (self.conv_states[0], self.new_conv, self.recurrent_states[0], self.new_recurrent)
        )

    def num_bytes(self) -> int:
        parts = (self.conv_states[0], self.new_conv, self.recurrent_states[0], self.new_recurrent)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


class RecurrentCache(RaggedCache):
    """A `RaggedCache` in which some layers keep states. Chains only, and passes of no fixed shape.

    Before each pass: `write` its tokens; `overdue` says how long a pass over committed tokens must come first, if any, and
    `settle` ends that one. Then a pass over `unread`, of whose outputs those at `asked` are wanted.

    Args:
        kinds: of all layers, as in `config.layer_types`.

    Attributes:
        read: how many tokens of each row its states have read; at most `host_lengths`.
    """

    TOKEN_BYTES = 8  # of each entry, beside its layers

    def __init__(
        self,
        kinds: list[str],
        batch_size: int,
        max_length: int,
        device: torch.device | str,
        shapes: Sequence[Shape | None] = (),
    ):
        self.kinds = kinds
        super().__init__(len(kinds), batch_size, self.room(max_length), device, shapes)
        self.tokens = torch.zeros(batch_size, self.max_length, dtype=torch.long, device=device)
        self.read = [0] * batch_size
        self._ends = [0] * batch_size  # how many tokens of each row are known
        self._passed: list[
            int
        ] = []  # what each row's states have read behind the last pass; [] if that means nothing any more
        self._offset = 0

    @staticmethod
    def room(max_length: int) -> int:
        """Entries per row that rows of `max_length` tokens take: a row's pass is as wide as that of the row which is furthest behind."""
        return max_length + UNREAD

    def _layer(self, index: int, shape: Any) -> Any:
        return _States(self, shape) if self.kinds[index] in KINDS else _Layer(self, shape)

    # ------------------------------------------------------------ passes

    def write(self, tokens: Tensor, offset: int) -> None:
        """Take note of the tokens `[B, Q]` that follow each row's committed ones plus `offset`."""
        self._offset = offset
        slots = self.lengths[:, None] + torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        self.tokens.scatter_(1, slots, tokens)
        self._ends = [length + offset + tokens.shape[1] for length in self.host_lengths]

    def overdue(self) -> int:
        """How many tokens a pass of committed ones should read before the next pass; 0 if none is needed."""
        lags = self._lags()
        return min(n for n in lags if n > 0) if max(lags) > UNREAD else 0

    def settle(self, count: int) -> None:
        """The last pass read `count` tokens of each row: where all of them are committed, they are read."""
        self._adopt([row for row, lag in enumerate(self._lags()) if lag >= count])

    def unread(self, count: int = 0) -> Tensor:
        """The next `count` tokens of each row, `[B, count]`; 0 for as many as are known of the row that is furthest behind."""
        count = count or max(end - read for end, read in zip(self._ends, self.read, strict=True))
        return self.tokens.gather(1, self._from_read(count))

    def asked(self, count: int) -> Tensor:
        """Where in that pass the `count` tokens are that were last written, `[B, count]`. One that a state has read before has no output any more."""
        start = self.lengths[:, None] + self._offset - self._from_read(1)
        return (start + torch.arange(count, device=start.device)).clamp(min=0)

    def _from_read(self, count: int) -> Tensor:
        read = torch.tensor(self.read, device=self.lengths.device)
        return read[:, None] + torch.arange(count, device=read.device)

    def place(self, num_new: int, offset: int = 0, nodes: Nodes | None = None) -> Tensor:
        """As ever, but a pass starts where the states are."""
        if nodes is not None or self.window is not None:
            raise IncompatibleError("a model with recurrent layers reads chains only, and no windows of fixed size.")
        self.used = max(self.read) + num_new
        if self.used > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} entries per row, {self.used} are needed")
        self.start = self.read[0] if min(self.read) == max(self.read) else None
        self.rows = torch.arange(self.batch_size, device=self.lengths.device)[:, None]
        self.slots = self.positions = self._from_read(num_new)
        self._passed = [read + num_new for read in self.read]
        return self.positions

    # ------------------------------------------------------------ what stays

    def advance(self, counts: Counts) -> None:
        super().advance(counts)
        # A row that was padded, or from which drafts were rejected, stays where it was.
        lags = self._lags()
        rows = [row for row, passed in enumerate(self._passed) if passed - self.read[row] <= lags[row]]
        # If another row stays far behind, all wait: a pass that brings it up reads as many tokens of each row, and must not run over.
        self._adopt(rows if max((lag for row, lag in enumerate(lags) if row not in rows), default=0) <= UNREAD else [])

    def _lags(self) -> list[int]:
        """Of each row, committed tokens that its states have not read."""
        return [
            min(end, length) - read for end, length, read in zip(self._ends, self.host_lengths, self.read, strict=True)
        ]

    def _adopt(self, rows: list[int]) -> None:
        for store in self._stores:
            if rows and isinstance(store, _States):
                store.adopt(rows)
        for row in rows:
            self.read[row] = self._passed[row]
        self._passed = []

    def keep(self, path: Tensor) -> None:
        raise IncompatibleError("a model with recurrent layers verifies chains only.")

    def skip(self, count: int) -> None:
        super().skip(count)
        self.read = list(self.host_lengths)

    def reset(self) -> None:
        super().reset()
        self.read, self._ends, self._passed = [0] * self.batch_size, [0] * self.batch_size, []
        for store in self._stores:
            if isinstance(store, _States):
                store.clear()

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.tokens = self.tokens[rows]
        self.read, self._ends, self._passed = [self.read[r] for r in rows], [self._ends[r] for r in rows], []

    def num_bytes(self) -> int:
        return super().num_bytes() + self.tokens.numel() * self.tokens.element_size()
