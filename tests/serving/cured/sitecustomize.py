"""Mends faults of vLLM's CPU build (0.32) in the engine's own process: a test puts this folder on its PYTHONPATH.

To verify drafts above temperature 0, vLLM repeats each request's temperature, top-k and top-p once for each of its
draft tokens. On a CPU it hands the C++ routine copies of its tensors converted to int64 and drops them afterwards: what
was to be filled stays uninitialised memory, and requests are sampled at whatever temperature stood there.

DFlash norms the context's keys of all layers in one call, with a weight for each layer. The CPU's norm takes the first
one's for all of them.

A Mamba layer's convolution goes on, after a round, from the last inputs that were accepted. The CPU's routine is not
told how many those were, and goes on from the rejected ones.

DFlash2 and DSpark need its second model runner (VLLM_USE_V2_MODEL_RUNNER=1), whose kernels are Triton's, and a Triton
that has a backend for CPUs, which no package of PyPI is. Triton's own interpreter (TRITON_INTERPRET=1) runs the same
kernels in numpy: with it, vLLM is told that there is such a backend. The interpreter (3.9) forgets that a comparison is
a boolean once it is broadcast, refuses it as a mask, and has no log1p.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


def expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *_: Any, **__: Any) -> None:
    """Write each request's value once for each of its draft tokens; `ends` are their numbers, added up."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))


def norm_keys(self: Any, keys: Any) -> Any:
    """Norm the context's keys `[L, T, H, D]`, each layer's by its own weights."""
    normed = keys.new_empty(keys.shape)
    for index, layer in enumerate(self.layers):
        normed[index] = layer.self_attn.k_norm(keys[index])
    return normed


def convolve(x: Any, state: Any, weight: Any, bias: Any = None, activation: Any = None, **given: Any) -> Any:
    """Convolve each request's new inputs, rows of `x` `[T, C]`, after those that stay of its last round.

    The `state` `[lines, C, W − 1 + drafts]` of a line holds the inputs before its last round but one, and that round's.
    """
    import torch

    lines, starts = given["conv_state_indices"], given["query_start_loc"]
    lines = lines[:, 0] if lines.dim() == 2 else lines
    accepted = given.get("num_accepted_tokens")
    starts = torch.arange(len(lines) + 1) if starts is None else starts
    width = weight.shape[1]
    for row, line in enumerate(lines.tolist()):
        begin, end = int(starts[row]), int(starts[row + 1])
        if line == 0 or begin == end:  # padding
            continue
        first = 0 if accepted is None else int(accepted[row]) - 1
        new = x[begin:end].t()
        inputs = torch.cat([state[line][:, first : first + width - 1], new], dim=1)  # [C, W − 1 + Q]
        kept = inputs[:, -(width - 1) :] if accepted is None else inputs[:, 1:]
        made = torch.nn.functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
        state[line][:, : kept.shape[1]] = kept
        x[begin:end] = (torch.nn.functional.silu(made) if activation else made).t()
    return x


def _mend_convolution(module: Any) -> None:
    module.causal_conv1d_update_cpu = convolve


def _mend_sampling(module: Any) -> None:
    module._expand_kernel_impl = expand


def _mend_dflash(module: Any) -> None:
    module.DFlashQwen3Model._normalize_context_k = norm_keys


def _mend_backends(module: Any) -> None:
    module.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def _mend_interpreter(module: Any) -> None:
    plain = module.InterpreterBuilder.binary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        made = plain(self, left, right, op)
        if made.data.dtype == bool:
            made.dtype = module.tl.int1
        return made

    module.InterpreterBuilder.binary_op = binary_op


def _mend_libdevice(module: Any) -> None:
    import triton.language as tl

    module.log1p = lambda value: tl.log(value + 1)


MENDS: dict[str, Callable[[Any], None]] = {
    "vllm.utils.cpu_triton_utils": _mend_sampling,
    "vllm.model_executor.models.qwen3_dflash": _mend_dflash,
    "vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d": _mend_convolution,
}
if os.environ.get("TRITON_INTERPRET") == "1":
    MENDS |= {"triton.backends": _mend_backends, "triton.runtime.interpreter": _mend_interpreter}
    MENDS |= {"triton.language.extra.libdevice": _mend_libdevice}


class _Mending(Loader):
    def __init__(self, loader: Loader, mend: Callable[[Any], None]):
        self.loader, self.mend = loader, mend

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.mend(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in MENDS:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Mending(found.loader, MENDS[name])
        return found


sys.meta_path.insert(0, _Finder())
