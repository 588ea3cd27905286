"""Hidden states of single layers, collected while a pass runs.

Shapes: B rows, Q tokens per row, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import IncompatibleError
from .layers import decoder_layers, hidden_states


@dataclass(frozen=True)
class Tap:
    """A hook that notes a layer's hidden states, and changes nothing.

    Attributes:
        seen: where it notes them, under `index`.
        before: whether it stands before the layer.
    """

    seen: dict[int, Tensor]
    index: int
    before: bool = False

    def __call__(self, layer: nn.Module, *call: Any) -> None:
        if not self.before:
            self.seen[self.index] = hidden_states(call[-1])
            return
        args, kwargs = call
        self.seen[self.index] = hidden_states(args[0] if args else kwargs["hidden_states"])


class TapReader:
    """Collects the hidden states that a pass is asked for, by hooks on the model's layers.

    A layer gets its hook when it is first asked for, and keeps it. The last tap needs none: a pass returns it.

    Attributes:
        seen: what the pass that runs has given so far, by tap; empty between passes.
    """

    def __init__(self, body: nn.Module, num_layers: int):
        self.seen: dict[int, Tensor] = {}
        self._body, self._num_layers = body, num_layers
        self._hooked: set[int] = set()

    def watch(self, taps: Sequence[int]) -> None:
        """Put hooks on the layers that these taps come from."""
        new = set(taps) - self._hooked - {self._num_layers}
        if not new:
            return
        layers = decoder_layers(self._body, self._num_layers)
        for tap in new:
            self._hook(tap, layers)
        self._hooked |= new

    def _hook(self, tap: int, layers: nn.ModuleList) -> None:
        if tap == 0:
            layers[0].register_forward_pre_hook(Tap(self.seen, tap, before=True), with_kwargs=True)
        else:
            layers[tap - 1].register_forward_hook(Tap(self.seen, tap))

    def collect(self, taps: Sequence[int], last: Tensor) -> Tensor | None:
        """Return the pass's hidden states at `taps`, `[B, Q, K, H]`, and forget them; None if there are no taps.

        Args:
            last: what the pass returned, `[B, Q, H]`.

        Raises:
            IncompatibleError: the pass did not come by all of them, or layers hand on something else.
        """
        self.seen[self._num_layers] = last
        try:
            self._check(taps, last)
            return torch.stack([self.seen[tap] for tap in taps], dim=2) if taps else None
        finally:
            self.seen.clear()

    def _check(self, taps: Sequence[int], last: Tensor) -> None:
        if missing := [tap for tap in taps if tap not in self.seen]:
            raise IncompatibleError(
                f"{type(self._body).__name__} does not run the layers that hidden states {missing} would be read from; "
                "take a drafter that reads the last one only, or none."
            )
        if others := [list(self.seen[tap].shape) for tap in taps if self.seen[tap].shape != last.shape]:
            raise IncompatibleError(
                f"layers of {type(self._body).__name__} hand on states of shape {others[0]}, and a drafter reads "
                f"{list(last.shape)}; take a drafter that reads the last one only, or none."
            )
