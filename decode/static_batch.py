"""Memory for rounds of fixed shapes, which lasts from request to request: on a GPU such rounds are captured as graphs.

Every pass reads a window of the caches, whatever its rows' lengths; windows come in a few sizes, and a graph serves one
window, depth, plan and sampling (seeds, sequence ids and the host's own proposals are inputs). The host reads what a
round emitted, once. Rows that have finished run on idly and are ignored.

`StaticBatch` holds the memory and runs the rounds; `Graphs`, after it, captures and replays work over fixed tensors.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from ..heads import Drafter, NoDraftSession, Proposal, Session
from ..heads.session import model_drafts
from ..targets import RaggedCache, Target
from ..targets.weights import module_versions, weight_versions
from .round import (
    PendingRound,
    RoundResult,
    RoundRow,
    RoundSetup,
    RoundState,
    propose,
    step,
    update_session,
)

_LEAST = 256
_MOST_GRAPHS = 64
_FEW_LAYERS = 2
_log = logging.getLogger("outrider")


def window_of(needed: int) -> int:
    """Return the smallest window that holds `needed` entries: 256, 384, 512, 768, 1024, …"""
    size = _LEAST
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def margin(nodes: int, depth: int, reads: int) -> int:
    """Return how many entries a round may write after the longest row; a drafter's cache is up to a round late.

    `nodes`: most drafts that are verified. `depth`: of the deepest. `reads`: most drafts that the drafter reads.
    """
    return 2 * (1 + max(nodes, depth, reads)) + 1


class StaticBatch:
    """Caches, a session and graphs for rounds of `rows` sequences of up to `length` entries.

    Args:
        drafter: None for plain decoding.
        spare: as for `Drafter.open`.
    """

    def __init__(self, target: Target, drafter: Drafter | None, rows: int, length: int, spare: int):
        self.target, self.drafter = target, drafter
        self.length, self.spare = window_of(length), spare
        self.cache: RaggedCache = target.new_cache(rows, self.length, joined=True)
        self.session = self._open()
        self.graphs: Graphs[RoundState, RoundResult] = Graphs(target.device, target.device.type == "cuda")
        self._computed_by = self._computes_by_now()
        self._pinned = [torch.empty(0, dtype=torch.long)] * 2  # taken in turns: one round may be read while one runs
        self._turn = 0
        self._idle: tuple[tuple[int, ...], Tensor] = ((), self.cache.lengths)
        self._proposing = list(range(rows))  # rows that the session's text part still has

    def _open(self) -> Session:
        if self.drafter is None:
            return NoDraftSession()
        return self.drafter.open(self.target, self.cache.batch_size, self.length, self.spare, self.cache)

    def num_bytes(self) -> int:
        """Return how many bytes both caches take."""
        rows = self.cache.batch_size
        state = 0 if self.drafter is None else self.drafter.state_bytes(self.target, rows, self.length, self.spare)
        return self.cache.num_bytes() + state

    def reset(self) -> None:
        """Become ready for another request.

        Where target or drafter were trained on, moved, or set otherwise in between, rounds start over: sessions may
        hold values computed from weights, and graphs read weights where they were and contain the settings' numbers.
        """
        self.cache.reset()
        before, self._computed_by = self._computed_by, self._computes_by_now()
        changed = before != self._computed_by
        if changed:
            self.graphs.clear()
        self._proposing = list(range(self.cache.batch_size))
        if self.drafter is not None and not self.drafter.abilities.fixed_shapes:
            self.session = self._open()
            return
        if changed:
            self.session = NoDraftSession()  # the old one's memory is freed before more is asked for
            self.session = self._open()
        self.session.reset()

    def _computes_by_now(self) -> list[Hashable]:
        """Return a version of everything that rounds compute by: weights, modules, hooks, and settings."""
        model: nn.Module = self.target.model
        versions = [*weight_versions(model.parameters()), *module_versions(model)]
        if self.drafter is None:
            return versions
        settings = [repr(part.config) for part in self.drafter.modules() if isinstance(part, Drafter)]
        return [*versions, *weight_versions(self.drafter.parameters()), *settings]

    def launch(
        self, setup: RoundSetup, state: RoundState, depth: int, idle: Sequence[int], needed: int
    ) -> PendingRound:
        """Launch one round of all rows; `read` waits for its result.

        Args:
            idle: rows that have finished.
            needed: entries that the longest of the others may reach in this round.
        """
        window, caches = min(window_of(needed), self.length), state.session.caches()
        # Our kernels read no more entries than there are, and a head of few layers can afford to read a whole window:
        # one graph then serves all lengths.
        if self.target.fast is not None and all(len(cache.layers) <= _FEW_LAYERS for cache in caches):
            window = self.length
        for store in (self.cache, *caches):
            store.window = self.length if store is self.cache and self.target.fast is not None else window
            if idle:  # what an idle row writes must stay inside the window, and its positions inside the context
                store.lengths.masked_fill_(self._mask(tuple(idle)), 1)
        after, result = self._run(setup, state, depth, window, idle)
        state = replace(after, session=state.session)
        return PendingRound(state, self._copied_to_host(result.packed), tuple(idle))

    def read(self, pending: PendingRound) -> list[RoundRow]:
        """Wait for a round and return its rows: the one read of a round."""
        rows = pending.read()
        lengths = zip(self.cache.host_lengths, rows, strict=True)
        self.cache.host_lengths = [
            1 if place in pending.idle else length + row.accepted + 1 for place, (length, row) in enumerate(lengths)
        ]
        return rows

    def _run(
        self, setup: RoundSetup, state: RoundState, depth: int, window: int, idle: Sequence[int]
    ) -> tuple[RoundState, RoundResult]:
        """Run a round in which the session's model drafts, after what its text part proposes; keep both up to date.

        A part that does not draft stays outside the captured work, and is updated after it: what the model makes of
        rounds without drafts grows with each.
        """
        text, model = state.session.text, state.session.model
        proposal, with_model = self._proposed(setup, state, depth, idle)
        inside = NoDraftSession() if model is None or not depth else model
        shape = None if proposal is None else (proposal.depth, proposal.parents is None, with_model)
        work = partial(step, setup, depth=depth, with_model=with_model)
        before = replace(state, session=inside, proposal=proposal)
        after, result, replayed = self.graphs.run((_key(setup, depth, window), shape), work, before)
        is_read_here = text is not None or inside is not model
        own = result.cloned() if replayed and is_read_here else result  # the next replay writes there
        if model is not None and inside is not model:
            update_session(model, own)
        if text is not None:
            update_session(text, own.select(self._proposing))
        return replace(after, proposal=None), result

    def _proposed(
        self, setup: RoundSetup, state: RoundState, depth: int, idle: Sequence[int]
    ) -> tuple[Proposal | None, bool]:
        """Return what the session's text part proposes, and whether its model drafts; rows that finished get nothing.

        The proposal has one size for every number of rows, so that one graph serves them all.
        """
        text = state.session.text
        if text is None or self.drafter is None:
            return None, True
        staying = [place for place, row in enumerate(self._proposing) if row not in idle]
        if len(staying) < len(self._proposing):
            text.select(list(staying))
            self._proposing = [self._proposing[place] for place in staying]
        proposal = propose(setup, text, state.root[self._proposing], depth)
        if proposal is None:
            return None, True
        with_model = model_drafts(proposal, len(self._proposing))
        size = self.drafter.max_nodes(depth)
        return proposal.spread(self._proposing, self.cache.batch_size, size), with_model

    def _mask(self, rows: tuple[int, ...]) -> Tensor:
        """Return True at `rows`, `[B]`; made when another row finishes."""
        if rows != self._idle[0]:
            mask = torch.zeros(self.cache.batch_size, dtype=torch.bool)
            mask[list(rows)] = True
            self._idle = (rows, mask.to(self.cache.lengths.device))
        return self._idle[1]

    def _copied_to_host(self, packed: Tensor) -> Callable[[], list[list[int]]]:
        """Start to copy `packed`, which the round after may overwrite; return a function that waits for the copy."""
        if packed.device.type != "cuda":
            return packed.clone().tolist
        self._turn = 1 - self._turn
        if self._pinned[self._turn].numel() < packed.numel():
            self._pinned[self._turn] = torch.empty(packed.numel(), dtype=packed.dtype, pin_memory=True)
        place = self._pinned[self._turn][: packed.numel()].view(packed.shape)
        place.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(packed.device))

        def wait() -> list[list[int]]:
            arrived.synchronize()
            rows: list[list[int]] = place.tolist()
            return rows

        return wait


def _key(setup: RoundSetup, depth: int, window: int) -> Hashable:
    """Return everything that decides a round's work, beside the tensors that it reads."""
    config = setup.sampler_config
    sampling = replace(config.sampling, seed=0)  # a seed is an input
    ends = None if config.processors is None else config.processors.eos
    return depth, window, setup.plan, sampling, ends


class StaticBatches:
    """A decoder's static batches, kept from request to request: one per number of rows, with a drafter and without.

    `wanted`: whether rounds have fixed shapes at all.
    """

    def __init__(self, target: Target, wanted: bool):
        self.target, self.wanted = target, wanted
        # Whether a round may be launched before the one before it is read, so that a GPU never waits for the host.
        self.ahead = wanted and target.device.type == "cuda"
        self.kept: dict[tuple[int, bool], StaticBatch] = {}

    def reserve(self, rows: int, length: int, spare: int, drafter: Drafter | None) -> StaticBatch:
        """Lend a batch until it is given back: one that an earlier request left, if it is large enough."""
        batch = self.kept.pop((rows, drafter is not None), None)
        if batch is None or length > batch.length or spare > batch.spare:
            batch = None  # freed before more is asked for
            batch = StaticBatch(self.target, drafter, rows, length, spare)
        batch.reset()
        return batch

    def give_back(self, batch: StaticBatch) -> None:
        """Keep what `reserve` lent for later requests."""
        self.kept[batch.cache.batch_size, batch.drafter is not None] = batch

    def held(self, rows: int, drafter: Drafter | None) -> int:
        """Return how many bytes `reserve` would use again or free."""
        batch = self.kept.get((rows, drafter is not None))
        return 0 if batch is None else batch.num_bytes()


class GraphTensors(Protocol):
    """Tensors by name, which may be moved to other places in memory."""

    def tensors(self) -> list[Tensor]:
        """Return all of them, in a fixed order."""

    def rebound(self, tensors: list[Tensor]) -> Self:
        """Return the same state in other places, given in that order."""


S = TypeVar("S", bound=GraphTensors)
R = TypeVar("R")


@dataclass
class _Graph(Generic[R]):
    """A captured piece of work: it reads `inputs`, and leaves the next state there."""

    graph: Any
    inputs: list[Tensor]
    result: R  # every replay writes there again
    work: object  # kept so that the memory of what it holds is not used again


class Graphs(Generic[S, R]):
    """Work over fixed tensors, captured once as a CUDA graph and replayed; the graphs used last are kept.

    The work is a function from a state to the next state and a result. A graph reads a state's tensors at one place in
    memory and leaves the next state's there.

    `captures`: False runs all work eagerly.
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

    def run(self, key: Hashable, work: Callable[[S], tuple[S, R]], state: S) -> tuple[S, R, bool]:
        """Do `work`, from a graph if it can be; also return whether the result lies where the next replay writes.

        The first of its kind runs eagerly, which warms up what capture must not; the second is captured.

        `key`: everything that decides the work, beside the state's tensors.
        """
        if not self.captures:
            return *work(state), False
        before = state.tensors()
        key = (key, tuple(tensor.shape for tensor in before))
        if key not in self._graphs:
            after, result = work(state)
            # Work that changes shapes (the first after a prompt, for example) comes once per request, which no graph
            # would pay for.
            if all(a.shape == b.shape for a, b in zip(before, after.tensors(), strict=True)):
                self._graphs[key] = None
                if len(self._graphs) > _MOST_GRAPHS:
                    del self._graphs[next(iter(self._graphs))]
            return after, result, False
        graph = self._graphs[key] = self._graphs.pop(key) or self._capture(work, state)
        if graph is None:
            return *work(state), False
        _copy(graph.inputs, before)
        graph.graph.replay()
        return state.rebound(graph.inputs), graph.result, True

    def _capture(self, work: Callable[[S], tuple[S, R]], state: S) -> _Graph[R] | None:
        before = state.tensors()
        inputs = [tensor.clone() for tensor in before]
        state = state.rebound(inputs)
        graph = torch.cuda.CUDAGraph()
        on_gpu = self.device.type == "cuda"
        collects = gc.isenabled()
        stream = _stream(self.device) if on_gpu else None
        outer = torch.cuda.current_stream(self.device) if on_gpu else None
        gc.disable()  # what a search for cycles frees may call CUDA, which ends a capture
        try:
            # The outer stream is taken up again even where a capture breaks off.
            with (
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
            return None
        finally:
            state.rebound(before)
            if collects:
                gc.enable()
        self._pool = self._pool or graph.pool()
        return _Graph(graph, inputs, result, work)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which everything of a device is captured: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


def _copy(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        if place is not value:
            place.copy_(value)
