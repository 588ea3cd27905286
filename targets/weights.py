"""Weights of a module: read from a folder, strictly, and watched for changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from .loading import refuse_pickles
from .stored import Stored, misfits, no_more_than, stored_tensors
from .taps import Tap

WEIGHTS = "model.safetensors"

M = TypeVar("M", bound=nn.Module)


def restored(make: Callable[[], M], folder: Path) -> M:
    """Return the module that `make` makes, filled from the weights in `folder`.

    It is made without contents first: memory is only taken for sizes that the file has.

    Raises:
        BadInputError: the weights are missing or damaged.
        IncompatibleError: they are not those of such a module.
    """
    refuse_pickles(folder)
    stored = stored_tensors(folder / WEIGHTS)
    with torch.device("meta"), no_more_than(len(stored), str(folder / WEIGHTS)):
        sketch = make()
    _require_fit(sketch, stored, folder)
    module = make()
    load_weights(module, folder)
    return module


def load_weights(module: nn.Module, folder: Path) -> None:
    """Fill `module` from model.safetensors, strictly: no missing, no unexpected names, equal shapes and kinds."""
    refuse_pickles(folder)
    _require_fit(module, stored_tensors(folder / WEIGHTS), folder)
    try:
        module.load_state_dict(load_file(folder / WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise BadInputError(
            f"{folder / WEIGHTS}: damaged or not a safetensors file ({error}). "
            "Copy it again, or take the last good checkpoint."
        ) from error


def _require_fit(module: nn.Module, stored: dict[str, Stored], folder: Path) -> None:
    problems = misfits(module.state_dict(), stored)
    if problems:
        raise IncompatibleError(f"{folder / WEIGHTS} does not fit its config.json: {'; '.join(problems[:4])}.")


def weight_versions(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return what changes when any of the weights is moved or written to.

    Torch does not count the writes to weights made in inference mode: of those only the place is known.
    """
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def module_versions(model: nn.Module) -> list[Hashable]:
    """Return what changes when a module is replaced or hooked into, or an adapter is chosen or switched off.

    Taps change nothing of what a module computes, so they do not count.
    """
    found: list[Hashable] = []
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        foreign = tuple(id(hook) for hook in hooks if not isinstance(hook, Tap))
        found.append((id(module), id(vars(module).get("forward")), foreign, *_adapters(module)))
    return found


def _adapters(module: nn.Module) -> tuple[Hashable, ...]:
    """Return which of PEFT's adapters a module computes with, and whether they are merged or switched off."""
    chosen = getattr(module, "active_adapters", None)
    if not isinstance(chosen, (list, tuple)):
        return ()
    return tuple(chosen), bool(getattr(module, "disable_adapters", False)), bool(getattr(module, "merged", False))
