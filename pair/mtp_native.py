"""MTP modules written back as their target's checkpoint holds them (see parts/mtp_checkpoint.py).

# safetensors files to put in the place of CHECKPOINT's
python -m outrider.pair.mtp_native DRAFTER CHECKPOINT OUT
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ..ground import BadInputError, IncompatibleError, OutriderError
from ..ground.replacing import replacing
from ..heads.mtp import Mtp
from ..heads.parts.mtp_checkpoint import KEPT, LAYER, SINGLE, Checkpoint, folder_of
from ..heads.parts.registry import load_drafter
from ..heads.parts.target_layer import plain_body


def save_native(drafter: Mtp, checkpoint: str, folder: str | Path) -> list[Path]:
    """Write the files of `checkpoint` that hold its MTP modules into `folder`, with this drafter's in their place.

    They are safetensors files. Names, shapes, dtypes and whatever else they hold stay: put them in the place of the
    originals, beside the same index.

    Returns:
        the files written.

    Raises:
        BadInputError, IncompatibleError: the checkpoint's modules are not of this drafter's kind.
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
        found = _layer_to(drafter.config.layer, state, names, original.path)
        new |= {place.layer + n: t for n, t in found.items()}
    written = []
    for file in sorted({original.files[name] for name in new}):
        tensors = load_file(original.file(file))
        for name in new.keys() & tensors.keys():
            tensors[name] = _like(name, new[name], tensors[name])
        written.append(_write(tensors, Path(folder) / file))
    return written


def _layer_to(values: dict[str, Any], state: dict[str, Tensor], names: list[str], path: str) -> dict[str, Tensor]:
    """Return a layer's tensors under a checkpoint's `names`: stacked as `transformers` has them, or one by one."""
    stacked = {n.removeprefix(LAYER): t for n, t in state.items() if n.startswith(LAYER)}
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
    """Return a layer's tensors as `transformers` saves them."""
    body = plain_body(values)
    body.layers[0].load_state_dict(tensors)
    with tempfile.TemporaryDirectory() as folder:
        body.save_pretrained(folder, max_shard_size="1TB")
        saved = load_file(Path(folder) / SINGLE)
    return {found[1]: t for n, t in saved.items() if (found := re.fullmatch(r"(?:model\.)?layers\.0\.(.+)", n))}


def _like(name: str, tensor: Tensor, original: Tensor) -> Tensor:
    if original.dtype not in KEPT or tensor.shape != original.shape:
        raise IncompatibleError(
            f"mtp: {name} is {tuple(original.shape)} of {original.dtype} in the checkpoint, the drafter's "
            f"{tuple(tensor.shape)}; it must be that of the same model, unquantised."
        )
    return tensor.to(original.dtype).contiguous()


def _write(tensors: dict[str, Tensor], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    return file


def main(arguments: list[str] | None = None) -> int:
    """Write a trained drafter's modules under their native names.

    Returns:
        the exit code: 0 fine, 2 bad input, 3 incompatible.
    """
    parser = argparse.ArgumentParser(
        prog="python -m outrider.pair.mtp_native", description="Write MTP modules back under their native names."
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
