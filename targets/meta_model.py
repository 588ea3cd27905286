"""Models made from a config alone: every shape, no contents. What runs on them allocates nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..common.errors import BadInputError, OutriderError, Refusal, reason
from .hub import model_folder
from .vetting import check_files, without_questions


def sketching() -> bool:
    """Return whether models made now should have no contents: inside `with torch.device("meta")`."""
    return torch.get_default_device().type == "meta"


def sketch_causal_lm(
    name: str, dtype: str | torch.dtype = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the causal LM of the config.json in a folder or on the Hub, on the meta device, without its weights.

    Weights are neither read nor looked for.

    Args:
        dtype: "auto" for what the config says, or float32 where it says nothing.

    Raises:
        BadInputError: there is no such config, or it cannot be reached.
    """
    try:
        folder = model_folder(name, revision, trust_remote_code, weights=False)
        check_files(folder, trust_remote_code)
        with without_questions():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Refusal:
        raise
    except Exception as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(
            f"the config of {name!r} cannot be read: {what} Without a connection give a folder that holds its "
            "config.json; weights are not needed."
        ) from error
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(
                config, dtype=_dtype(config, dtype), trust_remote_code=trust_remote_code
            )
    except OutriderError:
        raise
    except Exception as error:  # libraries raise what they like at settings that make no sense
        raise BadInputError(f"the config of {name!r} describes no model that can be made: {reason(error)}") from error
    model: PreTrainedModel = made
    return model.eval().requires_grad_(False)


def _dtype(config: Any, asked: str | torch.dtype) -> torch.dtype:
    """Return the dtype that was asked for; of "auto" the config's, or float32 where it says nothing."""
    chosen = asked if asked != "auto" else getattr(config.get_text_config(), "dtype", None) or torch.float32
    found = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {str(chosen)[:80]!r}, which torch does not have")
    return found
