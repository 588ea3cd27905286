"""Block drafters, DFlash and DSpark, in the layout of the `speculators` package, which vLLM reads as it is.

Its taps are HF `hidden_states` indices, as ours; tensors have the names that ours have. The target's embeddings are
never part of it, an output embedding only where the draft vocabulary is pruned. A missing `sample_from_anchor` means
one thing for DFlash and another for DSpark, so it is always written.

Shapes: V target vocabulary, V' draft vocabulary, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..common.runtime import versions
from ..heads import DFlash, DFlashConfig, Drafter, DrafterConfig, DSpark, DSparkConfig
from ..targets import Target
from .block_reading import BlockFlags, block_logits
from .drafter_files import DrafterFiles
from .layout import ExportLayout, Unsupported
from .llama import layer_sizes, llama_config
from .load_weights import fill
from .reading import ProbeSequence, output_table
from .speculators import VERSION, draft_ids, taps_lacking, verifier, vocabulary_maps

TAPS = "aux_hidden_state_layer_ids"
CLASSES: dict[str, tuple[type[DFlash], type[DFlashConfig], str]] = {
    "dflash": (DFlash, DFlashConfig, "DFlashDraftModel"),
    "dspark": (DSpark, DSparkConfig, "DSparkDraftModel"),
}


class BlockLayout(ExportLayout):
    """A layout of block drafters: tensors have our names, and config.json has the layers' sizes and a few flags."""

    beside: ClassVar[tuple[str, ...]] = ()  # tensors that are no part of our drafter

    @abstractmethod
    def layer(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config of the layers, which is that of a Qwen3."""

    @abstractmethod
    def flags(self, config: dict[str, Any], where: str) -> BlockFlags:
        """Return what engines take from a config.json of this layout.

        Raises:
            BadInputError: it lacks what nobody can guess.
        """

    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        config = found.config
        return block_logits(found.tensors, self.layer(config), self.flags(config, str(found.config_file)), passage)

    def read(self, found: DrafterFiles, target: Target) -> DFlash:
        config = self.settings(found.config, str(found.config_file), target.num_layers)
        drafter = CLASSES[self.drafter][0](config)
        weights = {name: tensor for name, tensor in found.tensors.items() if name not in self.beside}
        weights["token_ids"] = draft_ids(found.tensors, config.draft_vocab_size, config.vocab_size, found.folder)
        fill(drafter, weights, [], str(found.folder))
        drafter.check(target)
        return drafter.eval()

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        settings = self.settings(config, "config.json", 0)
        with torch.device("meta"):
            made = CLASSES[self.drafter][0](settings)
        return {name: tuple(t.shape) for name, t in made.state_dict().items() if name != "token_ids"}

    def settings(self, values: dict[str, Any], where: str, num_layers: int) -> DFlashConfig:
        """Return our config of theirs.

        Raises:
            BadInputError, IncompatibleError: config.json lacks something, or says what our drafter cannot do.
        """
        flags, layer = self.flags(values, where), self.layer(values)
        kinds = set(layer.get("layer_types") or ["full_attention"])
        problems = ["layers with a window and layers without one"] if len(kinds) > 1 else []
        plain = layer | {"model_type": "llama", "layer_types": None}
        common: dict[str, Any] = {
            "taps": flags.taps,
            "block_size": flags.slots,
            "from_anchor": flags.from_anchor,
            "causal": flags.causal,
            "sliding_window": flags.window or 0,
            "window_from": "anchor" if flags.window else "slot",
            "mask_token_id": flags.mask,
            "target_layers": num_layers,
            **layer_sizes({k: v for k, v in plain.items() if v is not None}, where, problems),
        }
        common["draft_vocab_size"] = int(values.get("draft_vocab_size") or common["vocab_size"])
        return CLASSES[self.drafter][1](**common, **(_heads(values) if self.drafter == "dspark" else {}))


class SpeculatorsBlocks(BlockLayout):
    """Block drafters as the `speculators` package keeps them.

    Args:
        vllm: whether vLLM must be able to serve them.
    """

    name = "speculators-blocks"
    optional = beside = ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight")

    def __init__(self, vllm: bool = False):
        self.vllm = vllm

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, DFlashConfig)
        found = taps_lacking(config.taps, num_layers) if config.taps else []
        if config.sliding_window and self.vllm:
            # Its layout has one meaning (all slots of a block see back to the same place), vLLM another: each slot's
            # window ends at that slot.
            why = "vLLM moves the window from slot to slot, which this layout cannot say"
            found.append(Unsupported(f"sliding_window: {config.sliding_window}", why, "sliding_window: 0"))
        elif config.sliding_window and config.window_from != "anchor":
            why = "it counts windows back from the block's first slot"
            found.append(Unsupported(f"window_from: {config.window_from}", why, "window_from: anchor"))
        if config.causal and not config.sliding_window:
            why = "layers that see all of the context see all of their block"
            found.append(
                Unsupported("causal: true", why, f"causal: false{'' if self.vllm else ', or a sliding_window with it'}")
            )
        if config.from_anchor and self.drafter == "dflash":
            why = "engines take DFlash's first slot for the root alone"
            found.append(Unsupported("from_anchor: true", why, "from_anchor: false, or a dspark drafter"))
        if isinstance(config, DSparkConfig):
            found += self._markov_lacks(config)
        return found

    def _markov_lacks(self, config: DSparkConfig) -> list[Unsupported]:
        if not config.markov_rank:
            return [
                Unsupported(
                    "markov_rank: 0", "its DSpark has a Markov head", "markov_rank: 1 or more, or a dflash drafter"
                )
            ]
        if self.vllm and config.markov_head != "vanilla":
            return [Unsupported(f"markov_head: {config.markov_head}", "vLLM serves one kind", "markov_head: vanilla")]
        return []

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, DFlash)
        require_servable(drafter, depth)
        tensors = {name: tensor for name, tensor in drafter.state_dict().items() if name != "token_ids"}
        tensors |= vocabulary_maps(drafter.token_ids, drafter.config.vocab_size)
        if drafter.output_ids is not None:
            table = output_table(target)
            tensors["lm_head.weight"] = table[drafter.token_ids.to(table.device)]
        return DrafterFiles(_written_config(drafter, target, depth), tensors)

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return config.get("speculators_model_type") == self.drafter

    def layer(self, config: dict[str, Any]) -> dict[str, Any]:
        return dict(config["transformer_layer_config"])

    def flags(self, config: dict[str, Any], where: str) -> BlockFlags:
        require_fields(config, ("transformer_layer_config", TAPS, "mask_token_id", "block_size"), where)
        layer, kind = self.layer(config), config["speculators_model_type"]
        sliding = "sliding_attention" in (layer.get("layer_types") or [])
        return BlockFlags(
            taps=tuple(config[TAPS]),
            mask=int(config["mask_token_id"]),
            slots=int(config["block_size"]),
            from_anchor=bool(config.get("sample_from_anchor", kind == "dspark")),
            causal=sliding and not config.get("sliding_window_non_causal", False),
            window=int(layer["sliding_window"]) if sliding else None,
            markov=config.get("markov_head_type", "vanilla") if config.get("markov_rank") else None,
        )


class SpeculatorsDFlash(SpeculatorsBlocks):
    """DFlash drafters in this layout."""

    drafter = "dflash"


class SpeculatorsDSpark(SpeculatorsBlocks):
    """DSpark drafters in this layout."""

    drafter = "dspark"


def require_fields(config: dict[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse a config.json without one of these fields."""
    for name in names:
        if config.get(name) is None:
            raise BadInputError(f"{where}: {name} is missing; without it nobody knows what the drafter reads.")


def require_servable(drafter: DFlash, depth: int) -> None:
    """Refuse a drafter that engines would read otherwise than it was trained.

    They embed a token in the place of its mask, and read a shorter block where fewer drafts are asked for, which says
    something else.
    """
    if drafter.config.mask_token_id is None:
        raise IncompatibleError(
            f"this {drafter.name} drafter has learned its mask, and engines embed a token in its place; train it with "
            "a drafter.mask_token_id that no text has."
        )
    if depth != drafter.max_depth and not drafter.config.causal:
        raise IncompatibleError(
            f"engines read as many slots as they draft, and a block of this {drafter.name} drafter is read whole: it "
            f"was trained for {drafter.max_depth} drafts, {depth} were asked for; export it with depth "
            f"{drafter.max_depth}, or train it with drafter.causal."
        )


def _written_config(drafter: DFlash, target: Target, depth: int) -> dict[str, Any]:
    config, kind = drafter.config, drafter.name
    method = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    found = {
        "architectures": [CLASSES[kind][2]],
        "model_type": "speculators",
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": verifier(target),
        },
        "transformer_layer_config": layer_config(config),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        TAPS: list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not config.causal,
        "tie_word_embeddings": False,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "transformers_version": versions()["transformers"],
    }
    return found | (head_fields(config) if isinstance(config, DSparkConfig) else {})


def layer_config(config: DFlashConfig) -> dict[str, Any]:
    """Return a Qwen3's config.json for a block drafter's layers."""
    kind = "sliding_attention" if config.sliding_window else "full_attention"
    return llama_config(config) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": [kind] * config.num_layers,
        "use_sliding_window": bool(config.sliding_window),
        "sliding_window": config.sliding_window or None,
    }


def head_fields(config: DSparkConfig) -> dict[str, Any]:
    """Return how DSpark's heads are described, in every layout."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_reads_markov,
    }


def _heads(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of our heads, from their description: the inverse of `head_fields`."""
    return {
        "markov_rank": int(values.get("markov_rank", 0)),
        "markov_head": str(values.get("markov_head_type", "vanilla")),
        "confidence": bool(values.get("enable_confidence_head", False)),
        "confidence_reads_markov": bool(values.get("confidence_head_with_markov", False)),
    }
