"""The fast pass on a CPU: its kernels interpreted, in few programs, since each takes milliseconds there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton.language as tl
    from triton.runtime import interpreter

    from outrider.targets.fast import operations, products
    from outrider.targets.fast.operations import Tiles
    from outrider.targets.fast.products import Fused


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut work into as few programs as still show how parts fit together."""
    monkeypatch.setattr(operations, "_PROGRAMS", 4)
    monkeypatch.setattr(products, "ways", lambda tokens: [Fused(Tiles(0 if tokens == 1 else 16, 128, 64))])


@pytest.fixture(autouse=True, scope="session")
def products_of_bfloat16() -> None:
    """Let the interpreter multiply bfloat16: up to Triton 3.7 it takes the bits of such numbers for integers."""

    def numbers(given: Any) -> Any:
        whole = given.dtype.scalar == tl.bfloat16
        return (given.data.astype(np.uint32) << 16).view(np.float32) if whole else given.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        product = np.matmul(numbers(a), numbers(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
