"""The fast pass launches seven kernels for a layer, the library's modules dozens: counted on a device that is faked."""

from __future__ import annotations

import pytest
import torch

from outrider.targets import Nodes, RowLengths, Target

from ..targets.small_models import NO_IDS, small_model
from .fake_cuda import Trace, fake_cuda, on_fake_cuda

pytest.importorskip("triton")
from outrider.targets.fast.triton_runner import TritonRunner

BEFORE = {"llama": 40, "qwen3": 56}
GOAL = {"llama": 9, "qwen3": 11}


def launched(kind: str, layers: int, tokens: int, fast: bool, tree: bool = False) -> Trace:
    """Return what a pass over `tokens` of one row launches."""
    model = small_model(kind, num_hidden_layers=layers, head_dim=16, **NO_IDS).to(torch.bfloat16)
    with fake_cuda():
        on_fake_cuda(model)
        target = Target(model)
        cache = target.new_cache(1, 512)
        cache.advance(RowLengths.of([100], "cuda"))
        cache.window = 512
        given = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        nodes = Nodes.of_tree(torch.zeros(1, tokens - 1, dtype=torch.long, device="cuda") - 1, 1) if tree else None
        if fast:
            target.fast = TritonRunner(model)
            assert target.fast.serves(given, cache)
        with Trace() as traced:
            target.run(given, cache, nodes=nodes)
    return traced


def per_layer(kind: str, *how: int) -> int:
    two, three = (launched(kind, layers, *how).kernels.total() for layers in (2, 3))
    return three - two


@pytest.mark.parametrize(("tokens", "tree"), [(1, False), (8, False), (64, True)])
@pytest.mark.parametrize("kind", GOAL)
def test_launches_for_a_layer(kind, tokens, tree):
    assert per_layer(kind, tokens, True, tree) == 7 <= GOAL[kind]


@pytest.mark.parametrize("kind", GOAL)
def test_the_librarys_modules_launch_as_many_as_are_said(kind):
    """If the library comes to launch fewer, the pages that compare with it are wrong."""
    assert per_layer(kind, 1, False) == BEFORE[kind]


def test_a_pass_launches_little_beside_its_layers():
    """The embedding, the last norm, and what places the tokens."""
    traced = launched("llama", 2, 1, True)
    assert traced.kernels.total() - 2 * 7 <= 12, traced.kernels
