"""The kernels compile for an H200 without one, need no more than it has, and spill nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "benchmarks.compiled", *arguments]
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


def test_one_tiling_of_each_kernel_compiles_for_sm90(tmp_path):
    done = compiled("--few", "--out", str(tmp_path / "kernels.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("multiply_vector", "multiply_tokens", "gate", "place_heads", "attend_parts", "merge_parts"):
        assert kernel in done.stdout


@pytest.mark.slow
def test_every_tiling_compiles_for_sm90():
    done = compiled()
    assert done.returncode == 0, done.stdout + done.stderr
