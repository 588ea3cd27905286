"""Block drafters as their own repositories keep them: DFlash of z-lab, DSpark of DeepSpec.

Both are a flat Qwen3 config with a few more fields, and tensors under our names. Taps are counted as outputs of layers:
layer i's output is HF `hidden_states[i + 1]`, and −1 stands for the embeddings. SGLang reads both; it drops tensors
whose names it does not know. How either counts a sliding window is said nowhere, so there is none.

Shapes: V target vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..heads import DFlash, DFlashConfig, Drafter, DrafterConfig, DSparkConfig
from ..targets import Target
from .blocks import BlockFlags, BlockLayout, head_fields, layer_config, require_fields, require_servable
from .drafter_files import DrafterFiles
from .layout import Unsupported
from .llama import EMBEDDINGS, check_embeddings
from .reading import embedding_table, output_table
from .speculators import taps_lacking

TAPS = "target_layer_ids"
OUTPUT = "lm_head.weight"
# Names that SGLang reads, too, and the usual ones.
_ALSO = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class RawBlocks(BlockLayout):
    """A block drafter under a flat config.json, whose taps are outputs of layers."""

    def layer(self, config: dict[str, Any]) -> dict[str, Any]:
        return dict(config)

    def plain_name(self, name: str) -> str:
        """Return the usual name of a tensor that SGLang finds under another one, too."""
        name = name.removeprefix("model.")
        also = next((start for start in _ALSO if name.startswith(start)), "")
        return _ALSO[also] + name.removeprefix(also) if also else name

    def read(self, found: DrafterFiles, target: Target) -> DFlash:
        usual = {self.plain_name(name): tensor for name, tensor in found.tensors.items()}
        return super().read(replace(found, tensors=usual), target)

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, DFlashConfig)
        found = taps_lacking(config.taps, num_layers) if config.taps else []
        if config.sliding_window:
            why = "how this layout counts a window is said nowhere"
            found.append(
                Unsupported(f"sliding_window: {config.sliding_window}", why, "sliding_window: 0, or speculators")
            )
        if config.draft_vocab_size not in (0, config.vocab_size):
            why = "it drafts with the target's own output embedding"
            found.append(Unsupported(f"draft_vocab_size: {config.draft_vocab_size}", why, "draft_vocab_size: 0"))
        return found


class ZLab(RawBlocks):
    """DFlash drafters as z-lab publishes them."""

    name = "z-lab"
    drafter = "dflash"

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, DFlashConfig)
        found = super().lacks(config, num_layers)
        if 0 in config.taps:
            taps = sorted({max(tap, 1) for tap in config.taps})
            why = "it taps outputs of layers, not embeddings"
            found.append(Unsupported(f"taps: {list(config.taps)}", why, f"taps: {taps}"))
        if config.from_anchor:
            why = "engines take DFlash's first slot for the root alone"
            found.append(Unsupported("from_anchor: true", why, "from_anchor: false, or a dspark drafter"))
        return found

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, DFlash)
        require_servable(drafter, depth)
        config = drafter.config
        values = _flat(drafter, target, "DFlashDraftModel") | {
            # Engines guess a missing `causal` from the kind of the layers, each in its own way.
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                TAPS: [tap - 1 for tap in config.taps],
                "causal": config.causal,
            },
        }
        return DrafterFiles(values, {n: t for n, t in drafter.state_dict().items() if n != "token_ids"})

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return "DFlashDraftModel" in _architectures(config)

    def flags(self, config: dict[str, Any], where: str) -> BlockFlags:
        own = dict(config.get("dflash_config") or {})
        # The block's size stands in either place.
        require_fields(own | {"block_size": block_size(config)}, (TAPS, "mask_token_id", "block_size"), where)
        if (projector := own.get("projector_type", config.get("projector_type"))) is not None:
            raise IncompatibleError(
                f"{where}: projector_type is {projector!r}: this is no plain DFlash drafter, though its architecture "
                "says so. Take the drafter's files in its own layout (for DSpark: speculators, or DeepSpec)."
            )
        _refuse_windows(config, own, where)
        return BlockFlags(
            taps=tuple(int(tap) + 1 for tap in own[TAPS]),
            mask=int(own["mask_token_id"]),
            slots=int(block_size(config) or 0),
            from_anchor=bool(own.get("shift_label", False)),
            causal=bool(own.get("causal", own.get("is_causal", False))),
            window=None,
        )


class DeepSpec(RawBlocks):
    """DSpark drafters as DeepSpec keeps them: the target's embeddings and output embedding are copied beside."""

    name = "deepspec"
    drafter = "dspark"
    optional = beside = (EMBEDDINGS, OUTPUT)

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, DSparkConfig)
        found = super().lacks(config, num_layers)
        if not config.from_anchor:
            found.append(Unsupported("from_anchor: false", "its first slot drafts, too", "from_anchor: true"))
        if config.causal:
            found.append(Unsupported("causal: true", "it reads a block whole", "causal: false"))
        if not config.markov_rank:
            nearest = "markov_rank: 1 or more, or a dflash drafter"
            found.append(Unsupported("markov_rank: 0", "its DSpark has a Markov head", nearest))
        return found

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, DFlash)
        require_servable(drafter, depth)
        config = drafter.config
        assert isinstance(config, DSparkConfig)
        values = _flat(drafter, target, "Qwen3DSparkModel") | {
            TAPS: [tap - 1 for tap in config.taps],
            "mask_token_id": config.mask_token_id,
            "num_anchors": config.num_anchors,
            **head_fields(config),
        }
        tensors = {n: t for n, t in drafter.state_dict().items() if n != "token_ids"}
        return DrafterFiles(values, tensors | {EMBEDDINGS: embedding_table(target), OUTPUT: output_table(target)})

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return not _architectures(config).isdisjoint({"Qwen3DSparkModel", "DSparkDraftModel"})

    def flags(self, config: dict[str, Any], where: str) -> BlockFlags:
        require_fields(config, (TAPS, "mask_token_id", "block_size"), where)
        _refuse_windows(config, {}, where)
        return BlockFlags(
            taps=tuple(int(tap) + 1 for tap in config[TAPS]),
            mask=int(config["mask_token_id"]),
            slots=int(config["block_size"]),
            from_anchor=True,
            causal=False,
            window=None,
            markov=config.get("markov_head_type", "vanilla") if config.get("markov_rank") else None,
        )

    def read(self, found: DrafterFiles, target: Target) -> DFlash:
        check_embeddings(found.tensors.get(EMBEDDINGS), target, found.folder)
        _check_output(found.tensors.get(OUTPUT), target, found.folder)
        return super().read(found, target)


def block_size(config: dict[str, Any]) -> int | None:
    """Return the slots of a block, wherever z-lab's config.json says it; None if it does not."""
    found: int | None = config.get("block_size", (config.get("dflash_config") or {}).get("block_size"))
    return found


def _architectures(config: dict[str, Any]) -> set[str]:
    """Return a config's architectures; none of the `speculators` package's, which have the same names."""
    return set() if "speculators_model_type" in config else set(config.get("architectures") or [])


def _flat(drafter: DFlash, target: Target, architecture: str) -> dict[str, Any]:
    return layer_config(drafter.config) | {
        "architectures": [architecture],
        "block_size": drafter.config.block_size,
        "num_target_layers": target.num_layers,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }


def _refuse_windows(config: dict[str, Any], own: dict[str, Any], where: str) -> None:
    if "sliding_attention" in (config.get("layer_types") or []) or own.get("use_swa"):
        raise IncompatibleError(
            f"{where}: its layers see a sliding window, and how this layout counts one is said nowhere; take the "
            "drafter in the layout of speculators."
        )


@torch.no_grad()
def _check_output(theirs: Tensor | None, target: Target, folder: Path) -> None:
    """Refuse another target's output embedding: ours reads the target's own."""
    if theirs is None:
        return
    own = output_table(target).float().cpu()
    if theirs.shape != own.shape:
        raise BadInputError(f"{folder}: {OUTPUT} is {tuple(theirs.shape)}, the target's {tuple(own.shape)}.")
    rounding = max(torch.finfo(theirs.dtype).eps, torch.finfo(target.dtype).eps)
    if not torch.allclose(theirs.float(), own, rtol=2 * rounding, atol=1e-6):
        raise IncompatibleError(f"{folder}: its {OUTPUT} is not the target's: it was made for another target.")
