"""Weights of another layout put into a drafter of ours: each of them, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from ..common import IncompatibleError


def fill(module: nn.Module, weights: Mapping[str, Tensor], unexpected: Iterable[str], where: str) -> None:
    """Fill `module`, strictly.

    Args:
        weights: by our names.
        unexpected: tensors of the layout that stand for nothing of ours.
        where: names the checkpoint.

    Raises:
        IncompatibleError: something is missing, left over, or of another shape.
    """
    own = module.state_dict()
    problems = [f"missing {name}" for name in own.keys() - weights.keys()]
    problems += [f"unexpected {name}" for name in [*unexpected, *(weights.keys() - own.keys())]]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if problems:
        raise IncompatibleError(
            f"{where}: the tensors do not fit its config.json: {'; '.join(sorted(problems)[:4])} "
            "(names as in our head)."
        )
    module.load_state_dict(dict(weights))
