"""Quantised matrices of drafters, as vLLM reads them: FP8, W8A16 and W4A16 in the layout of compressed-tensors.

The package rounds and packs. What was written is read by arithmetic of our own (`targets.quantised_files`), and both
must agree to the last bit. Inputs are not rounded, so an engine's drafts are those that are measured here.

By the source of vLLM 0.32, `fc`, the projections of a drafter's layers and an EAGLE-3 head's own output embedding may
be quantised. It numbers the layers after the target's, so the config names their kind. All else stays as it is.

Shapes: N outputs and K inputs of a matrix, of which G share a scale.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError

# By the words that `--precision` takes: the kind and bits of numbers, and the form of files.
_KINDS: Final = {
    "fp8": ("float", 8, "float-quantized"),
    "w8a16": ("int", 8, "pack-quantized"),
    "w4a16": ("int", 4, "pack-quantized"),
}
PRECISIONS: Final = tuple(_KINDS)
_GROUPS: Final = (128, 64, 32)  # inputs that share a scale of four bits; of eight, a row has one
_MATRIX: Final = re.compile(r"(fc|(model\.)?layers\.\d+\.(self_attn|mlp)\.\w+_proj)\.weight")
_OUTPUT: Final = "lm_head.weight"


@dataclass(frozen=True)
class Compressed:
    """Tensors of a drafter, some of them quantised.

    Attributes:
        tensors: as they are written.
        meant: by their plain names, the matrices as the package reads them again, in the precision of their scales.
        settings: the quantization_config of their config.json.
    """

    tensors: dict[str, Tensor]
    meant: dict[str, Tensor]
    settings: dict[str, object]


def compress(tensors: Mapping[str, Tensor], precision: str, output: bool = False) -> Compressed:
    """Return a drafter's tensors with its matrices in one of the `PRECISIONS`.

    `output`: with its output embedding.

    Raises:
        BadInputError: the package is not installed.
        IncompatibleError: the inputs of a matrix are no whole number of groups.
    """
    if importlib.util.find_spec("compressed_tensors") is None:
        raise BadInputError(f"the precision {precision} needs compressed-tensors: pip install 'outrider[quantised]'.")
    library = importlib.import_module("compressed_tensors")
    made = importlib.import_module("compressed_tensors.quantization")
    names = [name for name in tensors if _MATRIX.fullmatch(name) or (output and name == _OUTPUT)]
    matrices = {name: tensors[name].detach().cpu() for name in names}
    kind, bits, form = _KINDS[precision]
    grouped = {"strategy": "group", "group_size": _group_of(matrices)} if bits == 4 else {"strategy": "channel"}
    args = made.QuantizationArgs(num_bits=bits, type=kind, symmetric=True, dynamic=False, **grouped)
    kinds = ["Linear", "re:.*lm_head"] if output else ["Linear"]
    scheme = made.QuantizationScheme(targets=kinds, weights=args, format=form)
    packer = library.BaseCompressor.get_value_from_registry(form)
    written, meant = dict(tensors), dict(tensors)
    for name, weight in matrices.items():
        module = name.removesuffix("weight")
        blocks = weight.float().unflatten(1, (-1, args.group_size or weight.shape[1]))  # [N, K / G, G]
        scale, _ = made.utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        kept = scale if kind == "float" else scale.to(weight.dtype)  # as vLLM keeps it
        packed = packer.compress({"weight": weight.float(), "weight_scale": kept.float()}, scheme)
        packed["weight_scale"] = kept
        meant[name] = packer.decompress(packed, scheme)["weight"]
        del written[name]
        written |= {f"{module}{part}": tensor for part, tensor in packed.items()}
    ignore = ["embed_tokens"] if output else ["embed_tokens", "lm_head"]
    config = made.QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=ignore
    )
    return Compressed(written, meant, config.model_dump(mode="json", exclude_none=True))


def _group_of(matrices: Mapping[str, Tensor]) -> int:
    """Return the largest number of inputs of a group that all matrices are made of."""
    for size in _GROUPS:
        if all(weight.shape[1] % size == 0 for weight in matrices.values()):
            return size
    name, weight = next((name, w) for name, w in matrices.items() if w.shape[1] % _GROUPS[-1])
    raise IncompatibleError(
        f"w4a16: groups are of {', '.join(map(str, _GROUPS))} inputs, and {name} has {weight.shape[1]}. Take w8a16 or "
        "fp8, or train a head whose sizes are multiples of 32."
    )


def require_meant(read: Mapping[str, Tensor], meant: Mapping[str, Tensor], where: str) -> None:
    """Raise IncompatibleError unless what was read of a file is what was meant, to the last bit."""
    apart = [name for name in meant if name not in read or not torch.equal(read[name].float(), meant[name].float())]
    if apart or len(read) != len(meant):
        raise IncompatibleError(
            f"{where}: {', '.join(apart[:4]) or 'a tensor'} is read as other numbers than compressed-tensors wrote. "
            "Nothing was written; please report it, with the package's version."
        )
