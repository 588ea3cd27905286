"""How much memory a pass works with, besides weights and cache: measured on a few tokens, then scaled.

The sizes of a pass are linear in its tokens, and in the entries that it repeats for grouped heads; only masks and, where attention
writes them down, scores are products of both, and those are known exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import attention
from .recurrent import KINDS, UNREAD

if TYPE_CHECKING:
    from .target import Target


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made inside it: `live` now, `peak` at most. What an operator allocates for itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note((args, kwargs), new=False)
        made = func(*args, **(kwargs or {}))
        self._note(made, new=True)
        return made

    def _note(self, tensors: Any, new: bool) -> None:
        """Views share a storage, which is counted once, and until the last of them is gone."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and not tensor.is_sparse:
                self._count(tensor.untyped_storage(), new)

    def _count(self, storage: torch.UntypedStorage, new: bool) -> None:
        key, count = storage._cdata, storage.nbytes() if new else 0
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
        several, alone: of attention in a pass of several tokens, or of one, for each token, and for each entry that it sees, new or old.
        per_score: for each pair of a token and an entry, where attention writes scores down.
        per_mask: for the same pair, in a pass behind earlier entries: one over a whole prompt needs no masks.
        per_logit: of the output embedding, for each logit. kept: what stays of it.
        reread: tokens of a row that a pass may read again in front of the new ones, also those of whole prompts behind none (see `RecurrentCache`).
        chunk: the tokens of a pass count in whole chunks of so many.
    """

    per_token: float
    several: tuple[float, float]
    alone: tuple[float, float]
    per_score: int
    per_mask: int
    per_logit: float
    kept: int
    reread: int = 0
    chunk: int = 1

    def of_prompt(self, rows: int, length: int) -> int:
        """A pass over whole prompts."""
        masks = self.per_mask if self.reread else 0
        return int(rows * (self._counted(length) * self.per_token + length**2 * (self.per_score + masks)))

    def of_round(self, rows: int, num_new: int, length: int) -> int:
        """A pass over `num_new` tokens per row, which see up to `length` entries, themselves included."""
        per_token, per_entry = self.alone if num_new == 1 else self.several
        tokens = num_new + self.reread
        layers = max(self._counted(tokens) * self.per_token, tokens * per_token + length * per_entry)
        return int(rows * (layers + tokens * length * (self.per_score + self.per_mask)))

    def _counted(self, tokens: int) -> int:
        return -(-tokens // self.chunk) * self.chunk


@torch.no_grad()
def measure(target: Target) -> Footprint:
    """The footprint of a model's passes, from a few short ones."""
    # Linear attention works in chunks of 64.
    prompt = 16 if target.rewinds else 64
    scores, masks = _score_bytes(target)
    whole = _peak(target, 1, prompt, 0)
    chunk = prompt if not target.rewinds and _peak(target, 1, prompt // 2, 0) > 0.75 * whole else 1
    per_token = whole / prompt - scores * prompt
    several, alone = (_attention_bytes(target, count, chunk, scores + masks) for count in (2, 1))
    hidden = torch.zeros(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
    with PeakBytes() as head:
        logits = target.lm_head(hidden)
    reread = 0 if target.rewinds else UNREAD
    return Footprint(
        per_token, several, alone, scores, masks, head.peak / target.vocab_size, logits.element_size(), reread, chunk
    )


def _attention_bytes(target: Target, count: int, chunk: int, per_score: int) -> tuple[float, float]:
    """For each token and each entry of a pass over `count` tokens of each of two rows; where those are counted in chunks, of the entries alone."""
    short, long = (_peak(target, 2, count, seen - count) / 2 - count * seen * per_score for seen in (64, 128))
    per_entry = max(0.0, long - short) / 64
    return (max(0.0, short - 64 * per_entry) / count if chunk == 1 else 0.0), per_entry


def _peak(target: Target, rows: int, num_new: int, behind: int) -> int:
    """Of a pass over `num_new` tokens per row."""
    cache = target.new_cache(rows, behind + num_new)
    cache.skip(behind)
    tokens = (torch.arange(num_new, device=target.device) % target.vocab_size).expand(rows, -1)
    with PeakBytes() as run:
        target.forward(tokens, cache, logits=False)
    return run.peak


def _score_bytes(target: Target) -> tuple[int, int]:
    """Bytes for each pair of token and entry: scores that eager attention writes down (twice, or once and in fp32), and masks, which split attention repeats."""
    config = target.config
    kind, heads = getattr(config, "_attn_implementation", None), int(config.num_attention_heads)
    masks = len(set(getattr(config, "layer_types", None) or ("all",)) - KINDS)
    return heads * 8 if kind == "eager" else 0, (
        masks + (heads if kind == attention.NAME else 0)
    ) * target.dtype.itemsize
