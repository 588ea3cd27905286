"""MTP modules written back as their target's checkpoint holds them (see heads/mtp_checkpoint.py).

An engine reads them with the target: an export is the whole checkpoint again, with this drafter's modules in the place
of those that it came with.

# safetensors files to put in the place of CHECKPOINT's
python -m outrider.formats.mtp_layout DRAFTER CHECKPOINT OUT
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ..common import BadInputError, IncompatibleError, OutriderError
from ..common.atomic import replacing
from ..common.locks import scratch_folder
from ..common.terminal import print_to_stderr
from ..heads.mtp import Mtp, MtpConfig
from ..heads.mtp_checkpoint import LAYER, Checkpoint, folder_of, places_in, plain_body
from ..heads.registry import load_drafter
from ..targets import Target
from ..targets.model_folder import SINGLE
from ..targets.weights import WEIGHT_TYPES
from .base_layout import DrafterFiles, ExportLayout, Fields, Unsupported, pruned_lacking
from .engine_logits import ProbeSequence, session_logits

# Files of the target's folder that an export brings along.
_COPIED = {".json", ".safetensors", ".jinja", ".model", ".txt"}
# Families whose engines feed the layer's own output to the next draft; the others feed the normed one.
_HANDS_ON_RAW = ("deepseek_v3", "glm4_moe")


class NativeMtp(ExportLayout[Mtp, MtpConfig]):
    """MTP modules inside their target's checkpoint."""

    name = "mtp-native"
    drafter = "mtp"
    is_model = True

    def lacks(self, config: MtpConfig, num_layers: int) -> list[Unsupported]:
        lacks = []
        if config.hidden_first:
            why = "native modules project [embedding; hidden]"
            lacks.append(Unsupported("hidden_first: true", why, "hidden_first: false"))
        lacks += pruned_lacking(config, "native modules use the target's whole output embedding")
        if config.depth > 1:
            why = "engines run the first module again and again"
            lacks.append(Unsupported(f"depth: {config.depth}", why, "recursive: true, without depth"))
        family = config.layer.get("model_type")
        if family is None:  # a recipe's, before its target is known
            return lacks
        if family in _HANDS_ON_RAW and config.norm_output:
            why = "engines feed the output without its norm back in this family"
            lacks.append(Unsupported("norm_output: true", why, "norm_output: false"))
        if family not in _HANDS_ON_RAW and not config.norm_output:
            why = "engines feed the normed output back in this family"
            lacks.append(Unsupported("norm_output: false", why, "norm_output: true"))
        return lacks

    def save(self, drafter: Mtp, target: Target, folder: Path, depth: int) -> None:
        source = target.source.get("path")
        if source is None:
            raise BadInputError("mtp: this target was not loaded from a checkpoint, so there is none to write into.")
        if target.source.get("adapter") is not None:
            raise BadInputError(
                "mtp: this target's adapter is not in its checkpoint; merge it, put the MTP modules beside the merged "
                "weights, and load the target from there."
            )
        original = Path(folder_of(source))
        if not original.is_dir():
            raise BadInputError(f"mtp: {source!r} is no folder; download the checkpoint, and load the target from it.")
        changed = {file.name for file in save_native(drafter, source, folder)}
        for file in sorted(original.iterdir()):
            if file.is_file() and file.name not in changed and file.suffix in _COPIED:
                shutil.copyfile(file, folder / file.name)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return session_logits(self.read(files, target), target, passage)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        layers = (config.get("text_config") or config).get("num_hidden_layers")
        return layers is not None and bool(places_in(names, layers))

    def read(self, files: DrafterFiles, target: Target) -> Mtp:
        normed = files.config.get("model_type") not in _HANDS_ON_RAW
        config = MtpConfig(init="native", path=str(files.folder), norm_output=normed)
        return Mtp.build(config, target).eval()


def save_native(drafter: Mtp, checkpoint: str, folder: str | Path) -> list[Path]:
    """Write the files of `checkpoint` that hold its MTP modules into `folder`, with this drafter's in their place.

    They are safetensors files. Names, shapes, dtypes and whatever else they hold stay: put them in the place of the
    originals, beside the same index.

    Returns the files written.

    Raises BadInputError or IncompatibleError if the checkpoint's modules are not of this drafter's kind.
    """
    if drafter.config.hidden_first:
        raise IncompatibleError(
            "mtp: native modules project [embedding; hidden]; one that projects [hidden; embedding] has no native form."
        )
    original = Checkpoint(folder_of(checkpoint))
    new: dict[str, Tensor] = {}
    for k, (place, layer) in enumerate(original.places(drafter.config.target_layers, drafter.config.depth)):
        state = {name: tensor.detach().cpu() for name, tensor in drafter.module(k).state_dict().items()}
        new |= {name: state[ours] for ours, name in place.own.items()}
        names = [n.removeprefix(place.layer) for n in layer]
        new |= {place.layer + n: t for n, t in _named_as(names, drafter.config.layer, state, original.path).items()}
    written = []
    for name in sorted({original.files[name] for name in new}):
        tensors, file = load_file(original.file(name)), Path(folder) / name
        tensors |= {name: _like(name, new[name], tensors[name]) for name in new.keys() & tensors.keys()}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
        written.append(file)
    return written


def _named_as(names: list[str], values: dict[str, Any], state: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """Return a layer's tensors under a checkpoint's `names`: stacked as `transformers` has them, or one by one."""
    stacked = {n.removeprefix(LAYER): t for n, t in state.items() if n.startswith(LAYER)}
    if stacked.keys() == set(names):
        return stacked
    single = _unstacked(values, stacked)
    if single.keys() != set(names):
        problems = [f"missing {n}" for n in sorted(set(names) - single.keys())]
        problems += [f"unexpected {n}" for n in sorted(single.keys() - set(names))]
        raise IncompatibleError(f"mtp: the drafter's layer is not the one in {path!r}: {'; '.join(problems[:4])}.")
    return single


def _unstacked(values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors as `transformers` saves them."""
    body = plain_body(values)
    body.layers[0].load_state_dict(tensors)
    with scratch_folder("mtp") as folder:
        body.save_pretrained(folder, max_shard_size="1TB")
        saved = load_file(folder / SINGLE)
    return {match[1]: t for n, t in saved.items() if (match := re.fullmatch(r"(?:model\.)?layers\.0\.(.+)", n))}


def _like(name: str, tensor: Tensor, original: Tensor) -> Tensor:
    if original.dtype not in WEIGHT_TYPES or tensor.shape != original.shape:
        raise IncompatibleError(
            f"mtp: {name} is {tuple(original.shape)} of {original.dtype} in the checkpoint, the drafter's "
            f"{tuple(tensor.shape)}; it must be that of the same model, unquantised."
        )
    return tensor.to(original.dtype).contiguous()


def main(arguments: list[str] | None = None) -> int:
    """Write a trained drafter's modules under their native names; return 0, 2 for bad input, 3 for incompatible."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.formats.mtp_layout", description="Write MTP modules back under their native names."
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
        print_to_stderr(str(error))
        return error.exit_code
    sys.stdout.write("".join(f"{file}\n" for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
