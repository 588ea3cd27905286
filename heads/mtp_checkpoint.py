"""MTP modules as checkpoints hold them beside their target: where they stand, and how they are read to start from.

Two layouts, N the target's layers (`{layer}` stands for the tensors of a decoder layer of that architecture):

    DeepSeek-V3, GLM-4-MoE     model.layers.{N+k}.{layer}, .enorm, .hnorm, .eh_proj, .shared_head.norm, and copies of
                               the target's embeddings, .embed_tokens and .shared_head.head
    Qwen3-Next, Qwen3.5        mtp.layers.0.{layer}, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm

Both project [embedding; hidden], and read the target's hidden state after its final norm. `transformers` neither loads
nor saves these tensors: the checkpoint must be the published one. (formats/mtp_layout.py writes them back.)

A module's layer is one decoder layer of the target's own architecture, the last, with full attention: `transformers`
makes it from the target's config (`plain_body`), so that layers that come with a target's checkpoint fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.utils import cached_file

from ..common import BadInputError, IncompatibleError, refuse_unknown_keys
from ..common.errors import LIBRARY_ERRORS, reason
from ..targets import Target
from ..targets.loading import target_path
from ..targets.model_folder import INDEX, SINGLE, plain_weight_map
from ..targets.weights import WEIGHT_TYPES, name_and_shape_faults, stored_tensors

LAYER = "body.layers.0."  # of a module of ours
_ANGLES = "rotary_emb.inv_freq"  # old checkpoints hold them; they are not read
_OWN = ("embedding_norm", "hidden_norm", "projection", "norm")  # of a module, outside its layer


@dataclass(frozen=True)
class Place:
    """Where a checkpoint keeps one module."""

    own: dict[str, str]  # native names of the module's tensors outside its layer, by ours
    layer: str  # what native names of the layer's tensors begin with
    shared: tuple[str, str]  # names that copies of the target's input and output embedding may have


def places_in(names: Collection[str], num_layers: int) -> list[Place]:
    """Find the modules among a checkpoint's tensors, given its target's number of layers; [] if there are none."""
    if any(name.startswith("mtp.") for name in names):
        layers = {match[1] for name in names if (match := re.match(r"mtp\.layers\.(\d+)\.", name))}
        stems = [("mtp.", f"mtp.layers.{k}.") for k in range(max(1, len(layers)))]
        own, shared = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), ("embed_tokens", "lm_head")
    else:
        numbers = range(num_layers, num_layers + len(names))
        every = [
            [f"{stem}{number}." for number in numbers if f"{stem}{number}.eh_proj.weight" in names]
            for stem in ("model.layers.", "model.language_model.layers.")
        ]
        stems = [(at, at) for at in every[0] or every[1]]
        own, shared = ("enorm", "hnorm", "eh_proj", "shared_head.norm"), ("embed_tokens", "shared_head.head")
    return [
        Place(
            {f"{ours}.weight": f"{at}{name}.weight" for ours, name in zip(_OWN, own, strict=True)},
            layer,
            (f"{at}{shared[0]}.weight", f"{at}{shared[1]}.weight"),
        )
        for at, layer in stems
    ]


class Checkpoint:
    """The safetensors files of a model: a folder, or an id of the Hub.

    Raises BadInputError if there are none.
    """

    def __init__(self, path: str, revision: str | None = None):
        self.path, self.revision = path, revision
        index = self._find(INDEX)
        self.files: dict[str, str] = {}  # by tensor
        if index is not None:
            self.files = plain_weight_map(index)
        elif (single := self._find(SINGLE)) is not None:
            self.files = dict.fromkeys(stored_tensors(single), SINGLE)
        else:
            raise BadInputError(
                f"mtp: no {SINGLE} and no {INDEX} at {path!r}; "
                "give the folder or the Hub id of the published checkpoint."
            )

    def _find(self, name: str) -> Path | None:
        try:
            file = cached_file(self.path, name, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            raise BadInputError(f"mtp: the checkpoint {self.path!r} cannot be read ({cause}).") from error
        return None if file is None else Path(file)

    def file(self, name: str) -> Path:
        path = self._find(name)
        if path is None:
            raise BadInputError(
                f"mtp: {name} is missing from the checkpoint {self.path!r}, though its index names it; copy it again."
            )
        return path

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Read these tensors.

        Raises IncompatibleError if one of them is quantised.
        """
        read: dict[str, Tensor] = {}
        for file in sorted({self.files[name] for name in names}):
            with safe_open(self.file(file), framework="pt") as source:
                read |= {name: source.get_tensor(name) for name in names if self.files[name] == file}
        for name, tensor in read.items():
            if tensor.dtype not in WEIGHT_TYPES:
                raise IncompatibleError(
                    f"mtp: {name} in {self.path!r} is quantised ({tensor.dtype}); modules are trained in bf16 or more. "
                    "Take the checkpoint before its quantisation."
                )
        return read

    def places(self, num_layers: int, depth: int) -> list[tuple[Place, list[str]]]:
        """Return its `depth` modules, each with the names of its layer's tensors.

        Raises BadInputError if it holds none, or another number of them.
        """
        places = places_in(self.files.keys(), num_layers)
        if not places:
            raise BadInputError(
                f"mtp: the checkpoint {self.path!r} holds no MTP module: no tensor is named mtp.* or "
                f"model.layers.{num_layers}.eh_proj.weight. (Checkpoints that transformers saved have lost theirs.) "
                "Give the published one as path, or leave out init for new modules."
            )
        if len(places) != depth:
            raise BadInputError(
                f"mtp: the checkpoint {self.path!r} holds {len(places)} MTP modules, the drafter has {depth}; "
                f"set drafter.depth to {len(places)}."
            )
        result = [(place, self._layer(place)) for place in places]
        known = {name for place, layer in result for name in (*place.own.values(), *place.shared, *layer)}
        stems = ("mtp.", *(place.layer for place in places))
        odd = [n for n in self.files if n.startswith(stems) and n not in known and not n.endswith(_ANGLES)]
        missing = [n for place in places for n in place.own.values() if n not in self.files]
        _refuse(_differences(missing, odd), f"mtp: the modules in {self.path!r} are not of a known layout")
        return result

    def _layer(self, place: Place) -> list[str]:
        """Return the names of a module's tensors that are its layer's."""
        taken = {*place.own.values(), *place.shared}
        return [n for n in self.files if n.startswith(place.layer) and n not in taken and not n.endswith(_ANGLES)]


def folder_of(source: str) -> str:
    """Return the folder or the id of the Hub that a recipe's `source` means."""
    return str(Path(target_path(source)).expanduser())


def load_native(modules: Sequence[nn.Module], layer: dict[str, Any], target: Target, path: str | None = None) -> None:
    """Fill MTP modules from a checkpoint, strictly, in fp32: nothing missing, nothing left over.

    Args:
        layer: the config of a module's layer, see `layer_values`.
        path: the checkpoint; None for the target's own.

    Raises:
        BadInputError: there is no checkpoint, or another number of modules.
        IncompatibleError: it does not fit the target, is quantised, or the modules have embeddings of their own.
    """
    source = path or target.source.get("path")
    if source is None:
        raise BadInputError(
            "mtp: this target was not loaded from a checkpoint; "
            "name the one with its MTP modules: drafter.path=<folder>."
        )
    checkpoint = Checkpoint(folder_of(source), None if path else target.source.get("revision"))
    places = checkpoint.places(target.num_layers, len(modules))
    for module, (place, names) in zip(modules, places, strict=True):
        if path is None:
            _check_shared(checkpoint, place, target)
        read = checkpoint.read([*place.own.values(), *names])
        tensors = _layer_from(layer, {n.removeprefix(place.layer): read[n] for n in names}, checkpoint.path)
        own = {ours: read[name] for ours, name in place.own.items()}
        _fill(module, own | {LAYER + n: t for n, t in tensors.items()}, checkpoint.path)


def _differences(missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
    return [f"missing {n}" for n in missing] + [f"unexpected {n}" for n in unexpected]


def _refuse(problems: list[str], message: str) -> None:
    """Raise IncompatibleError where there are problems, with the first of them."""
    if problems:
        raise IncompatibleError(f"{message}: {'; '.join(problems[:4])}.")


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: str) -> None:
    problems = name_and_shape_faults(module.state_dict(), tensors)
    _refuse(problems, f"mtp: the modules in {path!r} do not fit the target's config")
    module.load_state_dict(tensors)


def _layer_from(values: dict[str, Any], tensors: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """Return a layer's tensors as `transformers` names and stacks them, from those of a checkpoint."""
    plain = plain_body(values)
    rest = {name: tensor for name, tensor in plain.state_dict().items() if not name.startswith("layers.")}
    wrong = f"mtp: the layer in {path!r} is not one of {type(plain).__name__}"
    try:
        body, info = type(plain).from_pretrained(
            None,
            config=plain.config,
            state_dict=rest | {f"layers.0.{n}": t for n, t in tensors.items()},
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError) as error:
        raise IncompatibleError(f"{wrong} ({str(error).splitlines()[0]}).") from error
    _refuse(sorted(_differences(info["missing_keys"], info["unexpected_keys"])), wrong)
    return {n.removeprefix("layers.0."): t for n, t in body.state_dict().items() if n.startswith("layers.0.")}


def _check_shared(checkpoint: Checkpoint, place: Place, target: Target) -> None:
    """Refuse modules with other embeddings than the target's."""
    embeddings = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    for name, embedding in zip(place.shared, embeddings, strict=True):
        if name in checkpoint.files:
            weight, copied = embedding.weight, checkpoint.read([name])[name]
            if copied.shape != weight.shape or not torch.equal(copied.to(weight.dtype), weight.cpu()):
                raise IncompatibleError(
                    f"mtp: {name} in {checkpoint.path!r} differs from the target's own; "
                    "modules with their own embeddings are not supported."
                )


# Settings that leave one layer of a config; the place where experts begin is counted from the first.
_ALONE: dict[str, Any] = {"layer_types": ["full_attention"], "mlp_only_layers": [], "use_sliding_window": False}
_ALONE |= dict.fromkeys(("num_hidden_layers", "vocab_size", "decoder_sparse_step"), 1)
_ALONE |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sliding_window"))
_ALONE |= dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"), 0)
_ALONE |= {"first_k_dense_replace": 0}
# Settings that choose the code that runs a layer, which may even be code of the Hub.
_KERNELS = {f"{stem}{kind}_implementation" for stem in ("", "_") for kind in ("attn", "experts")}
_OF_A_CHECKPOINT = {"architectures", "dtype", "torch_dtype", "quantization_config", "auto_map", "_name_or_path"}
_OF_A_CHECKPOINT |= {"transformers_version"}


def layer_values(target: Target, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model of one layer like the target's last, with these `changes`."""
    values, alone = target.config.to_dict(), dict(_ALONE)
    if target.config.is_heterogeneous:  # such a class makes layers differ by itself, and wants a window
        last, names = target.config.per_layer_config[-1], target.config.per_layer_attributes or ()
        values |= {name: getattr(last, name) for name in names} | {"per_layer_config": {}}
        del alone["sliding_window"]
    refuse_unknown_keys(changes, values, "drafter.layer")
    values = {k: v for k, v in values.items() if k not in _OF_A_CHECKPOINT}
    values |= {k: v[-1:] for k, v in values.items() if isinstance(v, list) and len(v) == target.num_layers}
    values |= {k: v for k, v in alone.items() if values.get(k) is not None}
    try:
        made = type(target.config)(**(values | changes))
    except LIBRARY_ERRORS as error:
        raise BadInputError(f"drafter.layer: {reason(error)}") from error
    saved = json.loads(made.to_json_string(use_diff=True))
    return {k: v for k, v in saved.items() if k not in _OF_A_CHECKPOINT}


def plain_body(values: dict[str, Any]) -> Any:
    """Make a `transformers` model of one layer from the config `values`; its embedding of one token is never read.

    Raises IncompatibleError if the library cannot make it, or it is not a stack of layers with one norm after them.
    """
    kind = values.get("model_type")
    if kind is None:
        raise IncompatibleError(
            "mtp: the config of a module's layer names no model_type, so its architecture is unknown."
        )
    try:
        config = AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k not in {"model_type", *_KERNELS}})
        body = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except LIBRARY_ERRORS as error:
        cause = reason(error)
        raise IncompatibleError(f"mtp: transformers cannot make a layer of a {kind!r} model ({cause}).") from error
    if getattr(config, "hidden_size_per_layer_input", 0):
        raise IncompatibleError(f"mtp: a layer of a {kind!r} model reads tokens, too; take another drafter.")
    if not isinstance(getattr(body, "norm", None), nn.Module) or not hasattr(body, "layers"):
        raise IncompatibleError(
            f"mtp: {type(body).__name__} is not a stack of layers with one norm after them; take another drafter."
        )
    return body
