"""Divergences by the kernels of `liger-kernel` on CUDA, where it is installed, in fewer passes over a vocabulary.

A drafter's loss needs a value of each position, and a gradient that a weight of each position can still reach. Of
Liger's kernels (0.8.4 and later) these give it: KL, and so soft cross-entropy; JSD, whose end β = 1 is reverse KL; and
total variation with hard cross-entropy. Most are no public interface of Liger's, so each is tried against the
definition first.

Shapes: P positions, V' symbols of the drafter. Draft logits may be of any type; all else is float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..heads.divergences import (
    Divergence,
    forward_kl,
    hard_cross_entropy,
    jensen_shannon,
    reverse_kl,
    soft_cross_entropy,
    total_variation,
)
from ..heads.losses import Loss, TargetDistribution, own_precision

_log = logging.getLogger(__name__)


def compared_by_kernels(
    reference: TargetDistribution, draft_logits: Tensor, loss: Loss
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (loss, alpha, top1) as `losses.compare` does; None for a loss without a kernel for each part."""
    parts = _parts(loss)
    kind = draft_logits.device.type
    if not all(works(divergence, kind) for _, divergence, _ in parts):
        return None
    with own_precision(draft_logits.device), torch.cuda.device_of(draft_logits):
        alpha, top1 = _agreement(reference, draft_logits)
        values = [
            weight * KERNELS[divergence](reference, draft_logits, **settings) for weight, divergence, settings in parts
        ]
        return torch.stack(values).sum(0), alpha, top1


def _parts(loss: Loss) -> list[tuple[float, Divergence, dict[str, float]]]:
    """Return weights, divergences and the settings that these were given."""
    parts = [(weight, getattr(part, "func", part), getattr(part, "keywords", {})) for weight, part in loss.parts]
    return [*parts, (loss.hard, hard_cross_entropy, {})] if loss.hard else parts


@torch.no_grad()
def _agreement(reference: TargetDistribution, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, top1)."""
    probs = logits.softmax(-1, dtype=torch.float32)
    alpha = torch.minimum(reference.probs, probs, out=probs).sum(-1)
    return alpha, (logits.argmax(-1) == reference.best).float()


class _PrecomputedGradient(torch.autograd.Function):
    """A value of each position, whose gradient by the logits is computed with it, and kept instead of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kernel: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        values, gradient = kernel(logits)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(slope[:, None]), None


def _cross_entropy(reference: TargetDistribution, logits: Tensor, least: float) -> Tensor:
    """Return Σ p (log max(p, `least`) − log q)."""
    from liger_kernel.ops.backends._triton.kl_div import kl_loss_and_grad_triton

    def kernel(logits: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel writes the gradient over its logits.
        own = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return kl_loss_and_grad_triton(own, reference.renormalised, None, -100, 1.0, least, 1.0)

    return _PrecomputedGradient.apply(logits, kernel)


def _jensen_shannon(reference: TargetDistribution, logits: Tensor, beta: float = 0.5) -> Tensor:
    """Return JSD(β), or reverse KL where β is 1."""
    from liger_kernel.ops.backends._triton.jsd import jsd_loss_and_grad_triton

    def kernel(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.log_softmax(-1, dtype=torch.float32)
        q = log_q.exp()
        # The kernel writes the gradient by log q over log q.
        terms, slopes = jsd_loss_and_grad_triton(log_q, reference.log_probs, None, beta, -100, 1.0)
        return terms.sum(-1), slopes.addcmul_(q, slopes.sum(-1, keepdim=True), value=-1)

    return _PrecomputedGradient.apply(logits, kernel)


def _both(reference: TargetDistribution, logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Return (hard cross-entropy, total variation)."""
    from liger_kernel.ops import LigerFusedCETVDFunction

    return LigerFusedCETVDFunction.apply(logits, reference.log_probs, following)


def _total_variation(reference: TargetDistribution, logits: Tensor) -> Tensor:
    return _both(reference, logits, reference.best.clamp(min=0))[1]


def _hard_cross_entropy(reference: TargetDistribution, logits: Tensor) -> Tensor:
    following = reference.following
    assert following is not None, "a hard loss needs the tokens that followed"
    return _both(reference, logits, following.clamp(min=0))[0] * (following >= 0)


KERNELS: dict[Divergence, Callable[..., Tensor]] = {
    forward_kl: partial(_cross_entropy, least=torch.finfo(torch.float32).tiny),
    soft_cross_entropy: partial(_cross_entropy, least=1.0),  # log 1 = 0: p's own entropy is left out
    reverse_kl: partial(_jensen_shannon, beta=1.0),
    jensen_shannon: _jensen_shannon,
    total_variation: _total_variation,
    hard_cross_entropy: _hard_cross_entropy,
}


@lru_cache
def works(divergence: Divergence, kind: str) -> bool:
    """Return whether it has a kernel that runs here and computes what the function does."""
    if divergence not in KERNELS or find_spec("liger_kernel") is None:
        return False
    name = getattr(divergence, "__name__", divergence)
    try:
        off = _try_kernel(divergence, torch.device(kind))
        why = "" if off < 1e-4 else f"is off by {off:.1e}"
    except Exception as error:  # a release without it, no compiler for it, …: Triton raises much
        why = f"does not run: {error}".partition("\n")[0]
    if why:
        _log.warning("%s takes torch's operations on %s: liger-kernel's %s", name, kind, why)
    return not why


def _try_kernel(divergence: Divergence, device: torch.device) -> float:
    """Return the largest difference between kernel and function, in values and gradients, on a small example."""
    loss = Loss((), 1.0) if divergence is hard_cross_entropy else Loss(((1.0, divergence),))
    with torch.inference_mode(False), torch.enable_grad(), own_precision(device):
        theirs, ours = 3 * torch.arange(2 * 5 * 33, device=device).sin().view(2, 5, 33)
        weights = torch.arange(5, device=device)
        reference = TargetDistribution.of(theirs, following=weights - 1)
        draft_logits, both = ours.clone().requires_grad_(), []
        kernel = KERNELS[divergence]
        for values in (kernel(reference, draft_logits), loss(reference, draft_logits.log_softmax(-1))):
            both.append([values, *torch.autograd.grad((values * weights).sum(), draft_logits)])
        return torch.stack([(a - b).abs().max() for a, b in zip(*both, strict=True)]).max().item()  # NaN, if one is
