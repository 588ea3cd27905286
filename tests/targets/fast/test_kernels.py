"""Every kernel of the fast pass computes what sums in float64 give, up to rounding.

On a CPU they are interpreted. `scripts/bench/kernels.py` has more cases, and runs on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from outrider.scripts.bench.kernels import (
    ATTENTION,
    WAYS,
    attention_error,
    heads_error,
    product_error,
)

CPU = torch.device("cpu")
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 0.008}  # the interpreter cuts bfloat16 off, where a GPU rounds
LARGE = [case for case in ATTENTION if case.queries > 60]
SMALL = [case for case in ATTENTION if case.queries < 60]
FEW = [case for case in SMALL if len(case.lengths) == 1 or case.window or (case.tree and case.group == 1)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in FEW else [pytest.mark.slow]) for case in SMALL]
)
def test_attention_in_parts(case):
    for dtype, limit in LIMITS.items():
        assert attention_error(case, dtype, CPU, parts=4) < limit
    assert attention_error(case, torch.float32, CPU, parts=1) < LIMITS[torch.float32]


@pytest.mark.parametrize("case", LARGE[:1], ids=str)
def test_attention_of_a_tree_of_64_nodes(case):
    assert attention_error(case, torch.float32, CPU, parts=2) < LIMITS[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_in_as_many_parts_as_fill_a_gpu(case):
    for dtype, limit in LIMITS.items():
        assert attention_error(case, dtype, CPU, parts=64) < limit


@pytest.mark.parametrize("kind", ["normed", "gated", "added"])
@pytest.mark.parametrize("name", WAYS)
def test_products(name, kind):
    way, numbers = WAYS[name]
    for dtype, limit in LIMITS.items():
        for tokens in numbers:
            assert product_error(way, tokens, kind, dtype, CPU) < limit * 2


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_heads(normed, size):
    for dtype, limit in LIMITS.items():
        assert heads_error(normed, size, dtype, CPU) < limit
