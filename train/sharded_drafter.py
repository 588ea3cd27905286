"""A drafter in parts: its weights, gradients or optimizer states are spread over the processes of a training.

FSDP2 (torch, through accelerate) and ZeRO (DeepSpeed) spread it, each in its own format. What leaves the training is
whole: a checkpoint holds the drafter that one process would have written, and one optimizer state by the names of its
weights. So a run continues under another number of processes, or another engine.

Weights stay float32; in mixed precision the loss is computed under autocast, as in data parallel training.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..heads import Drafter, DrafterConfig, DrafterLoss, TargetBatch
from .hooks import block_classes


class ShardedLoss(nn.Module):
    """A drafter's loss as a tuple of tensors, the model output that engines which spread weights expect."""

    def __init__(self, drafter: Drafter, precision: torch.dtype | None):
        super().__init__()
        self.drafter, self.precision = drafter, precision
        self.names: list[str] = []  # of the metrics that the last pass gave

    def forward(self, batch: TargetBatch, anchor: Tensor) -> tuple[Tensor, ...]:
        """Return the loss plus `anchor`, which is zero, the count, then sum and count of each metric."""
        with torch.autocast(batch.tokens.device.type, self.precision, enabled=self.precision is not None):
            loss: DrafterLoss = self.drafter(batch)
        self.names = list(loss.metrics)
        return loss.total + anchor, loss.count, *(value for pair in loss.metrics.values() for value in pair)


class ShardedDrafter(nn.Module):
    """A drafter that is spread over processes, with the way back to the whole one; `precision` is of the loss."""

    def __init__(self, drafter: Drafter, precision: torch.dtype | None = None):
        super().__init__()
        self.loss = ShardedLoss(drafter, precision)
        self._shell = _shell(drafter)

    @property
    def drafter(self) -> Drafter:
        return self.loss.drafter

    @property
    def config(self) -> DrafterConfig:
        """The drafter's settings, which trackers report."""
        return self.drafter.config

    def forward(self, batch: TargetBatch) -> dict[str, Any]:
        """Return the drafter's loss; `loss_of` makes a DrafterLoss of it again.

        An input with a gradient, which is the last one to be known, tells DeepSpeed when those of all weights are.
        """
        anchor = torch.zeros((), device=batch.tokens.device, requires_grad=torch.is_grad_enabled())
        total, count, *values = self.loss(batch, anchor)
        pairs = [[values[i], values[i + 1]] for i in range(0, len(values), 2)]
        return {"total": total, "count": count, "metrics": dict(zip(self.loss.names, pairs, strict=True))}

    def whole(self) -> Drafter:
        """Return a copy of the drafter with all of its weights. All processes must call this together."""
        return self._filled(self._gathered(keep=True)).train(self.drafter.training)

    def whole_in_first(self) -> Drafter | None:
        """Return a copy of the drafter in the first process, in main memory. All processes must call this together."""
        is_first = torch.distributed.get_rank() == 0
        weights = self._gathered(keep=is_first, device=torch.device("cpu"))
        return self._filled(weights).cpu() if is_first else None

    def _gathered(self, keep: bool, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return each weight whole, gathered one after the other; none if this process is only to take part."""
        self.reshard()
        weights = {}
        for name, parameter in self.drafter.named_parameters():
            value = full_tensor(parameter)
            if keep:
                weights[name] = value.to(device=device)
        return weights

    def _filled(self, weights: dict[str, Tensor]) -> Drafter:
        (shell,) = self._shell
        buffers = dict(self.drafter.named_buffers())  # `take` may have changed them since the shell was made
        filled: dict[int, Any] = {id(part): buffers[name].detach().clone() for name, part in shell.named_buffers()}
        filled |= {id(part): nn.Parameter(weights[n], part.requires_grad) for n, part in shell.named_parameters()}
        return copy.deepcopy(shell, filled)

    @torch.no_grad()
    def take(self, saved: Drafter) -> None:
        """Put in the weights of a drafter like this one, all processes together; RuntimeError for another."""
        weights = saved.state_dict()
        expected, given = ({n: v.shape for n, v in d.items()} for d in (self._shell[0].state_dict(), weights))
        if differing := {name for name, _ in expected.items() ^ given.items()}:
            raise RuntimeError(f"Other names or shapes: {', '.join(sorted(differing)[:4])}.")
        self.reshard()
        for name, parameter in self.drafter.named_parameters():
            replace(parameter, weights[name])
        for name, buffer in self.drafter.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def reshard(self) -> None:
        """Free what a pass without a backward pass leaves gathered: parts are read, and written, as parts."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sizes(self) -> tuple[int, int]:
        """Return how many numbers the drafter has, and how many of them are trained, in all processes together."""
        return sizes_of(self._shell[0])


class WholeDrafter:
    """A drafter that each process has whole, with the methods of `ShardedDrafter`."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter

    def whole(self) -> Drafter:
        """Return the drafter itself, in every process."""
        return self.drafter

    whole_in_first = whole

    def take(self, saved: Drafter) -> None:
        self.drafter.load_state_dict(saved.state_dict())

    def sizes(self) -> tuple[int, int]:
        return sizes_of(self.drafter)


def sizes_of(drafter: Drafter) -> tuple[int, int]:
    parameters = list(drafter.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def loss_of(output: dict[str, Any] | DrafterLoss) -> DrafterLoss:
    """Return the output of a model in training as a DrafterLoss."""
    if isinstance(output, DrafterLoss):
        return output
    return DrafterLoss(output["total"], output["count"], {k: (v[0], v[1]) for k, v in output["metrics"].items()})


def _shell(drafter: Drafter) -> tuple[Drafter]:
    """Return the drafter with the shapes of its weights alone, in a tuple, which hides it from `modules`."""
    bare = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in drafter.parameters()}
    return (copy.deepcopy(drafter, bare),)


def fit_engine(parts: ShardedDrafter, accelerator: Accelerator) -> None:
    """Set how the engine of a training spreads `parts`, before it does."""
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        _fit_fsdp(fsdp, parts)
        return
    plugin: Any = accelerator.state.deepspeed_plugin
    for half in ("bf16", "fp16"):
        plugin.deepspeed_config[half] = {"enabled": False}
    unset_hf_deepspeed_config()  # the trainer has set it again: see `training_arguments`
    if plugin.zero_stage == 3:
        # Losses read weights outside of the modules that they belong to: the whole drafter is gathered for a step.
        deepspeed().utils.set_z3_leaf_modules(parts, [ShardedLoss])


def _fit_fsdp(plugin: Any, parts: ShardedDrafter) -> None:
    plugin.cpu_ram_efficient_loading = False  # every process has made the drafter by itself
    model = getattr(parts.drafter, "model", None) if parts.drafter.by_layers else None
    # These are gathered one at a time, the rest of the drafter as one.
    plugin.transformer_cls_names_to_wrap = block_classes(model) if isinstance(model, PreTrainedModel) else []
    # Autocast chooses the precision of what passes between layers: casting it, too, would round the residual stream.
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=parts.loss.precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients of a step, in all processes together; 0 without any. All must call this."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm: Any = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def is_zero3(parameter: Tensor) -> bool:
    """Return whether ZeRO stage 3 holds only a part of this weight here."""
    return hasattr(parameter, "ds_tensor")


def full_tensor(parameter: nn.Parameter) -> Tensor:
    """Return a copy of a weight, whole. All processes must call this together."""
    part: Any = parameter.detach()
    if isinstance(part, DTensor):
        return part.full_tensor().clone()
    with _gathering(parameter):
        return parameter.detach().clone()


@torch.no_grad()
def replace(parameter: nn.Parameter, value: Tensor) -> None:
    """Put another value, whole, into a weight of which there may be only a part here."""
    if isinstance(parameter, DTensor):
        local = value.to(parameter.device, parameter.dtype)
        parameter.copy_(distribute_tensor(local, parameter.device_mesh, parameter.placements))
        return
    with _gathering(parameter, writes=True):
        if parameter.shape == value.shape:
            parameter.copy_(value)
    if not parameter.requires_grad:
        return
    if is_zero3(parameter):
        deepspeed().utils.safe_set_local_fp32_param(parameter, own_part(parameter, value))
    elif hasattr(parameter, "set_full_hp_param"):  # ZeRO stage 1 or 2, whose optimizer has a copy
        deepspeed().utils.safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))


def own_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this process's part of a whole value under ZeRO stage 3: an equal share, padded with zeros."""
    part: Any = parameter.ds_tensor  # type: ignore[attr-defined]
    size, rank = part.ds_numel, torch.distributed.get_rank()
    flat = value.flatten().to(part.device, torch.float32)
    own = flat[size * rank : size * (rank + 1)]
    return torch.nn.functional.pad(own, (0, size - own.numel()))


@contextmanager
def _gathering(parameter: nn.Parameter, writes: bool = False) -> Iterator[None]:
    """Have a weight whole inside."""
    if not is_zero3(parameter):
        yield
        return
    with deepspeed().zero.GatheredParameters([parameter], modifier_rank=0 if writes else None):
        yield


def deepspeed() -> Any:
    """Return the package, which only trainings under ZeRO need."""
    return importlib.import_module("deepspeed")
