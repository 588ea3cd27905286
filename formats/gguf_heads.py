"""Heads as llama.cpp reads them, each in one GGUF file: EAGLE-3 and DFlash (read in the source of its 11434).

`target_layers` counts as ours do: i is what layer i reads, HF `hidden_states[i]`. Stretched positions of Llama 3's kind
are factors in `rope_freqs`. The tokenizer is the target's.

EAGLE-3 has one layer and three taps there. `d2t` holds target ids, where other engines hold offsets. Positions turn
neighbours in pairs, so rows of queries and keys stand in another order. Taps are normed together or not at all, and the
state before the last norm is handed on.

In memory a file has the form of another layout: EAGLE-3 that of `speculators`, but for the order of rows, which
`is_neox_style` tells, and DFlash z-lab's.

Shapes: V' draft vocabulary, R dimensions of a head that turn.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Set
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from ..common import IncompatibleError
from ..heads import DFlash, DFlashConfig, Eagle3, Eagle3Config
from ..heads.decoder_layer import LayerConfig, full_rope
from ..targets import Target
from ..targets.gguf_models import GgufHeader
from .base_layout import DrafterFiles, Fields, Unsupported
from .blocks import DFLASH
from .draft_models import (
    FILE,
    Precise,
    finish,
    gguf_file,
    interleaved,
    require_same_tokens,
    write_sizes,
    write_tensor,
    write_tokenizer,
)
from .eagle_layouts import one_layer
from .engine_logits import embedding_table, vllm_rope
from .llama import EMBEDDINGS, llama_config, require_fields
from .raw_blocks import TAPS as OUTPUTS
from .raw_blocks import ZLab
from .speculators import BESIDE, TAPS, Speculators

FACTORS = "rope_freqs.weight"
# By our names in the other layouts, llama.cpp's.
_NAMES = {
    EMBEDDINGS: "token_embd.weight",
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    FACTORS: FACTORS,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
# Sizes of a Llama's config.json, by their keys after the architecture, and those that may be missing.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_GUESSED = {"vocab_size", "attention.head_count_kv", "attention.key_length"}
_FLAGS = ("norm_before_residual", "norm_before_fc")
_ROPES = ("default", "linear", "llama3")
# Types of targets whose hidden states 11434 hands to a drafter; of others it stops: "layer input tensor is null".
_TAPPED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "gpt_oss",
    "gemma4",
    "lfm2",
    "nemotron_h",
    "minimax_m2",
    "mimo_v2_flash",
)

# Keys of a head that computes something else than ours do.
_UNKNOWN = (
    "embedding_scale",
    "attention.scale",
    "attention.value_scale",
    "logit_scale",
    "final_logit_softcapping",
    "hidden_act",
    "attention.sliding_window",
    "selector_rank",
    "hyper_connection.count",
)

_log = logging.getLogger(__name__)


class GgufEagle3(Precise, Speculators):
    """EAGLE-3 heads as llama.cpp reads them."""

    name = "gguf-eagle3"
    optional = (*BESIDE, FACTORS)
    keeps_window = False

    def __init__(self) -> None:
        super().__init__(embeddings=False)

    def lacks(self, config: Eagle3Config, num_layers: int) -> list[Unsupported]:
        lacks = super().lacks(config, num_layers) + one_layer(config) + _rope_lacking(config)
        if len(config.taps) != 3:
            lacks.append(Unsupported(f"taps: {list(config.taps)}", "it reads three taps", "three taps"))
        for name, why, nearest in (
            ("norm_taps", "it norms the taps together or not at all", "norm_before_fc: true instead"),
            ("norm_output", "it hands on the state before the norm", "norm_output: false"),
        ):
            if getattr(config, name):
                lacks.append(Unsupported(f"{name}: true", why, nearest))
        return lacks

    def save_as(self, drafter: Eagle3, target: Target, folder: Path, depth: int, precision: str) -> None:
        config = drafter.config
        tensors = self.write(drafter, target, depth).tensors
        tensors.pop("t2d", None)
        if "d2t" in tensors:
            tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors = {name: interleaved(name, tensor, config) for name, tensor in tensors.items()}
        writer = _writer("eagle3", config, target, folder)
        writer.add_uint32("eagle3.target_hidden_size", config.hidden_size)
        for flag in _FLAGS:
            writer.add_bool(f"eagle3.{flag}", getattr(config, flag))
        _write_tensors(writer, tensors, _names(1), precision)

    def load(self, folder: Path) -> DrafterFiles:
        values, tensors = _read(folder, "eagle3", _names(1))
        if "d2t" in tensors:
            tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
        layer = _layer(values, tensors) | {"model_type": "llama", "is_neox_style": False}
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else layer.get("vocab_size"),
            TAPS: [int(tap) for tap in values["target_layers"]],
            "target_hidden_size": values.get("target_hidden_size", layer["hidden_size"]),
            **{flag: bool(values.get(flag, False)) for flag in _FLAGS},
            "fc_norm": False,
            "norm_output": False,
        }
        return DrafterFiles(config, tensors, folder)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return False  # `import_` knows it by the file

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        return super().shapes(_half_apart(config))

    def read(self, files: DrafterFiles, target: Target) -> Eagle3:
        config = _half_apart(files.config)
        layer = config["transformer_layer_config"]
        tensors = _for_target(files, layer, target)
        for part, heads in (("q", layer["num_attention_heads"]), ("k", layer["num_key_value_heads"])):
            name = f"layers.0.self_attn.{part}_proj.weight"
            if (rows := tensors.get(name)) is not None:
                tensors[name] = rows.view(heads, len(rows) // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
        return super().read(DrafterFiles(config, tensors, files.folder), target)


class GgufDFlash(Precise, ZLab):
    """DFlash drafters as llama.cpp reads them: embeddings and output embedding are the target's."""

    name = "gguf-dflash"
    optional = (FACTORS,)
    windows = "sliding_window: 0"

    def __init__(self) -> None:
        super().__init__(DFLASH)

    def lacks(self, config: DFlashConfig, num_layers: int) -> list[Unsupported]:
        return super().lacks(config, num_layers) + _rope_lacking(config)

    def save_as(self, drafter: DFlash, target: Target, folder: Path, depth: int, precision: str) -> None:
        config, tensors = drafter.config, self.write(drafter, target, depth).tensors
        some = torch.arange(min(8, target.vocab_size), device=target.device)[None]
        if not torch.allclose(target.embed(some)[0].float(), embedding_table(target)[some[0]].float(), rtol=1e-3):
            raise IncompatibleError("this target scales its embeddings, which is not written for llama.cpp.")
        writer = _writer("dflash", config, target, folder)
        writer.add_uint32("dflash.block_size", config.block_size)
        writer.add_causal_attention(config.causal)
        assert config.mask_token_id is not None  # `write` refuses a learned one
        writer.add_mask_token_id(config.mask_token_id)
        _write_tensors(writer, tensors, _names(config.num_layers, "hidden_norm.weight"), precision)

    def load(self, folder: Path) -> DrafterFiles:
        names = _names(GgufHeader.of(gguf_file(folder)).values.get("dflash.block_count", 0), "hidden_norm.weight")
        values, tensors = _read(folder, "dflash", names)
        layer = _layer(values, tensors)
        config = layer | {
            "model_type": "qwen3",
            "architectures": [self.kind.architecture],
            "block_size": values.get("block_size", 16),
            "is_causal": bool(values.get("attention.causal", False)),
            "dflash_config": {
                "mask_token_id": values.get("mask_token_id"),
                OUTPUTS: [int(tap) - 1 for tap in values["target_layers"]],
                "causal": bool(values.get("attention.causal", False)),
            },
        }
        return DrafterFiles(config, tensors, folder)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return False

    def read(self, files: DrafterFiles, target: Target) -> DFlash:
        config = copy.deepcopy(files.config)
        return super().read(DrafterFiles(config, _for_target(files, config, target), files.folder), target)


def _rope_lacking(config: LayerConfig) -> list[Unsupported]:
    """Return the lack of rotary positions of another type than those that were compared."""
    kind = config.rope["rope_type"]
    why = "what it does with these positions has not been compared"
    nearest = f"rope_type {' or '.join(_ROPES)}"
    return [] if kind in _ROPES else [Unsupported(f"rope_parameters: {kind}", why, nearest)]


def _names(num_layers: int, fused: str = "input_norm.weight") -> dict[str, str]:
    """Return llama.cpp's names by ours; `fused` is that of the norm beside `fc`."""
    names = {fused if ours == "input_norm.weight" else ours: theirs for ours, theirs in _NAMES.items()}
    for i in range(num_layers):
        names |= {f"layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight" for ours, theirs in _LAYER.items()}
    return names


def _writer(architecture: str, config: Eagle3Config | DFlashConfig, target: Target, folder: Path) -> gguf.GGUFWriter:
    """Return the writer of a head's file, with sizes, positions, taps and tokenizer in it."""
    if (kind := target.config.model_type) not in _TAPPED:
        _log.warning("llama.cpp 11434 hands no hidden states of a %s target to a drafter: it stops.", kind)
    layer = LlamaConfig(**{k: v for k, v in llama_config(config).items() if k != "model_type"})
    writer = gguf.GGUFWriter(str(folder / FILE), architecture)
    if config.rope["rope_type"] == "llama3":
        layer.rope_parameters = {"rope_type": "default", "rope_theta": config.rope["rope_theta"]}
        factors = _factors(llama_config(config), config.head_dim)
        writer.add_tensor(FACTORS, factors.numpy(), raw_dtype=gguf.GGMLQuantizationType.F32)
    write_sizes(writer, layer)
    writer.add_array(f"{architecture}.target_layers", list(config.taps))
    write_tokenizer(writer, target.require_tokenizer(), target.vocab_size)
    return writer


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: Mapping[str, Tensor], names: Mapping[str, str], precision: str
) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            write_tensor(writer, names[name], tensor, precision)
        else:
            writer.add_tensor(names[name], tensor.cpu().numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    finish(writer)


def _read(folder: Path, architecture: str, names: Mapping[str, str]) -> tuple[Fields, dict[str, Tensor]]:
    """Return a file's values, by their keys after the architecture, and its tensors, by our names where it has one."""
    file, ours = gguf_file(folder), {theirs: name for name, theirs in names.items()}
    GgufHeader.of(file)  # refuses a damaged file
    read = gguf.GGUFReader(str(file))
    values = {
        name.removeprefix(f"{architecture}.").removeprefix("tokenizer.ggml."): field.contents()
        for name, field in read.fields.items()
        if name.startswith(f"{architecture}.") or name == "tokenizer.ggml.mask_token_id"
    }
    # Numbers of 32 bits as they were meant: 1e-05, not 9.99999974e-06.
    values = {k: float(str(np.float32(v))) if isinstance(v, float) else v for k, v in values.items()}
    require_fields(values, ["target_layers", *(set(_SIZES.values()) - _GUESSED)], str(file))
    if other := [f"{name} {values[name]}" for name in _UNKNOWN if values.get(name) not in (None, 0, "silu")]:
        raise IncompatibleError(f"{file}: {architecture} with {', '.join(other)}, which our drafter does not have.")
    return values, {ours.get(one.name, one.name): _tensor(one) for one in read.tensors}


def _tensor(read: gguf.ReaderTensor) -> Tensor:
    """Return a tensor of a file: whole numbers as they are, weights in the type they have, or dequantised in fp32."""
    values = np.array(read.data)
    if read.tensor_type in (gguf.GGMLQuantizationType.I32, gguf.GGMLQuantizationType.I64):
        return torch.from_numpy(values).long()
    weights = torch.from_numpy(gguf.quants.dequantize(values, read.tensor_type).copy())
    kinds = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}
    return weights.to(kinds.get(read.tensor_type, torch.float32))


def _layer(values: Fields, tensors: Mapping[str, Tensor]) -> Fields:
    """Return the config of the layers in a file, with llama.cpp's defaults."""
    heads = values["attention.head_count"]
    values = {"attention.head_count_kv": heads, "attention.key_length": values["embedding_length"] // heads} | values
    kind = values.get("rope.scaling.type", "none")
    rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": values.get("rope.freq_base", 10000.0)}
    if kind != "none":
        rope["factor"] = values.get("rope.scaling.factor", 1.0)
    layer = {name: values[key] for name, key in _SIZES.items() if key in values}
    if "vocab_size" not in layer and (rows := tensors.get("lm_head.weight")) is not None:
        layer["vocab_size"] = len(rows)
    return layer | {"rope_parameters": rope, "tie_word_embeddings": False}


def _half_apart(config: Fields) -> Fields:
    """Return a config.json for rows in which the two of a pair are half a head apart, as our layers have them."""
    config = copy.deepcopy(config)
    config["transformer_layer_config"].pop("is_neox_style", None)
    return config


def _for_target(files: DrafterFiles, layer: Fields, target: Target) -> dict[str, Tensor]:
    """Return the tensors of a head of this target; its rotary positions come into `layer`, if the file has factors.

    Raises IncompatibleError for a head of another target's tokens, or whose positions are stretched otherwise.
    """
    if target.tokenizer is not None:
        require_same_tokens(gguf_file(files.folder), target.tokenizer)
    tensors = dict(files.tensors)
    if (factors := tensors.pop(FACTORS, None)) is not None:
        layer["rope_parameters"] = _stretched(factors, layer, target, files.folder)
    return tensors


def _factors(layer: Fields, size: int) -> Tensor:
    """Return by what each frequency is divided, `[R / 2]`, for a config.json's rotary positions."""
    plain = {"rope_type": "default", "rope_theta": layer["rope_parameters"]["rope_theta"]}
    every = layer | {"rope_parameters": plain, "rope_scaling": None}
    return vllm_rope(every, size)[0] / vllm_rope(layer, size)[0]


def _stretched(factors: Tensor, layer: Fields, target: Target, folder: Path) -> Fields:
    """Return the target's rotary parameters, of which a file holds the factors alone.

    Raises IncompatibleError if the file's are others.
    """
    theirs = getattr(target.config, "rope_parameters", None) or {}
    rope = full_rope(theirs, layer["max_position_embeddings"])
    made = layer | {"rope_parameters": rope, "rope_scaling": None}
    if rope["rope_type"] == "llama3" and torch.allclose(_factors(made, layer["head_dim"]), factors, rtol=1e-4):
        return rope
    raise IncompatibleError(
        f"{folder}: its {FACTORS} stretch positions in another way than the target's; nothing says by which rule."
    )
