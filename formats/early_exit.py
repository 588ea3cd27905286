"""Early exits (LayerSkip) for `transformers`: the target, with a generation config that makes its first layers draft.

`generate` then leaves after layer E through the target's own final norm and output embedding. A LoRA that trained the
early layers for it is merged into the weights that are written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ..common import BadInputError, IncompatibleError
from ..common.atomic import write_atomically
from ..common.untrusted_files import read_json
from ..heads import SelfSpeculative, SelfSpeculativeConfig
from ..targets import Target, config_only_target, load_causal_lm
from ..targets.config_only import is_plain
from .base_layout import DrafterFiles, ExportLayout, Unsupported, pruned_lacking
from .engine_logits import ProbeSequence, model_logits

GENERATION, EXIT = "generation_config.json", "assistant_early_exit"


def early_exit_of(folder: Path) -> int | None:
    """Return the layer after which `generate` leaves the model in `folder` to draft; None if it does not."""
    file = folder / GENERATION
    return read_json(file).get(EXIT) if file.is_file() else None


class EarlyExit(ExportLayout[SelfSpeculative, SelfSpeculativeConfig]):
    """Early exits without weights of their own."""

    name = "early-exit"
    drafter = "self_speculative"
    is_model = True

    def lacks(self, config: SelfSpeculativeConfig, num_layers: int) -> list[Unsupported]:
        lacks = []
        if config.num_blocks:
            why = "it leaves through the target's own norm and output embedding"
            lacks.append(Unsupported(f"num_blocks: {config.num_blocks}", why, "num_blocks: 0, on a LayerSkip target"))
        if not config.share_lm_head:
            lacks.append(Unsupported("share_lm_head: false", "it has no other output embedding", "share_lm_head: true"))
        return lacks + pruned_lacking(config, "it drafts from the whole vocabulary")

    def save(self, drafter: SelfSpeculative, target: Target, folder: Path, depth: int) -> None:
        save_target(target, folder)
        settings: dict[str, Any] = {EXIT: drafter.config.exit_layer, "num_assistant_tokens": depth}
        settings["num_assistant_tokens_schedule"] = "constant"
        file = folder / GENERATION
        before = read_json(file) if file.is_file() else GenerationConfig().to_diff_dict()
        write_atomically(file, json.dumps(before | settings, indent=2) + "\n")

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        model: Any = load_causal_lm(str(files.folder), strict=True).eval()
        model.config.num_hidden_layers = early_exit_of(files.folder)  # as `generate` does while it drafts
        return model_logits(model, passage)

    def read(self, files: DrafterFiles, target: Target) -> SelfSpeculative:
        layer = early_exit_of(files.folder)
        if layer is None:
            raise BadInputError(f"{files.folder / GENERATION}: {EXIT} is missing.")
        return SelfSpeculative.build(SelfSpeculativeConfig(exit_layer=layer, num_blocks=0), target)


def save_target(target: Target, folder: Path) -> None:
    """Write the target as it is served, its adapter merged, with its tokenizer.

    Raises IncompatibleError if what the library reads of that is another target.
    """
    target.model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(str(folder))
    if is_plain(target.model):
        differences = target.fingerprint().differences(config_only_target(folder).fingerprint())
        if differences:
            raise IncompatibleError(
                f"the target's copy is another model than the target: {', '.join(differences)}. Save it yourself, load "
                "the target from there, and make the pair of that one."
            )
