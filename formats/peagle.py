"""P-EAGLE heads in the layout of the `speculators` package: an EAGLE-3 head's, a vector and a token for the masks."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..heads import Drafter, PEagle, PEagleConfig
from ..targets import Target
from .drafter_files import DrafterFiles
from .llama import shapes_of
from .reading import ProbeSequence, peagle_logits
from .speculators import Speculators, fill_eagle3, read_settings, their_name, vllm_flags, write_eagle3

_MASK = "mask_token_id"


class SpeculatorsPEagle(Speculators):
    """P-EAGLE heads as the `speculators` package keeps them.

    Its loader fills embeddings that are missing with uninitialised memory, so they are written. There they may be
    trained; ours are the target's, and others are refused.
    """

    name = "speculators-peagle"
    drafter = "peagle"

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, PEagle)
        if drafter.mask is not None:
            raise IncompatibleError(
                "this peagle drafter has learned the embedding of its mask, and others embed a token in its place; "
                "train it with a drafter.mask_token_id that no text has."
            )
        written = write_eagle3(drafter, target, depth)
        config = written.config | {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": self.drafter,
            "speculators_config": written.config["speculators_config"] | {"algorithm": self.drafter},
            _MASK: drafter.config.mask_token_id,
        }
        return replace(written, config=config)

    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        layer, flags = vllm_flags(found.config, target.num_layers)
        return peagle_logits(found.tensors, layer, flags, int(found.config[_MASK]), passage)

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return config.get("speculators_model_type") == self.drafter

    def read(self, found: DrafterFiles, target: Target) -> PEagle:
        head = PEagle(_settings(found.config, str(found.config_file)))
        fill_eagle3(head, found.tensors, target, found.folder)
        return head.eval()

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        settings = _settings(config, "config.json")
        return shapes_of(PEagle, settings, lambda name: their_name(name, settings))


def _settings(values: dict[str, Any], where: str) -> PEagleConfig:
    for name in (_MASK, "eagle_aux_hidden_state_layer_ids"):
        if values.get(name) is None:
            raise BadInputError(f"{where}: {name} is missing; without it nobody knows what the drafter reads.")
    return PEagleConfig(**read_settings(values, where, []), mask_token_id=int(values[_MASK]))
