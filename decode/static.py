"""Rounds of fixed shapes: on a GPU captured as CUDA graphs, elsewhere the same code eagerly.

The memory of such rounds lasts from request to request, one set per number of rows. Every pass reads a window of the
caches, whatever its rows' lengths; windows come in a few sizes, and a graph serves one window, depth, plan and sampling
(seeds and sequence ids are inputs); the graphs used last are kept. A round drafts, verifies, accepts, compacts and leaves the next round's inputs
without the host; the host then reads what it emitted, once. Rows that have finished run on idly and are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..heads.parts.weights import weight_versions
from ..targets import RaggedCache
from .drafting import layout_of

if TYPE_CHECKING:
    from ..heads import Drafter
    from ..targets import Target
    from .engine import Batch, Outcome, Run

_LEAST = 256
_MOST_GRAPHS = 64
_log = logging.getLogger("outrider")


def window_of(needed: int) -> int:
    """The smallest window that holds `needed` entries: 256, 384, 512, 768, 1024, …"""
    size = _LEAST
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def margin(plan_nodes: int, depth: int, reads: int) -> int:
    """Entries that a round may write behind the longest row, in the target's cache and in a drafter's, which is up to a round behind."""
    return 2 * (1 + max(plan_nodes, depth, reads)) + 1


@dataclass
class _Graph:
    """A captured round: it reads `inputs`, and leaves the next round's there.

    `kept` holds what the graph reads beside them, so that nobody else gets its memory.
    """

    graph: Any
    inputs: list[Tensor]
    outcome: Outcome
    rule: str
    kept: object


class StaticRounds:
    """Memory and graphs for rounds of `rows` sequences of up to `length` entries.

    Args:
        spare: as for `Drafter.open`.
    """

    def __init__(self, target: Target, drafter: Drafter | None, rows: int, length: int, spare: int):
        self.target, self.drafter = target, drafter
        self.length, self.spare = window_of(length), spare
        self.cache: RaggedCache = target.new_cache(rows, self.length)
        self.drafting = None if drafter is None else self._open(drafter)
        self.captures = target.device.type == "cuda"
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._weights = self._weights_now()
        self._pool: Any = None
        self._pinned: Tensor | None = None
        self._masked: tuple[tuple[int, ...], Tensor] = ((), self.cache.lengths)

    def _open(self, drafter: Drafter) -> Any:
        return drafter.open(self.target, self.cache.batch_size, self.length, self.spare, self.cache)

    def fits(self, length: int, spare: int) -> bool:
        return length <= self.length and spare <= self.spare

    def num_bytes(self) -> int:
        """Of both caches."""
        state = (
            0
            if self.drafter is None
            else self.drafter.state_bytes(self.target, self.cache.batch_size, self.length, self.spare)
        )
        return self.cache.num_bytes() + state

    def reset(self) -> None:
        """Ready for another request. A drafter that was trained on in between starts over: its state may hold what it made of its weights."""
        self.cache.reset()
        if self.drafter is None:
            return
        if self._weights != (now := self._weights_now()):
            self._graphs.clear()
            self._pool = self.drafting = None  # freed before more is asked for
            self._weights, self.drafting = now, self._open(self.drafter)
        self.drafting.reset()

    def _weights_now(self) -> list[tuple[int, int]]:
        return [] if self.drafter is None else weight_versions(self.drafter.parameters())

    # ------------------------------------------------------------ a round

    def round(self, run: Run, batch: Batch, depth: int, idle: list[int], needed: int) -> list[list[int]]:
        """One round of all rows; returns what `Run.compute` packed, read back.

        Args:
            idle: rows that have finished. needed: entries that the longest of the others may reach in this round.
        """
        window = min(window_of(needed), self.length)
        caches = [
            self.cache,
            *(batch.drafting.caches() if self.drafter is not None and batch.drafting is not None else ()),
        ]
        for cache in caches:
            cache.window = window
            if idle:  # what an idle row writes must stay inside the window, and its positions inside the context
                cache.lengths.masked_fill_(self._mask(tuple(idle)), 1)
        outcome = self._captured(run, batch, depth, window) if self.captures else self._eager(run, batch, depth)
        if depth == 0 and batch.drafting is not None:
            run.absorb(batch, outcome)
        packed = self._read(outcome.packed)
        self.cache.host_lengths = [
            1 if r in idle else known + row[-3] + 1
            for r, (known, row) in enumerate(zip(self.cache.host_lengths, packed, strict=True))
        ]
        return packed

    def _mask(self, rows: tuple[int, ...]) -> Tensor:
        """True at `rows`, `[B]`; made when another row finishes."""
        if rows != self._masked[0]:
            mask = torch.zeros(self.cache.batch_size, dtype=torch.bool)
            mask[list(rows)] = True
            self._masked = (rows, mask.to(self.cache.lengths.device))
        return self._masked[1]

    def _eager(self, run: Run, batch: Batch, depth: int) -> Outcome:
        outcome = run.compute(batch, depth)
        if depth:
            run.absorb(batch, outcome)
        return outcome

    def _read(self, packed: Tensor) -> list[list[int]]:
        """The one read of a round."""
        if packed.device.type != "cuda":
            return packed.tolist()
        if self._pinned is None or self._pinned.shape != packed.shape:
            self._pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._pinned.copy_(packed, non_blocking=True)
        torch.cuda.current_stream(packed.device).synchronize()
        return self._pinned.tolist()

    # ------------------------------------------------------------ capture

    def _captured(self, run: Run, batch: Batch, depth: int, window: int) -> Outcome:
        """The same round from a graph. The first of its kind runs eagerly, which warms up what capture must not; the second is captured."""
        now = _carried(run, batch, depth)
        key = (depth, window, run.plan, replace(run.sampling, seed=0), run.eos, tuple(t.shape for t in now))
        if key not in self._graphs:
            outcome = self._eager(run, batch, depth)
            # A round that leaves other shapes than it found (the first behind a prompt, say) comes once per request: no graph is worth it.
            if all(a.shape == b.shape for a, b in zip(now, _carried(run, batch, depth), strict=True)):
                self._graphs[key] = None
                if len(self._graphs) > _MOST_GRAPHS:
                    del self._graphs[next(iter(self._graphs))]
            return outcome
        graph = self._graphs[key] = self._graphs.pop(key) or self._capture(run, batch, depth)
        if graph is None:
            return self._eager(run, batch, depth)
        for own, new in zip(graph.inputs, now, strict=True):
            if own is not new:
                own.copy_(new)
        graph.graph.replay()
        _carry(run, batch, depth, graph.inputs)
        run.rule = graph.rule
        # The next replay overwrites what a drafter that sits out would otherwise keep.
        return graph.outcome if depth or batch.drafting is None else graph.outcome.cloned()

    def _capture(self, run: Run, batch: Batch, depth: int) -> _Graph | None:
        before = _carried(run, batch, depth)
        inputs = [t.clone() for t in before]
        _carry(run, batch, depth, inputs)
        graph, device = torch.cuda.CUDAGraph(), self.cache.lengths.device
        on_gpu = device.type == "cuda"
        stream, outer = (torch.cuda.Stream(device), torch.cuda.current_stream(device)) if on_gpu else (None, None)
        try:
            # The outer stream is taken up again even where a capture breaks off.
            with (
                torch.cuda.device(device if on_gpu else -1),
                torch.cuda.stream(outer),
                torch.cuda.graph(graph, pool=self._pool, stream=stream),
            ):
                outcome = self._eager(run, batch, depth)
                for own, new in zip(inputs, _carried(run, batch, depth), strict=True):
                    if own is not new:
                        own.copy_(new)
        except RuntimeError as error:
            _log.warning(
                "rounds cannot be captured as CUDA graphs here, they run eagerly from now on: %s",
                str(error).splitlines()[0],
            )
            self.captures = False
            _carry(run, batch, depth, before)
            return None
        _carry(run, batch, depth, inputs)
        self._pool = self._pool or graph.pool()
        kept = (run.processors, None if run.plan.tree is None else layout_of(run.plan.tree, device))
        return _Graph(graph, inputs, outcome, run.rule, kept)


def _carried(run: Run, batch: Batch, depth: int) -> list[Tensor]:
    """Everything that a round reads and the round before, or the request, wrote; the caches' entries apart."""
    assert isinstance(run.seed, Tensor)
    found = [run.seed, batch.sequences, batch.root, batch.cache.lengths]
    found += [batch.wanting] if batch.wanting is not None else []
    found += batch.context.tensors() if batch.context is not None else []
    if depth and run.drafter is not None:
        found += [cache.lengths for cache in batch.drafting.caches()] + batch.drafting.carried()
    return found


def _carry(run: Run, batch: Batch, depth: int, tensors: list[Tensor]) -> None:
    """Put them back, from other places in memory."""
    rest = iter(tensors)
    run.seed, batch.sequences, batch.root, batch.cache.lengths = next(rest), next(rest), next(rest), next(rest)
    batch.wanting = next(rest) if batch.wanting is not None else None
    batch.context = batch.context.at(rest) if batch.context is not None else None
    if depth and run.drafter is not None:
        for cache in batch.drafting.caches():
            cache.lengths = next(rest)
        batch.drafting.carry(list(rest))
