"""The fast pass's kernels compiled for an H200 where there is none: registers, what spills, shared memory.

    python tests/targets/fast/compile_for_h200.py [--few]

At the shapes of Llama-3.1-8B and Qwen3-8B, in bfloat16, by every tiling that `matmuls.candidates` tries for 1, 8 and 64
tokens. A kernel that spills registers, or asks for more shared memory than a multiprocessor has, is a finding: exit
code 1. `TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.targets.cache_slots import Nodes, Placement
from outrider.targets.fast import custom_ops, matmuls
from outrider.targets.fast.custom_ops import Split
from outrider.targets.fast.matmuls import TritonMatmul

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that one program may have
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int64: "*i64", torch.bool: "*i1"}
HIDDEN = 4096
HEADS = 32
SHARED_HEADS = 8
SIZE = 128


@dataclass(frozen=True)
class Launch:
    """One launch as it would be: the kernel, what it is given, and what it is compiled with."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """Compile it for the target."""
        names = self.kernel.arg_names
        settings = {name: self.options[name] for name in self.options if name.startswith("num_")}
        given = dict(zip(names, self.arguments, strict=False))
        ones = {name: value for name, value in given.items() if isinstance(value, int) and value == 1}  # as at a launch
        constants = ones | {name: value for name, value in self.options.items() if name not in settings}
        signature = {name: "constexpr" if name in constants else _type(given[name]) for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if _is_aligned(given.get(name))}
        source = ASTSource(self.kernel, signature, constants, aligned)
        return triton.compile(source, target=TARGET, options=settings)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def launches(work: Any) -> list[Launch]:
    """Return the launches that `work` would make."""
    found: list[Launch] = []

    def note(kernel: Any, _: Any, *arguments: Any, **options: Any) -> None:
        found.append(Launch(kernel, arguments, options))

    with patch.object(custom_ops, "launch", note):
        work()
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return memory that is never touched: a matrix of 8B shape costs nothing so."""
    return torch.empty(*shape, dtype=dtype)


def cases(few: bool) -> Iterator[tuple[str, Any]]:
    """Yield each case: a name, and work that launches the kernel."""
    intermediates = {"llama": 14_336, "qwen3": 12_288}
    for tokens in (1, 8) if few else (1, 8, 64):
        for way in [way for way in matmuls.candidates(tokens) if isinstance(way, TritonMatmul)][: 1 if few else None]:
            how = list(astuple(way.tiles))
            x = empty(tokens, HIDDEN)
            norm = empty(HIDDEN)
            hidden = empty(tokens, HIDDEN)
            for kind, width in list(intermediates.items())[: 1 if few else None]:
                weight, out = empty(2 * width, HIDDEN), empty(tokens, width)
                yield (
                    f"gated, {kind}, {tokens} tokens, {how}",
                    lambda a=(x, weight, norm, None, out, 1e-5, True, False, how): custom_ops.product(*a),
                )
            if few:
                continue
            joined, out = empty((HEADS + 2 * SHARED_HEADS) * SIZE, HIDDEN), empty(tokens, 6144)
            square = empty(HIDDEN, HIDDEN)
            yield (
                f"joined, {tokens} tokens, {how}",
                lambda a=(x, joined, norm, None, out, 1e-5, False, False, how): custom_ops.product(*a),
            )
            yield (
                f"added, {tokens} tokens, {how}",
                lambda a=(x, square, None, None, hidden, 0.0, False, True, how): custom_ops.product(*a),
            )
    yield "gate", lambda: custom_ops.gate(empty(8, 28_672))
    for queries in (5,) if few else (1, 8, 64):
        for tree in (True,) if few else (False, True):
            yield f"attention, {queries} tokens, {'tree' if tree else 'chain'}", lambda q=queries, t=tree: attend(q, t)
    for normed in (True,) if few else (False, True):
        yield f"heads, {'normed' if normed else 'plain'}", lambda n=normed: place(n)


def attend(queries: int, tree: bool) -> None:
    lengths = torch.tensor([1000])
    slots = lengths[:, None] + torch.arange(queries)
    parents = torch.arange(queries - 1)[None] - 1
    nodes = Nodes.of_tree(parents, queries) if tree else None
    keys, values = empty(1, SHARED_HEADS, 4096, SIZE), empty(1, SHARED_HEADS, 4096, SIZE)
    placed = Placement(lengths, 4096, slots, slots, slice(0, 0), nodes)
    split = Split.of(1, SHARED_HEADS, HEADS // SHARED_HEADS * queries, 4096)
    custom_ops.attend(empty(queries, HEADS, SIZE), keys, values, placed, SIZE**-0.5, 0, split)


def place(normed: bool) -> None:
    joined, slots = empty(8, HEADS + 2 * SHARED_HEADS, SIZE), torch.arange(8)[None]
    keys, values = empty(1, SHARED_HEADS, 4096, SIZE), empty(1, SHARED_HEADS, 4096, SIZE)
    norms = [empty(SIZE), empty(SIZE)] if normed else []
    frequencies = empty(SIZE // 2, dtype=torch.float32)
    custom_ops.place_heads(joined, norms, frequencies, slots, slots, keys, values, 1e-6, 1.0)


def figures(launch: Launch) -> dict[str, Any]:
    """Return the registers and memory that a compiled kernel needs of a multiprocessor."""
    made = launch.compile()
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        told = subprocess.run(
            [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers, spilled = (int(found[1]) if (found := re.search(p, told)) else 0 for p in (_REGISTERS, _SPILLED))
    return {"registers": registers, "spilled_bytes": spilled, "shared_bytes": made.metadata.shared}


_REGISTERS, _SPILLED = r"Used (\d+) registers", r"(\d+) bytes spill stores"


def main(few: bool) -> int:
    """Print what each kernel needs in each case; return 1 if one does not fit."""
    ended = 0
    for name, work in cases(few):
        for launch in launches(work):
            needs = figures(launch)
            fits = not needs["spilled_bytes"] and needs["shared_bytes"] <= SHARED
            print(launch.kernel.fn.__name__, name, needs, "" if fits else "DOES NOT FIT", flush=True)
            ended = ended if fits else 1
    return ended


if __name__ == "__main__":
    sys.exit(main("--few" in sys.argv))
