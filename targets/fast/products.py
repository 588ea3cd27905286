"""A layer's products with what stands around them, by whichever way is fastest for so many tokens: that is tried.

Shapes: M tokens, C numbers of an input, N outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import torch
import triton
from torch import Tensor, nn

from . import operations
from .operations import Tiles

_MOST_TOKENS = 64  # of a product by our kernels; with more, products are no matter of reading weights
_REPEATS = 5
_TOLERANCE = 0.03  # relative, of one product in bfloat16
_log = logging.getLogger("outrider")


@dataclass(frozen=True)
class Matrix:
    """One product of a layer.

    Attributes:
        weight: `[N, C]`; of a gated one the gates' and then the ups', `[2N, C]`.
        norm: the weight of the RMSNorm of what it reads, `[C]`; None if that is read as it is.
        bias: `[N]`, or None.
        eps: of the norm.
        gated: whether SiLU of its first half is multiplied by its second.
    """

    weight: Tensor
    norm: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    gated: bool = False

    @property
    def outputs(self) -> int:
        """How many numbers come out."""
        return len(self.weight) // (2 if self.gated else 1)


class Way(Protocol):
    """How a product is computed."""

    def __call__(self, x: Tensor, matrix: Matrix, onto: Tensor | None = None) -> Tensor:
        """Return the product of `x` `[M, C]`, `[M, N]`, added `onto` a tensor in place if one is given."""


@dataclass(frozen=True)
class Fused:
    """A product by a kernel of ours, in one launch."""

    tiles: Tiles

    def __call__(self, x: Tensor, matrix: Matrix, onto: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), matrix.outputs) if onto is None else onto
        how = list(astuple(self.tiles))
        operations.product(
            x, matrix.weight, matrix.norm, matrix.bias, out, matrix.eps, matrix.gated, onto is not None, how
        )
        return out


@dataclass(frozen=True)
class ByLibrary:
    """A product by torch, on a GPU by cuBLAS, with a launch for each thing beside it."""

    def __call__(self, x: Tensor, matrix: Matrix, onto: Tensor | None = None) -> Tensor:
        if matrix.norm is not None:
            x = torch.rms_norm(x, matrix.norm.shape, matrix.norm, matrix.eps)
        if onto is not None:
            onto = onto if matrix.bias is None else onto.add_(matrix.bias)
            return onto.addmm_(x, matrix.weight.T)
        found = nn.functional.linear(x, matrix.weight, matrix.bias)
        return operations.gate(found) if matrix.gated else found


def ways(tokens: int) -> list[Way]:
    """Return what is tried for `tokens`, the one that is taken without a trial first."""
    if tokens > _MOST_TOKENS:
        return [ByLibrary()]
    block = max(16, triton.next_power_of_2(tokens))
    tiles = [Tiles(block, 32, 128, 4, 4), Tiles(block, 16, 256, 4, 4), Tiles(block, 64, 128, 4, 3)]
    tiles += [Tiles(block, 64, 64, 4, 5), Tiles(block, 128, 64, 8, 4)]
    if tokens == 1:
        tiles = [Tiles(0, 8, 512), Tiles(0, 4, 1024), Tiles(0, 16, 256), Tiles(0, 16, 512, 8), *tiles[:2]]
    return [*map(Fused, tiles), ByLibrary()]


class Products:
    """The ways that were found fastest on this device, by product and number of tokens.

    Args:
        matrices: of all layers, by the name of the product: a trial reads all of them in turn, as a pass does, since a
            single one would stay in the GPU's cache.

    Attributes:
        found: the way that is taken, by product and number of tokens, a power of two.
        tried: the milliseconds of all layers' products by each way that was tried.
    """

    def __init__(self, matrices: dict[str, list[Matrix]]):
        self.matrices = matrices
        self.found: dict[tuple[str, int], Way] = {}
        self.tried: dict[tuple[str, int], dict[Way, float]] = {}

    def multiply(self, name: str, layer: int, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return a layer's product of `x` `[M, C]`, `[M, N]`, added `onto` a tensor in place if one is given."""
        return self.way(name, x, onto)(x, self.matrices[name][layer], onto)

    def way(self, name: str, x: Tensor, onto: Tensor | None) -> Way:
        """Return how that product is computed for so many tokens: as for the next power of two, which is tried once.

        A trial takes a good part of a second, and prompts come in all lengths.
        """
        tokens = triton.next_power_of_2(len(x))
        if tokens > _MOST_TOKENS:
            return ByLibrary()
        key = (name, tokens)
        if key not in self.found:
            if not _can_try(x):
                return ways(tokens)[0]
            like = x.new_empty(tokens, x.shape[1]).normal_()
            self.found[key] = self._fastest(name, like, None if onto is None else onto.new_zeros(tokens, onto.shape[1]))
        return self.found[key]

    def _fastest(self, name: str, x: Tensor, onto: Tensor | None) -> Way:
        matrices = self.matrices[name]
        right = _product(ByLibrary(), x, matrices[0], onto).float()
        times: dict[Way, float] = {}
        for way in ways(len(x)):
            try:
                if not _close(_product(way, x, matrices[0], onto).float(), right):
                    _log.warning("%s of %d tokens by %s gives other numbers than torch: left out", name, len(x), way)
                    continue
                times[way] = _milliseconds(lambda way=way: _all(way, x, matrices, onto))  # type: ignore[misc]
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, triton.TritonError) as error:  # a GPU may have too little of something for one way
                _log.debug("%s of %d tokens by %s: %s", name, len(x), way, error)
        self.tried[name, len(x)] = times
        return min(times, key=lambda way: times[way], default=ByLibrary())


def _product(way: Way, x: Tensor, matrix: Matrix, onto: Tensor | None) -> Tensor:
    return way(x, matrix, None if onto is None else onto.clone())


def _all(way: Way, x: Tensor, matrices: Sequence[Matrix], onto: Tensor | None) -> None:
    for matrix in matrices:
        way(x, matrix, onto)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _TOLERANCE * other.norm())


def _can_try(x: Tensor) -> bool:
    """Tell whether there is something to time, and nothing is being captured."""
    return x.device.type == "cuda" and not _is_fake(x) and not torch.cuda.is_current_stream_capturing()


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def _milliseconds(work: Callable[[], None]) -> float:
    """Return the least milliseconds of `work` as a graph: from Python, launches take longer than small products."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_REPEATS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
