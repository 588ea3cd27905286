"""The kernel of uniforms gives what torch gives, to the last bit: a seed that was written down gives its text again.

It is interpreted here; `differs` is what a GPU is asked before the kernel is used there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.decode import rng

pytest.importorskip("triton")
from outrider.decode import rng_kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_proven", {})


@pytest.mark.parametrize("seed", [0, 1, -1, 10**6, 2**63 - 1, 2**63, 2**64 + 5])
def test_the_kernel_gives_what_torch_gives_to_the_last_bit(seed):
    """One to four keys, alone and broadcast, of every stream, up to the largest numbers."""
    rows, places = torch.tensor([0, 7, 2**40, -(2**62), 2**63 - 1]), torch.tensor([[3], [12345]])
    tokens = torch.arange(300)
    for keys in ((rows,), (rows, places), (places, rows, rows), (rows[:, None, None], rows[:2, None], places, tokens)):
        for stream in (0, 1, 4):
            found = rng_kernel.uniforms(rng.seed_on(CPU, seed), stream, list(keys))
            assert torch.equal(found, rng.uniforms_by_torch(seed, stream, *keys))


def test_no_rows_have_no_uniforms():
    assert rng_kernel.uniforms(torch.tensor(3), 1, [torch.zeros(0, dtype=torch.long)]).shape == (0,)


def test_a_device_is_asked_once_whether_the_kernel_is_right_there(monkeypatch, caplog):
    assert rng.differs(CPU) == ""
    asked, keys = [], (torch.zeros(1, dtype=torch.long),)
    monkeypatch.setattr(rng, "differs", lambda device: asked.append(device) or "")
    assert [rng._by_kernel(keys) for _ in range(3)] == [True] * 3
    assert asked == [CPU]
    assert not caplog.records


@pytest.mark.parametrize("fault", ["a wrong bit", "an error"])
def test_a_kernel_that_is_wrong_on_a_device_is_not_used_there(fault, monkeypatch, caplog):
    right = rng_kernel.uniforms

    def wrong(*given: Any) -> torch.Tensor:
        if fault == "an error":
            raise ValueError("\nno such instruction")
        return right(*given) + 2.0**-53

    monkeypatch.setattr(rng_kernel, "uniforms", wrong)
    keys = (torch.zeros(1, dtype=torch.long),)
    assert not rng._by_kernel(keys)
    assert ("other numbers" if fault == "a wrong bit" else "no such instruction") in caplog.text


def test_keys_that_the_kernel_does_not_take_are_left_to_torch():
    key = torch.zeros(1, dtype=torch.long)
    assert not rng._by_kernel((key,) * 5)
    assert not rng._by_kernel((key.float(),))
    assert not rng._by_kernel((key[None, None, None],))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_uses_the_kernel():
    keys = (torch.arange(5, device="cuda"),)
    assert rng._by_kernel(keys)
    assert torch.equal(rng.uniforms(3, 1, *keys), rng.uniforms_by_torch(3, 1, *keys))
