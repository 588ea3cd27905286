"""The operations and bytes of passes, of training steps and of optimizers, counted on shapes.

A training step is rehearsed on tensors without contents. What depends on contents is assumed: of a mask over positions
a given share is true, of any other mask everything, a number that the host asks for is 0, and the answer to yes or no
is yes (positions are in order, no row is packed). Heads that shorten their rows by what is supervised are so taken at
their longest.

Shapes: B rows, T tokens, K taps, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..common import BadInputError
from ..heads import Drafter, TargetBatch
from ..targets import PeakBytes, Target
from ..targets.layers import usual_layer

aten = torch.ops.aten
_EXPERTS = "transformers.grouped_mm_fallback"  # the same product in dtypes that torch has none for
_FUSED_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu  # the one that also runs without contents
_FUSED_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
_INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor}
_INDEXED |= {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def pass_bytes(target: Target) -> int:
    """Return the bytes of weights that a plain step reads.

    These are all but an input embedding that is not the output's too, and of experts those that one token meets.
    """
    table, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    read = {id(p): (name, p) for module in (target.body, head) for name, p in module.named_parameters()}
    if table.weight is not head.weight:
        read.pop(id(table.weight), None)
    share = _share_of_experts(usual_layer(target.config))
    return round(sum(p.nbytes * (share if ".experts." in name else 1) for name, p in read.values()))


def _share_of_experts(config: Any) -> float:
    """Return the share of a layer's experts that one token meets."""
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next(filter(None, counts), 1)
    return float((getattr(config, "num_experts_per_tok", None) or experts) / experts)


def active_weights(model: Any, config: Any) -> int:
    """Return the weights that one token is multiplied with: no embeddings, and the experts that it chooses."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embeddings |= {id(p) for p in output.parameters()} if output is not None else set()
    share, total = _share_of_experts(config), 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and id(parameter) not in embeddings:
            total += parameter.numel() * (share if ".experts." in name else 1)
    return round(total)


def pass_flops(target: Target, rows: int, length: int) -> float:
    """Return the operations of a pass of the target's layers over whole rows, the masked half of attention included."""
    config, kinds = target.config, getattr(target.config, "layer_types", None) or ["full_attention"] * target.num_layers
    width = 0  # of the queries of all layers that attend
    for kind, layer in zip(kinds, config.per_layer_config, strict=True):
        if kind in ("full_attention", "sliding_attention"):
            heads = int(getattr(layer, "num_attention_heads", 0))
            width += heads * int(getattr(layer, "head_dim", None) or target.hidden_size // max(heads, 1))
    return rows * length * (2 * active_weights(target.model, usual_layer(config)) + 4 * length * width)


class Flops(TorchDispatchMode):
    """Counts operations as torch.utils.flop_counter does, whose own mode allows no `autograd.grad` inside a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=made)
        elif packet is aten._grouped_mm or str(packet) == _EXPERTS:
            # Tokens by their experts: weights [experts, in, out], or their gradient.
            self.total += 2 * math.prod(args[0].shape) * args[1].shape[-1]
        elif packet is _FUSED_ATTENTION:
            self.total += sdpa_flop_count(*(t.shape for t in args[:3]))
        elif packet is _FUSED_BACKWARD:
            self.total += sdpa_backward_flop_count(*(t.shape for t in args[:4]))
        return made


@dataclass(frozen=True)
class RehearsedStep:
    """One micro-batch, forward and backward."""

    flops: int  # of matrix products and attention; a multiplication and an addition are two
    peak: int  # the most bytes at one time of what the step makes, gradients included
    features: int  # bytes of the hidden states that it is given


def rehearse(drafter: Drafter, target: Target, rows: int, length: int, supervised: float) -> RehearsedStep:
    """Count a training step of `drafter` on a batch of whole rows, drafter and target on the meta device.

    `supervised`: share of the tokens that are learned.

    Raises BadInputError if its loss asks for contents in a way that cannot be assumed.
    """
    states = torch.empty(rows, length, len(drafter.taps) + 1, target.hidden_size, dtype=target.dtype, device="meta")
    tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
    mask, hidden = torch.ones_like(tokens, dtype=torch.bool), states[:, :, :-1] if drafter.taps else None
    batch = TargetBatch(target, tokens, mask, hidden, states[:, :, -1])
    memory, flops = PeakBytes(), Flops()
    try:
        with torch.device("meta"), FusedAttention(), memory, flops, AssumedContents(supervised):
            (drafter.loss(batch).total / rows).backward()
    except (RuntimeError, NotImplementedError) as error:
        raise BadInputError(
            f"a {drafter.name} drafter's training step cannot be planned without contents: {str(error).splitlines()[0]}"
        ) from error
    drafter.zero_grad(set_to_none=True)
    return RehearsedStep(flops.total, memory.peak, states.nbytes)


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that the optimizer keeps from step to step, and bytes that it works with inside one."""

    states: int
    working: int


def rehearse_optimizer(drafter: Drafter, optimizer: torch.optim.Optimizer, is_fused: bool) -> OptimizerBytes:
    """Count a step of the optimizer of a drafter's trained weights.

    `is_fused`: whether the real one's steps work in place; fusing needs a device, so the one that is given does not.
    """
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    with PeakBytes() as memory:
        optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    drafter.zero_grad(set_to_none=True)
    return OptimizerBytes(states, 0 if is_fused else max(0, memory.peak - states))


class AssumedContents(TorchDispatchMode):
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
            return torch.empty(self._count(args[0]), args[0].dim(), dtype=torch.long, device=args[0].device)
        if func in _INDEXED:
            args = (args[0], self._places(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))

    def _count(self, mask: Tensor) -> int:
        return mask.numel() if mask.dim() < 2 else round(self.share * mask.numel())

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return masks as the places of what is true in them."""
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                count, device = self._count(index), index.device
                places += [torch.empty(count, dtype=torch.long, device=device) for _ in range(index.dim())]
            else:
                places.append(index)
        return places


class FusedAttention(TorchFunctionMode):
    """A mode in which attention keeps no scores in memory, as on devices; torch's own without contents would."""

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
    return _FUSED_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
