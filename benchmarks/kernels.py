"""The fast pass's kernels against sums in float64: the largest relative error of each, over shapes where faults hide.

    python -m benchmarks.kernels --out benchmarks/results/kernels-h200.json
    TRITON_INTERPRET=1 python -m benchmarks.kernels --out benchmarks/results/kernels-interpreted.json

Attention: one visible entry, scores that are all negative, rows of different lengths, heads that share keys by 1, 4,
5, 7 and 8, heads of 16, 64 and 128 numbers, a window, and a tree of 64 nodes; what must not be read is NaN. Products:
one token and several, normed, biased, gated and added. Heads: with norms and without. An error is the distance from the
exact result over its size, of the token at which it is largest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from outrider.common.machine import best_device, device_name
from outrider.common.runtime import versions
from outrider.targets.cache_slots import Nodes, Placement
from outrider.targets.fast import custom_ops
from outrider.targets.fast.custom_ops import Split, Tiles
from outrider.targets.fast.matmuls import Matmul, Matrix, TorchMatmul, TritonMatmul
from outrider.targets.fast.triton_runner import exact_attention

from .report import command, options, publish, table, write

SPARE = 9  # slots after a pass's entries, which must not be read


@dataclass(frozen=True)
class Attention:
    """One case of attention.

    Attributes:
        lengths: committed entries of the rows. queries: tokens of each row.
        group: heads that share keys. size: of a head. window: 0 for all of the text.
        tree: whether the tokens are nodes of a random tree.
        negative: whether all scores are far below 0.
    """

    lengths: tuple[int, ...] = (0, 3, 150)
    queries: int = 5
    group: int = 4
    size: int = 64
    window: int = 0
    tree: bool = False
    negative: bool = False

    def __str__(self) -> str:
        kind = "tree" if self.tree else "chain"
        said = f"{kind} of {self.queries} after {self.lengths}, {self.group} heads share keys, size {self.size}"
        return said + (f", window {self.window}" if self.window else "") + (", negative" if self.negative else "")


ATTENTION = (
    Attention((0,), 1),
    Attention((0,), 1, negative=True),
    Attention((200, 1), 1, group=8, size=128, negative=True),
    Attention(group=1),
    Attention(group=4, size=128, negative=True),
    Attention(group=8, tree=True),
    Attention(group=1, size=128, tree=True, negative=True),
    Attention((40, 100), 3, group=5, size=16, negative=True),
    Attention(group=7, tree=True),
    Attention((70,), 64, group=4, tree=True),
    Attention((130,), 64, group=8, size=128, tree=True, negative=True),
    Attention((40, 100), 3, window=33),
    Attention((40, 100), 7, window=9, tree=True, negative=True),
)


def attention_error(case: Attention, dtype: torch.dtype, device: torch.device, parts: int | None = None) -> float:
    """Return the error of attention in one case; `parts` None for as many as fill a GPU."""
    generator = torch.Generator().manual_seed(1)
    rows = len(case.lengths)
    shared = 2
    room = max(case.lengths) + case.queries + SPARE

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query = numbers(rows * case.queries, shared * case.group, case.size)
    keys, values = numbers(rows, shared, room, case.size), numbers(rows, shared, room, case.size)
    if case.negative:
        query, keys = query.abs(), -keys.abs()
    placed = _placed(case, device, room, generator)
    _poison(keys, values, placed)
    split = Split.of(rows, shared, case.group * case.queries, room)
    split = split if parts is None else Split(parts, split.block)
    scale = case.size**-0.5
    found = custom_ops.attend(query, keys, values, placed, scale, case.window, split)
    right = exact_attention(query, keys.nan_to_num(), values.nan_to_num(), placed, scale, case.window)
    return largest_error(found, right)


def _placed(case: Attention, device: torch.device, room: int, generator: torch.Generator) -> Placement:
    lengths = torch.tensor(case.lengths, device=device)
    slots = lengths[:, None] + torch.arange(case.queries, device=device)
    positions, nodes = slots, None
    if case.tree:
        earlier = torch.arange(case.queries - 1)
        parents = (torch.rand(len(case.lengths), case.queries - 1, generator=generator) * (earlier + 1)).long() - 1
        nodes = Nodes.of_tree(parents.to(device), case.queries)
        positions = lengths[:, None] + nodes.depths
    rows = torch.arange(len(case.lengths), device=device)[:, None]
    return Placement(lengths, room, slots, positions, (rows, slots), nodes)


def _poison(keys: Tensor, values: Tensor, placed: Placement) -> None:
    """Put NaN after the last entry of each row."""
    for row, last in enumerate(placed.slots[:, -1].tolist()):
        keys[row, :, last + 1 :] = values[row, :, last + 1 :] = float("nan")


def largest_error(found: Tensor, right: Tensor) -> float:
    """Return the largest relative error of a token, `[M, ...]`."""
    found, right = found.double().flatten(1), right.double().flatten(1)
    return ((found - right).norm(dim=1) / right.norm(dim=1)).max().item()


def product_error(
    way: Matmul, tokens: int, kind: str, dtype: torch.dtype, device: torch.device, width: int = 96
) -> float:
    """Return the error of a product of this kind: "normed", "gated" (and normed), or "added" (with a bias)."""
    generator, outputs = torch.Generator().manual_seed(2), 88

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows = 2 * outputs if kind == "gated" else outputs
    norm, bias = (None, numbers(outputs)) if kind == "added" else (numbers(width), None)
    matrix = Matrix(numbers(rows, width) / width**0.5, norm, bias, 1e-5, kind == "gated")
    x, onto = numbers(tokens, width) * 3, numbers(tokens, outputs) if kind == "added" else None
    before = None if onto is None else onto.clone()
    return largest_error(way(x, matrix, onto), exact_product(x, matrix, before))


def exact_product(x: Tensor, matrix: Matrix, onto: Tensor | None) -> Tensor:
    """Return a product in float64, `[M, N]`."""
    x = x.double()
    if matrix.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + matrix.eps) * matrix.norm.double()
    found = x @ matrix.weight.double().T
    if matrix.bias is not None:
        found = found + matrix.bias.double()
    if matrix.gated:
        left, right = found.chunk(2, 1)
        found = torch.nn.functional.silu(left) * right
    return found if onto is None else found + onto.double()


def heads_error(normed: bool, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the error of queries, keys and values as they are placed."""
    generator = torch.Generator().manual_seed(3)
    rows = 2
    queries = 3
    heads = 4
    shared = 2

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    joined = numbers(rows * queries, heads + 2 * shared, size)
    norms = [numbers(size), numbers(size)] if normed else []
    frequencies = (10_000.0 ** -(torch.arange(0, size, 2) / size)).to(device)
    positions = torch.tensor([[5, 6, 6], [1000, 1001, 1002]], device=device)
    slots = torch.tensor([[5, 6, 7], [1, 2, 3]], device=device)
    keys, values = (joined.new_zeros(rows, shared, 12, size) for _ in range(2))
    query = custom_ops.place_heads(joined, norms, frequencies, positions, slots, keys, values, 1e-6, 1.0)
    right_query, right_keys = exact_heads(joined, norms, frequencies, positions.flatten(), heads, shared)
    at = torch.arange(rows, device=device)[:, None]
    found_keys, found_values = (entries[at, :, slots].flatten(0, 1) for entries in (keys, values))
    right_values = joined[:, heads + shared :]
    pairs = ((query, right_query), (found_keys, right_keys), (found_values, right_values))
    return max(largest_error(found, right) for found, right in pairs)


def exact_heads(
    joined: Tensor, norms: Sequence[Tensor], frequencies: Tensor, positions: Tensor, heads: int, shared: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normed and turned in float64, by angles that are rounded as the library's are."""
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)
    cosine, sine = (turn.to(joined.dtype).double()[:, None] for turn in (angles.cos(), angles.sin()))
    found = []
    for number, part in enumerate(joined[:, : heads + shared].double().split([heads, shared], 1)):
        if norms:
            part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * norms[number].double()
        first, second = part.chunk(2, -1)
        found.append(part * cosine + torch.cat([-second, first], -1) * sine)
    return found[0], found[1]


def multiply_bfloat16() -> None:
    """Let products of bfloat16 be products of the numbers, for the rest of the process.

    Triton's interpreter, up to 3.7, multiplies bfloat16 as if its bits were integers.
    """
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _create_dot(_builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _numbers(given: Any) -> Any:
    """Return a block as floats: the interpreter keeps bfloat16 as its sixteen bits, the upper half of a float's."""
    if given.dtype.scalar == tl.bfloat16:
        return (given.data.astype(np.uint32) << 16).view(np.float32)
    return given.data


WAYS: dict[str, tuple[Matmul, tuple[int, ...]]] = {
    "multiply_vector": (TritonMatmul(Tiles(0, 32, 64)), (1,)),
    "multiply_tokens": (TritonMatmul(Tiles(16, 32, 64)), (1, 5, 33)),
    "torch and gate": (TorchMatmul(), (1, 5)),
}


def errors(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, str, float]]:
    """Yield each kernel, a case, and its error there."""
    for case in ATTENTION:
        yield "attend_parts and merge_parts", str(case), attention_error(case, dtype, device)
        yield "attend_parts alone", str(case), attention_error(case, dtype, device, parts=1)
    for name, (way, numbers) in WAYS.items():
        for kind in ("normed", "gated", "added"):
            for tokens in numbers:
                yield name, f"{tokens} tokens, {kind}", product_error(way, tokens, kind, dtype, device)
    for normed in (False, True):
        for size in (64, 128):
            said = f"size {size}, {'normed' if normed else 'without norms'}"
            yield "place_heads", said, heads_error(normed, size, dtype, device)


def tables(result: dict[str, Any]) -> list[str]:
    """Return the largest error of each kernel in each dtype."""
    dtypes = [dtype for dtype in ("float32", "bfloat16") if dtype in result]
    kernels = sorted(result[dtypes[0]]["largest"])
    rows = ([f"`{name}`", *(f"{result[dtype]['largest'][name]:.1e}" for dtype in dtypes)] for name in kernels)
    return [table(["kernel", *(f"largest relative error, {dtype}" for dtype in dtypes)], rows)]


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args(given)
    device = best_device()
    if device.type == "cpu":
        multiply_bfloat16()
    result: dict[str, Any] = {"device": str(device), "device_name": device_name(device), "versions": versions()}
    for dtype in arguments.dtypes:
        largest: dict[str, float] = {}
        cases = []
        for kernel, case, error in errors(getattr(torch, dtype), device):
            cases.append({"kernel": kernel, "case": case, "error": error})
            largest[kernel] = max(error, largest.get(kernel, 0.0))
        result[dtype] = {"largest": largest, "cases": cases}
        write(result, arguments.out)
    publish(result, arguments.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
