"""The matrix products of a layer with the operations around them, tuned for each number of tokens.

Shapes: M tokens, C numbers of an input, N outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
import triton
from torch import Tensor, nn

from . import custom_ops
from .custom_ops import Tiles
from .trial_passes import captured

_MOST_TOKENS = 64  # of a product by our kernels; larger ones are not bound by reading weights
_REPEATS = 5
_TOLERANCE = 0.03  # relative, of one product in bfloat16
_log = logging.getLogger("outrider")


@dataclass(frozen=True)
class Matrix:
    """One product of a layer."""

    weight: Tensor  # [N, C]; of a gated one the gates' and then the ups', [2N, C]
    norm: Tensor | None = None  # the weight of the RMSNorm of its input, [C]
    bias: Tensor | None = None  # [N]
    eps: float = 0.0  # of the norm
    gated: bool = False  # SiLU of the first half is multiplied by the second half

    @property
    def outputs(self) -> int:
        """The width of the output."""
        return len(self.weight) // (2 if self.gated else 1)


@dataclass(frozen=True)
class TritonMatmul:
    """The product of `x` `[M, C]`, `[M, N]`, added `onto` a tensor in place if one is given, by a kernel of ours."""

    tiles: Tiles

    def __call__(self, x: Tensor, matrix: Matrix, onto: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), matrix.outputs) if onto is None else onto
        how = list(astuple(self.tiles))
        custom_ops.product(
            x, matrix.weight, matrix.norm, matrix.bias, out, matrix.eps, matrix.gated, onto is not None, how
        )
        return out


@dataclass(frozen=True)
class TorchMatmul:
    """The same product by torch, on a GPU by cuBLAS, with a launch for each operation around it."""

    def __call__(self, x: Tensor, matrix: Matrix, onto: Tensor | None = None) -> Tensor:
        if matrix.norm is not None:
            x = torch.rms_norm(x, matrix.norm.shape, matrix.norm, matrix.eps)
        if onto is not None:
            onto = onto if matrix.bias is None else onto.add_(matrix.bias)
            return onto.addmm_(x, matrix.weight.T)
        product = nn.functional.linear(x, matrix.weight, matrix.bias)
        return custom_ops.gate(product) if matrix.gated else product


Matmul = TritonMatmul | TorchMatmul


def candidates(tokens: int) -> list[Matmul]:
    """Return the implementations to try for `tokens`; the first is taken where nothing can be tried.

    The tilings are those that were fastest for some product of an 8B shape on an H200, among nine; cuBLAS was for the
    others (`benchmarks/results/passes-8b-h200.json`).
    """
    if tokens > _MOST_TOKENS:
        return [TorchMatmul()]
    if tokens == 1:
        tiles = [Tiles(0, 16, 512, 8), Tiles(0, 4, 1024), Tiles(0, 4, 2048, 8)]
    else:
        tiles = [Tiles(_bucket(tokens), 128, 64, 8, 4), Tiles(_bucket(tokens), 64, 64, 4, 5)]
    return [*map(TritonMatmul, tiles), TorchMatmul()]


def _bucket(tokens: int) -> int:
    """Return the number of tokens that is tried for `tokens`: a power of two, and 16 for all from 2 on.

    A tensor core multiplies by sixteen tokens at once, however many there are.
    """
    return 1 if tokens == 1 else max(16, triton.next_power_of_2(tokens))


class TunedMatmuls:
    """The fastest implementations on this device, by product and number of tokens, of which few are tried.

    A trial reads the matrices of all layers in turn, as a pass does: a single one would stay in the GPU's cache.
    """

    def __init__(self, matrices: dict[str, list[Matrix]]):
        self.matrices = matrices
        self.chosen: dict[tuple[str, int], Matmul] = {}
        self.timings: dict[tuple[str, int], dict[Matmul, float]] = {}  # milliseconds of all layers' products

    def multiply(self, name: str, layer: int, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return a layer's product of `x` `[M, C]`, `[M, N]`, added `onto` a tensor in place if one is given."""
        return self.choose(name, x, onto)(x, self.matrices[name][layer], onto)

    def choose(self, name: str, x: Tensor, onto: Tensor | None) -> Matmul:
        """Return the implementation for so many tokens: that of their bucket, for which all are tried once."""
        tokens = _bucket(len(x))
        if tokens > _MOST_TOKENS:
            return TorchMatmul()
        key = (name, tokens)
        if key not in self.chosen:
            if not _can_try(x):
                return candidates(tokens)[0]
            generator = torch.Generator(x.device).manual_seed(0)  # a training draws from the common one
            x = x.new_empty(tokens, x.shape[1]).normal_(generator=generator)
            onto = None if onto is None else onto.new_zeros(tokens, onto.shape[1])
            self.chosen[key] = self._fastest(name, x, onto)
        return self.chosen[key]

    def _fastest(self, name: str, x: Tensor, onto: Tensor | None) -> Matmul:
        matrices = self.matrices[name]
        tried = matrices[-1]  # the last layer is never an empty one, as the first layers of a grown model are
        right = _product(TorchMatmul(), x, tried, onto)
        times: dict[Matmul, float] = {}
        for matmul in candidates(len(x)):
            try:
                difference = _product(matmul, x, tried, onto) - right
                if not difference.norm() <= _TOLERANCE * right.norm():  # NaN is neither close nor far
                    _log.warning("%s of %d tokens by %s gives other numbers than torch: left out", name, len(x), matmul)
                    continue
                times[matmul] = _milliseconds(partial(_all, matmul, x, matrices, _cloned(onto)))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, triton.TritonError) as error:  # a GPU may have too little of something for one
                _log.debug("%s of %d tokens by %s: %s", name, len(x), matmul, error)
        self.timings[name, len(x)] = times
        return min(times, key=lambda matmul: times[matmul], default=TorchMatmul())


def _product(matmul: Matmul, x: Tensor, matrix: Matrix, onto: Tensor | None) -> Tensor:
    return matmul(x, matrix, _cloned(onto)).float()


def _cloned(onto: Tensor | None) -> Tensor | None:
    return None if onto is None else onto.clone()


def _all(matmul: Matmul, x: Tensor, matrices: Sequence[Matrix], onto: Tensor | None) -> None:
    for matrix in matrices:
        matmul(x, matrix, onto)


def _can_try(x: Tensor) -> bool:
    """Return whether there is something to time, and nothing is being captured."""
    fake = isinstance(x, torch._subclasses.FakeTensor)
    return x.device.type == "cuda" and not fake and not torch.cuda.is_current_stream_capturing()


def _milliseconds(work: Callable[[], None]) -> float:
    """Return the least milliseconds of `work` as a graph."""
    replay = captured(work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_REPEATS):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
