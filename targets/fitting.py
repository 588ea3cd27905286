"""A model's config and its weights, compared before anything is made that should hold them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..common.errors import IncompatibleError
from ..common.safe_load import read_json
from .meta_model import sketch_causal_lm
from .stored import Stored, misfits, no_more_than, plain_weight_map, stored_tensors
from .vetting import INDEX, MODEL_CONFIG, SINGLE

_PACKED = 32  # parameters of a quantised model in one element of its files, at most


def check_sizes(folder: Path, dtype: str | torch.dtype = "auto") -> None:
    """Raise IncompatibleError if the config of a causal LM asks for more than its weights fill.

    The library makes what it does not find; here it would be refused afterwards, and may be more than there is memory.
    """
    stored = stored_model(folder)
    quantised = "quantization_config" in read_json(folder / MODEL_CONFIG)
    with no_more_than(len(stored), f"{folder}: {SINGLE}"):
        model = sketch_causal_lm(str(folder), dtype)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(tensor.num_elements for tensor in stored.values())
    if wanted > (held * _PACKED if quantised else held):
        problems = misfits(dict(model.named_parameters()), stored)
        raise IncompatibleError(
            f"the weights in {str(folder)!r} do not fit its config.json: {'; '.join(problems[:4])}. That asks for "
            f"{wanted:,} parameters, and there are {held:,}. Take a good copy of the model."
        )
    if not quantised:
        _check_kinds(folder, model.state_dict(), stored)


def _check_kinds(folder: Path, wanted: dict[str, Tensor], stored: dict[str, Stored]) -> None:
    odd = [name for name, tensor in wanted.items() if name in stored and _other_kind(tensor, stored[name])]
    if odd:
        raise IncompatibleError(
            f"the weights in {str(folder)!r} do not fit its config.json: {odd[0]} is {stored[odd[0]].dtype}, expected "
            "floating-point numbers."
        )


def _other_kind(tensor: Tensor, found: Stored) -> bool:
    return tensor.is_floating_point() != found.is_floating


def stored_model(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a model in one file or several.

    Raises:
        Refusal: they are damaged, or the index names files that are not beside it.
    """
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return stored_tensors(folder / SINGLE)
    files = set(plain_weight_map(folder / INDEX).values())
    return {name: tensor for file in sorted(files) for name, tensor in stored_tensors(folder / file).items()}
