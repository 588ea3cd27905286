"""PEFT adapters, merged into a target as they would be served; never from a pickle.

An adapter's config may be a stranger's: it names patterns, files and modules to import. Only kinds and settings that
merge weights and do nothing else are read.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import PreTrainedModel

from ..common.errors import BadInputError, IncompatibleError, OutriderError, Refusal, reason
from ..common.safe_load import read_json
from .model_folder import is_local
from .weights import misfits, no_more_than, stored_tensors

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Kinds whose weights are sums and products with the target's: nothing is imported, downloaded or computed from data.
KINDS = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA")

# Settings that may differ from the library's defaults. Of all others some name files, modules to import, or layers to
# repeat.
_SETTINGS = (
    "alpha",
    "alpha_pattern",
    "apply_GS",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "block_share",
    "boft_block_num",
    "boft_block_size",
    "boft_dropout",
    "boft_n_butterfly_factor",
    "coft",
    "decompose_both",
    "decompose_factor",
    "deltaT",
    "ensure_weight_tying",
    "eps",
    "exclude_modules",
    "fan_in_fan_out",
    "feedforward_modules",
    "inference_mode",
    "init_r",
    "init_ia3_weights",
    "init_lora_weights",
    "init_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "module_dropout",
    "modules_to_save",
    "num_cayley_neumann_terms",
    "oft_block_size",
    "peft_type",
    "peft_version",
    "r",
    "rank_dropout",
    "rank_dropout_scale",
    "rank_pattern",
    "revision",
    "target_modules",
    "target_parameters",
    "target_r",
    "task_type",
    "tfinal",
    "tinit",
    "total_step",
    "trainable_token_indices",
    "use_cayley_neumann",
    "use_dora",
    "use_effective_conv2d",
    "use_rslora",
    "use_scalar",
)

# Initialisations that the weights overwrite. Others (pissa, olora, eva, …) also change the target's own.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern", "modules_to_save")
_MAX_SIZE = 2**20

# Each repetition of one character multiplies the work by the length of a name; repeated groups may double it with each
# character.
_MAX_REPETITIONS, _MAX_PATTERN, _SECONDS = 5, 2000, 2.0
_ESCAPED, _CLASS = re.compile(r"\\."), re.compile(r"\[[^\]]*\]")
_REPETITION, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+{]")


def merge_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """Return the model with the adapter in its weights.

    The adapter's products are summed in fp64: rounded to the weights' own precision they are then the same whatever
    library multiplies, and so is the target's fingerprint.

    Raises:
        BadInputError: it cannot be loaded, holds only a pickle, or asks for more than merging weights.
    """
    try:
        folder = _adapter_folder(adapter)
        config = checked_config(folder, [name for name, _ in model.named_modules()])
        _require_fit(model, config, folder)
        with_adapter = PeftModel.from_pretrained(model, str(folder), config=config)
        _widen(with_adapter, cast(str, with_adapter.base_model.prefix))
        return cast(PreTrainedModel, with_adapter.merge_and_unload())
    except OutriderError:
        raise
    except Exception as error:
        elsewhere = "" if Path(adapter).expanduser().exists() else " (no such folder is here, so the Hub was asked)"
        raise BadInputError(f"the adapter at {adapter!r} cannot be loaded{elsewhere}: {reason(error)}") from error


def checked_config(folder: Path, names: list[str]) -> PeftConfig:
    """Return the config of the adapter in `folder`.

    Args:
        names: of the target's modules, which its patterns are tried on.

    Raises:
        Refusal: it asks for more than to merge weights, or holds a pattern that takes too long.
    """
    file = folder / ADAPTER_CONFIG
    values = read_json(file)
    kind = values.get("peft_type")
    if kind not in KINDS:
        raise Refusal.of(file, f"peft_type is {kind!r}", f"one of {', '.join(KINDS)}", "Save the merged target.")
    made: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    _require_plain(file, values, {setting.name: setting.default for setting in fields(made)})
    _require_quick(file, values, names)
    return cast(PeftConfig, made.from_pretrained(str(folder)))


def _require_plain(file: Path, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse settings that do more than place an adapter's weights, and sizes that no adapter has."""
    for name, value in values.items():
        if name not in _SETTINGS and value and name in defaults and value != defaults[name]:
            raise Refusal.of(
                file,
                f"{name} is {str(value)[:80]!r}",
                "a setting that only merges weights",
                "Merge this adapter in a place you trust, and save the merged target.",
            )
        if isinstance(value, int) and abs(value) > _MAX_SIZE:
            raise Refusal.of(file, f"{name} is {value}", f"at most {_MAX_SIZE}", "Copy it again.")
    start = values.get("init_lora_weights", True)
    if start is not None and start not in _PLAIN_STARTS:
        raise Refusal.of(
            file,
            f"init_lora_weights is {start!r}, which changes the target's own weights, too",
            "true, false or gaussian",
            "Convert it with peft (save_pretrained's path_initial_model_for_weight_conversion).",
        )


def _require_quick(file: Path, values: dict[str, Any], names: list[str]) -> None:
    """Refuse patterns that take too long on the target's `names`, without trying those that may never end."""
    until = time.monotonic() + _SECONDS
    for pattern in _patterns(values):
        plain = _CLASS.sub("x", _ESCAPED.sub("x", pattern))
        repetitions = len(_REPETITION.findall(plain.replace("(?", "(")))
        if len(pattern) > _MAX_PATTERN or repetitions > _MAX_REPETITIONS or _REPEATED_GROUP.search(plain):
            _refuse_pattern(file, pattern, "repeats groups, or too much")
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            _refuse_pattern(file, pattern, f"is no pattern ({error})")
        for name in names:
            compiled.fullmatch(name)
            if time.monotonic() > until:
                _refuse_pattern(file, pattern, "takes too long")


def _refuse_pattern(file: Path, pattern: str, why: str) -> None:
    raise Refusal.of(
        file,
        f"the pattern {pattern[:80]!r} {why}",
        "a short one, in which only single characters repeat",
        "List the modules' names instead.",
    )


def _patterns(values: dict[str, Any]) -> Iterator[str]:
    """Yield every setting of a config that peft reads as a regular expression."""
    for name in _PATTERNS:
        found = values.get(name)
        yield from [found] if isinstance(found, str) else [p for p in found or () if isinstance(p, str)]
    for name in ("rank_pattern", "alpha_pattern"):
        found = values.get(name) or {}
        if isinstance(found, dict):
            yield from found


def _require_fit(model: PreTrainedModel, config: PeftConfig, folder: Path) -> None:
    """Refuse an adapter whose config asks for more than its weights hold, before memory is taken for it."""
    stored = stored_tensors(folder / ADAPTER_WEIGHTS)
    with torch.device("meta"), no_more_than(len(stored) + 2 * len(model.state_dict()), str(folder / ADAPTER_WEIGHTS)):
        empty = PeftModel(type(model)(copy.deepcopy(model.config)), copy.deepcopy(config))
    wanted = get_peft_model_state_dict(empty, save_embedding_layers=False)
    problems = [problem for problem in misfits(wanted, stored) if not problem.startswith("unexpected")]
    if problems or not wanted:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise IncompatibleError(
            f"{folder / ADAPTER_WEIGHTS} does not fit this target: {'; '.join(problems[:3]) or 'no weights'}{more}. "
            f"Its {ADAPTER_CONFIG} says that it was made for {config.base_model_name_or_path!r}; give that target, or "
            "another adapter."
        )


def _widen(model: nn.Module, prefix: str) -> None:
    """Cast the parameters of an adapter, whose names contain `prefix`, to fp64."""
    for name, parameter in model.named_parameters():
        if prefix in name:
            parameter.data = parameter.data.double()


def _adapter_folder(adapter: str) -> Path:
    """Return the adapter's folder on this machine: its own, or one in the Hub's cache.

    Raises:
        BadInputError: its weights are in no safetensors file: peft would open a pickle.
    """
    folder = Path(adapter).expanduser()
    if not folder.exists() and is_local(adapter):
        raise BadInputError(
            f"no adapter at {adapter!r}: the folder does not exist. Give the folder of a PEFT adapter, or a Hub id "
            "like 'org/name'."
        )
    if not folder.exists():
        folder = Path(snapshot_download(adapter, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise BadInputError(
            f"the adapter at {adapter!r} has no {ADAPTER_WEIGHTS}: Outrider reads safetensors only, as a pickle "
            "(adapter_model.bin) can run code when loaded. Convert it once, in a place you trust: load it there with "
            "peft, and save it anew."
        )
    return folder
