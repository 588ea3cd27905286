"""Mends a fault of vLLM's CPU build (0.32) in the engine's own process: a test puts this folder on its PYTHONPATH.

To verify drafts above temperature 0, vLLM repeats each request's temperature, top-k and top-p once for each of its
draft tokens. On a CPU it hands the C++ routine copies of its tensors converted to int64 and drops them afterwards: what
was to be filled stays uninitialised memory, and requests are sampled at whatever temperature stood there.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FAULTY = "vllm.utils.cpu_triton_utils"


def expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *_: Any, **__: Any) -> None:
    """Write each request's value once for each of its draft tokens; `ends` are their numbers, added up."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))


class _Mending(Loader):
    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module._expand_kernel_impl = expand  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != FAULTY:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Mending(found.loader)
        return found


sys.meta_path.insert(0, _Finder())
