"""PEFT adapters, merged into a target as they would be served; never from a pickle.

A stranger's config may name files and modules to import. Only kinds and settings that just merge weights are read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from ..common.errors import BadInputError, IncompatibleError, OutriderError, Refusal, reason
from ..common.untrusted_files import read_json
from .model_folder import is_local, say_if_downloaded
from .smoke_check import few_logits, require_same_logits
from .weights import no_more_than, stored_tensors, weight_faults

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Kinds whose weights are sums and products with the target's: nothing is imported, downloaded or computed from data.
KINDS = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "HRA")

# Settings that may differ from the library's defaults, by the adapters that have them. Of all others some name files,
# modules to import, or layers to repeat.
_SETTINGS = {
    "all": "auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern layers_to_transform "
    "modules_to_save peft_type peft_version r revision target_modules task_type",
    "LoRA": "alpha_pattern bias ensure_weight_tying fan_in_fan_out init_lora_weights lora_alpha lora_bias lora_dropout "
    "rank_pattern target_parameters trainable_token_indices use_dora use_rslora",
    "AdaLoRA": "deltaT init_r target_r tfinal tinit total_step",
    "LoHa, LoKr": "alpha decompose_both decompose_factor init_weights module_dropout rank_dropout rank_dropout_scale "
    "use_effective_conv2d use_scalar",
    "IA3": "feedforward_modules init_ia3_weights",
    "OFT, HRA": "apply_GS block_share coft eps num_cayley_neumann_terms oft_block_size use_cayley_neumann",
}
_ALLOWED = {name for names in _SETTINGS.values() for name in names.split()}

# Initialisations that the weights overwrite. Others (pissa, olora, eva, …) also change the target's own.
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
_MAX_SIZE = 2**20
_WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)  # peft's layers, in the places of a model's own


def merge_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """Return the model with the adapter in its weights.

    The adapter's products are summed in fp64: rounded to the weights' own precision they are then the same whatever
    library multiplies, and so is the target's fingerprint. Tied embeddings are untied where it changes one side only.

    Raises:
        BadInputError: it cannot be loaded, holds only a pickle, or asks for more than merging weights.
        IncompatibleError: it does not fit, or merged it makes other logits than peft's unmerged layers.
    """
    folder, config = fitting_adapter(model, adapter)
    with _explained(adapter), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of tied embeddings, which are untied here
        return _merged(model, config, folder)


def fitting_adapter(model: PreTrainedModel, adapter: str) -> tuple[Path, PeftConfig]:
    """Return folder and config of an adapter that fits the model; raises as `merge_adapter` does."""
    with _explained(adapter):
        folder = _adapter_folder(adapter)
        config = checked_config(folder)
        _require_fit(model, config, folder)
        return folder, config


@contextmanager
def _explained(adapter: str) -> Iterator[None]:
    """Name the adapter in the error of a library that cannot load it."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        elsewhere = "" if Path(adapter).expanduser().exists() else " (no such folder is here, so the Hub was asked)"
        raise BadInputError(f"the adapter at {adapter!r} cannot be loaded{elsewhere}: {reason(error)}") from error


def _merged(model: PreTrainedModel, config: PeftConfig, folder: Path) -> PreTrainedModel:
    """Return the model with the adapter in its weights, after a comparison with the logits of the two side by side."""
    ties, vocab = _Ties(model), model.config.get_text_config().vocab_size
    with_adapter = PeftModel.from_pretrained(model, str(folder), config=config)
    expected = few_logits(with_adapter, vocab)
    ties.cut_at_adapters()
    for name, parameter in with_adapter.named_parameters():
        if cast(str, with_adapter.base_model.prefix) in name:  # it is the adapter's
            parameter.data = parameter.data.double()
    merged = cast(PreTrainedModel, with_adapter.merge_and_unload())
    left = next((name for name, module in merged.named_modules() if isinstance(module, _WRAPPERS)), None)
    if left is not None:
        raise IncompatibleError(
            f"the adapter in {folder} cannot be merged: peft leaves a part of it at {left}, which two of its settings "
            "train at once. Train it with one of them (a LoRA, modules_to_save or trainable_token_indices)."
        )
    ties.join_equals(bool(getattr(config, "ensure_weight_tying", False)))
    advice = "Take an adapter of another kind, or without the target's embeddings."
    require_same_logits(f"the adapter in {folder}, merged by peft,", few_logits(merged, vocab), expected, advice)
    return merged


class _Ties:
    """The weight that a model's input and output embeddings share, if they are tied."""

    def __init__(self, model: Any):
        self.model, self.shared = model, model.get_input_embeddings().weight
        configs = (model.config, model.config.get_text_config())
        is_tied = model.get_output_embeddings().weight is self.shared
        self.told_by = [c for c in configs if is_tied and getattr(c, "tie_word_embeddings", False)]

    def _ends(self) -> list[Any]:
        return [self.model.get_input_embeddings(), self.model.get_output_embeddings()]

    def cut_at_adapters(self) -> None:
        """Give each embedding a weight of its own where one of them has an adapter, which changes that one alone."""
        if self.told_by and any(isinstance(end, _WRAPPERS) for end in self._ends()):
            sharing = [m for m in self.model.modules() if m._parameters.get("weight") is self.shared]
            for module in sharing[1:]:
                module.weight = nn.Parameter(self.shared.detach().clone(), requires_grad=False)

    def join_equals(self, changed_alike: bool) -> None:
        """Tie embeddings of equal weights again, and set in the configs whether they are tied.

        Weights that were `changed_alike` by one adapter are equal but for rounding: the sums have two orders.
        """
        first, last = (end.weight for end in self._ends())
        tolerance = 4 * torch.finfo(first.dtype).eps * float(first.abs().max()) if changed_alike else 0.0
        is_tied = bool(self.told_by) and float((first - last).abs().max()) <= tolerance
        if is_tied:
            self.model.get_output_embeddings().weight = first
        for config in self.told_by:
            config.tie_word_embeddings = is_tied


def checked_config(folder: Path) -> PeftConfig:
    """Return the config of the adapter in `folder`; raises Refusal if it asks for more than to merge weights."""
    file = folder / ADAPTER_CONFIG
    values = read_json(file)
    kind = values.get("peft_type")
    if kind not in KINDS:
        raise Refusal.of(file, f"peft_type is {kind!r}", f"one of {', '.join(KINDS)}", "Save the merged target.")
    made: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    _require_plain(file, values, {setting.name: setting.default for setting in fields(made)})
    return cast(PeftConfig, made.from_pretrained(str(folder)))


def _require_plain(file: Path, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse settings that do more than place an adapter's weights, and sizes that no adapter has."""
    for name, value in values.items():
        if name not in _ALLOWED and value and name in defaults and value != defaults[name]:
            advice = "Merge this adapter in a place you trust, and save the merged target."
            raise Refusal.of(file, f"{name} is {str(value)[:80]!r}", "a setting that only merges weights", advice)
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


def _require_fit(model: PreTrainedModel, config: PeftConfig, folder: Path) -> None:
    """Refuse an adapter whose config asks for more than its weights hold, before memory is taken for it."""
    stored = stored_tensors(folder / ADAPTER_WEIGHTS)
    with torch.device("meta"), no_more_than(len(stored) + 2 * len(model.state_dict()), str(folder / ADAPTER_WEIGHTS)):
        empty = PeftModel(type(model)(copy.deepcopy(model.config)), copy.deepcopy(config))
    wanted = get_peft_model_state_dict(empty, save_embedding_layers=False)
    problems = [problem for problem in weight_faults(wanted, stored) if not problem.startswith("unexpected")]
    if problems or not wanted:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise IncompatibleError(
            f"{folder / ADAPTER_WEIGHTS} does not fit this target: {'; '.join(problems[:3]) or 'no weights'}{more}. "
            f"Its {ADAPTER_CONFIG} says that it was made for {config.base_model_name_or_path!r}; give that target, or "
            "another adapter."
        )


def _adapter_folder(adapter: str) -> Path:
    """Return the adapter's folder on this machine: its own, or one in the Hub's cache; it holds safetensors."""
    folder = Path(adapter).expanduser()
    if not folder.exists() and is_local(adapter):
        raise BadInputError(
            f"no adapter at {adapter!r}: the folder does not exist. Give the folder of a PEFT adapter, or a Hub id "
            "like 'org/name'."
        )
    if not folder.exists():
        say_if_downloaded(adapter, ADAPTER_CONFIG)
        folder = Path(snapshot_download(adapter, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise BadInputError(
            f"the adapter at {adapter!r} has no {ADAPTER_WEIGHTS}: Outrider reads safetensors only, as a pickle "
            "(adapter_model.bin) can run code when loaded. Convert it once, in a place you trust: load it there with "
            "peft, and save it anew."
        )
    return folder
