"""What the drafts of a block lose: which of them weigh how much, and the loss of many blocks, a few at a time.

Shapes: A blocks, k drafts of each, H hidden size, V' draft vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common import BadInputError
from ..divergences import Loss
from ..losses import TargetDistribution, acceptance_metrics, compare, own_precision, with_slopes

WEIGHTINGS = ("decay", "dpace", "overlap")


def check_weighting(name: str) -> None:
    """Raise BadInputError if there is no such way to weigh drafts."""
    if name not in WEIGHTINGS:
        raise BadInputError(f"drafter: weighting must be one of {', '.join(WEIGHTINGS)}, found {name!r}.")


def default_gamma(drafts: int) -> float:
    """Return the decay's length γ for blocks of so many drafts: 7, 5 and 4 for 15, 9 and 7 (DFlash, 2602.06036)."""
    return {15: 7.0, 9: 5.0, 7: 4.0}.get(drafts, 1 + 3 * drafts / 7)


def decay_weights(drafts: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """Return exp(−(j − 1)/γ) for drafts j = 1, …, k, `[k]` (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(drafts, device=device) / gamma)


def pace_weights(probs: Tensor, counts: Tensor, floor: float = 0.5) -> Tensor:
    """Return Σ_{m≥j} Π_{i≤m} q̃_i with q̃ = (1 − α)·q + α, `[A, k]` (D-PACE, arXiv 2605.18810).

    It is ∂/∂log q̃_j of Σ_m Π_{i≤m} q̃_i, which is what a round would accept: a draft weighs what depends on it.

    Args:
        probs: how probable each draft is to be right, `[A, k]`.
        counts: which drafts are to be learned, `[A, k]`; another one has the factor 1 and the weight 0.
        floor: α.
    """
    eased = ((1 - floor) * probs + floor).masked_fill(~counts, 1.0)
    reached = eased.cumprod(1) * counts
    return reached.flip(1).cumsum(1).flip(1) * counts


@dataclass(frozen=True)
class Weighting:
    """How much each draft weighs.

    Attributes:
        name: `decay` falls with the draft's place; `dpace` follows how probable the drafter finds the tokens that
            followed, `overlap` how probable its drafts are to be accepted.
        fixed: the weights that are known beforehand, `[A, k]`: 0 for drafts that are not to be learned.
        floor: α of `pace_weights`.
    """

    name: str
    fixed: Tensor
    floor: float = 0.5

    def of(self, part: slice, logits: Tensor, following: Tensor | None, alpha: Tensor) -> Tensor:
        """Return the weights of a part of the blocks, `[a, k]`, from draft logits `[a · k, V']` and Σ min(p, q)."""
        fixed = self.fixed[part]
        if self.name == "decay":
            return fixed
        right = alpha.view_as(fixed)
        if self.name == "dpace":
            assert following is not None
            right = probability(logits, following).view_as(fixed)
        return fixed * pace_weights(right, fixed > 0, self.floor)


def probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the softmax of `logits` `[P, V']` at `tokens` `[P]`, 0 where a token is −1: it cannot be said."""
    chosen = logits.float().gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    return (chosen - logits.float().logsumexp(-1)).exp() * (tokens >= 0)


@dataclass
class BlockComparison:
    """What a drafter made of A blocks, `[A, k]` each.

    Attributes:
        total: Σ weight · loss, the one differentiable value.
        loss, alpha, top1: as in `losses.Comparison`.
        others: what else was found, by name.
    """

    total: Tensor
    loss: Tensor
    alpha: Tensor
    top1: Tensor
    others: dict[str, Tensor]

    def metrics(self, counts: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `loss_d1`, `top1_d1`, …, and the acceptance of chains, over the drafts that count, `[A, k]`."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        named = {"loss": self.loss, "top1": self.top1, **self.others}
        for j, here in enumerate(counts.unbind(1)):
            found |= {f"{name}_d{j + 1}": (values[:, j][here].sum(), here.sum()) for name, values in named.items()}
        return found | acceptance_metrics(list(self.alpha.unbind(1)), list(counts.unbind(1)))


# Returns draft logits [a · k, V'] of states [a, k, H] of a part of the blocks.
Logits = Callable[[Tensor, slice], Tensor]
# Returns what is lost beside, [a · k], and figures of it, of the part's states and of Σ min(p, q), [a · k].
Beside = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class LossInputs:
    """What blocks are compared with, and how.

    Attributes:
        reference: the target's side of a part of the blocks, `[a · k]` positions.
        logits: the drafter's.
        rule: what a position loses.
        weighting: what it weighs.
        beside: what it loses beside; None for nothing.
        parameters: what `logits` and `beside` train.
    """

    reference: Callable[[slice], TargetDistribution]
    logits: Logits
    rule: Loss
    weighting: Weighting
    beside: Beside | None = None
    parameters: Sequence[Tensor] = ()


def compare_blocks(states: Tensor, sides: LossInputs, chunk: int = 512) -> BlockComparison:
    """Return what blocks `[A, k, H]` lose, whole blocks of about `chunk` drafts at a time.

    As in `losses.chunked_compare`, the gradient of a part is taken as soon as its loss is known, so that logits of all
    drafts are never in memory together.
    """
    count, drafts = states.shape[:2]
    learning = torch.is_grad_enabled()
    trained = [p for p in sides.parameters if p.requires_grad] if learning else []
    slopes = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
    columns = torch.zeros_like(states)
    found: dict[str, Tensor] = {}
    total = states.new_zeros((), dtype=torch.float32)
    for part in parts(count, max(1, chunk // drafts)):
        hidden = states[part].detach().requires_grad_(learning)
        lost, values = _compared(hidden, part, sides)
        for name, value in values.items():
            found.setdefault(name, states.new_zeros(count, drafts, dtype=torch.float32))[part] = value
        total += lost.detach()
        if learning:
            first, *rest = torch.autograd.grad(lost, [hidden, *trained], allow_unused=True)
            columns[part] = first
            for slope, other in zip(slopes, rest, strict=True):
                if other is not None:
                    slope += other
    if learning:
        total = with_slopes(total, [(states, columns), *zip(trained, slopes, strict=True)])
    blank = states.new_zeros(count, drafts, dtype=torch.float32)
    loss, alpha, top1 = (found.pop(name, blank) for name in ("loss", "alpha", "top1"))
    return BlockComparison(total, loss, alpha, top1, found)


def parts(count: int, step: int) -> list[slice]:
    """Return `count` things in parts of `step`."""
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _compared(hidden: Tensor, part: slice, sides: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of a part of the blocks, and what was found there, `[a, k]` each."""
    with torch.no_grad(), own_precision(hidden.device):
        reference = sides.reference(part)
    logits = sides.logits(hidden, part)
    loss, alpha, top1 = compare(reference, logits, sides.rule)
    weights = sides.weighting.of(part, logits.detach(), reference.following, alpha).flatten()
    values = {"loss": loss.detach(), "alpha": alpha, "top1": top1}
    total = (loss * weights).sum()
    if sides.beside is not None:
        lost, figures = sides.beside(hidden, alpha)
        total, values = total + (lost * weights).sum(), values | figures
    return total, {name: value.view(hidden.shape[:2]) for name, value in values.items()}
