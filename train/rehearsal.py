"""A training step on tensors without contents: what it computes and what it keeps, as the drafter's own code says.

Only shapes are known, so what depends on contents is assumed: of a mask over positions a given share is true, of any
other mask everything, a number that the host asks for is 0, and what it asks yes or no is yes (positions are in order,
no row is packed). Heads that shorten their rows by what is supervised are so taken at their longest.

Shapes: B rows, T tokens, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from ..common import BadInputError
from ..common.flops import FUSED_ATTENTION, Flops
from ..heads import Drafter, TargetBatch
from ..targets import PeakBytes, Target
from . import muon

aten = torch.ops.aten
_INDEXED = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


@dataclass(frozen=True)
class RehearsedStep:
    """One micro-batch, forward and backward.

    Attributes:
        flops: of matrix products and attention; a multiplication and an addition are two.
        peak: bytes of what the step makes, at most at one time, gradients included.
        features: bytes of the hidden states that it is given.
    """

    flops: int
    peak: int
    features: int


def rehearse(drafter: Drafter, target: Target, rows: int, length: int, supervised: float) -> RehearsedStep:
    """Return what a step of `drafter` takes on a batch of whole rows, both on the meta device.

    Args:
        supervised: share of the tokens that are learned.

    Raises:
        BadInputError: its loss asks for contents in a way that cannot be assumed.
    """
    states = torch.empty(rows, length, len(drafter.taps) + 1, target.hidden_size, dtype=target.dtype, device="meta")
    tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
    batch = TargetBatch(
        target,
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        states[:, :, :-1] if drafter.taps else None,
        states[:, :, -1],
    )
    memory, flops = PeakBytes(), Flops()
    try:
        with torch.device("meta"), FusedAttention(), memory, flops, Assumed(supervised):
            (drafter.loss(batch).total / rows).backward()
    except (RuntimeError, NotImplementedError) as error:
        raise BadInputError(
            f"a {drafter.name} drafter's training step cannot be planned without contents: {str(error).splitlines()[0]}"
        ) from error
    drafter.zero_grad(set_to_none=True)
    return RehearsedStep(flops.total, memory.peak, states.numel() * states.element_size())


@dataclass(frozen=True)
class OptimizerBytes:
    """What the optimizer keeps from step to step, and works with inside one."""

    states: int
    working: int


def rehearse_optimizer(drafter: Drafter, args: TrainingArguments) -> OptimizerBytes:
    """Return what a step of the optimizer takes that the trainer would make.

    Raises:
        BadInputError: it needs a package that is missing, or a device.
    """
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer, is_fused = _optimizer(drafter, trained, args)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    memory = PeakBytes()
    with memory:
        optimizer.step()
    states = sum(
        t.numel() * t.element_size()
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, Tensor)
    )
    drafter.zero_grad(set_to_none=True)
    return OptimizerBytes(states, 0 if is_fused else max(0, memory.peak - states))


def _optimizer(
    drafter: nn.Module, trained: Sequence[nn.Parameter], args: TrainingArguments
) -> tuple[torch.optim.Optimizer, bool]:
    """Return the optimizer, and whether its steps are fused and so work in place.

    Fusing needs a device, so the one that is returned is not fused; it keeps the same states.
    """
    if args.optim == muon.NAME:
        return muon.MuonAdamW(*muon.split_parameters(drafter), args.learning_rate), False
    try:
        made, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        is_fused = bool(settings.pop("fused", False))
        return made(trained, **settings), is_fused
    except (ImportError, ValueError, RuntimeError, TypeError) as error:
        raise BadInputError(
            f"training.optim {args.optim}: cannot be planned here: {str(error).splitlines()[0]}"
        ) from error


# ------------------------------------------------------------ modes


class Assumed(TorchDispatchMode):
    """A mode that gives what depends on contents an assumed size: see the top of this file."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 0
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:
            return torch.empty(self._count(args[0]), args[0].dim(), dtype=torch.long, device="meta")
        if func in _INDEXED:
            args = (args[0], self._places(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))

    def _count(self, mask: Tensor) -> int:
        return mask.numel() if mask.dim() < 2 else round(self.share * mask.numel())

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return masks as the places of what is true in them."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                found += [torch.empty(self._count(index), dtype=torch.long, device="meta") for _ in range(index.dim())]
            else:
                found.append(index)
        return found


class FusedAttention(TorchFunctionMode):
    """A mode in which attention is what devices compute, without scores in memory.

    Without contents torch would take the one that writes them down.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 (groups are expanded wherever there are some)
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return FUSED_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
