"""Loading models: from a folder, from the Hub, or the one that ships with Outrider; never from a pickle."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..common import digests
from ..common.errors import BadInputError, IncompatibleError, OutriderError, Refusal
from .adapters import ADAPTER_CONFIG, merge_adapter
from .attention import NAME as SPLIT_ATTENTION
from .attention import register
from .fitting import check_sizes
from .hub import model_folder
from .meta_model import sketch_causal_lm, sketching
from .tokenizers import tokenizer_of
from .vetting import check_files, without_questions

EMBEDDED = "embedded"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def load_model_and_tokenizer(
    path: str,
    revision: str | None,
    adapter: str | None,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    attention: str | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and tokenizer that `Target.load` wraps, in main memory, with the adapter merged."""
    if attention == SPLIT_ATTENTION:
        register()
    model = load_causal_lm(target_path(path), dtype, revision, trust_remote_code, attention)
    tokenizer = load_tokenizer_of(path, revision, trust_remote_code)
    return model if adapter is None else merge_adapter(model, adapter), tokenizer


def load_tokenizer_of(path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target, whose weights are not needed for it.

    Raises:
        BadInputError: it cannot be had.
    """
    name = target_path(path)
    try:
        folder = model_folder(name, revision, trust_remote_code, weights=False)
        if folder.is_dir():
            check_files(folder, trust_remote_code)
        return tokenizer_of(folder, trust_remote_code)
    except OutriderError:
        raise
    except Exception as error:
        raise _load_error(f"tokenizer of {name}", error) from error


def load_causal_lm(
    name: str,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: str | None = None,
    strict: bool = False,
) -> PreTrainedModel:
    """Load a causal LM from a folder or the Hub, from safetensors only. A missing tensor is an error, never random.

    On the meta device this gives a model of the right shapes without contents (see `targets.sketch`).

    Args:
        strict: also refuse tensors that the model has no place for.

    Raises:
        BadInputError: there is no such model, or it holds only pickled weights.
        IncompatibleError: the weights do not fit the config.
    """
    if sketching():
        return sketch_causal_lm(name, dtype, revision, trust_remote_code)
    folder = folder_of(name, dtype, revision, trust_remote_code)
    try:
        with without_questions():
            loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except OutriderError:
        raise
    except Exception as error:
        raise _load_error(name, error) from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    problems = [f"missing {key}" for key in info["missing_keys"]]
    problems += [f"another shape: {found[0]}" for found in info["mismatched_keys"]]
    problems += [f"unexpected {key}" for key in info["unexpected_keys"]] if strict else []
    if problems:
        raise IncompatibleError(
            f"the weights in {name!r} do not fit its config.json: {'; '.join(sorted(problems)[:4])}."
        )
    model.name_or_path = model.config.name_or_path = name  # not where the Hub's cache keeps it
    return model


def folder_of(name: str, dtype: str | torch.dtype, revision: str | None, trust_remote_code: bool) -> Path:
    """Return the folder of a model, its weights included, after all that can be checked without opening them.

    Raises:
        BadInputError, IncompatibleError, Refusal: as `load_causal_lm`.
    """
    folder = model_folder(name, revision, trust_remote_code)
    _check_folder(folder, name, dtype, trust_remote_code)
    return folder


def target_path(path: str) -> str:
    """Return where a target is: the folder of the one that ships with Outrider, or `path` as it is."""
    return str(embedded_path()) if path == EMBEDDED else path


def embedded_path() -> Path:
    """Return the folder of the target that ships with Outrider."""
    return Path(str(resources.files("outrider.recipes"))) / "embedded" / "target"


def refuse_pickles(folder: Path) -> None:
    """Raise BadInputError if `folder` holds no safetensors: neither pickled weights nor none at all are read."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = [file.name for pattern in PICKLES for file in folder.glob(pattern)]
    if pickled:
        raise BadInputError(
            f"{folder}: {pickled[0]} is a pickle, which can run code when loaded; Outrider reads safetensors only. "
            "Convert it once, in a place you trust: load the state dict there and write it with "
            "safetensors.torch.save_file."
        )
    raise BadInputError(f"{folder}: no *.safetensors file with weights.")


def expanded(path: str | Path) -> str:
    """Return `path` with a leading tilde replaced by the home folder."""
    return os.path.expanduser(path)


def _check_folder(folder: Path, name: str, dtype: str | torch.dtype, trust_remote_code: bool) -> None:
    if not folder.is_dir():
        raise BadInputError(
            f"no model at {name!r}: the folder does not exist. Give a folder, a Hub id like 'org/name', or 'embedded'."
        )
    if not (folder / "config.json").exists():
        raise BadInputError(f"no model at {name!r}: the folder has no config.json.")
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


def _load_error(name: str, error: Exception) -> BadInputError:
    what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hint = "Check the path, or the Hub id and your access to it."
    if "safetensor" in type(error).__name__.lower():
        hint = "Its safetensors file is damaged: copy it again."
    elif isinstance(error, ImportError):  # of what its config.json says that it was quantised by, such as bitsandbytes
        hint = (
            "Install what it asks for; or take the model as it was before it was quantised, and target.quantize: int8 "
            "(--quantize int8), which needs torchao alone."
        )
    return BadInputError(f"the model {name!r} cannot be loaded: {what} {hint}")
