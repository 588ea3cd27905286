"""Every kernel of the fast pass, interpreted, gives what sums in float64 give; benchmarks/kernels.py has more cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter

from benchmarks.kernels import ATTENTION, WAYS, attention_error, heads_error, product_error
from outrider.targets.cache_slots import Placement
from outrider.targets.fast import custom_ops
from outrider.targets.fast.custom_ops import Split

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


def test_entries_may_lie_where_32_bits_do_not_reach(monkeypatch):
    """One tensor holds the entries of all rows and layers: at 70B shapes far more than 2^31 numbers."""
    # Only the pages that are touched take memory; the interpreter would copy all of them onto themselves.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *given: None)
    room, apart = 16, 2**30
    near = torch.zeros(2, 3, 1, room, 16, dtype=torch.bfloat16)  # keys and values
    far = torch.empty(2 * apart + near[0].numel() * 2, dtype=torch.bfloat16)
    far = far.as_strided(near.shape, (3 * near[0, 0].numel(), apart, room * 16, 16, 1)).zero_()
    joined, frequencies = torch.randn(6, 4, 16).bfloat16(), torch.rand(8)
    lengths = torch.tensor([0, 5, 9])
    slots = lengths[:, None] + torch.arange(2)
    placed = Placement(lengths, room, slots, slots, (torch.arange(3)[:, None], slots))
    found = []
    for keys, values in (near, far):
        query = custom_ops.place_heads(joined, [], frequencies, slots, slots, keys, values, 0, 1)
        found.append(custom_ops.attend(query, keys, values, placed, 0.25, 0, Split(2, 16)))
    assert torch.equal(near, far)
    assert near[:, 2].any()
    assert torch.equal(*found)


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


@pytest.mark.parametrize("tilings", ["one", pytest.param("every", marks=pytest.mark.slow)])
def test_kernels_compile_for_an_h200_that_is_not_there(tilings):
    """They need no more than it has, and spill nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_h200.py")
    words = [sys.executable, str(script), *(["--few"] if tilings == "one" else [])]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("multiply_vector", "multiply_tokens", "gate", "place_heads", "attend_parts", "merge_parts"):
        assert kernel in done.stdout
