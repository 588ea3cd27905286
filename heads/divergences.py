"""Divergences of a drafter's distribution q from the target's p, or from the token that followed.

Each is one value per position, from log-probabilities.

On CUDA the kernels of `liger-kernel` compute them where it is installed, in fewer passes over a vocabulary. A drafter's
loss needs a value of each position, and a gradient that a weight of each position can still reach. Of Liger's kernels
(0.8.4 and later) these give it: KL, and so soft cross-entropy; JSD, whose end β = 1 is reverse KL; and total variation
with hard cross-entropy. Most are no public interface of Liger's, so each is tried against the definition first.

Shapes: P positions, V symbols of the target, V' of the drafter. For the kernels draft logits may be of any type; all
else is float32.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..common import BadInputError

Divergence = Callable[[Tensor, Tensor], Tensor]
LossName = str | dict[str, float]  # as in a recipe: see `divergence`
_log = logging.getLogger(__name__)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) per position, `[P]`. Its gradient is soft cross-entropy's; this one is zero at q = p."""
    return (log_p.exp() * (log_p - log_q).nan_to_num(0.0)).sum(-1)


def soft_cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """−Σ p log q per position, `[P]` (EAGLE-3's loss, arXiv 2503.01840)."""
    return -(log_p.exp() * log_q).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) per position, `[P]`."""
    return forward_kl(log_q, log_p)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """β KL(p || m) + (1−β) KL(q || m) with m = βp + (1−β)q, per position, `[P]` (DistillSpec, arXiv 2310.08461)."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).clamp(min=1e-30).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """½ Σ |p − q| = 1 − Σ min(p, q) per position, `[P]`: one minus the acceptance rate of rejection sampling."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """−log Σ min(p, q) per position, `[P]` (LK losses, arXiv 2602.23881).

    Its gradient is TV's divided by the acceptance rate, so none vanishes far from p.
    """
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def renyi_half(log_p: Tensor, log_q: Tensor) -> Tensor:
    """−2 log Σ √(p q) per position, `[P]`: Rényi's divergence of order ½, symmetric (D-PARD, SpecForge)."""
    return -2 * (0.5 * (log_p + log_q)).logsumexp(-1)


def hybrid_acceptance(log_p: Tensor, log_q: Tensor, eta: float = 3.0) -> Tensor:
    """λ KL(p || q) + (1−λ) TV(p, q) per position, `[P]` (LK losses, arXiv 2602.23881): KL far from p, TV near it.

    λ = exp(−η α) with that position's acceptance rate α, and is not differentiated. The paper takes η = 3, and 10 for
    Medusa's heads.
    """
    variation = total_variation(log_p, log_q)
    share = torch.exp(-eta * (1 - variation.detach()))
    return share * forward_kl(log_p, log_q) + (1 - share) * variation


def hard_cross_entropy(following: Tensor, log_q: Tensor) -> Tensor:
    """−log q at the token that followed per position, `[P]` (Medusa's loss, arXiv 2401.10774).

    It is 0 where `following` `[P]` is −1: a token that q has no probability for.
    """
    return -log_q.gather(-1, following.clamp(min=0)[:, None])[:, 0] * (following >= 0)


def smooth_l1(features: Tensor, drafted: Tensor) -> Tensor:
    """Mean over H of ½ d² where |d| < 1 and of |d| − ½ elsewhere, `[...]` (EAGLE, arXiv 2401.15077).

    d is the drafted minus the true feature, `[..., H]`. Its gradient stays bounded where a few dimensions of a hidden
    state are far larger than the others.
    """
    return torch.nn.functional.smooth_l1_loss(
        drafted.float(), features.float().expand_as(drafted), reduction="none"
    ).mean(-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "soft_ce": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "lk_nla": negative_log_acceptance,
    "renyi_half": renyi_half,
    "lk_hybrid": hybrid_acceptance,
}
HARD = "hard_ce"

# Of the divergences with a parameter: its name, and what it may be.
_PARAMETERS: dict[str, tuple[str, str, Callable[[float], bool]]] = {
    "jsd": ("beta", "between 0 and 1", lambda beta: 0 < beta < 1),
    "lk_hybrid": ("eta", "0 or more", lambda eta: 0 <= eta < math.inf),
}


@dataclass(frozen=True)
class Loss:
    """A weighted sum of divergences, and of `hard` times the cross-entropy with the token that followed."""

    parts: tuple[tuple[float, Divergence], ...]
    hard: float = 0.0

    @property
    def soft(self) -> float | None:
        """The weight of soft cross-entropy where there is nothing else: `losses.compare` has a shorter way for it."""
        return self.parts[0][0] if not self.hard and [rule for _, rule in self.parts] == [soft_cross_entropy] else None

    def __call__(self, reference: TargetDistribution, log_q: Tensor) -> Tensor:
        """Return the loss of each position, `[P]`, from log q `[P, V']`."""
        values = [weight * rule(reference.log_probs, log_q) for weight, rule in self.parts]
        if self.hard:
            assert reference.following is not None, "a hard loss needs the tokens that followed"
            values.append(self.hard * hard_cross_entropy(reference.following, log_q))
        return torch.stack(values).sum(0)


def divergence(name: str | Mapping[str, float]) -> Loss:
    """Return the loss that a recipe names.

    `name`: such as `soft_ce`, `jsd(0.1)` or `lk_hybrid(10)`, or weights of several: `{soft_ce: 1.0, tv: 0.1}`.

    Raises BadInputError for an unknown name, or a parameter or a weight that makes no sense.
    """
    weights = {name: 1.0} if isinstance(name, str) else name
    if not isinstance(weights, Mapping) or not weights:
        raise BadInputError(
            "loss: expected a name or a mapping from names to weights such as {soft_ce: 1.0, tv: 0.1}, "
            f"found {name!r}."
        )
    parts, hard = [], 0.0
    for part, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise BadInputError(f"loss: the weight of {part!r} must be a number above 0, found {weight!r}.")
        if part == HARD:
            hard = float(weight)
        else:
            parts.append((float(weight), _named(part)))
    return Loss(tuple(parts), hard)


def _named(name: Any) -> Divergence:
    """Return one divergence, with its parameter if there is one: `jsd(0.1)`."""
    match = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", str(name))
    kind, given = match.groups() if match else (name, None)
    if kind not in DIVERGENCES or (given is not None and kind not in _PARAMETERS):
        takes = " and ".join(f"{k}({p})" for k, (p, _, _) in _PARAMETERS.items())
        raise BadInputError(
            f"unknown loss {name!r}; known: {', '.join((*DIVERGENCES, HARD))}; {takes} take a parameter."
        )
    if given is None:
        return DIVERGENCES[kind]
    parameter, expected, fits = _PARAMETERS[kind]
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise BadInputError(f"loss {name!r}: {parameter} must be a number, {expected}; found {given!r}.")
    return partial(DIVERGENCES[kind], **{parameter: value})


@dataclass
class TargetDistribution:
    """The target's side of a comparison."""

    probs: Tensor  # p on the drafter's vocabulary, `[P, V']`; sums to less than 1 where that one is pruned
    logits: Tensor  # the target's there, `[P, V']`
    best: Tensor  # index there of the target's most probable token, -1 where it is not there, `[P]`
    following: Tensor | None = None  # index there of the token that followed, `[P]`; None where no loss needs it
    pruned: bool = False  # whether the drafter's vocabulary is

    @cached_property
    def log_probs(self) -> Tensor:
        """log p renormalised on the drafter's vocabulary (EAGLE-3's target), `[P, V']`."""
        return self.logits.log_softmax(-1, dtype=torch.float32)

    @cached_property
    def renormalised(self) -> Tensor:
        """p on the drafter's vocabulary alone, `[P, V']`; sums to 1."""
        return self.logits.softmax(-1, dtype=torch.float32) if self.pruned else self.probs

    @classmethod
    def of(cls, logits: Tensor, kept: Tensor | None = None, following: Tensor | None = None) -> TargetDistribution:
        """Make a reference from the target's logits `[P, V]`.

        Args:
            kept: the token ids of a pruned draft vocabulary, `[V']`.
            following: the target's own tokens, `[P]`.
        """
        best, probs = logits.argmax(-1), logits.softmax(-1, dtype=torch.float32)
        if kept is None:
            return cls(probs, logits, best, following)
        place = torch.full((logits.shape[-1],), -1, device=kept.device).scatter(
            0, kept, torch.arange(len(kept), device=kept.device)
        )
        probs, logits = probs.index_select(-1, kept), logits.index_select(-1, kept)
        return cls(probs, logits, place[best], None if following is None else place[following], True)

    def at(self, candidates: Tensor) -> TargetDistribution:
        """Return the target on a few symbols of the drafter's vocabulary, others at each position: `[P, C]`."""

        def place(symbols: Tensor) -> Tensor:
            found = candidates == symbols[:, None]
            return torch.where(found.any(-1), found.int().argmax(-1), -1)

        probs, logits = (x.gather(-1, candidates) for x in (self.probs, self.logits))
        following = None if self.following is None else place(self.following)
        return TargetDistribution(probs, logits, place(self.best), following, True)


def own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: mixed precision is for the drafter. (The meta device has none.)"""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


_KERNEL_DEVICES = {"cuda"}  # of devices


def kernels_serve(rule: Loss, kind: str) -> bool:
    """Return whether there is a kernel for each part of a loss on that kind of device."""
    return kind in _KERNEL_DEVICES and all(kernel_works(divergence, kind) for _, divergence, _ in _parts(rule))


def compare_by_kernels(
    reference: TargetDistribution, draft_logits: Tensor, rule: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, alpha, top1) as `losses.compare` does, by a loss that kernels serve."""
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
    return [*parts, (rule.hard, hard_cross_entropy, {})] if rule.hard else parts


@torch.no_grad()
def _agreement(reference: TargetDistribution, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, top1)."""
    probs = logits.softmax(-1, dtype=torch.float32)
    return torch.minimum(reference.probs, probs, out=probs).sum(-1), (logits.argmax(-1) == reference.best).float()


def _kl(reference: TargetDistribution, logits: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return Σ p (log max(p, `least`) − log q) and its gradient, which the kernel writes over its logits."""
    from liger_kernel.ops.backends._triton.kl_div import kl_loss_and_grad_triton

    own = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return kl_loss_and_grad_triton(own, reference.renormalised, None, -100, 1.0, least, 1.0)


def _jsd(reference: TargetDistribution, logits: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return JSD(β), or reverse KL where β is 1, and its gradient. The kernel writes that by log q over log q."""
    from liger_kernel.ops.backends._triton.jsd import jsd_loss_and_grad_triton

    log_q = logits.log_softmax(-1, dtype=torch.float32)
    q = log_q.exp()
    terms, slopes = jsd_loss_and_grad_triton(log_q, reference.log_probs, None, beta, -100, 1.0)
    return terms.sum(-1), slopes.addcmul_(q, slopes.sum(-1, keepdim=True), value=-1)


class _Known(torch.autograd.Function):
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
    return _Known.apply(logits, partial(_kl, reference, least=least))


def _jensen_shannon(reference: TargetDistribution, logits: Tensor, beta: float = 0.5) -> Tensor:
    return _Known.apply(logits, partial(_jsd, reference, beta=beta))


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


_KERNELS: dict[Divergence, Callable[..., Tensor]] = {
    forward_kl: partial(_cross_entropy, least=torch.finfo(torch.float32).tiny),
    soft_cross_entropy: partial(_cross_entropy, least=1.0),  # log 1 = 0: p's own entropy is left out
    reverse_kl: partial(_jensen_shannon, beta=1.0),
    jensen_shannon: _jensen_shannon,
    total_variation: _total_variation,
    hard_cross_entropy: _hard_cross_entropy,
}


@lru_cache
def kernel_works(rule: Divergence, kind: str) -> bool:
    """Return whether it has a kernel that runs here and computes what the function does."""
    if rule not in _KERNELS or find_spec("liger_kernel") is None:
        return False
    name = getattr(rule, "__name__", rule)
    try:
        off = _try_kernel(rule, torch.device(kind))
        why = "" if off < 1e-4 else f"is off by {off:.1e}"
    except Exception as error:  # a release without it, no compiler for it, …: Triton raises much
        why = f"does not run: {error}".partition("\n")[0]
    if why:
        _log.warning("%s takes torch's operations on %s: liger-kernel's %s", name, kind, why)
    return not why


def _try_kernel(divergence: Divergence, device: torch.device) -> float:
    """Return the largest difference between kernel and function, in values and gradients, on a small example."""
    rule = Loss((), 1.0) if divergence is hard_cross_entropy else Loss(((1.0, divergence),))
    with torch.inference_mode(False), torch.enable_grad(), own_precision(device):
        theirs, ours = 3 * torch.arange(2 * 5 * 33, device=device).sin().view(2, 5, 33)
        weights = torch.arange(5, device=device)
        reference = TargetDistribution.of(theirs, following=weights - 1)
        draft_logits, both = ours.clone().requires_grad_(), []
        for values in (
            compare_by_kernels(reference, draft_logits, rule)[0],
            rule(reference, draft_logits.log_softmax(-1)),
        ):
            both.append([values, *torch.autograd.grad((values * weights).sum(), draft_logits)])
        return torch.stack([(a - b).abs().max() for a, b in zip(*both, strict=True)]).max().item()  # NaN, if one is
