"""A cache for models whose layers keep a state that no position rewinds: linear attention, short convolutions.

The library's own cache cannot take drafts back: its `crop` leaves recurrent states as the rejected tokens made them. So
here a state moves only over tokens that stay:

- Each layer keeps two states of a row: the row's own, and the one that the last pass ended with.
- A pass starts from the row's own state, and first reads the committed tokens that this state has not read.
- `advance` makes the state at the pass's end the row's own if all that the pass read is committed. If not, the row
  keeps its own state, and the next pass reads the committed tokens again. A row with too many of them gets a pass for
  them alone.

Shapes as in `cache.py`; C channels of a convolution, W its width.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from ..common.errors import IncompatibleError
from .cache import AttentionStore, LayerShape, LayerStore, RaggedCache, RowLengths, TensorShape, shape_of
from .cache_slots import Nodes, Placement

# Kinds of layers, and the models they were tried in. Other models update their states in ways of their own. A hybrid
# layer keeps states, and keys and values.
HYBRID = "hybrid"
KINDS = frozenset({"linear_attention", "conv", HYBRID})
# Those of Mamba layers overwrite the state that they are given where they read one token.
OVERWRITING = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3", *OVERWRITING)

# A pass reads up to this many committed tokens again before they get a pass of their own. Where a pass waits for
# weights, reading these tokens with it is free; linear attention works in chunks of 64 in any case.
UNREAD = 16


def has_states(config: PreTrainedConfig) -> bool:
    """Return whether some layers of a model keep states rather than keys and values."""
    return bool(KINDS & set(getattr(config, "layer_types", None) or ()))


class StateStore(LinearAttentionLayer):
    """The states of one layer: convolution inputs `[B, C, W]`, and a recurrent state `[B, heads, D, D']`.

    The library's models look for each row's own `conv_states`, and the `recurrent_states` to start from, under the key
    0. Each row's `own_recurrent` state stays as it was; `new_conv` and `new_recurrent` are those after the last pass.
    """

    def __init__(self, cache: RaggedCache, shape: LayerShape | None = None):
        super().__init__()
        self.cache = weakref.proxy(cache)
        # With these the model asks the layer for states, and writes into no convolution's.
        self.record_past, self.has_previous_state = True, {0: True}
        self.new_conv: Tensor | None = None
        self.own_recurrent: Tensor | None = None
        self.new_recurrent: Tensor | None = None
        if shape is not None and shape.conv is not None:
            self.conv_states[0], self.new_conv = self._two(shape.conv)
        if shape is not None and shape.recurrent is not None:
            self.own_recurrent, self.new_recurrent = self._two(shape.recurrent)

    def _two(self, shape: TensorShape) -> tuple[Tensor, Tensor]:
        """Return memory for the rows' own states, and for those at the end of a pass."""
        own = torch.zeros(self.cache.batch_size, *shape.size, dtype=shape.dtype, device=shape.device)
        return own, torch.zeros_like(own)

    def hand_over(self, copied: bool) -> None:
        """Let the next pass start from the rows' own recurrent states, or from a copy that it may overwrite."""
        self.recurrent_states[0] = self.own_recurrent
        if copied and self.own_recurrent is not None and self.new_recurrent is not None:
            self.recurrent_states[0] = self.new_recurrent.copy_(self.own_recurrent)

    @property
    def shape(self) -> LayerShape | None:
        return shape_of(None, None, self.new_conv, self.new_recurrent)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Return a convolution's input: the row's own state, and the new inputs `[B, C, Q]` after it."""
        width = conv_kernel_size or conv_states.shape[-1]
        own, new = self.conv_states[0], self.new_conv
        if own is None or new is None:
            size = (*conv_states.shape[1:-1], width)
            own, new = self._two(TensorShape(size, conv_states.dtype, conv_states.device))
            self.conv_states[0], self.new_conv = own, new
        whole = torch.cat([own, conv_states], -1)
        new.copy_(whole[..., -width:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Note the state at the end of the pass, `[B, heads, D, D']`."""
        if self.new_recurrent is None:
            shape = TensorShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype, recurrent_states.device)
            self.own_recurrent, self.new_recurrent = self._two(shape)
        return self.new_recurrent.copy_(recurrent_states)

    def adopt(self, rows: list[int]) -> None:
        """Make the states at the end of the last pass the own states of these rows."""
        if len(rows) == self.cache.batch_size:
            self.conv_states[0], self.new_conv = self.new_conv, self.conv_states[0]
            self.own_recurrent, self.new_recurrent = self.new_recurrent, self.own_recurrent
            return
        for own, new in ((self.conv_states[0], self.new_conv), (self.own_recurrent, self.new_recurrent)):
            if own is not None and new is not None:
                own[rows] = new[rows]

    def clear(self) -> None:
        """Set the rows' own states to those of an empty text."""
        for state in (self.conv_states[0], self.own_recurrent):
            if state is not None:
                state.zero_()

    def move(self, source: Tensor, destination: Tensor) -> None:
        raise AssertionError("a state keeps no entries that could be moved")

    def select(self, rows: list[int]) -> None:
        self.recurrent_states[0] = None
        self.conv_states[0], self.new_conv, self.own_recurrent, self.new_recurrent = (
            None if state is None else state[rows]
            for state in (self.conv_states[0], self.new_conv, self.own_recurrent, self.new_recurrent)
        )


class HybridStore(StateStore, AttentionStore):  # type: ignore[override] # the library lets them say whether they crop
    """The states of one layer, and its keys and values."""

    is_compileable = False

    def __init__(self, cache: RaggedCache, shape: LayerShape | None = None):
        AttentionStore.__init__(self, cache, shape)
        StateStore.__init__(self, cache, shape)

    @property
    def shape(self) -> LayerShape | None:
        return shape_of(self.keys, self.values, self.new_conv, self.new_recurrent)

    def select(self, rows: list[int]) -> None:
        StateStore.select(self, rows)
        AttentionStore.select(self, rows)


class RecurrentCache(RaggedCache):
    """A `RaggedCache` in which some layers keep states. It reads chains only, and its passes have no fixed shape.

    Before each pass its tokens are given to `write`. As long as `overdue` is not 0, a pass over that many committed
    tokens comes first, and `settle` ends it. Then comes the pass over `unread`, of which the outputs at `asked` count.

    Args:
        kinds: the kinds of all layers, as in `config.layer_types`.
        overwrites: whether the model writes over the states that a pass of one token is given.

    Attributes:
        read: how many tokens of each row its states have read; at most `host_lengths`.
        tokens: the texts, `[B, L]`, of which a part may have to be read again.
    """

    TOKEN_BYTES = 8  # of `tokens`, for each entry of a row

    def __init__(
        self,
        kinds: Sequence[str],
        batch_size: int,
        max_length: int,
        device: torch.device | str,
        shapes: Sequence[LayerShape | None] = (),
        overwrites: bool = False,
    ):
        self.kinds, self.overwrites = kinds, overwrites
        super().__init__(len(kinds), batch_size, self.room(max_length), device, shapes)
        self.tokens = torch.zeros(batch_size, self.max_length, dtype=torch.long, device=device)
        self.read = [0] * batch_size
        self._ends = [0] * batch_size  # how many tokens of each row are known
        # How many each row's states had read at the end of the last pass; [] once that means nothing any more.
        self._passed: list[int] = []
        self._offset = 0

    @staticmethod
    def room(max_length: int) -> int:
        """Return the entries for a row of `max_length` tokens: a pass is as wide as the row with most to read again."""
        return max_length + UNREAD

    def new_layer(self, index: int, shape: LayerShape | None) -> LayerStore:
        if self.kinds[index] == HYBRID:
            return HybridStore(self, shape)
        return StateStore(self, shape) if self.kinds[index] in KINDS else AttentionStore(self, shape)

    def num_bytes(self) -> int:
        return super().num_bytes() + self.tokens.numel() * self.tokens.element_size()

    def write(self, tokens: Tensor, offset: int) -> None:
        """Note the tokens `[B, Q]` that follow each row's committed ones plus `offset`."""
        self._offset = offset
        slots = self.lengths[:, None] + torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        self.tokens.scatter_(1, slots, tokens)
        self._ends = [length + offset + tokens.shape[1] for length in self.host_lengths]

    def overdue(self) -> int:
        """Return how many committed tokens of each row a pass must read before the next one; 0 if none is needed."""
        lags = self._lags()
        return min(lag for lag in lags if lag > 0) if max(lags) > UNREAD else 0

    def settle(self, count: int) -> None:
        """End a pass that read `count` tokens of each row: rows in which all of these are committed have read them."""
        self._adopt([row for row, lag in enumerate(self._lags()) if lag >= count])

    def unread(self, count: int = 0) -> Tensor:
        """Return the next tokens that each row's states have not read, `[B, count]`; 0 takes the most of any row."""
        count = count or max(end - read for end, read in zip(self._ends, self.read, strict=True))
        return self.tokens.gather(1, self._from_read(count))

    def asked(self, count: int) -> Tensor:
        """Return the places of the last `count` written tokens in a pass over `unread`, `[B, count]`.

        A token that the row's own state has read already has no output any more; its place means nothing.
        """
        start = self.lengths[:, None] + self._offset - self._from_read(1)
        return (start + torch.arange(count, device=start.device)).clamp(min=0)

    def _from_read(self, count: int) -> Tensor:
        """Return the positions of the next `count` tokens after those each row's states have read, `[B, count]`."""
        read = torch.tensor(self.read, device=self.lengths.device)
        return read[:, None] + torch.arange(count, device=read.device)

    def place(self, num_new: int, offset: int = 0, nodes: Nodes | None = None, beyond: int = 0) -> Tensor:
        """Place the next pass after the tokens that each row's states have read; return its positions, `[B, Q]`."""
        if nodes is not None or self.window is not None:
            raise IncompatibleError("a model with recurrent layers reads chains only, and no windows of fixed size.")
        used, slots = self.room_for(max(self.read) + num_new), self._from_read(num_new)
        even = min(self.read) == max(self.read)
        index = slice(self.read[0], used) if even else (self._rows(), slots)
        self.placed = Placement(self.lengths, used, slots, slots, index)
        self._passed = [read + num_new for read in self.read]
        for store in self._states():
            store.hand_over(copied=self.overwrites and num_new == 1)
        return slots

    def _states(self) -> Iterator[StateStore]:
        return (store for store in self._stores if isinstance(store, StateStore))

    def advance(self, counts: RowLengths) -> None:
        super().advance(counts)
        # A row that was padded, or from which drafts were rejected, keeps its own state.
        lags = self._lags()
        rows = [row for row, passed in enumerate(self._passed) if passed - self.read[row] <= lags[row]]
        # If another row still has much to read, all wait: the pass for it reads as many tokens of every row, and rows
        # that had moved on might have no room for these.
        most = max((lag for row, lag in enumerate(lags) if row not in rows), default=0)
        self._adopt(rows if most <= UNREAD else [])

    def _lags(self) -> list[int]:
        """Return for each row how many committed tokens its states have not read."""
        rows = zip(self._ends, self.host_lengths, self.read, strict=True)
        return [min(end, length) - read for end, length, read in rows]

    def _adopt(self, rows: list[int]) -> None:
        """Make the states at the end of the last pass the own states of these rows, and forget the others."""
        for store in self._states() if rows else ():
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
        self.read = [0] * self.batch_size
        self._ends = [0] * self.batch_size
        self._passed = []
        for store in self._states():
            store.clear()

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.tokens = self.tokens[rows]
        self.read = [self.read[r] for r in rows]
        self._ends = [self._ends[r] for r in rows]
        self._passed = []
