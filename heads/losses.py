"""Losses of drafters over many positions: what a step reads, how drafts are compared, what comes out, and its metrics.

The divergences themselves stand in divergences.py.

Shapes: B rows (R where documents are counted), T tokens, P positions, K taps, H hidden size, V symbols of the target,
V' of the drafter, S unrolled steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..common import BadInputError
from ..common.plugins import plugin
from ..targets import Target
from ..targets.documents import Documents
from .divergences import DIVERGENCES, HARD, PARAMETERS, Divergence, hard_cross_entropy, soft_cross_entropy

Head = Callable[[Tensor], Tensor]

# Positions that have logits at a time. A GPU reads and writes all gradients of an output embedding with each chunk, at
# 8B shape 2 GB: there larger ones are worth their memory. (On the meta device trainings on a GPU are planned.)
CHUNK = 512
CHUNKS = {"cuda": 2048, "meta": 2048}
KERNEL_DEVICES = {"cuda"}  # where kernels of another package compare (`outrider.losses`), if they have the loss

# A head predicts x_{t+2} from the features at t and the token x_{t+1}; so no drafter learns the first two tokens of a
# row, and all of them count the same positions.
FIRST_LEARNED = 2


@dataclass
class TargetBatch:
    """A batch that a drafter learns from: sequences, and the target's hidden states.

    Attributes:
        target: gives `embed` and `lm_head`; never trained.
        tokens: `[B, T]`, padded on the right.
        supervised: `[B, T]` bool, True at the tokens a drafter should learn to predict (the target's own responses).
        hidden: the drafter's taps, `[B, T, K, H]`; None for drafters without taps.
        last: the target's last hidden state, `[B, T, H]`; `target.lm_head(last)` are its logits.
        seed: of a loss's draws from a row, beside the row's text: so neither batch nor process changes them.
        documents: the texts of each row, where rows hold several; None where each holds one. For drafters that `pack`.
    """

    target: Target
    tokens: Tensor
    supervised: Tensor
    hidden: Tensor | None
    last: Tensor
    seed: int = 0
    documents: Documents | None = None

    def texts(self) -> Iterator[TargetBatch]:
        """Yield batches whose rows are one text each, from packed rows those of about one length together."""
        if self.documents is None:
            yield self
            return
        for numbers in self.documents.passes(self.tokens.device):
            alone = partial(self.documents.alone, numbers=numbers)
            texts = replace(self, tokens=alone(self.tokens), supervised=alone(self.supervised), documents=None)
            texts.last = alone(self.last)
            texts.hidden = None if self.hidden is None else alone(self.hidden)
            yield texts


Sum = tuple[Tensor, Tensor]  # (sum, count): divided once, after everything was added up


@dataclass
class DrafterLoss:
    """A loss as a sum over supervised positions, so that accumulation and data parallelism reduce it right.

    Attributes:
        total: differentiable sum over positions (depth weights included).
        count: number of supervised positions in the batch.
        metrics: (sum, count) per name: `loss_d1`, `top1_d1`, `alpha_d1`, …, `tau`; probes of a pair need those of
            depth 1 and `tau`.
    """

    total: Tensor
    count: Tensor
    metrics: dict[str, Sum] = field(default_factory=dict)

    @classmethod
    def sum(cls, losses: Iterable[DrafterLoss]) -> DrafterLoss:
        """Return the loss of several batches together; there is at least one."""
        first, *others = losses
        for loss in others:
            metrics = {n: (a + loss.metrics[n][0], b + loss.metrics[n][1]) for n, (a, b) in first.metrics.items()}
            first = cls(first.total + loss.total, first.count + loss.count, metrics)
        return first

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)


@dataclass(frozen=True)
class Loss:
    """A weighted sum of divergences, and of `hard` times the cross-entropy with the token that followed."""

    parts: tuple[tuple[float, Divergence], ...]
    hard: float = 0.0

    @property
    def soft(self) -> float | None:
        """The weight of soft cross-entropy where there is nothing else: `compare` has a shorter way for it."""
        return self.parts[0][0] if not self.hard and [part for _, part in self.parts] == [soft_cross_entropy] else None

    def __call__(self, reference: TargetDistribution, log_q: Tensor) -> Tensor:
        """Return the loss of each position, `[P]`, from log q `[P, V']`."""
        values = [weight * part(reference.log_probs, log_q) for weight, part in self.parts]
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
    if kind not in DIVERGENCES or (given is not None and kind not in PARAMETERS):
        takes = " and ".join(f"{k}({p})" for k, (p, _, _) in PARAMETERS.items())
        raise BadInputError(
            f"unknown loss {name!r}; known: {', '.join((*DIVERGENCES, HARD))}; {takes} take a parameter."
        )
    if given is None:
        return DIVERGENCES[kind]
    parameter, expected, fits = PARAMETERS[kind]
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise BadInputError(f"loss {name!r}: {parameter} must be a number, {expected}; found {given!r}.")
    return partial(DIVERGENCES[kind], **{parameter: value})


def float32_or_more(values: Tensor) -> torch.dtype:
    """Return the precision in which `values` are compared: float32, or their own float64."""
    return torch.promote_types(values.dtype, torch.float32)


def own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: mixed precision is for the drafter. (The meta device has none.)"""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


HALF = (torch.bfloat16, torch.float16)


class Float32Logits(TorchFunctionMode):
    """A mode in which `torch.nn.functional.linear` returns float32, whatever autocast or its inputs' dtype are.

    A divergence's gradient is the difference of two distributions. Logits that are rounded to bfloat16 are off by up to
    1/32 where they reach 8, and the better a drafter is, the more of the difference that is: of soft cross-entropy's
    gradient 5% at an acceptance of 0.87 and 26% at 0.97, of those that follow acceptance 22% and 51%. Sums that are
    written in float32 lose 0.2%. The target's logits stay as they are: rounded, they are the law that it is served
    with.

    A GPU multiplies in half precision as before, and writes the sums as they are; elsewhere the products are made in
    float32. Float64, and weights that are no plain tensors (quantised ones), are left alone.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not linear or type(args[1]) not in (Tensor, torch.nn.Parameter):
            return func(*args, **(kwargs or {}))
        return float32_linear(*args, **(kwargs or {}))


def float32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the products `[..., V]` of `hidden` `[..., H]` and `weight` `[V, H]`, in float32 or float64."""
    device = hidden.device.type
    if device == "meta":  # which has no autocast; trainings are planned there
        products = linear(hidden, weight, bias)
        return products.to(float32_or_more(products))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if dtype not in HALF or torch.float64 in (hidden.dtype, weight.dtype):
        return linear(hidden, weight, bias)
    with torch.autocast(device, enabled=False):
        rows: Tensor = _Products.apply(hidden.flatten(0, -2), weight, dtype)
        products = rows.view(*hidden.shape[:-1], -1)
        return products if bias is None else products + bias.float()


class _Products(torch.autograd.Function):
    """Products of `[P, H]` and `[V, H]`, whose sums `[P, V]` are written in float32; in half precision backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden.to(dtype), weight)
        if hidden.is_cuda:
            return torch.mm(hidden.to(dtype), weight.to(dtype).t(), out_dtype=torch.float32)
        return linear(hidden.float(), weight.float())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        rounded = slope.to(hidden.dtype)
        of_hidden = rounded @ weight.to(hidden.dtype) if ctx.needs_input_grad[0] else None
        return of_hidden, rounded.t() @ hidden if ctx.needs_input_grad[1] else None, None


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
        return self.logits.log_softmax(-1, dtype=float32_or_more(self.logits))

    @cached_property
    def renormalised(self) -> Tensor:
        """p on the drafter's vocabulary alone, `[P, V']`; sums to 1."""
        return self.logits.softmax(-1, dtype=float32_or_more(self.logits)) if self.pruned else self.probs

    @classmethod
    def of(cls, logits: Tensor, kept: Tensor | None = None, following: Tensor | None = None) -> TargetDistribution:
        """Make a reference from the target's logits `[P, V]`.

        Args:
            kept: the token ids of the draft vocabulary, ascending, `[V']`; None for all.
            following: the target's own tokens, `[P]`.
        """
        best, probs = logits.argmax(-1), logits.softmax(-1, dtype=float32_or_more(logits))
        if kept is None or len(kept) == logits.shape[-1]:
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


@dataclass
class PositionLosses:
    """The comparison of P positions with the target, `[P]` each, with S steps `[S, P]`."""

    total: Tensor  # Σ weight · loss, the one differentiable value
    loss: Tensor  # of each position; where the draft vocabulary is pruned, from p renormalised on it
    alpha: Tensor  # Σ min(p, q), the analytic acceptance probability; mass that q cannot reach counts as rejected
    top1: Tensor  # 1.0 where both agree on the most probable token


def compare(reference: TargetDistribution, draft_logits: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, alpha, top1) of draft logits `[P, V']`; the loss is differentiable."""
    if draft_logits.device.type in KERNEL_DEVICES and (by_kernels := plugin("losses", "kernels")) is not None:
        compared: tuple[Tensor, Tensor, Tensor] | None = by_kernels(reference, draft_logits, loss)
        if compared is not None:
            return compared
    draft_logits = draft_logits.to(float32_or_more(draft_logits))
    if loss.soft is not None:
        with own_precision(draft_logits.device):
            values, alpha, best = _SoftCrossEntropy.apply(draft_logits, reference.renormalised, reference.probs)
        return loss.soft * values, alpha, (best == reference.best).float()
    log_q = draft_logits.log_softmax(-1)
    with torch.no_grad():
        alpha = torch.minimum(reference.probs, log_q.exp()).sum(-1)
        top1 = (log_q.argmax(-1) == reference.best).float()
    return loss(reference, log_q), alpha, top1


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
    """How `chunked_compare` makes logits of hidden states, and the loss by which it compares them."""

    target_head: Head  # returns logits `[P, V]` of the target's hidden states `[P, H]`
    draft_head: Head | Sequence[Head]  # returns logits `[P, V']` of the drafter's; one for all steps, or one for each
    loss: Loss
    kept: Tensor | None = None  # token ids of the draft vocabulary, ascending, `[V']`; None for all
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
    weights = weights.to(float32_or_more(steps))
    heads = settings.draft_head
    heads = [heads] * len(steps) if callable(heads) else heads
    slopes = ChunkedSlopes(steps, settings.parameters)
    results = steps.new_zeros(3, *shape, dtype=float32_or_more(steps))  # loss, alpha and top1, [3, S, P]
    size = settings.chunk or CHUNKS.get(target_hidden.device.type, CHUNK)
    for begin in range(0, len(target_hidden), size):
        part = slice(begin, begin + size)
        with torch.no_grad(), own_precision(target_hidden.device):
            tokens = None if following is None else following[part]
            reference = TargetDistribution.of(settings.target_head(target_hidden[part]), settings.kept, tokens)
        for i, head in enumerate(heads):
            hidden = slopes.chunk((i, part))
            with Float32Logits():
                compared = compare(reference, head(hidden), settings.loss)
            results[:, i, part] = torch.stack([values.detach() for values in compared])
            slopes.learn((compared[0] * weights[i, part]).sum(), hidden, (i, part))
    total = slopes.attach((results[0] * weights).sum())
    if draft_hidden.ndim < 3:
        results = results[:, 0]
    loss, alpha, top1 = results
    return PositionLosses(total, loss, alpha, top1)


def compare_drafts(
    batch: TargetBatch,
    rows: Tensor,  # [P]
    places: Tensor,  # [P]
    drafted: Tensor,  # [P, H'] or [S, P, H']
    settings: LossSettings,
    weights: Tensor | None = None,  # [P] or [S, P]
) -> PositionLosses:
    """Return the comparison of drafts of the tokens at `places` of `rows` with the target's distributions there.

    `drafted` is the input of `settings.draft_head`; for `weights` see `chunked_compare`.
    """
    return chunked_compare(batch.last[rows, places - 1], drafted, settings, weights, batch.tokens[rows, places])


class ChunkedSlopes:
    """The gradients of a loss that is made a chunk at a time, by hidden states and by the parameters that it trains."""

    def __init__(self, hidden: Tensor, parameters: Sequence[Tensor]):
        self.hidden, self.learning = hidden, torch.is_grad_enabled()
        self.trained = [p for p in parameters if p.requires_grad] if self.learning else []
        self.slopes = [torch.zeros_like(p, dtype=float32_or_more(p)) for p in self.trained]
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
        made: Tensor = _Attached.apply(total, [self.columns, *self.slopes], self.hidden, *self.trained)
        return made


class _Attached(torch.autograd.Function):
    """A total whose gradients by some tensors are known already; a backward pass scales them where they stand."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, slopes: list[Tensor], *_: Tensor) -> Tensor:
        ctx.slopes = slopes
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slopes, ctx.slopes = ctx.slopes, []  # a second backward pass would scale them twice, and fails
        return None, None, *(slope.mul_(gradient) for slope in slopes)


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
        alphas.append(ahead(result.alpha.new_zeros(wanted.shape).masked_scatter(wanted, result.alpha[k]), k))
        measured.append(ahead(torch.zeros_like(wanted).masked_scatter(wanted, known), k))
    return metrics | acceptance_metrics(alphas, measured)
