"""The fastest product of a weight with few rows on a CPU, measured once for each shape and number of rows.

The library has several: of the weight as it is, of its transpose (by which one row reads wide weights in half the
time), and of a copy in oneDNN's blocks. Which is fastest depends on processor, shape and rows, and no rule was found
that holds on two makes of processor. Choices are remembered by processor, threads and versions in a small file, which
is safe to delete.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from ..common.cache_files import CacheFile
from ..common.machine import cpu_name

MOST_ROWS = 64  # products of more rows are bound by arithmetic, which the library does well
_PACKED_FOR = 8  # rows: oneDNN chooses one layout for all products of several rows
_FOUR = 4  # on some processors its products of fewer rows take longer than of four
_READ, _MOST_COPIES = 2**26, 32  # bytes that a trial reads, more than most caches hold, as a pass does; of so many
_REPEATS = 7  # of each way in a trial, in turns
_WITHIN = 1.05  # a way that needs no further copy may take so much longer
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative, of a product


@dataclass(frozen=True)
class Way:
    """A way to multiply `x` `[M, K]` by a weight `[N, K]`: its copy of the weight, and the product `[M, N]`."""

    name: str
    copied: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    copy_of: str = ""  # the way whose copy it shares; "" for its own


def _transposed(weight: Tensor) -> Tensor:
    return weight.T.contiguous()


def _by_transpose(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    return x @ copy if bias is None else torch.addmm(bias, x, copy)


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    return packed


def _by_blocks(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
    return product


def _by_four_rows(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    padded = nn.functional.pad(x, (0, 0, 0, max(0, _FOUR - len(x))))
    return _by_blocks(padded, copy, bias)[: len(x)]


PLAIN = Way("plain", lambda weight: weight, nn.functional.linear)
PACKED = Way("packed", _packed, _by_blocks)
FOUR_ROWS = Way("packed, four rows", _packed, _by_four_rows, PACKED.name)
TRANSPOSED = Way("transposed", _transposed, _by_transpose)
WAYS = {way.name: way for way in (PLAIN, PACKED, FOUR_ROWS, TRANSPOSED)}

_found: dict[tuple[int, int, torch.dtype, int, int], Way] = {}
_CHOICES = CacheFile("products.json", TypeAdapter(dict[str, str]))  # names of ways by what they depend on


def fastest(outputs: int, inputs: int, dtype: torch.dtype, rows: int, weight: Callable[[], Tensor]) -> Way:
    """Return the fastest way to multiply so many rows by weights `[N, K]` on this CPU; it is tried at first use.

    `weight` returns one of them.
    """
    rows = rows if rows <= _PACKED_FOR else 1 << (rows - 1).bit_length()
    key = (outputs, inputs, dtype, rows, torch.get_num_threads())
    way = _found.get(key)
    if way is None:
        way = _found[key] = PLAIN if rows > MOST_ROWS else _remembered_or_tried(weight(), rows)
    return way


def choices() -> dict[str, str]:
    """Return the names of the ways that were chosen on this machine, by what they depend on."""
    return _CHOICES.read() or {}


def _remembered_or_tried(weight: Tensor, rows: int) -> Way:
    outputs, inputs = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    key = f"{machine}: {outputs} x {inputs} in {dtype}, {rows} rows"
    known = choices().get(key)
    if known in WAYS:
        return WAYS[known]
    way = _tried(weight, rows)
    _CHOICES.write(choices() | {key: way.name})
    return way


def _tried(weight: Tensor, rows: int) -> Way:
    """Return the fastest way by trial: one that is right, and needs no copy where another is hardly faster."""
    count = min(_MOST_COPIES, max(1, _READ // weight.nbytes))
    generator = torch.Generator().manual_seed(0)  # a training draws from the common one
    weights = [weight, *(torch.empty_like(weight).normal_(generator=generator) for _ in range(count - 1))]
    x = weight.new_empty(rows, weight.shape[1]).normal_(generator=generator)
    expected = PLAIN.product(x, weight, None)
    tried: dict[str, list[Tensor]] = {}
    for way in WAYS.values():
        if way is FOUR_ROWS and rows >= _FOUR:
            continue
        with suppress(RuntimeError):  # a build of torch may lack one
            copies = tried[way.copy_of] if way.copy_of else [way.copied(each) for each in weights]
            difference = way.product(x, copies[0], None) - expected
            if difference.norm() <= _TOLERANCE[weight.dtype] * expected.norm():
                tried[way.name] = copies
    seconds = dict.fromkeys(tried, math.inf)
    for _ in range(_REPEATS):
        for name, copies in tried.items():
            seconds[name] = min(seconds[name], _seconds(WAYS[name], x, copies))
    best = min(seconds.values())
    return next(WAYS[name] for name, taken in seconds.items() if taken <= _WITHIN * best)


def _seconds(way: Way, x: Tensor, copies: Sequence[Tensor]) -> float:
    """Return the seconds of multiplying by all copies in turn, as a pass does."""
    began = time.perf_counter()
    for copy in copies:
        way.product(x, copy, None)
    return time.perf_counter() - began
