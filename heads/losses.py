"""Losses of drafters over many positions, and their metrics. The divergences themselves stand in divergences.py.

Shapes: P positions, V symbols of the target, V' of the drafter, S unrolled steps, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..targets.sequence_packing import Documents
from .divergences import Loss, TargetDistribution, compare_by_kernels, kernels_serve, own_precision

Head = Callable[[Tensor], Tensor]

# Positions that have logits at a time. A GPU reads and writes all gradients of an output embedding with each chunk, at
# 8B shape 2 GB: there larger ones are worth their memory. (On the meta device trainings on a GPU are planned.)
CHUNK = 512
CHUNKS = {"cuda": 2048, "meta": 2048}


@dataclass
class PositionLosses:
    """The comparison of P positions with the target, `[P]` each, with S steps `[S, P]`."""

    total: Tensor  # Σ weight · loss, the one differentiable value
    loss: Tensor  # of each position; where the draft vocabulary is pruned, from p renormalised on it
    alpha: Tensor  # Σ min(p, q), the analytic acceptance probability; mass that q cannot reach counts as rejected
    top1: Tensor  # 1.0 where both agree on the most probable token


def compare(reference: TargetDistribution, draft_logits: Tensor, rule: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, alpha, top1) of draft logits `[P, V']`; the loss is differentiable."""
    if kernels_serve(rule, draft_logits.device.type):
        return compare_by_kernels(reference, draft_logits, rule)
    if rule.soft is not None:
        draft_logits = draft_logits.float()
        with own_precision(draft_logits.device):
            loss, alpha, best = _SoftCrossEntropy.apply(draft_logits, reference.renormalised, reference.probs)
        return rule.soft * loss, alpha, (best == reference.best).float()
    log_q = draft_logits.float().log_softmax(-1)
    with torch.no_grad():
        alpha = torch.minimum(reference.probs, log_q.exp()).sum(-1)
        top1 = (log_q.argmax(-1) == reference.best).float()
    return rule(reference, log_q), alpha, top1


class _SoftCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy, whose gradient is q − p, and Σ min(p, q), in fewer passes over a vocabulary than by log q."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, renormalised: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        draft_probs, (highest, best) = logits.softmax(-1), logits.max(-1)
        # log q is the logits but for a constant, which is known where q is largest: there it is at least 1 / V'.
        constant = highest - draft_probs.gather(-1, best[:, None])[:, 0].log()
        loss = constant - torch.linalg.vecdot(renormalised, logits)
        alpha = torch.minimum(probs, draft_probs).sum(-1)
        ctx.save_for_backward(renormalised, draft_probs)
        ctx.mark_non_differentiable(alpha, best)
        return loss, alpha, best

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        renormalised, draft_probs = ctx.saved_tensors
        return (draft_probs - renormalised).mul_(slope[:, None]), None, None


@dataclass(frozen=True)
class LossSettings:
    """How `chunked_compare` makes logits of hidden states, and the rule by which it compares them."""

    target_head: Head  # returns logits `[P, V]` of the target's hidden states `[P, H]`
    draft_head: Head | Sequence[Head]  # returns logits `[P, V']` of the drafter's; one for all steps, or one for each
    rule: Loss
    kept: Tensor | None = None  # token ids `[V']` of a pruned draft vocabulary
    parameters: Sequence[Tensor] = ()  # what `draft_head` trains; others get no gradient from the comparison
    chunk: int = 0  # how many positions have logits at a time; 0 for as many as suit the device


def chunked_compare(
    target_hidden: Tensor,  # [P, H]
    draft_hidden: Tensor,  # [P, H'] or [S, P, H']
    settings: LossSettings,
    weights: Tensor | None = None,  # [P] or [S, P]
    following: Tensor | None = None,  # [P]
) -> PositionLosses:
    """Return the comparison of the logits of hidden states, a chunk at a time, so that `[P, V]` never exists.

    The gradient of each chunk is taken as soon as its loss is known (as in Liger's fused linear losses, arXiv
    2410.10989): no logits are kept for the backward pass, and none are computed twice.

    Args:
        weights: of each loss in the total; 1 if None.
        following: the tokens that followed, for a hard loss.
    """
    steps = draft_hidden if draft_hidden.ndim == 3 else draft_hidden[None]  # [S, P, H']
    shape = steps.shape[:2]
    weights = steps.new_ones(shape) if weights is None else weights.reshape(shape)
    weights, heads = weights.float(), settings.draft_head
    heads = [heads] * len(steps) if callable(heads) else heads
    slopes = ChunkedSlopes(steps, settings.parameters)
    results = steps.new_zeros(3, *shape, dtype=torch.float32)  # loss, alpha and top1, [3, S, P]
    size = settings.chunk or CHUNKS.get(target_hidden.device.type, CHUNK)
    for begin in range(0, len(target_hidden), size):
        part = slice(begin, begin + size)
        with torch.no_grad(), own_precision(target_hidden.device):
            tokens = None if following is None else following[part]
            reference = TargetDistribution.of(settings.target_head(target_hidden[part]), settings.kept, tokens)
        for i, head in enumerate(heads):
            hidden = slopes.chunk((i, part))
            compared = compare(reference, head(hidden), settings.rule)
            results[:, i, part] = torch.stack([values.detach() for values in compared])
            slopes.learn((compared[0] * weights[i, part]).sum(), hidden, (i, part))
    total = slopes.attach((results[0] * weights).sum())
    if draft_hidden.ndim < 3:
        results = results[:, 0]
    loss, alpha, top1 = results
    return PositionLosses(total, loss, alpha, top1)


class ChunkedSlopes:
    """The gradients of a loss that is made a chunk at a time, by hidden states and by the parameters that it trains."""

    def __init__(self, hidden: Tensor, parameters: Sequence[Tensor]):
        self.hidden, self.learning = hidden, torch.is_grad_enabled()
        self.trained = [p for p in parameters if p.requires_grad] if self.learning else []
        self.slopes = [torch.zeros_like(p, dtype=torch.float32) for p in self.trained]
        self.columns = torch.zeros_like(hidden)

    def chunk(self, index: Any) -> Tensor:
        """Return the hidden states of a chunk at `index`."""
        return self.hidden[index].detach().requires_grad_(self.learning)

    def learn(self, loss: Tensor, hidden: Tensor, index: Any) -> None:
        """Add the gradients of the loss of a chunk, whose states `hidden` stand at `index`."""
        if not self.learning:
            return
        # Where each step has a head of its own, the others' weights have no part in it.
        own, *others = torch.autograd.grad(loss, [hidden, *self.trained], allow_unused=True)
        self.columns[index] = own
        for slope, other in zip(self.slopes, others, strict=True):
            if other is not None:
                slope += other

    def attach(self, total: Tensor) -> Tensor:
        """Return `total` with these gradients."""
        if not self.learning:
            return total
        pairs = [(self.hidden, self.columns), *zip(self.trained, self.slopes, strict=True)]
        linear = torch.stack([(x.float() * slope).sum() for x, slope in pairs]).sum()
        return total + (linear - linear.detach())


def ahead(values: Tensor, by: int) -> Tensor:
    """Return `values[:, t + by]` at t `[B, T]`; zero after the end."""
    return torch.nn.functional.pad(values, (0, by))[:, by:]


def acceptance_metrics(alphas: list[Tensor], wanted: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the expected acceptance of a chain from the analytic alphas along it, as (sum, count) pairs.

    Args:
        alphas: per depth, `[B, T]`: the acceptance probability at that depth of the chain that starts at t.
        wanted: per depth, `[B, T]` bool: where it was measured.

    Returns:
        `alpha_d1`, …: acceptance at depth d, weighted by the probability that the chain gets there (so: given that
        depth d−1 was accepted). `tau`: 1 + Σ_d Π_{i<=d} alpha_i per starting position, never the product of averages.
    """
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    reach = torch.ones_like(alphas[0])
    tau = torch.ones_like(alphas[0])
    whole = torch.ones_like(wanted[0])
    for depth, (alpha, measured) in enumerate(zip(alphas, wanted, strict=True), 1):
        whole = whole & measured
        metrics[f"alpha_d{depth}"] = ((reach * alpha)[whole].sum(), reach[whole].sum())
        reach = reach * alpha
        tau = tau + reach
    metrics["tau"] = (tau[whole].sum(), whole.sum())
    return metrics


def metrics_by_depth(result: PositionLosses, wanted: Tensor, here: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `loss_d1`, `top1_d1`, … of steps, and their `acceptance_metrics`.

    Args:
        wanted: the tokens that they predict, each step from one place further back, `[B, T]`.
        here: which of those tokens each step predicts, `[S, P]`.
    """
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    alphas, measured = [], []
    for k, known in enumerate(here):
        for name, values in (("loss", result.loss), ("top1", result.top1)):
            metrics[f"{name}_d{k + 1}"] = values[k][known].sum(), known.sum()
        alphas.append(ahead(torch.zeros(wanted.shape, device=wanted.device).masked_scatter(wanted, result.alpha[k]), k))
        measured.append(ahead(torch.zeros_like(wanted).masked_scatter(wanted, known), k))
    return metrics | acceptance_metrics(alphas, measured)


@dataclass(frozen=True)
class AcceptedPositions:
    """Which tokens of a batch's texts rounds of decoding reached, and the share of each text's loss that lies on those.

    A round begins after a root and emits tokens: the drafts that were accepted, and the target's own after them. At
    each of these depths a draft was judged. So every token of an answer but its first was reached in one round, at one
    depth d, from the root d places before it: there a head learns exactly what decoding asks of it.
    """

    depths: Tensor  # at which depth a round reached each token, `[R, T]`; 0 where none did
    share: float

    def reached(self, rows: Tensor, places: Tensor, depths: Tensor) -> Tensor:
        """Return which drafts rounds reached, bool: of the tokens at `places` of `rows`, at `depths` from 1 on."""
        return self.depths[rows, places] == depths

    def roots(self) -> Tensor:
        """Return the roots of rounds, `[R, T]` bool: the tokens before those of depth 1."""
        return torch.nn.functional.pad(self.depths == 1, (0, 1))[:, 1:]

    def weighed(
        self,
        weights: Tensor,
        rows: Tensor,
        places: Tensor,
        depths: Tensor,
        documents: Documents | None = None,
        rest: Tensor | None = None,
    ) -> Tensor:
        """Return `weights` of drafts, of which the share has moved to what was reached; the sum of each text stays.

        Draft i of a text whose weights are w has (1 − share) · w_i, and if it was reached also share · w_i · Σ w / Σ w
        of the reached ones. A text of which nothing was reached keeps its weights.

        Args:
            rows, places, depths: as in `reached`; they broadcast to `weights`.
            documents: the texts that rows hold; None where each is one.
            rest: replaces w in the first part, with the same sums; None for w.
        """
        rest = weights if rest is None else rest
        reached = weights * self.reached(rows, places, depths)
        numbers = rows if documents is None else documents.numbers(rows.device)[rows, places]
        texts = numbers.expand_as(weights)
        count = len(self.depths) if documents is None else len(documents) + 1
        index, none = texts.flatten(), weights.new_zeros(count)
        whole, there = (none.index_add(0, index, values.flatten()) for values in (weights, reached))
        is_any = there > 0
        factors = torch.where(is_any, self.share * whole / there.where(is_any, torch.ones_like(there)), 0.0)
        return (1 - self.share * is_any)[texts] * rest + factors[texts] * reached
