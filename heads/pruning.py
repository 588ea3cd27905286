"""A smaller model cut out of the target: whole layers, from the first to the last.

Inside layers the lab cuts (`outrider.pruning`): attention heads, MLP neurons and hidden dimensions.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..common import BadInputError, IncompatibleError
from ..common.plugins import plugin
from ..targets import Target, decoder_layers
from ..targets.layers import usual_layer

LAYERS = "num_hidden_layers"
HIDDEN = "hidden_size"
NEURONS = "intermediate_size"
HEADS, GROUPS = "num_attention_heads", "num_key_value_heads"
SIZES = (LAYERS, HIDDEN, NEURONS, HEADS, GROUPS)


def _kept_sizes(target: Target, model: dict[str, Any]) -> dict[str, int]:
    """Return the target's sizes, with those that `model` names instead; heads and their groups imply each other."""
    check_names(model)
    own = {name: int(getattr(usual_layer(target.config), name, None) or 0) for name in SIZES}
    own[GROUPS] = own[GROUPS] or own[HEADS]
    for name, size in model.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= own[name]:
            raise BadInputError(
                f"draft_model: init prune needs model.{name} between 1 and the target's {own[name]}, found {size!r}."
            )
    wanted, shared = own | model, own[HEADS] // max(own[GROUPS], 1)
    if HEADS in model:
        wanted[GROUPS] = model.get(GROUPS, model[HEADS] // shared)
    elif GROUPS in model:
        wanted[HEADS] = model[GROUPS] * shared
    if wanted[HEADS] != wanted[GROUPS] * shared:
        raise BadInputError(
            f"draft_model: init prune keeps whole groups of the {shared} attention heads that share keys and values: "
            f"model.{HEADS} must be {shared} times model.{GROUPS} (or leave one of them out), "
            f"found {wanted[HEADS]} and {model.get(GROUPS, 'none')}."
        )
    return wanted


def check_names(model: dict[str, Any]) -> None:
    """Raise BadInputError unless `model` names sizes, and at least one."""
    if not model or set(model) - set(SIZES):
        raise BadInputError(
            f"draft_model: init prune takes sizes to keep of the target: give model one or more of {', '.join(SIZES)}, "
            f"and nothing else; found {model!r}."
        )


def chosen_layers(of: int, count: int) -> list[int]:
    """Return `count` of `of` layers, evenly from the first to the last."""
    return [round(i * (of - 1) / (count - 1)) for i in range(count)] if count > 1 else [of - 1]


@torch.no_grad()
def pruned(target: Target, model: dict[str, Any], token_counts: Tensor | None = None) -> PreTrainedModel:
    """Make a model of the target's architecture, fp32, with what is worth most of the target's weights.

    Args:
        model: sizes to keep.
        token_counts: how often each token occurs, `[V]`, to begin the text that importance is measured on. None: any
            tokens.

    Raises:
        BadInputError: a name that is no size, a size above the target's, or heads that do not make whole groups.
        IncompatibleError: its layers are of different kinds, or (where they are cut inside) not Llama-like, or it
            carries an adapter that is not merged.
    """
    sizes = _kept_sizes(target, model)
    narrower = sizes != _kept_sizes(target, {LAYERS: sizes[LAYERS]})
    if not narrower:
        small = with_sizes(target, sizes[LAYERS])
        _copy_layers(target, small)
        return small
    by_width = plugin("pruning", "width")
    if by_width is None:
        raise BadInputError(f"draft_model: init prune keeps whole layers here: give model.{LAYERS} alone.")
    small = by_width(target, sizes, token_counts)
    assert isinstance(small, PreTrainedModel)
    return small


def with_sizes(target: Target, layers: int, **sizes: int) -> PreTrainedModel:
    """Return a new model of the target's architecture with so many layers and, inside them, other `sizes`, fp32.

    Its config has the per-layer settings of the layers that stay.
    """
    values = target.config.to_dict()
    kept = chosen_layers(target.num_layers, layers)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == target.num_layers:
            values[name] = [value[i] for i in kept]
    if differing := values.get("per_layer_config"):
        by_layer = {int(i): sizes_there for i, sizes_there in differing.items()}
        values["per_layer_config"] = {new: by_layer[old] for new, old in enumerate(kept) if old in by_layer}
    values = {k: v for k, v in values.items() if k not in ("architectures", "dtype", "torch_dtype")}
    values[getattr(target.config, "attribute_map", {}).get(LAYERS, LAYERS)] = layers
    try:
        config = type(target.config)(**(values | sizes))
    except Exception as error:  # the library's own checks, of several kinds
        reason = str(error.__cause__ or error).splitlines()[0]
        raise BadInputError(
            f"draft_model: {type(target.config).__name__} cannot have the sizes that model asks to keep: {reason}"
        ) from error
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _copy_layers(target: Target, model: PreTrainedModel) -> None:
    """Fill `model`, the target's architecture with fewer layers, from the target."""
    theirs = decoder_layers(target.body, target.num_layers)
    own = decoder_layers(model.base_model, model.config.num_hidden_layers)
    inside = {id(p) for part in (theirs, own) for p in part.parameters()}
    rest = {name: p for name, p in target.model.named_parameters() if id(p) not in inside}
    try:
        for new, index in zip(own, chosen_layers(len(theirs), len(own)), strict=True):
            new.load_state_dict(theirs[index].state_dict())
        for name, parameter in model.named_parameters():
            if id(parameter) not in inside:
                parameter.copy_(rest[name])
    except (RuntimeError, KeyError) as error:
        raise IncompatibleError(
            f"draft_model: the layers of {type(target.model).__name__} cannot be taken over "
            f"({str(error).splitlines()[0]}). Merge the target's adapter first if it has one, or take init random."
        ) from error
