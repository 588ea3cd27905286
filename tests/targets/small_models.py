"""Small models of any architecture, with the library's random weights, and tokens for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# A vision tower beside a text model: as deep as that.
VISION = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "num_key_value_heads")}
VISION |= {"image_size": 28, "patch_size": 14}


def small_model(kind: str, attention: str | None = None, sizes: dict[str, int] = SIZES, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def tokens(rows: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
