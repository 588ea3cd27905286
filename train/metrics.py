"""Means over many batches, kept as (sum, count) pairs and divided once, after all processes were added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..heads import DrafterLoss


class MetricSums:
    """Pairs added up by name, on their device: nothing waits for the host before `means`."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}

    def add(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (total, count) in pairs.items():
            pair = torch.stack([total.detach().double(), count.detach().double()])
            self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def add_loss(self, loss: DrafterLoss) -> None:
        """Add the per-depth metrics, and `loss`: what is minimised, per supervised position."""
        self.add({**loss.metrics, "loss": (loss.total, loss.count)})

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the means since the last call, without what was never counted. `reduce` adds up over all processes."""
        if not self._pairs:
            return {}
        names = sorted(self._pairs)
        totals = reduce(torch.stack([self._pairs[name] for name in names])).tolist()
        self._pairs.clear()
        return {name: total / count for name, (total, count) in zip(names, totals, strict=True) if count > 0}
