"""Taking the fast pass for a target: where it serves, and where it is proven to compute what the library does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from ...common.errors import IncompatibleError
from ..cache import RaggedCache
from ..layers import is_of_llama_kind
from ..placement import Nodes

_log = logging.getLogger("outrider")
_refused: WeakSet[Any] = WeakSet()  # models that were tried: each trial compiles kernels


class Fast(Protocol):
    """What runs passes in place of a model's layers, see `body.FastBody`."""

    def serves(self, inputs: Tensor, cache: RaggedCache) -> bool:
        """Tell whether it can run a pass over `inputs` as the model would now."""

    def run(
        self,
        inputs: Tensor,
        cache: RaggedCache,
        taps: Sequence[int] = (),
        offset: int = 0,
        nodes: Nodes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass as `Backbone.run` does, with a cache."""

    def shallow(self, count: int) -> Fast:
        """Return the same cut after its first `count` layers."""


class Holder(Protocol):
    """A backbone, which runs by `fast` what that serves."""

    fast: Fast | None

    @property
    def model(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def compiled(self) -> bool: ...


def use_fast_pass(target: Holder) -> None:
    """Let a target read a few tokens at a time by kernels of our own; prompts stay the library's.

    Raises:
        IncompatibleError: the model is of another kind, or the device and its software do not serve, or the kernels
            give other numbers there than the library's modules.
    """
    name = type(target.model).__name__
    if (reason := _missing(target.model)) is not None:
        raise IncompatibleError(f"the fast pass does not serve {name}: {reason}.")
    body = import_module(".body", __package__)
    if (reason := body.why_not(target.model)) is not None:
        raise IncompatibleError(f"the fast pass does not serve {name}: it has {reason}.")
    with by_library(target):
        fast = body.FastBody(target.model)
        reason = import_module(".proof", __package__).differs(fast, target)
    if reason is not None:
        raise IncompatibleError(
            f"the fast pass of {name} gives other numbers here than the library's modules: {reason}. Decode without it."
        )
    target.fast = fast


def prefer_fast_pass(target: Holder) -> bool:
    """Take the fast pass for a target in bfloat16 on a GPU, where it serves and is proven; return whether it is taken.

    A model is tried once. One that `torch.compile` was asked for stays with that.
    """
    if target.fast is not None:
        return True
    if target.device.type != "cuda" or target.dtype != torch.bfloat16 or target.compiled or target.model in _refused:
        return False
    try:
        use_fast_pass(target)
    except torch.OutOfMemoryError:
        raise
    except IncompatibleError as error:
        _log.info("%s", error)
    except Exception as error:  # Triton raises what it likes where a kernel does not compile: the library goes on
        _log.warning("the fast pass failed, the library's modules run: %s", (str(error).splitlines() or [""])[0])
    if target.fast is None:
        _refused.add(target.model)
    return target.fast is not None


@contextmanager
def by_library(target: Holder) -> Iterator[None]:
    """Run all passes inside by the library's modules."""
    fast, target.fast = target.fast, None
    try:
        yield
    finally:
        target.fast = fast


def _missing(model: Any) -> str | None:
    """Return which condition does not hold, of those that can be told without the kernels."""
    if not is_of_llama_kind(model):
        return "it serves Llama, Mistral, Qwen2 and Qwen3 whose modules are as the library made them"
    weight = model.model.embed_tokens.weight
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its weights are {weight.dtype}; expected bfloat16, float16 or float32"
    if find_spec("triton") is None:
        return "its kernels need Triton, which is not installed; pip install triton"
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels run on a GPU, and the model is on {weight.device}"
    return None
