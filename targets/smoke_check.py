"""Checks that a model can be read as all decoding reads it, in passes over a token or two.

A model that fails would silently write another text than its own `generate`, and its config does not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..common.errors import BadInputError, IncompatibleError, OutriderError, first_line
from .backbone import Backbone
from .cache import RowLengths
from .cache_and_masks import CacheLayout
from .weights import overflow_of, require_true_ties

_TRIED = 8  # tokens

# The relative difference between two results of the same sums, made in passes of other shapes. It is generous, since
# low precision adds up over layers; the faults that are looked for differ by their own size.
_TOLERANCE = 0.1


def require_readable(target: Backbone, lm_head: Callable[[Tensor], Tensor], layout: CacheLayout) -> None:
    """Raise IncompatibleError for a target whose text would differ from its own `generate`'s, or whose passes fail."""
    require_true_ties(target.model)
    _check_frozen(target)
    with refusing(target.model):
        _check_causal(target)
        _check_logits(target, lm_head)
        cache = layout.allocate(1, 3, target.device)
        for count in (1, 2):  # a token, and then two at once
            target.run(torch.zeros(1, count, dtype=torch.long, device=target.device), cache)
            cache.advance(RowLengths.of([count], target.device))


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Raise IncompatibleError where a pass of the model fails: its class cannot do it, or its config makes no sense."""
    try:
        yield
    except (OutriderError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise IncompatibleError(
            f"{type(model).__name__} cannot be read piece by piece over a cache, as decoding does: "
            f"{first_line(error)}. Check its config.json, or take another target."
        ) from error


def _check_frozen(target: Backbone) -> None:
    """Refuse a model with active dropout: no two of its passes would be the same."""
    if any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in target.model.modules()):
        raise IncompatibleError(
            f"{type(target.model).__name__} is in training mode and drops parts out, so it says something else each "
            "time; call model.eval() first."
        )


def _check_causal(target: Backbone) -> None:
    """Refuse a model whose states at a token depend on the tokens after it.

    Encoders such as BERT load as causal models; their config has `is_decoder: false`, as that of some causal ones does.
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


def _check_logits(target: Backbone, lm_head: Callable[[Tensor], Tensor]) -> None:
    """Refuse a model whose logits are not the product of its output embedding and its last hidden state."""
    # Several tokens: the embedding of padding may be nothing.
    tokens = torch.arange(min(_TRIED, int(target.config.vocab_size)), device=target.device)[None]
    own, ours = target.model(input_ids=tokens, use_cache=False).logits, lm_head(target.run(tokens)[0])
    if own.shape[-1] > 1 and (own == own[..., :1]).all():
        raise BadInputError(
            f"the target's logits are the same for every token, so it can say nothing. {overflow_of(target.model)}"
            "Take a good copy of the weights."
        )
    if own.shape != ours.shape or differ(own, ours):
        raise IncompatibleError(
            f"{type(target.model).__name__} does not make its logits of its last hidden state by its output embedding "
            "alone, so they cannot be had where a drafter needs them; take another target."
        )


@torch.no_grad()
def reads_ragged_rows(target: Backbone, layout: CacheLayout) -> bool:
    """Return whether a row has the same states beside a longer one and beside one of its own length."""
    states = []
    for lengths in ([1, 1], [1, 3]):
        cache = layout.allocate(2, max(lengths) + 1, target.device)
        target.run(torch.zeros(2, max(lengths), dtype=torch.long, device=target.device), cache)
        cache.advance(RowLengths.of(lengths, target.device))
        states.append(target.run(torch.zeros(2, 1, dtype=torch.long, device=target.device), cache)[0][0, 0])
    alone, beside = states
    return not differ(beside, alone, 4 * torch.finfo(alone.dtype).eps ** 0.75)


@torch.no_grad()
def few_logits(model: Any, vocab: int) -> Tensor:
    """Return a model's logits of a few tokens, spread over a vocabulary, by the library's own pass, `[T, vocab]`."""
    tokens = torch.linspace(0, vocab - 1, 2 * _TRIED, device=model.get_input_embeddings().weight.device).long()
    return cast(Tensor, model(input_ids=tokens[None], use_cache=False).logits[0, :, :vocab])


def require_same_logits(what: str, logits: Tensor, expected: Tensor, advice: str, tolerance: float = 0.0) -> None:
    """Raise IncompatibleError if logits after a change of a model differ by more than rounding from those before it.

    Args:
        what: the changed model, for the sentence.
        tolerance: relative, where the change leaves more than rounding once in the model's precision.
    """
    distance, size = ((part.cpu().float()).norm() for part in (logits.cpu() - expected.cpu(), expected))
    allowed = max(tolerance, torch.finfo(logits.dtype).eps ** 0.5)
    if not distance <= allowed * size and bool(expected.isfinite().all()):
        raise IncompatibleError(
            f"{what} makes other logits: they differ by {distance / size:.2g} of their size, and at most {allowed:.2g} "
            f"is expected of rounding. {advice}"
        )


def differ(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Return whether two results differ by more than rounding."""
    distance, size = (one.float() - other.float()).norm(), other.float().norm()
    return bool(distance > tolerance * size)
