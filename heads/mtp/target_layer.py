"""One decoder layer of the target's own architecture, as a model of its own.

It is the last of the target's layers, with full attention; weights are new. `transformers` makes it from the target's
config, so that layers that come with a target's checkpoint fit.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from ...common import BadInputError, IncompatibleError, refuse_unknown_keys
from ...common.errors import LIBRARY_ERRORS, reason
from ...targets import Target

# What it takes to leave one layer of a config; what says where experts begin is counted from the first.
_ALONE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "vocab_size": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
}
# How it is computed is no part of what it is; such a setting may even name code of the Hub.
_NOT_OF_A_LAYER = (
    "model_type",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
_OF_A_CHECKPOINT = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "auto_map",
    "transformers_version",
    "_name_or_path",
)


def layer_values(target: Target, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model of one layer like the target's last, with these `changes`, as config.json has it."""
    values = target.config.to_dict()
    refuse_unknown_keys(changes, values, "drafter.layer")
    values = {k: v for k, v in values.items() if k not in _OF_A_CHECKPOINT}
    values |= {k: v[-1:] for k, v in values.items() if isinstance(v, list) and len(v) == target.num_layers}
    values |= {k: v for k, v in _ALONE.items() if values.get(k) is not None}
    try:
        made = type(target.config)(**(values | changes))
    except LIBRARY_ERRORS as error:
        raise BadInputError(f"drafter.layer: {reason(error)}") from error
    saved = json.loads(made.to_json_string(use_diff=True))
    return {k: v for k, v in saved.items() if k not in _OF_A_CHECKPOINT}


def plain_body(values: dict[str, Any]) -> Any:
    """Make a `transformers` model of one layer from the config `values`; nobody reads its embedding of one token.

    Raises:
        IncompatibleError: the library does not know this architecture or refuses its settings, or it is not of the kind
            that MTP modules are made of.
    """
    kind = values.get("model_type")
    if kind is None:
        raise IncompatibleError(
            "mtp: the config of a module's layer names no model_type, so nobody knows what it is a layer of."
        )
    try:
        config = AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k not in _NOT_OF_A_LAYER})
        body = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except LIBRARY_ERRORS as error:
        raise IncompatibleError(
            f"mtp: transformers cannot make a layer of a {kind!r} model ({reason(error)})."
        ) from error
    if not isinstance(getattr(body, "norm", None), nn.Module) or not hasattr(body, "layers"):
        raise IncompatibleError(
            f"mtp: {type(body).__name__} is not a stack of layers with one norm after them; take another drafter."
        )
    return body
