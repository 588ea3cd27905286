"""Weights of a module: read from a folder, strictly, and watched for changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..ground import BadInputError, IncompatibleError
from .loading import refuse_pickles

WEIGHTS = "model.safetensors"


def load_weights(module: nn.Module, folder: Path) -> None:
    """Fill `module` from model.safetensors, strictly: no missing, no unexpected names, equal shapes."""
    refuse_pickles(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise BadInputError(
            f"{folder / WEIGHTS}: damaged or not a safetensors file ({error}). "
            "Copy it again, or take the last good checkpoint."
        ) from error
    own = module.state_dict()
    problems = [f"missing {n}" for n in own.keys() - weights.keys()] + [
        f"unexpected {n}" for n in weights.keys() - own.keys()
    ]
    problems += [
        f"{n} is {tuple(weights[n].shape)}, expected {tuple(own[n].shape)}"
        for n in own.keys() & weights.keys()
        if own[n].shape != weights[n].shape
    ]
    if problems:
        raise IncompatibleError(f"{folder / WEIGHTS} does not fit its config.json: {'; '.join(sorted(problems)[:4])}.")
    module.load_state_dict(weights)


def weight_versions(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return what changes when any of the weights is moved or written to.

    Torch does not count the writes to weights made in inference mode: of those only the place is known.
    """
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
