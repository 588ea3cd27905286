"""Loading models: from a folder, from the Hub, or the one that ships with Outrider; never from a pickle.

A config is compared with the weights beside it before memory is taken, by a model on the meta device.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Mapping
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast, get_args

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..common import digests
from ..common.errors import BadInputError, IncompatibleError, OutriderError, Refusal, first_line, reason
from ..common.plugins import plugin
from ..common.untrusted_files import read_json
from .gguf_models import converted, fetched_folder, gguf_facts
from .images import SEEING, ImageReader, processor_in
from .model_folder import (
    FETCHED,
    INDEX,
    MODEL_CONFIG,
    PUBLISHED,
    SINGLE,
    check_files,
    gguf_in,
    is_local,
    model_folder,
    plain_weight_map,
    refuse_pickles,
    require_local_model,
    without_questions,
)
from .peft_adapters import ADAPTER_CONFIG
from .quantised_files import precision_in, quantised_files
from .smoke_check import few_logits, require_same_logits
from .split_attention import NAME as SPLIT_ATTENTION
from .split_attention import register
from .tokenizers import tokenizer_of
from .weights import no_more_than, require_true_ties, stored_tensors, weight_faults

EMBEDDED = "embedded"
_ROUNDING_TO_INT8 = 0.5  # of the logits' size, at most: some outliers cost a lot, and nonsense costs more
_PACKED = 32  # parameters of a quantised model in one element of its files, at most

_log = logging.getLogger(__name__)

QuantisationKind = Literal["int8", "int8-dynamic"]
# torchao's config for each: of weights alone, or also of the inputs of each product, row by row.
_CONFIGS: Final = {"int8": "Int8WeightOnlyConfig", "int8-dynamic": "Int8DynamicActivationInt8WeightConfig"}


def load_tokenizer_of(path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target, without its weights; raises BadInputError if it cannot be loaded."""
    name = target_path(path)
    try:
        folder = model_folder(name, revision, trust_remote_code, weights=False)
        if folder.is_dir():
            check_files(folder, trust_remote_code)
        return tokenizer_of(folder, trust_remote_code)
    except OutriderError:
        raise
    except Exception as error:
        raise _load_error(f"tokenizer of {name!r}", error) from error


def image_reader_of(
    path: str, revision: str | None, trust_remote_code: bool, tokenizer: PreTrainedTokenizerBase
) -> ImageReader:
    """Return the reader of images of a target, without its weights; nothing is read before an image comes."""

    def processor() -> Any:
        folder = model_folder(target_path(path), revision, trust_remote_code, weights=False)
        check_files(folder, trust_remote_code)
        with without_questions():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return processor_in(folder, config, tokenizer)

    return ImageReader(processor)


def load_causal_lm(
    name: str,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: str | None = None,
    strict: bool = False,
) -> PreTrainedModel:
    """Load a causal LM from a folder or the Hub, from safetensors only. A missing tensor is an error, never random.

    On the meta device this gives a model of the right shapes without contents.

    `strict`: also refuse tensors that the model has no place for.

    Raises:
        BadInputError: there is no such model, or it holds only pickled weights.
        IncompatibleError: the weights do not fit the config.
    """
    if on_meta_device():
        return meta_causal_lm(name, dtype, revision, trust_remote_code)
    folder = folder_of(name, dtype, revision, trust_remote_code)
    if attention == SPLIT_ATTENTION:
        register()
    files = quantised_files(folder)
    try:
        if files is not None:
            files.check(dict(meta_causal_lm(str(folder), dtype, None, trust_remote_code).named_parameters()))
        with without_questions():
            loaded = _auto_class(read_json(folder / MODEL_CONFIG).get("model_type")).from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, where both sizes can be said
                **({} if files is None else files.loading(trust_remote_code)),
            )
    except OutriderError:
        raise
    except Exception as error:
        raise _load_error(f"model {name!r}", error) from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    unexpected = sorted(info["unexpected_keys"])
    _require_fitting(name, info, unexpected if strict else [])
    if files is not None:
        files.require_loaded(model)
    require_true_ties(model)
    if unexpected:
        _log.warning(
            "%s holds %d tensors that its config.json has no place for, %s the first: they are left out. Look whether "
            "the config is that of these weights.",
            name,
            len(unexpected),
            unexpected[0],
        )
    model.name_or_path = model.config.name_or_path = name  # not where the Hub's cache keeps it
    return model


def _require_fitting(name: str, info: Mapping[str, Any], unexpected: list[str]) -> None:
    """Raise IncompatibleError if the library found weights missing, of another shape, or unexpected."""
    problems = [f"missing {key}" for key in info["missing_keys"]]
    shapes = [(key, tuple(stored), tuple(wanted)) for key, stored, wanted in info["mismatched_keys"]]
    problems += [f"{key} is {stored}, expected {wanted}" for key, stored, wanted in shapes]
    problems += [f"unexpected {key}" for key in unexpected]
    if problems:
        raise IncompatibleError(
            f"the weights in {name!r} do not fit its config.json: {'; '.join(sorted(problems)[:4])}."
        )


def folder_of(name: str, dtype: str | torch.dtype, revision: str | None, trust_remote_code: bool) -> Path:
    """Return the folder of a model with its weights, after all checks that do not open them; raises their errors."""
    folder = model_folder(name, revision, trust_remote_code)
    refuse_pickles(folder)
    check_files(folder, trust_remote_code)
    if (folder / ADAPTER_CONFIG).exists():
        raise Refusal.of(
            folder / ADAPTER_CONFIG,
            "an adapter in a model's folder, which would be applied without a word",
            "a model",
            "Give the adapter as such: target.adapter in a recipe, --adapter elsewhere.",
        )
    if digests.has_seal(folder):
        digests.require_whole(folder, "Copy it again, or let its training write it anew.")
    if not trust_remote_code:
        check_sizes(folder, dtype)
    return folder


class TargetGrowth(Protocol):
    """How the models of `PATH@SHAPE` are made; registered as `grown` under `outrider.targets`."""

    @property
    def shapes(self) -> Collection[str]:
        """The names that may follow the @."""
        ...

    def config(self, config: PreTrainedConfig, shape: str) -> PreTrainedConfig:
        """Return the config of a model of this shape that computes what one of `config` does."""

    def model(self, model: PreTrainedModel, shape: str, device: torch.device) -> PreTrainedModel:
        """Return a model of this shape that computes what `model` does."""


def target_growth() -> TargetGrowth | None:
    """Return what makes grown targets, if a package brings it."""
    return cast("TargetGrowth | None", plugin("targets", "grown"))


def split_shape(path: str) -> tuple[str, str | None]:
    """Return the path of a model, and of `PATH@SHAPE` the shape that it is grown into."""
    model, _, shape = path.rpartition("@")
    growth = target_growth() if model else None
    return (model, shape) if growth is not None and shape in growth.shapes else (path, None)


def target_path(path: str) -> str:
    """Return where a target's files are: `path` without a shape, or the folder of a name of ours, or of a GGUF.

    Raises the errors of `gguf_models.converted`, and BadInputError for a name whose model was not fetched.
    """
    path = split_shape(path)[0]
    if path == EMBEDDED:
        return str(embedded_path())
    if path in PUBLISHED:
        return PUBLISHED[path]
    if path in FETCHED:
        return str(fetched_folder(path))
    file = gguf_in(path)
    return path if file is None else str(converted(file))


def source_of(path: str, revision: str | None, adapter: str | None = None) -> dict[str, str | None]:
    """Return where a target is loaded from, for people: of a GGUF with its digest, and how it came quantised."""
    name = target_path(path)
    folder = model_folder(name, revision, weights=False)
    return {"path": path, "revision": revision, "adapter": adapter} | gguf_facts(Path(name)) | precision_in(folder)


def embedded_path() -> Path:
    """Return the folder of the target that ships with Outrider."""
    return Path(str(resources.files("outrider.recipes"))) / "embedded" / "target"


def _load_error(what: str, error: Exception) -> BadInputError:
    hint = "Check the path, or the Hub id and your access to it."
    if "safetensor" in type(error).__name__.lower():
        hint = "Its safetensors file is damaged: copy it again."
    elif isinstance(error, ImportError):
        hint = "Install what it asks for."
    return BadInputError(f"the {what} cannot be loaded: {first_line(error)} {hint}")


def on_meta_device() -> bool:
    """Return whether models made now get no contents: inside `with torch.device("meta")`."""
    return torch.get_default_device().type == "meta"


def meta_causal_lm(
    name: str, dtype: str | torch.dtype = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the causal LM of the config.json in a folder or on the Hub, on the meta device; no weights are looked for.

    Raises BadInputError if there is no such config, or it cannot be reached. "auto" is the config's own dtype, or
    float32 where it has none.
    """
    require_local_model(target_path(name))
    try:
        folder = model_folder(target_path(name), revision, trust_remote_code, weights=False)
        check_files(folder, trust_remote_code)
        with without_questions():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if (shape := split_shape(name)[1]) is not None and (growth := target_growth()) is not None:
            config = growth.config(config, shape)
    except (IncompatibleError, Refusal):
        raise
    except Exception as error:
        hint = "Without a connection give a folder that holds its config.json; weights are not needed."
        hint = "Take a good copy of the model." if is_local(target_path(name)) else hint
        raise BadInputError(f"the config of {name!r} cannot be read: {first_line(error)} {hint}") from error
    try:
        with torch.device("meta"):
            model: PreTrainedModel = _auto_class(config.model_type).from_config(
                config, dtype=_dtype(config, dtype), trust_remote_code=trust_remote_code
            )
    except OutriderError:
        raise
    except Exception as error:  # libraries raise anything at settings that make no sense
        raise BadInputError(f"the config of {name!r} describes no model that can be made: {reason(error)}") from error
    return model.eval().requires_grad_(False)


def _auto_class(model_type: Any) -> Any:
    """Return the library's class that makes models of a type: those that see images are no causal LMs there."""
    return AutoModelForImageTextToText if model_type in SEEING else AutoModelForCausalLM


def _dtype(config: PreTrainedConfig, asked: str | torch.dtype) -> torch.dtype:
    chosen = asked if asked != "auto" else getattr(config.get_text_config(), "dtype", None) or torch.float32
    dtype = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {str(chosen)[:80]!r}, which torch does not have")
    return dtype


def check_sizes(folder: Path, dtype: str | torch.dtype = "auto") -> None:
    """Raise IncompatibleError if the config of a causal LM asks for more than its weights fill.

    The library would make the missing ones, for which there may be no memory, and only then be refused. Raises Refusal
    if files are damaged, or the index names files that are not beside it.
    """
    whole = (folder / SINGLE).exists() or not (folder / INDEX).exists()
    files = [SINGLE] if whole else sorted(set(plain_weight_map(folder / INDEX).values()))
    stored = {name: tensor for file in files for name, tensor in stored_tensors(folder / file).items()}
    quantised = "quantization_config" in read_json(folder / MODEL_CONFIG)
    with no_more_than(len(stored), f"{folder}: {SINGLE}"):
        model = meta_causal_lm(str(folder), dtype)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(prod(tensor.shape) for tensor in stored.values())
    if wanted > (held * _PACKED if quantised else held):
        problems = weight_faults(dict(model.named_parameters()), stored)
        raise IncompatibleError(
            f"the weights in {str(folder)!r} do not fit its config.json: {'; '.join(problems[:4])}. That asks for "
            f"{wanted:,} parameters, and there are {held:,}. Take a good copy of the model."
        )
    wanted_tensors = {} if quantised else model.state_dict()
    for name, tensor in wanted_tensors.items():
        if name in stored and tensor.is_floating_point() != stored[name].is_floating:
            raise IncompatibleError(
                f"the weights in {str(folder)!r} do not fit its config.json: {name} is {stored[name].dtype}, expected "
                "floating-point numbers."
            )


def quantise(model: PreTrainedModel, kind: str, came: str | None = None) -> None:
    """Quantise the linear layers of `model` in place by torchao, all but the output embedding.

    It comes after an adapter was merged. A quantised target is another target: the drafter reads the hidden states of
    the quantised model, and drafts for that one.

    Raises:
        BadInputError: there is no such kind, the model came quantised (as `came`), or torchao is not installed.
        IncompatibleError: it makes logits that rounding to int8 does not explain.
    """
    if came is not None:
        raise BadInputError(f"quantize: expected a model that is not quantised, found {came}. Leave {kind} out.")
    if kind not in _CONFIGS:
        raise BadInputError(f"quantize: expected one of {', '.join(get_args(QuantisationKind))}, found {kind!r}.")
    try:
        library = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise BadInputError("quantised targets need torchao: pip install 'outrider[quantised]'.") from error
    output, vocab = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    expected = few_logits(model, vocab)

    library.quantize_(
        model,
        getattr(library, _CONFIGS[kind])(),
        filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not output,
    )
    advice = "Take the other kind, another torchao, or no target.quantize."
    require_same_logits(
        f"the target, quantised to {kind},", few_logits(model, vocab), expected, advice, _ROUNDING_TO_INT8
    )
