"""Work over fixed tensors, captured once as a CUDA graph and replayed.

What is captured is a function from a state to the next state and a result. A state is whatever names the tensors that
the work reads and an earlier piece of work, or the host, wrote; a graph reads them at one place in memory and leaves
the next state's there.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

_MOST_GRAPHS = 64
_log = logging.getLogger("outrider")


class GraphTensors(Protocol):
    """Tensors by name, which may be moved to other places in memory."""

    def tensors(self) -> list[Tensor]:
        """Return all of them, in a fixed order."""

    def at(self, tensors: list[Tensor]) -> Self:
        """Return the same state in other places, given in that order."""


S = TypeVar("S", bound=GraphTensors)
R = TypeVar("R")


@dataclass
class _Graph(Generic[R]):
    """A captured piece of work: it reads `inputs`, and leaves the next state there.

    Attributes:
        result: what the work returned; every replay writes there again.
        work: kept so that nobody else gets the memory of what it holds.
    """

    graph: Any
    inputs: list[Tensor]
    result: R
    work: object


class Graphs(Generic[S, R]):
    """The graphs of one device, the ones used last.

    Args:
        captures: False runs all work eagerly.
    """

    def __init__(self, device: torch.device, captures: bool):
        self.device, self.captures = device, captures
        self._graphs: dict[Hashable, _Graph[R] | None] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        """Count what was captured."""
        return sum(graph is not None for graph in self._graphs.values())

    def clear(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._graphs.clear()
        self._pool = None

    def play(self, key: Hashable, work: Callable[[S], tuple[S, R]], state: S) -> tuple[S, R, bool]:
        """Do `work`, from a graph if it can be; also tell whether the result lies where the next replay writes.

        The first of its kind runs eagerly, which warms up what capture must not; the second is captured.

        Args:
            key: everything that decides what `work` does beside the state's tensors.
        """
        if not self.captures:
            return *work(state), False
        before = state.tensors()
        key = (key, tuple(tensor.shape for tensor in before))
        if key not in self._graphs:
            after, result = work(state)
            self._admit(key, before, after.tensors())
            return after, result, False
        graph = self._graphs[key] = self._graphs.pop(key) or self._capture(work, state)
        if graph is None:
            return *work(state), False
        _copy(graph.inputs, before)
        graph.graph.replay()
        return state.at(graph.inputs), graph.result, True

    def _admit(self, key: Hashable, before: list[Tensor], after: list[Tensor]) -> None:
        """Let work be captured next time, if it leaves the shapes it found.

        Work that does not (the first after a prompt, say) comes once per request: no graph is worth it.
        """
        if any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
            return
        self._graphs[key] = None
        if len(self._graphs) > _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _capture(self, work: Callable[[S], tuple[S, R]], state: S) -> _Graph[R] | None:
        before = state.tensors()
        inputs = [tensor.clone() for tensor in before]
        state = state.at(inputs)
        graph, on_gpu = torch.cuda.CUDAGraph(), self.device.type == "cuda"
        stream = _stream(self.device) if on_gpu else None
        outer = torch.cuda.current_stream(self.device) if on_gpu else None
        try:
            # The outer stream is taken up again even where a capture breaks off.
            with (
                _no_collection(),
                torch.cuda.device(self.device if on_gpu else -1),
                torch.cuda.stream(outer),
                torch.cuda.graph(graph, pool=self._pool, stream=stream),
            ):
                after, result = work(state)
                _copy(inputs, after.tensors())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            _log.warning("rounds cannot be captured as CUDA graphs here, they run eagerly from now on: %s", reason)
            self.captures = False
            state.at(before)
            return None
        state.at(before)
        self._pool = self._pool or graph.pool()
        return _Graph(graph, inputs, result, work)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which everything of a device is captured: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from searching for cycles: what it frees on the way may call CUDA, which ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _copy(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        if place is not value:
            place.copy_(value)
