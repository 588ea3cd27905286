"""MTP modules as checkpoints hold them beside their target: read to start from, and written back under the same names.

Two layouts, N the target's layers (`{layer}` stands for the tensors of a decoder layer of that architecture):

    DeepSeek-V3, GLM-4-MoE     model.layers.{N+k}.{layer}, .enorm, .hnorm, .eh_proj, .shared_head.norm, and copies of the target's
                               embeddings, .embed_tokens and .shared_head.head
    Qwen3-Next, Qwen3.5        mtp.layers.0.{layer}, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm

Both project [embedding; hidden], and read the target's hidden state after its final norm (vLLM's and transformers' code agree). `transformers`
does not load these tensors with the target, and does not save them: the checkpoint must be the published one.

    python -m outrider.heads.parts.mtp_native DRAFTER CHECKPOINT OUT      # safetensors files to put in the place of CHECKPOINT's
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ground import BadInputError, IncompatibleError
from ...ground.files import replacing
from ...targets import Target, embedded_path
from ...targets.loading import EMBEDDED

if TYPE_CHECKING:
    from ..mtp import Module, Mtp

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_KEPT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYER = "body.layers.0."  # of a module of ours
_ANGLES = "rotary_emb.inv_freq"  # old checkpoints hold them; nobody reads them


@dataclass(frozen=True)
class Place:
    """Where a checkpoint keeps one module.

    Attributes:
        own: native names of the module's tensors outside its layer, by ours.
        layer: what native names of the layer's tensors begin with.
        shared: names that copies of the target's input and output embedding may have.
    """

    own: dict[str, str]
    layer: str
    shared: tuple[str, str]


def places_in(names: Collection[str], num_layers: int) -> list[Place]:
    """The modules among the tensors `names` of a checkpoint whose target has `num_layers` layers; [] if there are none."""
    if any(name.startswith("mtp.") for name in names):
        layers = {match[1] for name in names if (match := re.match(r"mtp\.layers\.(\d+)\.", name))}
        own = {
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "projection": "fc",
            "norm": "norm",
        }
        theirs = {f"{ours}.weight": f"mtp.{name}.weight" for ours, name in own.items()}
        return [
            Place(theirs, f"mtp.layers.{k}.", ("mtp.embed_tokens.weight", "mtp.lm_head.weight"))
            for k in range(max(1, len(layers)))
        ]
    own = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
    for stem in ("model.layers.", "model.language_model.layers."):
        found = [
            f"{stem}{num_layers + k}." for k in range(len(names)) if f"{stem}{num_layers + k}.eh_proj.weight" in names
        ]
        if found:
            return [
                Place(
                    {f"{ours}.weight": f"{at}{name}.weight" for ours, name in own.items()},
                    at,
                    (f"{at}embed_tokens.weight", f"{at}shared_head.head.weight"),
                )
                for at in found
            ]
    return []


class Checkpoint:
    """The safetensors files of a model: a folder, or an id of the Hub.

    Raises:
        BadInputError: there are none.
    """

    def __init__(self, path: str, revision: str | None = None):
        self.path, self.revision = path, revision
        index = self._find(_INDEX)
        self.files: dict[str, str] = {}  # by tensor
        if index is not None:
            self.files = json.loads(index.read_text())["weight_map"]
        elif (single := self._find(_SINGLE)) is not None:
            self.files = dict.fromkeys(_names(single), _SINGLE)
        else:
            raise BadInputError(
                f"mtp: no {_SINGLE} and no {_INDEX} at {path!r}; give the folder or the Hub id of the published checkpoint."
            )

    def _find(self, name: str) -> Path | None:
        from transformers.utils import cached_file

        try:
            found = cached_file(self.path, name, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"mtp: the checkpoint {self.path!r} cannot be read ({str(error).splitlines()[0]})."
            ) from error
        return None if found is None else Path(found)

    def file(self, name: str) -> Path:
        """One of its files, on this machine."""
        found = self._find(name)
        if found is None:
            raise BadInputError(
                f"mtp: {name} is missing from the checkpoint {self.path!r}, though its index names it; copy it again."
            )
        return found

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors.

        Raises:
            IncompatibleError: one of them is quantised.
        """
        from safetensors import safe_open

        read: dict[str, Tensor] = {}
        for file in sorted({self.files[name] for name in names}):
            with safe_open(self.file(file), framework="pt") as source:
                read |= {name: source.get_tensor(name) for name in names if self.files[name] == file}
        for name, tensor in read.items():
            if tensor.dtype not in _KEPT:
                raise IncompatibleError(
                    f"mtp: {name} in {self.path!r} is quantised ({tensor.dtype}); modules are trained in bf16 or more. "
                    "Take the checkpoint before its quantisation."
                )
        return read

    def places(self, num_layers: int, depth: int) -> list[tuple[Place, list[str]]]:
        """Its `depth` modules, each with the names of its layer's tensors.

        Raises:
            BadInputError: it holds none, or another number of them.
        """
        found = places_in(self.files.keys(), num_layers)
        if not found:
            raise BadInputError(
                f"mtp: the checkpoint {self.path!r} holds no MTP module: no tensor is named mtp.* or model.layers.{num_layers}.eh_proj.weight. "
                "(Checkpoints that transformers saved have lost theirs.) Give the published one as path, or leave out init for new modules."
            )
        if len(found) != depth:
            raise BadInputError(
                f"mtp: the checkpoint {self.path!r} holds {len(found)} MTP modules, the drafter has {depth}; set drafter.depth to {len(found)}."
            )
        result = []
        for place in found:
            taken = {*place.own.values(), *place.shared}
            result.append(
                (
                    place,
                    [n for n in self.files if n.startswith(place.layer) and n not in taken and not n.endswith(_ANGLES)],
                )
            )
        known = {name for place, layer in result for name in (*place.own.values(), *place.shared, *layer)}
        odd = [
            n
            for n in self.files
            if n.startswith(("mtp.", *(p.layer for p in found))) and n not in known and not n.endswith(_ANGLES)
        ]
        missing = [n for place in found for n in place.own.values() if n not in self.files]
        if odd or missing:
            problems = [f"missing {n}" for n in missing] + [f"unexpected {n}" for n in odd]
            raise IncompatibleError(
                f"mtp: the modules in {self.path!r} are not of a known layout: {'; '.join(problems[:4])}."
            )
        return result


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        return list(source.keys())


def _place(source: str) -> str:
    """A folder or an id of the Hub, from what a recipe may say."""
    return str(embedded_path() if source == EMBEDDED else Path(source).expanduser())


# ------------------------------------------------------------ reading


def load_native(drafter: Mtp, target: Target, path: str | None = None) -> None:
    """Fill the modules from the checkpoint at `path` (None: the target's own), strictly, in fp32: nothing missing, nothing left over.

    Raises:
        BadInputError: there is no checkpoint, or other modules than asked for.
        IncompatibleError: it does not fit the target's architecture, is quantised, or the modules have embeddings of their own.
    """
    if drafter.config.hidden_first:
        raise BadInputError("mtp: native modules project [embedding; hidden]; leave out hidden_first.")
    source = path or target.source.get("path")
    if source is None:
        raise BadInputError(
            "mtp: this target was not loaded from a checkpoint; name the one with its MTP modules: drafter.path=<folder>."
        )
    checkpoint = Checkpoint(_place(source), None if path else target.source.get("revision"))
    for k, (place, layer) in enumerate(checkpoint.places(target.num_layers, drafter.config.depth)):
        if path is None:
            _check_shared(checkpoint, place, target)
        read = checkpoint.read([*place.own.values(), *layer])
        tensors = {ours: read[name] for ours, name in place.own.items()}
        tensors |= {
            _LAYER + n: t
            for n, t in _layer_from(
                drafter.config.layer, {n.removeprefix(place.layer): read[n] for n in layer}, checkpoint.path
            ).items()
        }
        _fill(drafter.module(k), tensors, checkpoint.path)


def _fill(module: Module, tensors: dict[str, Tensor], path: str) -> None:
    own = module.state_dict()
    problems = [f"missing {n}" for n in own.keys() - tensors.keys()] + [
        f"unexpected {n}" for n in tensors.keys() - own.keys()
    ]
    problems += [
        f"{n} is {tuple(t.shape)}, expected {tuple(own[n].shape)}"
        for n, t in tensors.items()
        if n in own and t.shape != own[n].shape
    ]
    if problems:
        raise IncompatibleError(
            f"mtp: the modules in {path!r} do not fit the target's config: {'; '.join(sorted(problems)[:4])}."
        )
    module.load_state_dict(tensors)


def _layer_from(values: dict[str, Any], tensors: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """A layer's tensors as `transformers` names and stacks them, from those of a checkpoint."""
    from ..mtp import plain_body

    plain = plain_body(values)
    rest = {name: tensor for name, tensor in plain.state_dict().items() if not name.startswith("layers.")}
    try:
        body, info = type(plain).from_pretrained(
            None,
            config=plain.config,
            state_dict=rest | {f"layers.0.{n}": t for n, t in tensors.items()},
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError) as error:
        raise IncompatibleError(
            f"mtp: the layer in {path!r} is not one of {type(plain).__name__} ({str(error).splitlines()[0]})."
        ) from error
    problems = [f"missing {n}" for n in info["missing_keys"]] + [f"unexpected {n}" for n in info["unexpected_keys"]]
    if problems:
        raise IncompatibleError(
            f"mtp: the layer in {path!r} is not one of {type(plain).__name__}: {'; '.join(sorted(problems)[:4])}."
        )
    return {n.removeprefix("layers.0."): t for n, t in body.state_dict().items() if n.startswith("layers.0.")}


def _check_shared(checkpoint: Checkpoint, place: Place, target: Target) -> None:
    """Refuse modules with other embeddings than the target's."""
    embeddings = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    for name, embedding in zip(place.shared, embeddings, strict=True):
        if name in checkpoint.files:
            weight, copied = embedding.weight, checkpoint.read([name])[name]
            if copied.shape != weight.shape or not torch.equal(copied.to(weight.dtype), weight.cpu()):
                raise IncompatibleError(
                    f"mtp: {name} in {checkpoint.path!r} differs from the target's own; modules with their own embeddings are not supported."
                )


# ------------------------------------------------------------ writing


def save_native(drafter: Mtp, checkpoint: str, folder: str | Path) -> list[Path]:
    """Write the safetensors files of `checkpoint` that hold its MTP modules into `folder`, with this drafter's in their place.

    Names, shapes, dtypes and whatever else these files hold stay: put them in the place of the originals, beside the same index.

    Returns:
        the files written.

    Raises:
        BadInputError, IncompatibleError: the checkpoint's modules are not of this drafter's kind.
    """
    from safetensors.torch import load_file

    if drafter.config.hidden_first:
        raise IncompatibleError(
            "mtp: native modules project [embedding; hidden]; one that projects [hidden; embedding] has no native form."
        )
    original = Checkpoint(_place(checkpoint))
    new: dict[str, Tensor] = {}
    for k, (place, layer) in enumerate(original.places(drafter.config.target_layers, drafter.config.depth)):
        state = {name: tensor.detach().cpu() for name, tensor in drafter.module(k).state_dict().items()}
        new |= {name: state[ours] for ours, name in place.own.items()}
        new |= {
            place.layer + n: t
            for n, t in _layer_to(
                drafter.config.layer, state, [n.removeprefix(place.layer) for n in layer], original.path
            ).items()
        }
    written = []
    for file in sorted({original.files[name] for name in new}):
        tensors = load_file(original.file(file))
        for name in new.keys() & tensors.keys():
            tensors[name] = _like(name, new[name], tensors[name])
        written.append(_write(tensors, Path(folder) / file))
    return written


def _layer_to(values: dict[str, Any], state: dict[str, Tensor], names: list[str], path: str) -> dict[str, Tensor]:
    """A layer's tensors under the `names` of a checkpoint, which may hold them stacked as `transformers` does, or one by one."""
    stacked = {n.removeprefix(_LAYER): t for n, t in state.items() if n.startswith(_LAYER)}
    if stacked.keys() == set(names):
        return stacked
    single = _unstacked(values, stacked)
    if single.keys() != set(names):
        problems = [f"missing {n}" for n in sorted(set(names) - single.keys())] + [
            f"unexpected {n}" for n in sorted(single.keys() - set(names))
        ]
        raise IncompatibleError(f"mtp: the drafter's layer is not the one in {path!r}: {'; '.join(problems[:4])}.")
    return single


def _unstacked(values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's tensors as `transformers` saves them."""
    from safetensors.torch import load_file

    from ..mtp import plain_body

    body = plain_body(values)
    body.layers[0].load_state_dict(tensors)
    with tempfile.TemporaryDirectory() as folder:
        body.save_pretrained(folder, max_shard_size="1TB")
        saved = load_file(Path(folder) / _SINGLE)
    return {found[1]: t for n, t in saved.items() if (found := re.fullmatch(r"(?:model\.)?layers\.0\.(.+)", n))}


def _like(name: str, tensor: Tensor, original: Tensor) -> Tensor:
    if original.dtype not in _KEPT or tensor.shape != original.shape:
        raise IncompatibleError(
            f"mtp: {name} is {tuple(original.shape)} of {original.dtype} in the checkpoint, the drafter's {tuple(tensor.shape)}; it must be that of the same model, unquantised."
        )
    return tensor.to(original.dtype).contiguous()


def _write(tensors: dict[str, Tensor], file: Path) -> Path:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    return file


def main(arguments: list[str] | None = None) -> int:
    """Write a trained drafter's modules under their native names; returns the exit code (0 fine, 2 bad input, 3 incompatible)."""
    from ...ground import OutriderError
    from .. import load_drafter
    from ..mtp import Mtp

    parser = argparse.ArgumentParser(
        prog="python -m outrider.heads.parts.mtp_native", description="Write MTP modules back under their native names."
    )
    parser.add_argument("drafter", help="the folder of a trained mtp drafter")
    parser.add_argument("checkpoint", help="the target's published checkpoint: a folder or a Hub id")
    parser.add_argument("out", help="where the files go that replace the checkpoint's")
    given = parser.parse_args(arguments)
    try:
        drafter = load_drafter(given.drafter)
        if not isinstance(drafter, Mtp):
            raise BadInputError(
                f"{given.drafter} holds a drafter of type {drafter.name!r}; only mtp drafters have a native form."
            )
        files = save_native(drafter, given.checkpoint, given.out)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("".join(f"{file}\n" for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
