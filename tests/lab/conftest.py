"""The fixtures of the rooms that the lab's verbs and drafters are tested with, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from outrider.targets import Target

from ..eval.conftest import suites  # noqa: F401
from ..heads.conftest import target  # noqa: F401
from ..scripts.conftest import changed_target, outrider, recipe_file, target_folder  # noqa: F401
from ..serving.conftest import start_server  # noqa: F401


def save_lora(folder: Path, base: Path, seed: int, size: float, **settings: Any) -> Path:
    """Write a LoRA of a target, with weights of this size that change its text; 0 changes nothing."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "up_proj"]} | settings)
    model = get_peft_model(Target.load(base).model, config)
    for key, weight in model.named_parameters():
        if "lora_B" in key and size:
            torch.nn.init.normal_(weight, std=size)
    model.save_pretrained(folder)
    return folder
