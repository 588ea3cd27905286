"""How much memory a pass works with, besides weights and cache: measured on a few tokens, then scaled.

The sizes of a pass are linear in its tokens, and in the entries that it repeats for grouped heads; only masks and, in eager
attention, scores are products of both, and those are known exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made inside it: `live` now, `peak` at most. What an operator allocates for itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._note(given, 0)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return made

    def _note(self, tensor: Tensor, count: int) -> None:
        """Views share a storage, which is counted once, and until the last of them is gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, count)
            self.live += count
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.live -= count


@dataclass(frozen=True)
class Footprint:
    """Bytes of working memory, see above.

    Attributes:
        per_token: of the layers, for each token of a pass.
        per_entry: for each entry, new or old, of a row that a pass behind earlier entries sees.
        per_score: for each pair of a token and an entry that it might see: masks, and scores if attention is eager.
        per_fresh_score: the same in a pass over a whole prompt, which needs no masks.
        per_logit: of the output embedding, for each logit.
        kept: bytes of one logit afterwards.
    """

    per_token: float
    per_entry: float
    per_score: float
    per_fresh_score: float
    per_logit: float
    kept: int

    def of_prompt(self, rows: int, length: int) -> int:
        """A pass over whole prompts."""
        return int(rows * length * (self.per_token + length * self.per_fresh_score))

    def of_round(self, rows: int, num_new: int, length: int) -> int:
        """A pass over `num_new` tokens per row, behind which there are `length` entries."""
        return int(rows * (num_new * (self.per_token + length * self.per_score) + length * self.per_entry))
