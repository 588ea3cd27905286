"""Muon for a drafter's matrices, AdamW for the rest, as one optimizer: `training.optim: muon`.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) moves a matrix along its orthogonalised momentum.
The update is scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate serves both.
`DrafterTrainer.create_optimizer` chooses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..common.machine import cpu_multiplies_bfloat16

NAME = "muon"


class _Float32Muon(torch.optim.Muon):
    """torch's Muon, orthogonalising in float32.

    torch multiplies in bfloat16. A processor without instructions for that took 30 seconds for the matrices of a head
    576 wide, and one second in float32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"])
        update = orthogonalised(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7) -> Tensor:
    """Return `matrix` with singular values near 1, by Newton-Schulz iterations of fifth order in its own dtype."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonAdamW(torch.optim.Optimizer):
    """An optimizer of both kinds, with one list of groups for schedulers and one state for checkpoints.

    Of `others` norms and biases (one dimension) do not decay.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        matrices, others = list(matrices), list(others)
        wide, narrow = ([p for p in others if (p.ndim > 1) == is_wide] for is_wide in (True, False))
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            on_cpu = all(p.device.type == "cpu" for p in matrices)
            kind = _Float32Muon if on_cpu and not cpu_multiplies_bfloat16() else torch.optim.Muon
            self._parts.append(kind(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        for members, decay in ((wide, weight_decay), (narrow, 0.0)):
            if members:
                self._parts.append(torch.optim.AdamW(members, lr=lr, weight_decay=decay, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "_parts"):  # not yet there in a copy
            self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (what Muon moves, what AdamW moves): matrices inside of the network; embeddings, norms and biases."""
    ends = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for name, module in model.named_modules():
        output = module if name.endswith("lm_head") else None
        if hasattr(module, "get_output_embeddings"):
            output = module.get_output_embeddings()
        ends |= {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set()
    trained = [p for p in model.parameters() if p.requires_grad]
    inside = [p for p in trained if p.ndim == 2 and id(p) not in ends]
    chosen = {id(p) for p in inside}
    return inside, [p for p in trained if id(p) not in chosen]
