"""Block drafters as their own repositories keep them: DFlash and DFlash2 of z-lab, DSpark of DeepSpec.

All are a flat Qwen3 config with a few more fields, and tensors under our names. Taps are counted as outputs of layers:
layer i's output is HF `hidden_states[i + 1]`, and −1 stands for the embeddings. SGLang reads them; it drops tensors
whose names it does not know. None defines how a sliding window is counted, so there is none.

Shapes: V target vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ..common import IncompatibleError
from ..heads import DFlash, DFlashConfig, DSpark, DSparkConfig
from ..targets import Target
from .base_layout import DrafterFiles, Fields, Unsupported, pruned_lacking, with_prefix
from .blocks import (
    DRAFTS_FROM_ANCHOR,
    DSPARK,
    NO_MARKOV_HEAD,
    OUTPUT,
    B,
    BlockFlags,
    BlockLayout,
    C,
    layer_config,
    own_tensors,
    require_servable,
)
from .engine_logits import ProbeSequence, embedding_table, output_table
from .llama import EMBEDDINGS, require_fields
from .speculators import tapped_embeddings, taps_lacking

TAPS = "target_layer_ids"
# Names that SGLang reads, too, and the usual ones.
_ALSO = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class RawBlocks(BlockLayout[B, C]):
    """A block drafter under a flat config.json, whose taps are outputs of layers."""

    counts_outputs = True
    windows: ClassVar[str] = "sliding_window: 0, or speculators"  # the nearest that can be served of them

    def layer(self, config: Fields) -> dict[str, Any]:
        return dict(config)

    def listed_taps(self, config: Fields) -> tuple[str, list[int] | None]:
        return TAPS, (config.get("dflash_config") or config).get(TAPS)

    def plain_name(self, name: str) -> str:
        """Return the usual name of a tensor that SGLang finds under another one, too."""
        name = name.removeprefix("model.")
        for also, usual in _ALSO.items():
            name = with_prefix(name, also, usual)
        return name

    def read(self, files: DrafterFiles, target: Target) -> B:
        return super().read(self._usual(files), target)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return super().logits(self._usual(files), target, passage)

    def _usual(self, files: DrafterFiles) -> DrafterFiles:
        """Return the files with tensors under their usual names."""
        return replace(files, tensors={self.plain_name(name): tensor for name, tensor in files.tensors.items()})

    def lacks(self, config: C, num_layers: int) -> list[Unsupported]:
        lacks = taps_lacking(config.taps, num_layers)
        if config.sliding_window:
            why = "this layout does not define how a window is counted"
            lacks.append(Unsupported(f"sliding_window: {config.sliding_window}", why, self.windows))
        return lacks + pruned_lacking(config, "it drafts with the target's own output embedding")


class ZLab(RawBlocks[DFlash, DFlashConfig]):
    """Drafters as z-lab publishes them, DFlash or DFlash2."""

    name = "z-lab"

    def lacks(self, config: DFlashConfig, num_layers: int) -> list[Unsupported]:
        lacks = super().lacks(config, num_layers)
        if 0 in config.taps:
            lacks.append(tapped_embeddings(config.taps))
        if config.from_anchor:
            lacks.append(DRAFTS_FROM_ANCHOR)
        return lacks

    def write(self, drafter: DFlash, target: Target, depth: int) -> DrafterFiles:
        require_servable(drafter, target, depth, self.kind)
        config = drafter.config
        values = _flat(drafter, target, self.kind.architecture) | {
            # Engines guess a missing one from the kind of the layers, each in its own way. SGLang reads `is_causal`
            # beside the layers' sizes, vLLM `causal` within.
            "is_causal": config.causal,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                TAPS: [tap - 1 for tap in config.taps],
                "causal": config.causal,
                **self.kind.written(config),
            },
        }
        return DrafterFiles(values, own_tensors(drafter))

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return self.kind.architecture in _architectures(config)

    def flags(self, config: Fields, where: str) -> BlockFlags:
        own = dict(config.get("dflash_config") or {})
        slots: Any = config.get("block_size", own.get("block_size"))  # it stands in either place
        require_fields(own | {"block_size": slots}, (TAPS, "mask_token_id", "block_size"), where)
        if (projector := own.get("projector_type", config.get("projector_type"))) not in (None, self.drafter):
            raise IncompatibleError(
                f"{where}: projector_type is {projector!r}: this is no plain DFlash drafter, though its architecture "
                "says so. Take the drafter's files in its own layout (for DSpark: speculators, or DeepSpec)."
            )
        _refuse_windows(config, own, where)
        return BlockFlags(
            taps=tuple(int(tap) + 1 for tap in own[TAPS]),
            mask=int(own["mask_token_id"]),
            slots=int(slots),
            from_anchor=bool(own.get("shift_label", False)),
            causal=bool(own.get("causal", own.get("is_causal", config.get("is_causal", False)))),
            own=self.kind.settings(own, where),
        )


class DeepSpec(RawBlocks[DSpark, DSparkConfig]):
    """DSpark drafters as DeepSpec keeps them: the target's embeddings and output embedding are copied beside."""

    name = "deepspec"
    first_tap = -1
    optional = beside = (EMBEDDINGS, OUTPUT)

    def __init__(self) -> None:
        super().__init__(DSPARK)

    def lacks(self, config: DSparkConfig, num_layers: int) -> list[Unsupported]:
        lacks = super().lacks(config, num_layers)
        if not config.from_anchor:
            lacks.append(Unsupported("from_anchor: false", "its first slot drafts, too", "from_anchor: true"))
        if config.causal:
            lacks.append(Unsupported("causal: true", "it reads a block whole", "causal: false"))
        if not config.markov_rank:
            lacks.append(NO_MARKOV_HEAD)
        return lacks

    def write(self, drafter: DSpark, target: Target, depth: int) -> DrafterFiles:
        require_servable(drafter, target, depth, self.kind)
        config = drafter.config
        values = _flat(drafter, target, "Qwen3DSparkModel") | {
            TAPS: [tap - 1 for tap in config.taps],
            "mask_token_id": config.mask_token_id,
            "num_anchors": config.num_anchors,
            **self.kind.written(config),
        }
        copies = {EMBEDDINGS: embedding_table(target), OUTPUT: output_table(target)}
        return DrafterFiles(values, own_tensors(drafter) | copies)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return not _architectures(config).isdisjoint({"Qwen3DSparkModel", "DSparkDraftModel"})

    def flags(self, config: Fields, where: str) -> BlockFlags:
        require_fields(config, (TAPS, "mask_token_id", "block_size"), where)
        _refuse_windows(config, {}, where)
        return BlockFlags(
            taps=tuple(int(tap) + 1 for tap in config[TAPS]),
            mask=int(config["mask_token_id"]),
            slots=int(config["block_size"]),
            from_anchor=True,
            causal=False,
            own=self.kind.settings(config, where),
        )


def _architectures(config: Fields) -> set[str]:
    """Return a config's architectures; none of the `speculators` package's, which have the same names."""
    return set() if "speculators_model_type" in config else set(config.get("architectures") or [])


def _flat(drafter: DFlash, target: Target, architecture: str) -> dict[str, Any]:
    return layer_config(drafter.config) | {
        "architectures": [architecture],
        "block_size": drafter.config.block_size,
        "num_target_layers": target.num_layers,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }


def _refuse_windows(config: Fields, own: dict[str, Any], where: str) -> None:
    if "sliding_attention" in (config.get("layer_types") or []) or own.get("use_swa"):
        raise IncompatibleError(
            f"{where}: its layers see a sliding window, which this layout does not define; take the drafter in the "
            "layout of speculators."
        )
