"""EAGLE heads as engines read them under a flat Llama config: EAGLE-1 for vLLM and SGLang, EAGLE-3 for SGLang.

EAGLE-1 (`Eagle…`) has `fc`, and layers of which the first has no norm.
Engines differ in one tensor. The method's own repository has `fc.bias` if its config says `bias`; SGLang always adds a
bias, and invents one that is missing; vLLM has none and refuses the tensor.

EAGLE-3 as SGLang, SpecForge and the authors' repository name it: the tensors of the `speculators` layout, with
`midlayer.` for `layers.0.`. The taps are counted as outputs: layer i's output is HF `hidden_states[i + 1]`. SGLang
drops tensors whose names it does not know, and leaves what they should have filled random.

Shapes: H hidden size.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from torch import Tensor

from ..heads import Eagle1, Eagle1Config, Eagle3, Eagle3Config
from ..targets import Target
from .base_layout import DrafterFiles, ExportLayout, Fields, Unsupported, fill, pruned_lacking, with_prefix
from .blocks import own_tensors
from .compression import PRECISIONS
from .engine_logits import (
    Flags,
    ProbeSequence,
    eagle1_logits,
    eagle3_logits,
    embedding_table,
    require_unscaled,
    scale_field,
)
from .llama import EMBEDDINGS, check_embeddings, layer_sizes, llama_config, shapes_of
from .speculators import BESIDE, TAPS, Speculators, tapped_embeddings, taps_lacking


class EagleLayout(ExportLayout[Eagle1, Eagle1Config]):
    """EAGLE heads.

    `engine`: whose dialect is written; all are read.
    """

    name = "eagle"
    drafter = "eagle1"
    optional = (EMBEDDINGS, "fc.bias")

    def __init__(self, engine: Literal["vllm", "sglang", "eagle"]):
        self.engine, self.keeps_window = engine, engine == "vllm"
        self.precisions = PRECISIONS if engine == "vllm" else ()

    def lacks(self, config: Eagle1Config, num_layers: int) -> list[Unsupported]:
        lacks = []
        if config.norm_first:
            why = "its first layer has no norm before attention"
            lacks.append(Unsupported("norm_first: true", why, "norm_first: false, or an eagle3 drafter"))
        nearest = "draft_vocab_size: 0, or an eagle3 drafter"
        lacks += pruned_lacking(config, "it drafts from the whole vocabulary", nearest)
        if config.fc_bias and self.engine == "vllm":
            lacks.append(Unsupported("fc_bias: true", "its fc has no bias", "fc_bias: false"))
        return lacks

    def write(self, drafter: Eagle1, target: Target, depth: int) -> DrafterFiles:
        tensors, weight = own_tensors(drafter), drafter.fc.weight
        if drafter.input_projection.is_scaled:
            scaled = weight.float() * drafter.input_projection.scale()
            exact = bool((scaled.to(weight.dtype) == scaled).all())
            tensors["fc.weight"] = scaled.to(weight.dtype) if exact else scaled  # an engine rounds once, as it loads
        if self.engine == "sglang" and not drafter.config.fc_bias:
            tensors["fc.bias"] = weight.new_zeros(len(weight))
        if self.engine != "vllm":
            require_unscaled(target, drafter.name)
        if self.engine == "eagle":
            tensors[EMBEDDINGS] = embedding_table(target)
        window = drafter.config.sliding_window if self.keeps_window else 0
        values = llama_config(drafter.config, window) | scale_field(target)
        values |= {
            # vLLM counts its layers from the target's last one on, unless it is told how many come before.
            **({"target_layer_count": target.num_layers} if window else {}),
            # vLLM puts "Eagle" before the name of a Llama by itself.
            "architectures": ["LlamaForCausalLMEagle" if self.engine == "sglang" else "LlamaForCausalLM"],
            "bias": drafter.config.fc_bias,
            "eagle_fc_bias": drafter.config.fc_bias,
            "dtype": str(weight.dtype).removeprefix("torch."),
        }
        return DrafterFiles(values, tensors)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return eagle1_logits(files.tensors, files.config, passage)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        architectures = config.get("architectures") or []
        eagle3 = "draft_vocab_size" in config or any("Eagle3" in name for name in architectures)
        named = any("Eagle" in name for name in architectures) or "bias" in config or "eagle_fc_bias" in config
        return named and not eagle3 and "speculators_model_type" not in config

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        bias = bool(config.get("bias") or config.get("eagle_fc_bias"))
        return shapes_of(Eagle1, _whole(layer_sizes(config, "config.json"), fc_bias=bias))

    def read(self, files: DrafterFiles, target: Target) -> Eagle1:
        bias = files.tensors.get("fc.bias")
        has_bias = bias is not None and bool(bias.any())  # SGLang wants one, if only of zeros
        sizes = layer_sizes(files.config, str(files.config_file))
        drafter = Eagle1(_whole(sizes, fc_bias=has_bias, target_layers=target.num_layers))
        no_part = (EMBEDDINGS,) if has_bias else (EMBEDDINGS, "fc.bias")
        weights = {name: tensor for name, tensor in files.tensors.items() if name not in no_part}
        fill(drafter, weights | {"token_ids": drafter.token_ids}, [], str(files.folder))
        check_embeddings(files.tensors.get(EMBEDDINGS), target, files.folder)
        return drafter


def _whole(sizes: dict[str, Any], **settings: Any) -> Eagle1Config:
    """Return the settings of a head that drafts from its target's whole vocabulary."""
    return Eagle1Config(**sizes, **settings, draft_vocab_size=sizes["vocab_size"])


_FIRST, _FIRST_THERE = "layers.0.", "midlayer."


class Sglang(ExportLayout[Eagle3, Eagle3Config]):
    """EAGLE-3 heads as SGLang reads them."""

    name = "sglang"
    drafter = "eagle3"
    optional = BESIDE
    keeps_window = False
    counts_outputs = True

    def lacks(self, config: Eagle3Config, num_layers: int) -> list[Unsupported]:
        lacks = taps_lacking(config.taps, num_layers)
        if 0 in config.taps:
            lacks.append(tapped_embeddings(config.taps))
        if len(config.taps) == 1:
            why = "it leaves out fc where the taps are as wide as the head"
            lacks.append(Unsupported(f"taps: {list(config.taps)}", why, "two taps or more"))
        for name, why, nearest in (
            ("norm_before_fc", "it norms taps one by one or not at all", "norm_taps: true instead"),
            ("norm_before_residual", "it adds to the hidden state as it is", "norm_before_residual: false"),
        ):
            if getattr(config, name):
                lacks.append(Unsupported(f"{name}: true", why, nearest))
        return lacks + one_layer(config)

    def write(self, drafter: Eagle3, target: Target, depth: int) -> DrafterFiles:
        tensors, config = Speculators(embeddings=False).write(drafter, target, depth).tensors, drafter.config
        values = llama_config(config) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.hidden_size,
            "num_aux_hidden_states": len(config.taps),
            "fc_norm": config.norm_taps,
            "norm_output": config.norm_output,
            "norm_before_residual": False,
            "eagle_config": {TAPS: [tap - 1 for tap in config.taps], "use_aux_hidden_state": True},
            "dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
        }
        return DrafterFiles(values, {_there(name): tensor for name, tensor in tensors.items()})

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        tensors = {_here(name): tensor for name, tensor in files.tensors.items()}
        return eagle3_logits(tensors, files.config, sglang_flags(files.config, target.num_layers), passage)

    def listed_taps(self, config: Fields) -> tuple[str, list[int] | None]:
        return TAPS, (config.get("eagle_config") or {}).get(TAPS)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        named = any("Eagle3" in name for name in config.get("architectures") or [])
        return named and "transformer_layer_config" not in config

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        same = as_speculators(DrafterFiles(config, {}), 12)
        return {_there(name): shape for name, shape in Speculators().shapes(same.config).items()}

    def plain_name(self, name: str) -> str:
        """Return SGLang's name: ModelOpt writes `layers.0.` for `midlayer.`, others `model.` before everything."""
        return _there(_here(name))

    def read(self, files: DrafterFiles, target: Target) -> Eagle3:
        return Speculators().read(as_speculators(files, target.num_layers), target)


def one_layer(config: Eagle3Config) -> list[Unsupported]:
    """Return the lack of engines whose EAGLE-3 heads have one layer."""
    many = config.num_layers > 1
    return [Unsupported(f"num_layers: {config.num_layers}", "its EAGLE-3 has one layer", "num_layers: 1")] * many


def sglang_flags(config: Fields, num_layers: int) -> Flags:
    """Return the flags that SGLang takes from a flat config.json; it knows no other."""
    taps = (config.get("eagle_config") or {}).get(TAPS)
    return Flags(
        taps=tuple(tap + 1 for tap in ((1, num_layers // 2 - 1, num_layers - 4) if taps is None else taps)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )


def as_speculators(files: DrafterFiles, num_layers: int) -> DrafterFiles:
    """Return a flat checkpoint in the layout of `speculators`."""
    config, flags = files.config, sglang_flags(files.config, num_layers)
    values = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {k: v for k, v in config.items() if k != "architectures"},
        "draft_vocab_size": config.get("draft_vocab_size"),
        TAPS: list(flags.taps),
        "fc_norm": flags.fc_norm,
        "norm_output": flags.norm_output,
        "norm_before_fc": config.get("norm_before_fc", False),
        "norm_before_residual": config.get("norm_before_residual", False),
    }
    return DrafterFiles(values, {_here(name): tensor for name, tensor in files.tensors.items()}, files.folder)


def _there(name: str) -> str:
    return with_prefix(name, _FIRST, _FIRST_THERE)


def _here(name: str) -> str:
    return with_prefix(name.removeprefix("model."), _FIRST_THERE, _FIRST)
