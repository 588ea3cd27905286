"""How much memory a pass works with, besides weights and cache: measured on a few tokens, then scaled.

The sizes of a pass are linear in its tokens, and in the entries that it repeats for grouped heads. Only masks are
products of both, and scores where attention writes them down; those are known exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .backbone import Backbone
from .cache_and_masks import masked_kinds
from .recurrent import UNREAD
from .split_attention import NAME as SPLIT_ATTENTION


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside it: `live` ones now, and at the `peak`.

    Memory that an operator allocates for itself is not seen.
    """

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
        """Count the storages of tensors. Views share one, which is counted once, until the last of them is gone.

        Weights in oneDNN's blocks show none; passes read them, and make none.
        """
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and not tensor.is_sparse and not tensor.is_mkldnn:
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
    """Bytes of memory that passes of a model work with, besides its weights and its cache."""

    per_token: float  # of the layers, for each token of a pass
    several: tuple[float, float]  # of attention in a pass of several tokens: for each token, and for each entry it sees
    alone: tuple[float, float]  # the same in a pass of one token
    per_score: int  # for each pair of a token and an entry, where attention writes scores down
    per_mask: int  # for each such pair, in a pass after earlier entries: one over a whole prompt needs no masks
    per_logit: float  # of the output embedding
    kept: int  # of each logit, after the pass
    reread: int = 0  # tokens of a row that a pass may read again before the new ones (see `RecurrentCache`)
    chunk: int = 1  # the tokens of a pass count in whole chunks of this many

    def of_prompt(self, rows: float, length: int) -> int:
        """Return the bytes that a pass over whole prompts works with."""
        masks = self.per_mask if self.reread else 0
        return int(rows * (self._counted(length) * self.per_token + length**2 * (self.per_score + masks)))

    def of_round(self, rows: int, num_new: int, length: int) -> int:
        """Return the bytes of a pass over `num_new` tokens per row, which see up to `length` entries with their own."""
        per_token, per_entry = self.alone if num_new == 1 else self.several
        tokens = num_new + self.reread
        layers = max(self._counted(tokens) * self.per_token, tokens * per_token + length * per_entry)
        return int(rows * (layers + tokens * length * (self.per_score + self.per_mask)))

    def _counted(self, tokens: int) -> int:
        return -(-tokens // self.chunk) * self.chunk


@torch.no_grad()
def measure(backbone: Backbone, lm_head: Callable[[Tensor], Tensor], vocab_size: int) -> Footprint:
    """Measure the footprint of a model's passes on a few short ones."""
    # Linear attention works in chunks of 64.
    prompt = 16 if backbone.rewinds else 64
    scores, masks = _score_bytes(backbone)
    whole = _peak(backbone, 1, prompt, 0)
    chunk = prompt if not backbone.rewinds and _peak(backbone, 1, prompt // 2, 0) > 0.75 * whole else 1
    per_token = whole / prompt - scores * prompt
    several, alone = (_attention_bytes(backbone, count, chunk, scores + masks) for count in (2, 1))
    hidden = torch.zeros(1, 1, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device)
    with PeakBytes() as head:
        logits = lm_head(hidden)
    reread = 0 if backbone.rewinds else UNREAD
    return Footprint(
        per_token, several, alone, scores, masks, head.peak / vocab_size, logits.element_size(), reread, chunk
    )


def _attention_bytes(backbone: Backbone, count: int, chunk: int, per_score: int) -> tuple[float, float]:
    """Return the bytes of attention for each token, and for each entry, in a pass over `count` tokens per row.

    Where tokens count in chunks, their bytes are in `Footprint.per_token`, and the first of the two is 0.
    """
    short, long = (_peak(backbone, 2, count, seen - count) / 2 - count * seen * per_score for seen in (64, 128))
    per_entry = max(0.0, long - short) / 64
    return (max(0.0, short - 64 * per_entry) / count if chunk == 1 else 0.0), per_entry


def _peak(backbone: Backbone, rows: int, num_new: int, num_earlier: int) -> int:
    """Return the peak of a pass over `num_new` tokens per row, after `num_earlier` entries."""
    cache = backbone.new_cache(rows, num_earlier + num_new)
    cache.skip(num_earlier)
    tokens = (torch.arange(num_new, device=backbone.device) % backbone.config.vocab_size).expand(rows, -1)
    with PeakBytes() as run:
        backbone.run(tokens, cache)
    return run.peak


def _score_bytes(backbone: Backbone) -> tuple[int, int]:
    """Return the bytes of scores, and of masks, for each pair of a token and an entry.

    Eager attention writes scores down twice, or once and in fp32; split attention repeats masks for its heads.
    """
    config = backbone.config
    kind = getattr(config, "_attn_implementation", None)
    heads = max(int(layer.num_attention_heads) for layer in config.per_layer_config)
    masks = len(masked_kinds(config))
    repeated = heads if kind == SPLIT_ATTENTION else 0
    return heads * 8 if kind == "eager" else 0, (masks + repeated) * backbone.dtype.itemsize
