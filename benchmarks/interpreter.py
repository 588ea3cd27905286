"""Triton's interpreter, put right where it is wrong: up to 3.7 it multiplies bfloat16 as if its bits were integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def multiply_bfloat16() -> None:
    """Let products of bfloat16 be products of the numbers, for the rest of the process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _create_dot(_builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _numbers(given: Any) -> Any:
    """Return a block as floats: the interpreter keeps bfloat16 as its sixteen bits, the upper half of a float's."""
    if given.dtype.scalar == tl.bfloat16:
        return (given.data.astype(np.uint32) << 16).view(np.float32)
    return given.data
