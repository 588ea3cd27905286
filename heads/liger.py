"""Losses by the kernels of `liger-kernel`, where it is installed, on CUDA.

They compute what divergences.py defines, in fewer passes over a vocabulary. A drafter's loss needs a value of each
position, and a gradient that a weight of each position can still reach. Of Liger's kernels (0.8.4 and later) those of
KL give that, and so soft cross-entropy; that of JSD, whose end β = 1 is reverse KL; and the one that makes total
variation and hard cross-entropy together. Those that contain the output embedding (`fused_linear_…`, `chunked_loss`)
give one sum; and of LK losses it has none.

Most of these are no public interface of Liger's, so each is tried against the definition before it is used.

Shapes: P positions, V' symbols of the drafter's vocabulary. Draft logits may be of any type; all else is float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import divergences
from .divergences import Divergence, Loss, TargetDistribution, own_precision

_KINDS = {"cuda"}  # of devices
_log = logging.getLogger(__name__)


def serves(rule: Loss, kind: str) -> bool:
    """Whether there is a kernel for each part of a loss on that kind of device."""
    return kind in _KINDS and all(works(divergence, kind) for _, divergence, _ in _parts(rule))


def compare(reference: TargetDistribution, draft_logits: Tensor, rule: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `losses.compare` does, by a loss that is served."""
    with own_precision(draft_logits.device), torch.cuda.device_of(draft_logits):
        alpha, top1 = _agreement(reference, draft_logits)
        values = [
            weight * _KERNELS[divergence](reference, draft_logits, **settings)
            for weight, divergence, settings in _parts(rule)
        ]
        return torch.stack(values).sum(0), alpha, top1


def _parts(rule: Loss) -> list[tuple[float, Divergence, dict[str, float]]]:
    """Return weights, divergences and the settings that these were given."""
    parts = [(weight, getattr(part, "func", part), getattr(part, "keywords", {})) for weight, part in rule.parts]
    return [*parts, (rule.hard, divergences.hard_cross_entropy, {})] if rule.hard else parts


@torch.no_grad()
def _agreement(reference: TargetDistribution, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, top1)."""
    probs = logits.softmax(-1, dtype=torch.float32)
    return torch.minimum(reference.probs, probs, out=probs).sum(-1), (logits.argmax(-1) == reference.best).float()


# ------------------------------------------------------------ kernels


def _kl(reference: TargetDistribution, logits: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return Σ p (log max(p, `least`) − log q) and its gradient, which the kernel writes over its logits."""
    from liger_kernel.ops.backends._triton.kl_div import kl_loss_and_grad_triton

    own = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    found: tuple[Tensor, Tensor] = kl_loss_and_grad_triton(own, reference.renormalised, None, -100, 1.0, least, 1.0)
    return found


def _jsd(reference: TargetDistribution, logits: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return JSD(β), or reverse KL where β is 1, and its gradient. The kernel writes that by log q over log q."""
    from liger_kernel.ops.backends._triton.jsd import jsd_loss_and_grad_triton

    log_q = logits.log_softmax(-1, dtype=torch.float32)
    q = log_q.exp()
    terms, slopes = jsd_loss_and_grad_triton(log_q, reference.log_probs, None, beta, -100, 1.0)
    return terms.sum(-1), slopes.addcmul_(q, slopes.sum(-1, keepdim=True), value=-1)


class _Known(torch.autograd.Function):
    """A value of each position whose gradient by the logits is made along with it, and kept instead of them."""

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


def _forward_kl(reference: TargetDistribution, logits: Tensor) -> Tensor:
    found: Tensor = _Known.apply(logits, partial(_kl, reference, least=torch.finfo(torch.float32).tiny))
    return found


def _soft_cross_entropy(reference: TargetDistribution, logits: Tensor) -> Tensor:
    found: Tensor = _Known.apply(logits, partial(_kl, reference, least=1.0))  # log 1 = 0: p's own entropy is left out
    return found


def _jensen_shannon(reference: TargetDistribution, logits: Tensor, beta: float = 0.5) -> Tensor:
    found: Tensor = _Known.apply(logits, partial(_jsd, reference, beta=beta))
    return found


def _both(reference: TargetDistribution, logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Return (hard cross-entropy, total variation)."""
    from liger_kernel.ops import LigerFusedCETVDFunction

    found: tuple[Tensor, Tensor] = LigerFusedCETVDFunction.apply(logits, reference.log_probs, following)
    return found


def _total_variation(reference: TargetDistribution, logits: Tensor) -> Tensor:
    return _both(reference, logits, reference.best.clamp(min=0))[1]


def _hard_cross_entropy(reference: TargetDistribution, logits: Tensor) -> Tensor:
    following = reference.following
    assert following is not None, "a hard loss needs the tokens that followed"
    return _both(reference, logits, following.clamp(min=0))[0] * (following >= 0)


_KERNELS: dict[Divergence, Callable[..., Tensor]] = {
    divergences.forward_kl: _forward_kl,
    divergences.soft_cross_entropy: _soft_cross_entropy,
    divergences.reverse_kl: partial(_jensen_shannon, beta=1.0),
    divergences.jensen_shannon: _jensen_shannon,
    divergences.total_variation: _total_variation,
    divergences.hard_cross_entropy: _hard_cross_entropy,
}


# ------------------------------------------------------------ trials


@lru_cache
def works(divergence: Divergence, kind: str) -> bool:
    """Whether it has a kernel that runs here and computes what the function does."""
    if divergence not in _KERNELS or find_spec("liger_kernel") is None:
        return False
    name = getattr(divergence, "__name__", divergence)
    try:
        difference = _trial(divergence, torch.device(kind))
    except Exception as error:  # a release without it, no compiler for it, …: Triton raises much
        _log.warning(
            "%s takes torch's operations: liger-kernel's does not run on %s (%s)",
            name,
            kind,
            str(error).partition("\n")[0],
        )
        return False
    if not difference < 1e-4:
        _log.warning("%s takes torch's operations: liger-kernel's is off by %.1e on %s", name, difference, kind)
        return False
    return True


def _trial(divergence: Divergence, device: torch.device) -> float:
    """Return the largest difference between kernel and function, in values and gradients, on a small example."""
    rule = Loss((), 1.0) if divergence is divergences.hard_cross_entropy else Loss(((1.0, divergence),))
    with torch.inference_mode(False), torch.enable_grad(), own_precision(device):
        theirs, ours = 3 * torch.arange(2 * 5 * 33, device=device).sin().view(2, 5, 33)
        reference, weights = (
            TargetDistribution.of(theirs, following=torch.arange(-1, 4, device=device)),
            torch.arange(5, device=device),
        )
        draft_logits, both = ours.clone().requires_grad_(), []
        for values in (compare(reference, draft_logits, rule)[0], rule(reference, draft_logits.log_softmax(-1))):
            both.append([values, *torch.autograd.grad((values * weights).sum(), draft_logits)])
        return torch.stack([(a - b).abs().max() for a, b in zip(*both, strict=True)]).max().item()  # NaN, if one is
