"""Uno's LoRA as `peft` writes adapters: SGLang reads it so (`--uno-lora-path`), and vLLM's pull request 55947."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..common import IncompatibleError
from ..common.untrusted_files import read_json
from ..formats.base_layout import DrafterFiles, ExportLayout, Unsupported, fill
from ..formats.engine_logits import ProbeSequence, session_logits
from ..targets import Target
from ..targets.model_folder import refuse_pickles
from ..targets.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..targets.weights import stored_tensors
from .uno import Uno, UnoConfig, linear_layers

# Settings by which products are scaled or added otherwise, and the values that leave them as they are.
_PLAIN = {"peft_type": "LORA", "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}}


class PeftLora(ExportLayout[Uno, UnoConfig]):
    """A LoRA of all linear layers in a target's decoder layers, for noise from the whole vocabulary."""

    name = "peft"
    drafter = "uno"

    def lacks(self, config: UnoConfig, num_layers: int) -> list[Unsupported]:
        if config.mask_token_id is None:
            return []
        why = "engines put tokens of the whole vocabulary in place of drafts"
        return [Unsupported(f"mask_token_id: {config.mask_token_id}", why, "mask_token_id: null")]

    def write(self, drafter: Uno, target: Target, depth: int) -> DrafterFiles:
        names = _names(target)
        settings = {
            **_PLAIN,
            "task_type": "CAUSAL_LM",
            "r": drafter.config.rank,
            "lora_alpha": drafter.config.alpha,
            "target_modules": sorted({name.split(".")[-3] for name in names}),
            "base_model_name_or_path": target.place or None,
            "inference_mode": True,
        }
        return DrafterFiles(settings, {name: drafter.get_parameter(own) for name, own in names.items()})

    def save(self, drafter: Uno, target: Target, folder: Path, depth: int) -> None:
        self.write(drafter, target, depth).save(folder, ADAPTER_WEIGHTS, ADAPTER_CONFIG)

    def load(self, folder: Path) -> DrafterFiles:
        refuse_pickles(folder)
        stored_tensors(folder / ADAPTER_WEIGHTS)  # refuses a damaged file
        return DrafterFiles(read_json(folder / ADAPTER_CONFIG), load_file(folder / ADAPTER_WEIGHTS), folder)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return session_logits(self.read(files, target), target, passage)

    def read(self, files: DrafterFiles, target: Target) -> Uno:
        if others := [name for name, plain in _PLAIN.items() if (files.config.get(name) or plain) != plain]:
            raise IncompatibleError(
                f"{files.folder / ADAPTER_CONFIG}: {others[0]} makes it another adapter than Uno's."
            )
        config = UnoConfig(rank=int(files.config["r"]), alpha=float(files.config["lora_alpha"]))
        drafter, names = Uno.build(config, target), _names(target)
        known = {own: files.tensors[name].float() for name, own in names.items() if name in files.tensors}
        fill(drafter, known, files.tensors.keys() - names.keys(), str(files.folder))
        return drafter


def _names(target: Target) -> dict[str, str]:
    """Return the names of an Uno drafter's weights by those that peft has for them."""
    whole = {id(module): name for name, module in target.model.named_modules()}
    linears = [whole[id(linear)] for linear in linear_layers(target).values()]
    return {
        f"base_model.model.{name}.lora_{part.upper()}.weight": f"lora_{part}.{index}"
        for index, name in enumerate(linears)
        for part in "ab"
    }
