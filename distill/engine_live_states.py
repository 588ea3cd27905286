"""Hidden states that an engine makes while a training reads them: each shortly before its row's turn, and kept nowhere.

The order of the rows is known before they are read, so the engine makes the next ones meanwhile. A row that was never
announced, or whose states were dropped, is asked for when it is read: that costs time alone.

Shapes: B rows, T positions, K taps, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..targets import Target
from .engine_states import EngineStates
from .features import digest_of, probes_of, rows_of, stored_taps

# Of rows that were announced and not read: a resumed training passes over some, and evaluations come in between.
_WINDOWS = 3

Made = Mapping[int, tuple[Tensor | None, Tensor]]  # by row: taps [T, K, H] and last state [T, H]


class LiveStates:
    """The hidden states of a data set's rows, made by an engine in a thread of its own, in which that lives as well.

    Args:
        ahead: how many rows are announced before they are read.
        at_once: rows that the engine is asked for together.
    """

    def __init__(
        self,
        engine: EngineStates,
        target: Target,
        sequences: Dataset,
        taps: Sequence[int],
        ahead: int,
        at_once: int = 1,
    ):
        self.engine = engine
        self.ahead = ahead
        self.at_once = at_once
        self.target = target
        self._sequences = sequences.select_columns(["input_ids"]).with_format("arrow")
        stored = stored_taps(taps, target.num_layers)
        self._columns = [None if tap == target.num_layers else stored.index(tap) for tap in taps]
        self._thread, self._stack = ThreadPoolExecutor(1, "hidden states"), ExitStack()
        self._asked: dict[int, Future[Made]] = {}
        self._announced: deque[list[int]] = deque()
        self._gathered: list[int] = []

    @contextmanager
    def running(self) -> Iterator[LiveStates]:
        """Have the engine ready inside, and trusted; raises what `EngineStates.running` does."""
        self.target.fingerprint()  # which reads the files, and is asked for at the end
        probes = probes_of(self._sequences, digest_of(self._sequences)[1])
        try:
            self._thread.submit(self._stack.enter_context, self.engine.running(probes)).result()
            yield self
        finally:
            for future in self._asked.values():
                future.cancel()
            self.engine.give_up()
            self._thread.submit(self._stack.close).result()
            self._thread.shutdown()

    def near(self, positions: Iterable[tuple[int, list[int]]]) -> Iterator[int]:
        """Yield positions, each after the rows of the `ahead` next ones were announced."""
        waiting: deque[int] = deque()
        for position, rows in positions:
            self._announce(rows)
            waiting.append(position)
            if len(waiting) > self.ahead:
                yield waiting.popleft()
        yield from waiting

    def _announce(self, rows: list[int]) -> None:
        self._announced.append(rows)
        if len(self._announced) > _WINDOWS * self.ahead:
            passed, wanted = self._announced.popleft(), {row for later in self._announced for row in later}
            for row in (row for row in passed if row not in wanted):
                self._gathered = [other for other in self._gathered if other != row]
                future = self._asked.pop(row, None)
                if future is not None and all(other is not future for other in self._asked.values()):
                    future.cancel()
        self._gathered += [row for row in rows if row not in self._asked and row not in self._gathered]
        if len(self._gathered) >= self.at_once:
            self._ask()

    def _ask(self) -> None:
        """Let the thread make the gathered rows after those that it was asked for already."""
        rows, self._gathered = self._gathered, []
        self._asked |= dict.fromkeys(rows, self._thread.submit(self._made, rows)) if rows else {}

    def _made(self, rows: list[int]) -> Made:
        tokens = {i: next(rows_of(self._sequences, range(i, i + 1))) for i in rows}
        return {i: (hidden, last) for i, hidden, last in self.engine.of(tokens)}

    def _taken(self, row: int) -> tuple[Tensor | None, Tensor]:
        """Return the taps `[T, K, H]`, in the drafter's order, and last state of a row that was asked for."""
        hidden, last = self._asked.pop(row).result()[row]
        parts = [last if c is None or hidden is None else hidden[:, c] for c in self._columns]
        return torch.stack(parts, dim=1) if parts else None, last

    def batch(self, indices: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """Return the states of these rows: hidden `[B, T, K, H]` (None without taps) and last `[B, T, H]`.

        They are padded on the right with zeros, as `FeatureStore.batch` pads them.
        """
        missing = [row for row in indices if row not in self._asked or self._asked[row].cancelled()]
        if missing:
            self._gathered = list(dict.fromkeys([*self._gathered, *missing]))
            self._ask()
        rows = [self._taken(row) for row in indices]
        hidden = [taps for taps, _ in rows if taps is not None]
        last = pad_sequence([state for _, state in rows], batch_first=True)
        return pad_sequence(hidden, batch_first=True) if hidden else None, last
