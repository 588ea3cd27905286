"""A CUDA device that computes nothing: rounds run on it as on a real one, and what a graph could not hold is noticed.

Fake tensors know their shapes and devices, no values. So a read of a value by the host, a shape that depends on one,
and a mix of devices are errors where they happen, and every kernel that a round would launch can be counted.

The CPU build of torch knows no CUDA device at all. Three lines of C++ give it one on which nothing can be done.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""
# They make a tensor's memory, or another view of one: no kernel.
_NO_KERNEL = ("empty", "new_empty", "lift_fresh", "detach", "_unsafe_view", "set_", "resize_", "sym_size")


def make_guard(folder: Path) -> None:
    """Let this process name CUDA devices, though it has none."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    if shutil.which("g++") is None:
        pytest.skip("needs g++, or a CUDA build of torch")
    source = folder / "guard.cpp"
    library = folder / "guard.so"
    torch_folder = Path(torch.__file__).parent
    source.write_text(_GUARD)
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}"]
    subprocess.run(["g++", *flags, source, "-o", library, f"-L{torch_folder / 'lib'}", "-lc10"], check=True)
    ctypes.CDLL(str(library))


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Make new tensors fake inside, on whatever device is named."""
    make = torch.tensor

    def tensor(data: Any, *arguments: Any, device: Any = None, **options: Any) -> Tensor:
        made = make(data, *arguments, **options)
        if device is None or torch.device(device).type != "cuda":
            return made
        assert Trace.active is None, f"a round copies values from the host to the device: {str(data)[:80]}"
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    with FakeTensorMode(), torch.inference_mode(), patch.object(torch, "tensor", tensor):
        yield


def on_fake_cuda(*modules: nn.Module | None) -> None:
    """Put all parameters and buffers on the fake device, in place; what was shared stays shared."""
    moved: dict[int, Tensor] = {}
    for module in (part for whole in modules if whole is not None for part in whole.modules()):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    is_there = tensor.device.type == "cuda"
                    tensors[name] = moved.setdefault(id(tensor), tensor if is_there else _moved(tensor))


def _moved(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


class Trace(TorchDispatchMode):
    """Counts the kernels of the work inside, and refuses what a captured round must not do.

    A number on the CPU may be the other operand of a kernel; a tensor with shape may not, nor may anything be copied
    from the host to the device.
    """

    active: Trace | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __enter__(self) -> Trace:
        Trace.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Trace.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        after = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        shaped = [t for t in before + after if t.device.type == "cpu" and t.ndim]
        assert not shaped, f"{func} works on the CPU: {[tuple(t.shape) for t in shaped]}"
        if self._launches(func, before, after):
            self.kernels[func.overloadpacket.__name__] += 1
        return out

    @staticmethod
    def _launches(func: Any, before: list[Tensor], after: list[Tensor]) -> bool:
        if func.overloadpacket.__name__ in _NO_KERNEL or not any(t.numel() for t in before + after):
            return False
        if func._schema.is_mutable:
            return True
        memory = {t.untyped_storage()._cdata for t in before}
        return any(t.untyped_storage()._cdata not in memory for t in after)
