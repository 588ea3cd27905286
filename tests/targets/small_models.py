"""Small models of any architecture, with the library's random weights, and tokens for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.targets import PeakBytes, RowLengths, Target

from ..closeness import assert_same

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NO_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

# A vision tower beside a text model: as deep as that.
VISION = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "num_key_value_heads")}
VISION |= {"image_size": 28, "patch_size": 14}


def small_model(kind: str, attention: str | None = None, sizes: dict[str, int] = SIZES, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def prefilled(target: Target, lengths: list[int], max_length: int) -> tuple[Any, Tensor]:
    """Return a cache after a pass over prompts of these lengths, and the prompts, padded."""
    cache, prompt = target.new_cache(len(lengths), max_length), tokens(len(lengths), max(lengths))
    target.forward(prompt, cache)
    cache.advance(RowLengths.of(lengths, "cpu"))
    return cache, prompt


def require_librarys(logits: Tensor, target: Target, texts: list[list[int]], new: Tensor) -> None:
    """Logits `[B, Q, V]` of `new` tokens after each text are those of the library, which reads the whole text alone."""
    for row, text in enumerate(texts):
        expected = target.model(torch.tensor([text + new[row].tolist()])).logits[0, len(text) :]
        assert_same(logits[row], expected)


def require_offsets(target: Target, length: int, kept: list[int], again_from: int = 0) -> None:
    """Passes from the last entry (offset −1), or after an uncommitted one (1), give what one pass over all does."""
    text, cache = tokens(2, length + 3), target.new_cache(2, 20)
    target.forward(text[:, :length], cache)
    cache.advance(RowLengths.of(kept, "cpu"))
    rows, starts = torch.arange(2)[:, None], torch.tensor(kept)[:, None]
    again = target.forward(text[rows, starts - 1 + torch.arange(2)], cache, offset=-1).logits
    after = target.forward(text[rows, starts + 1], cache, offset=1).logits
    for row, n in enumerate(kept):
        expected = target.model(text[row : row + 1, : n + 2]).logits[0, n - 1 :]
        assert_same(again[row, again_from:], expected[again_from:2])
        assert_same(after[row, 0], expected[2])


@contextmanager
def allocated(target: Target, rows: int, length: int) -> Iterator[tuple[Target, Any]]:
    """Give a target's new cache, which takes exactly what was announced, and as much after the passes inside."""
    announced = target.cache_bytes(rows, length)
    with PeakBytes() as made:
        cache = target.new_cache(rows, length)
    assert made.live - cache.lengths.nbytes == announced == cache.num_bytes() > 0
    yield target, cache
    assert cache.num_bytes() == announced


def tokens(rows: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
