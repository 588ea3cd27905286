"""Finding the parts of a Hugging Face model: its body, its decoder layers, and the norm after them."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common.errors import IncompatibleError


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its output embedding.

    PEFT's wrapper around the model is looked through; the layers that PEFT has put into it stay. Some models name their
    body wrongly (Llama 4's text model): it is their part that has the input embedding.
    """
    unwrap = getattr(model, "get_base_model", None)
    whole = model if unwrap is None else unwrap()
    if whole.base_model is not whole or not hasattr(whole, "lm_head"):
        return cast(PreTrainedModel, whole.base_model)
    embedding = whole.get_input_embeddings()
    return cast(PreTrainedModel, next((part for part in whole.children() if embedding in part.modules()), whole))


def decoder_layers(body: nn.Module, count: int) -> nn.ModuleList:
    """Return the list of a model's `count` decoder layers.

    Raises:
        IncompatibleError: there is no such list.
    """
    # A vision tower may be as deep as the decoder.
    decoder = body.get_decoder() if isinstance(body, PreTrainedModel) else body
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleError(f"{type(body).__name__} has no list of {count} layers; taps cannot be read from it.")


def first_layers(body: PreTrainedModel, layers: nn.ModuleList, count: int) -> PreTrainedModel:
    """Return a copy of `body` that has only the first `count` of its `layers`, and shares every module with it.

    Raises:
        IncompatibleError: a `forward` on the way to the layers was replaced, and would run the body's own.
    """
    return cast(PreTrainedModel, _with_part(body, _path(body, layers), layers[:count]))


@torch.no_grad()
def find_final_norm(body: PreTrainedModel, layers: nn.ModuleList) -> nn.Module | None:
    """Return the module that makes the body's last hidden state of what its `layers` gave; None if no single one does.

    Models name it differently, so it is found by one pass: it stands beside the layers, and was called last.
    """
    *above, _ = _path(body, layers)
    neighbours = [part for part in body.get_submodule(".".join(above)).children() if part is not layers]
    called: list[nn.Module] = []
    given: list[Tensor] = []
    handles = [part.register_forward_hook(lambda part, *_: called.append(part)) for part in neighbours]
    handles.append(layers[-1].register_forward_hook(lambda *call: given.append(hidden_states(call[-1]))))
    token = torch.zeros(1, 1, dtype=torch.long, device=next(body.parameters()).device)
    last = body(input_ids=token, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    return called[-1] if called and torch.equal(called[-1](given[-1]).view_as(last), last) else None


def hidden_states(output: Tensor | tuple[Any, ...]) -> Tensor:
    """Return the hidden states in what a layer gave: they may come alone, or first in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _path(body: nn.Module, part: nn.Module) -> list[str]:
    """Return the names that lead from `body` to its `part`."""
    return next(name for name, module in body.named_modules() if module is part).split(".")


def _with_part(module: nn.Module, path: list[str], part: nn.Module) -> nn.Module:
    """Return a copy of `module` that has `part` at `path` and shares everything else."""
    if not path:
        return part
    if "forward" in vars(module):
        raise IncompatibleError(
            f"the forward of {type(module).__name__} was replaced (by accelerate's hooks, for example): "
            "it cannot be run in part."
        )
    copied = copy.copy(module)
    copied._modules = module._modules | {path[0]: _with_part(getattr(module, path[0]), path[1:], part)}
    return copied
