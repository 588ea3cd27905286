"""What is tried of a model before anything is decoded with it: that it can be read as all decoding reads it.

Configs do not say these things alike, and a model for which they do not hold would write another text than its own
`generate`, without a word. So they are looked at, in passes over a token or two.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.errors import IncompatibleError, OutriderError
from .cache import RaggedCache, RowLengths
from .layout import CacheLayout

_LOOKED_AT = 8  # tokens

# How far two results of the same sums, made in passes of other shapes, may lie apart: relative, and generous, since
# low precision adds up over layers. What is looked for differs by its own size.
_TOLERANCE = 0.1


class Readable(Protocol):
    """What is tried of a target."""

    model: PreTrainedModel
    body: PreTrainedModel

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def device(self) -> torch.device: ...

    def run(self, inputs: Tensor, cache: RaggedCache | None = None) -> tuple[Tensor, Tensor | None]: ...

    def lm_head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor: ...


def try_reading(target: Readable, layout: CacheLayout) -> None:
    """Refuse a target whose text would be another than its own `generate`'s, or that fails on the way.

    Raises:
        IncompatibleError: it is in training mode, is not causal, makes its logits in another way, or cannot be read
            piece by piece.
    """
    _check_frozen(target)
    try:
        _check_causal(target)
        _check_logits(target)
        _read_in_pieces(target, layout)
    except (OutriderError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise IncompatibleError(
            f"{type(target.model).__name__} cannot be read piece by piece over a cache, as decoding does: {reason}. "
            "Take another target."
        ) from error


def _check_frozen(target: Readable) -> None:
    """Refuse a model that drops out: no two of its passes would be the same."""
    training = (module for module in target.model.modules() if module.training)
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in training):
        raise IncompatibleError(
            f"{type(target.model).__name__} is in training mode and drops parts out, so it says something else each "
            "time; call model.eval() first."
        )


def _check_causal(target: Readable) -> None:
    """Refuse a model whose states at a token depend on the tokens after it.

    Encoders (BERT and its kin) load as causal models, and say in their config that they are none; some that say it are
    causal all the same.
    """
    if getattr(target.config, "is_decoder", None) is not False:
        return
    first, second = (target.run(torch.tensor([[0, following]], device=target.device))[0] for following in (1, 2))
    if differ(first[:, 0], second[:, 0]):
        raise IncompatibleError(
            f"{type(target.model).__name__} reads a text in both directions: what it makes of a token depends on the "
            "tokens after it, so it cannot go on with a text token by token. If it was trained as a decoder, say "
            "`is_decoder: true` in its config."
        )


def _check_logits(target: Readable) -> None:
    """Refuse a model whose logits are not what its output embedding makes of its last hidden state."""
    # Several tokens: the embedding of padding may be nothing.
    tokens = torch.arange(min(_LOOKED_AT, int(target.config.vocab_size)), device=target.device)[None]
    own, ours = target.model(input_ids=tokens, use_cache=False).logits, target.lm_head(target.run(tokens)[0])
    if own.shape != ours.shape or differ(own, ours):
        raise IncompatibleError(
            f"{type(target.model).__name__} does not make its logits of its last hidden state by its output embedding "
            "alone, so they cannot be had where a drafter needs them; take another target."
        )


def _read_in_pieces(target: Readable, layout: CacheLayout) -> None:
    """Read a token, and then two at once."""
    cache = layout.allocate(1, 3, target.device)
    for count in (1, 2):
        target.run(torch.zeros(1, count, dtype=torch.long, device=target.device), cache)
        cache.advance(RowLengths.of([count], target.device))


@torch.no_grad()
def reads_ragged_rows(target: Readable, layout: CacheLayout) -> bool:
    """Tell whether a row is read alike beside a longer one and beside one of its own length."""
    alone, beside = (_last_of_first_row(target, layout, lengths) for lengths in ([1, 1], [1, 3]))
    return not differ(beside, alone, 4 * torch.finfo(alone.dtype).eps ** 0.75)


def _last_of_first_row(target: Readable, layout: CacheLayout, lengths: list[int]) -> Tensor:
    """Return the state at a token that is read after rows of these lengths, in the first row, `[H]`."""
    cache = layout.allocate(2, max(lengths) + 1, target.device)
    target.run(torch.zeros(2, max(lengths), dtype=torch.long, device=target.device), cache)
    cache.advance(RowLengths.of(lengths, target.device))
    return target.run(torch.zeros(2, 1, dtype=torch.long, device=target.device), cache)[0][0, 0]


def differ(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Tell whether two results are more than rounding apart."""
    distance, size = (one.float() - other.float()).norm(), other.float().norm()
    return bool(distance > tolerance * size)
