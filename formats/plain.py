"""Draft models as plain Hugging Face checkpoints with the target's tokenizer, which every engine reads as it is.

Shapes: k draft tokens, V target vocabulary, V' the draft model's own.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import IncompatibleError
from ..heads import Drafter, DrafterConfig, DraftModel
from ..heads.saved import read_config
from ..targets import Target, load_causal_lm
from .drafter_files import DrafterFiles
from .layout import ExportLayout, Unsupported
from .reading import ProbeSequence


class Plain(ExportLayout):
    """Draft models."""

    name = "hf"
    drafter = "draft_model"

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        return []

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, DraftModel)
        return DrafterFiles(drafter.model.config.to_dict(), drafter.model.state_dict())

    def save(self, drafter: Drafter, target: Target, folder: Path, depth: int) -> None:
        assert isinstance(drafter, DraftModel)
        require_one_vocabulary(drafter, target)
        drafter.save(folder)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(str(folder))

    def load(self, folder: Path) -> DrafterFiles:
        """Return its config alone; the model is loaded by the library, see `logits`."""
        return DrafterFiles(read_config(folder), {}, folder)

    @torch.no_grad()
    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        model: Any = load_causal_lm(str(found.folder), dtype=torch.float32, strict=True).eval()
        text = torch.cat([passage.tokens, passage.drafts])[None]
        return model.to(text.device)(text).logits[0, -1 - len(passage.drafts) :]

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {}  # the library's strict loading says what is missing

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        architectures = config.get("architectures") or [""]
        return "model_type" in config and architectures[0].endswith(("ForCausalLM", "LMHeadModel"))

    def read(self, found: DrafterFiles, target: Target) -> Drafter:
        drafter = DraftModel.from_folder(found.folder, found.config, target)
        drafter.check(target)
        return drafter


def require_one_vocabulary(drafter: DraftModel, target: Target) -> None:
    """Refuse a draft model with fewer or more ids than the target: engines want vocabularies of one size."""
    own = drafter.runner.vocab_size
    if own != target.vocab_size:
        raise IncompatibleError(
            f"engines want vocabularies of one size: the draft model's has {own} entries, the target's "
            f"{target.vocab_size}. Train it with init: prune or random, which take the target's own size."
        )
