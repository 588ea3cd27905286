"""The fast pass on a CPU: its kernels interpreted, in few programs, since each takes milliseconds there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from benchmarks.kernels import multiply_bfloat16
    from outrider.targets.fast import custom_ops, matmuls
    from outrider.targets.fast.custom_ops import Tiles
    from outrider.targets.fast.matmuls import TritonMatmul


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut work into as few programs as still show how parts fit together."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(custom_ops, "_PROGRAMS", 4)
    monkeypatch.setattr(matmuls, "candidates", lambda tokens: [TritonMatmul(Tiles(0 if tokens == 1 else 16, 128, 64))])


@pytest.fixture(autouse=True, scope="session")
def right_interpreter() -> None:
    multiply_bfloat16()
