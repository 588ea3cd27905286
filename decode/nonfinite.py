"""Logits that are not finite, traced to the layer that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass
class NonFiniteTracer:
    """Finds the first layer, in the order of computation, whose output is not finite."""

    models: Mapping[str, nn.Module]  # by the names that errors give them
    origin: str | None = None  # that layer, such as "the target's model.layers.3.mlp"; None if there is none yet
    _layer: nn.Module | None = field(default=None, init=False)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Look at every layer's output inside; that makes each of them wait for the device."""
        hooks = []
        for owner, model in self.models.items():
            for name, layer in model.named_modules():
                hooks.append(layer.register_forward_hook(self._hook(f"{owner}'s {name}" if name else owner)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def look(layer: nn.Module, _given: Any, output: Any) -> None:
            tensors = (t for t in tree_leaves(output) if isinstance(t, Tensor))
            if self.origin is None and any(_count(t) for t in tensors):
                self.origin, self._layer = name, layer

        return look

    def explanation(self) -> str:
        """Return a sentence that names the layer, or the weight."""
        if self.origin is None:
            for owner, model in self.models.items():
                for name, weight in model.named_parameters():
                    if _count(weight):
                        return f"{owner[0].upper()}{owner[1:]}'s {name} holds numbers that are not finite."
            return "The same tokens, read again in one pass, give finite numbers: the fault does not repeat itself."
        bad = 0 if self._layer is None else sum(_count(p) for p in self._layer.parameters())
        weights = f", {bad} of whose weights are not finite" if bad else ""
        return f"The first output that is not finite is that of {self.origin}{weights}."


def _count(tensor: Tensor) -> int:
    """Return how many numbers of a tensor are not finite."""
    return int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0
