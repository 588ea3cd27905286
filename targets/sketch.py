"""A model of its config alone: every shape, no contents. What runs on it allocates nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ..ground.errors import BadInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sketching() -> bool:
    """Whether models made now should have no contents: inside `with torch.device("meta")`."""
    return torch.get_default_device().type == "meta"


def sketch_causal_lm(
    name: str, dtype: str | torch.dtype = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal LM of the config.json in a folder or on the Hub, on the meta device. Of weights nothing is read, or even looked for.

    Args:
        dtype: "auto" for the config's, or float32 where it says none.

    Raises:
        BadInputError: there is no such config, or it cannot be reached.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(
            os.path.expanduser(name), revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(
            f"the config of {name!r} cannot be read: {what} Without a connection give a folder that holds its config.json; weights are not needed."
        ) from error
    chosen = getattr(config.get_text_config(), "dtype", None) or torch.float32 if dtype == "auto" else dtype
    chosen = getattr(torch, chosen) if isinstance(chosen, str) else chosen
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
    return model.eval().requires_grad_(False)
