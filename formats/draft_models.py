"""Draft models: plain Hugging Face checkpoints with the target's tokenizer, which most engines read, and GGUF files.

GGUF is llama.cpp's: one file with weights, sizes and the tokenizer. It is read back by `transformers`, whose reader
knows nothing of ours. Engines want target and draft model with the same tokenizer metadata: `write_gguf` writes either.

Shapes: V vocabulary, k draft tokens.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common import BadInputError, IncompatibleError
from ..heads import DraftModel, DraftModelConfig
from ..targets import Target, load_causal_lm
from ..targets.gguf_models import read_gguf
from .base_layout import D, DrafterFiles, ExportLayout, Fields
from .compression import compress
from .engine_logits import ProbeSequence, model_logits

FILE = "draft.gguf"
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
# llama.cpp's names of pre-tokenizers, by the beginning of their regular expression; without one it is GPT-2's own.
_PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|": "qwen2",
}
# Normalisations that llama.cpp leaves out: they change no text that is normal already.
_HARMLESS = (None, {"type": "NFC"})
_KINDS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
# By the words that `--precision` takes.
_BLOCKS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_PRECISIONS = {kind.name.lower(): kind for kind in (*_KINDS.values(), *(gguf.GGMLQuantizationType[b] for b in _BLOCKS))}


class Precise:
    """Layouts of GGUF files, whose matrices can be of several precisions."""

    precisions: tuple[str, ...] = tuple(_PRECISIONS)
    other_precisions: ClassVar[str] = (
        " The gguf package reads Q4_K and the other K types, and rounds to none: llama-quantize makes them of f16."
    )

    def rounded(self, drafter: D, target: Target, depth: int, precision: str) -> D:
        """Return the drafter that files of a precision hold."""
        drafter = copy.deepcopy(drafter)
        for weight in drafter.parameters():
            weight.data = rounded(weight.data, precision)
        return drafter


class Gguf(Precise, ExportLayout[DraftModel, DraftModelConfig]):
    """Draft models as llama.cpp reads them."""

    name = "gguf"
    drafter = "draft_model"

    def save_as(self, drafter: DraftModel, target: Target, folder: Path, depth: int, precision: str) -> None:
        require_one_vocabulary(drafter, target)
        write_gguf(drafter.model, target.require_tokenizer(), folder / FILE, precision)

    def load(self, folder: Path) -> DrafterFiles:
        return DrafterFiles({}, {}, folder)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return model_logits(read_gguf(gguf_file(files.folder)), passage)

    def read(self, files: DrafterFiles, target: Target) -> DraftModel:
        file = gguf_file(files.folder)
        if target.tokenizer is not None:
            require_same_tokens(file, target.tokenizer)
        return DraftModel(read_gguf(file))


def gguf_file(folder: Path) -> Path:
    """Return the one GGUF file in `folder`; raises BadInputError for none or several."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise BadInputError(f"{folder}: expected one .gguf file, found {len(files)}.")
    return files[0]


def require_same_tokens(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a GGUF file whose tokens are not the target's."""
    field = gguf.GGUFReader(str(file)).get_field("tokenizer.ggml.tokens")
    theirs = [] if field is None else field.contents()
    for token, index in tokenizer.get_vocab().items():
        if index >= len(theirs) or theirs[index] != token:
            other = theirs[index] if index < len(theirs) else "nothing"
            raise IncompatibleError(f"{file}: token {index} is {other!r} there, the target's is {token!r}.")


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, precision: str = "") -> None:
    """Write a causal LM and its tokenizer into `file`, with matrices of this precision; "" for that of its weights.

    Raises IncompatibleError if its architecture, rotary positions or tokenizer are none that this writes.
    """
    config: Any = model.config
    if config.model_type not in _ARCHITECTURES:
        raise IncompatibleError(
            f"gguf: models of the type {config.model_type!r} are not written ({', '.join(_ARCHITECTURES)} are). Export "
            "it with --to hf, and use llama.cpp's own converter."
        )
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    write_sizes(writer, config)
    write_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in _named(model, architecture):
        write_tensor(writer, name, tensor, precision)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what a writer was given into its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the sizes and rotary positions of a Llama-like model's config."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    rope = dict(config.rope_parameters)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind != "default":
        raise IncompatibleError(f"gguf: rotary positions of the type {kind!r} are not written; default and linear are.")


def _named(model: PreTrainedModel, architecture: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors under llama.cpp's names."""
    config: Any = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, tensor in _separate_experts(model.state_dict()):
        if name == "lm_head.weight" and tied:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise IncompatibleError(f"gguf: {name} has no name there.")
        if "qwen3" in config.model_type and name.endswith("o_proj.bias"):
            if tensor.any():
                raise IncompatibleError(f"gguf: {name}: llama.cpp's {config.model_type} has no place for it.")
            continue  # one of zeros, as grown models have it, adds nothing
        theirs += "" if theirs.endswith((".weight", ".bias")) else ".weight"
        if architecture is gguf.MODEL_ARCH.LLAMA and ".self_attn." in name:
            tensor = interleaved(name, tensor, config)
        yield theirs, tensor


def _separate_experts(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in which the gates and ups of experts `[E, 2U, H]` are apart."""
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", part), half
        else:
            yield name, tensor


def interleaved(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return queries' and keys' rows in the order in which llama.cpp turns this architecture's: neighbours in pairs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((number for part, number in heads.items() if f".{part}." in name), None)
    if count is None:
        return tensor
    return tensor.view(count, 2, len(tensor) // count // 2, -1).transpose(1, 2).reshape(tensor.shape)


def write_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, precision: str = "") -> None:
    """Write weights: matrices in this precision ("" for their own), vectors in float32."""
    kind = _kind(tensor, precision)
    if kind is None:
        raise IncompatibleError(f"gguf: {name} is of {tensor.dtype}; float32, bfloat16 and float16 are written.")
    values: np.ndarray = tensor.detach().float().cpu().contiguous().numpy()
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _kind(tensor: Tensor, precision: str) -> gguf.GGMLQuantizationType | None:
    if tensor.ndim < 2 or not precision:
        return _KINDS.get(tensor.dtype if tensor.ndim > 1 else torch.float32)
    # Rows that are no whole number of blocks stay in float16, as llama.cpp's converter leaves them.
    fits = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[_PRECISIONS[precision]][0] == 0
    return _PRECISIONS[precision] if fits else gguf.GGMLQuantizationType.F16


def rounded(weight: Tensor, precision: str) -> Tensor:
    """Return a matrix as it is read from a file of this precision, in float32; a vector as it is."""
    kind = _kind(weight, precision)
    if weight.ndim < 2 or kind is None:
        return weight
    held = gguf.quants.quantize(weight.detach().float().cpu().contiguous().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(held, kind).copy()).to(weight.device)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Write a byte-level BPE; raises IncompatibleError for another tokenizer."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(backend))
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([_token_type(i, tokens, added) for i in range(vocab_size)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in backend["model"]["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(bool(getattr(tokenizer, "add_bos_token", False)))
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _token_type(index: int, tokens: dict[int, str], added: dict[int, Any]) -> int:
    if index not in tokens:
        return int(gguf.TokenType.UNUSED)
    if index not in added:
        return int(gguf.TokenType.NORMAL)
    return int(gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED)


def _pre_tokenizer(backend: dict[str, Any]) -> str:
    """Return llama.cpp's name of how the tokenizer splits a text before it merges bytes."""
    split = backend.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    byte_level = next((part for part in parts if part.get("type") == "ByteLevel"), None)
    pattern = next((part["pattern"].get("Regex", "") for part in parts if part.get("type") == "Split"), None)
    if (
        backend["model"].get("type", "BPE") == "BPE"
        and byte_level is not None
        and backend.get("normalizer") in _HARMLESS
    ):
        if pattern is None and byte_level.get("use_regex", True):
            return "gpt-2"
        for beginning, name in _PRE_TOKENIZERS.items():
            if pattern is not None and pattern.startswith(beginning):
                return name
    raise IncompatibleError(
        "gguf: this tokenizer is not one of the byte-level BPEs that are written (GPT-2's, Llama 3's, Qwen2's way of "
        "splitting). Export the draft model with --to hf, and use llama.cpp's own converter for it and the target."
    )


class Plain(ExportLayout[DraftModel, DraftModelConfig]):
    """Draft models.

    `precisions`: those of `compression` that the engine reads.
    """

    name = "hf"
    drafter = "draft_model"
    is_model = True

    def __init__(self, precisions: tuple[str, ...] = ()):
        self.precisions = precisions

    def write(self, drafter: DraftModel, target: Target, depth: int) -> DrafterFiles:
        return DrafterFiles(drafter.model.config.to_dict(), drafter.model.state_dict())

    def save(self, drafter: DraftModel, target: Target, folder: Path, depth: int) -> None:
        require_one_vocabulary(drafter, target)
        drafter.save(folder)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(str(folder))

    def rounded(self, drafter: DraftModel, target: Target, depth: int, precision: str) -> DraftModel:
        made = compress(drafter.model.state_dict(), precision)
        drafter = copy.deepcopy(drafter).cast(torch.float32)
        drafter.model.load_state_dict(made.meant)
        return drafter

    def save_as(self, drafter: DraftModel, target: Target, folder: Path, depth: int, precision: str) -> None:
        self.save(drafter, target, folder, depth)
        if precision:
            files = DrafterFiles.load(folder)
            files.quantised(compress(files.tensors, precision)).save(folder)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return model_logits(load_causal_lm(str(files.folder), dtype=torch.float32, strict=True).eval(), passage)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        architectures = config.get("architectures") or [""]
        return "model_type" in config and architectures[0].endswith(("ForCausalLM", "LMHeadModel"))

    def read(self, files: DrafterFiles, target: Target) -> DraftModel:
        return DraftModel.from_folder(files.folder, files.config, target)


def require_one_vocabulary(drafter: DraftModel, target: Target) -> None:
    """Refuse a draft model with fewer or more ids than the target: engines want vocabularies of one size."""
    own = drafter.runner.vocab_size
    if own != target.vocab_size:
        raise IncompatibleError(
            f"engines want vocabularies of one size: the draft model's has {own} entries, the target's "
            f"{target.vocab_size}. Train it with init: prune or random, which take the target's own size."
        )
