"""Models that came quantised: the tensors that their files must hold, and the weights that these mean.

The library of each method loads them, through `transformers`. Before, names and shapes in the files are compared with
config.json; afterwards every weight of the loaded model with what our own arithmetic makes of the files.

Shapes: a linear layer has N outputs and K inputs; a scale belongs to a block of rows and columns.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..common.errors import BadInputError, IncompatibleError
from ..common.untrusted_files import parse_json, read_json
from .model_folder import INDEX, MODEL_CONFIG, SINGLE, plain_weight_map
from .weights import TensorInfo, stored_tensors

# The module that reads the weights of each method on a CPU.
LIBRARIES: Final = {
    "compressed-tensors": "compressed_tensors",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "fp8": "transformers",
}
UNCOMPARED: Final = ("mxfp4",)  # experts alone, fused; loaded as before, with a warning
Settings = Mapping[str, Any]  # a quantization_config
_FORMATS: Final = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
# Parts of a weight in the files of torchao and of FP8 blocks, by the names of compressed-tensors.
_NAMES: Final = {
    "_weight_qdata": "weight",
    "_weight_scale": "weight_scale",
    "_weight_zero_point": "weight_zero_point",
    "weight_scale_inv": "weight_scale",
}
# Weights of all experts in one, and the matrices of each in the files.
_OF_EXPERTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PLAIN: Final = ("F64", "F32", "F16", "BF16")
_BEFORE: Final = "the model as it was before it was quantised, and target.quantize: int8 (--quantize int8)."
_GOOD_COPY: Final = "Take a good copy of the model, with the config.json that belongs to its weights."

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scheme:
    """One way in which weights are kept.

    Attributes:
        bits: of a number. is_float: whether it is an FP8 one.
        block: rows and columns that share a scale; 0 for all of them.
        symmetric: whether there are no zero points.
        packed: whether numbers stand bit by bit in words of 32.
        activations: bits of the inputs; 16 where they are left as they are.
    """

    bits: int
    is_float: bool
    block: tuple[int, int]
    symmetric: bool = True
    packed: bool = False
    activations: int = 16

    @property
    def name(self) -> str:
        return f"{'FP8 ' * self.is_float}W{self.bits}A{self.activations}"

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight `[N, K]`."""
        return tuple(ceil(count / size) if size else 1 for count, size in zip(shape, self.block, strict=True))

    def spread(self, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the scale of each number of a weight, `[N, K]`."""
        wide = scales.float().reshape(self.scales(shape))
        for dim, size in enumerate(self.block):
            wide = wide.repeat_interleave(size or shape[dim], dim)
        return wide[: shape[0], : shape[1]]

    def compressed_tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors of a weight `[N, K]` in the files of compressed-tensors."""
        scales, words = self.scales(shape), ceil(shape[1] * self.bits / 32)
        zeros = (ceil(scales[0] * self.bits / 32), scales[1]) if self.packed else scales
        found = {"weight_packed": (shape[0], words), "weight_shape": (2,)} if self.packed else {"weight": shape}
        return found | {"weight_scale": scales} | ({} if self.symmetric else {"weight_zero_point": zeros})


class QuantisedFiles:
    """The files of a quantised model in `folder`.

    Raises:
        BadInputError: its method's library is missing.
        IncompatibleError: nothing compares what that method makes of files, or it is no method for decoding.
    """

    def __init__(self, folder: Path, settings: Settings):
        self.folder, self.settings = folder, settings
        self.wanted: Mapping[str, Tensor] = {}  # the weights of the model, without contents
        self.method = str(settings.get("quant_method"))[:40]
        self.precision = precision_of(settings)
        self._require_library()
        self.schemes = list(_schemes(self.method, settings, folder))
        single = (folder / SINGLE).exists() or not (folder / INDEX).exists()
        names = [SINGLE] if single else sorted(set(plain_weight_map(folder / INDEX).values()))
        self.files: dict[str, Path] = {}
        self.parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)  # by module, and by name inside it
        for file in (folder / name for name in names):
            for tensor, info in stored_tensors(file).items():
                inner = tensor.find(".weight.") + 1 or tensor.rfind(".") + 1
                self.parts[tensor[:inner]][tensor[inner:]] = info
                self.files[tensor] = file

    def _require_library(self) -> None:
        what = f"{self.folder} was quantised by {self.method}"
        if self.method not in LIBRARIES:
            raise IncompatibleError(
                f"{what}, whose loaded weights nothing here compares with the files; expected one of "
                f"{', '.join(LIBRARIES)}. Take W4A16 weights by compressed-tensors (pack-quantized), or {_BEFORE}"
            )
        if importlib.util.find_spec(LIBRARIES[self.method]) is None:
            raise BadInputError(
                f"{what}, which needs its library: pip install 'outrider[quantised]'. Or take {_BEFORE}"
            )

    @property
    def quantises_inputs(self) -> bool:
        """Whether the library's modules quantise their inputs, for which they must stay as the library makes them."""
        return self.method == "compressed-tensors" and any(scheme.activations < 16 for scheme in self.schemes)

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Raise IncompatibleError unless the files hold every wanted weight, plain or with all of its parts."""
        self.wanted = wanted
        faults = [fault for name, weight in wanted.items() for fault in self._faults(name, tuple(weight.shape))]
        if faults:
            raise IncompatibleError(
                f"the weights in {str(self.folder)!r} do not fit the quantization_config of its config.json "
                f"({self.precision}): {'; '.join(faults[:4])}. {_GOOD_COPY}"
            )

    def loading(self, trust_remote_code: bool) -> dict[str, PreTrainedConfig]:
        """Return what `from_pretrained` is told: to make plain weights where nothing else is quantised."""
        if self.method not in ("compressed-tensors", "fp8") or self.quantises_inputs:
            return {}
        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=trust_remote_code)
        config.quantization_config = dict(self.settings) | {"dequantize": True}
        return {"config": config}

    def require_loaded(self, model: PreTrainedModel) -> None:
        """Raise IncompatibleError unless the loaded model has the weights that the files mean, but for rounding."""
        # The library would unpack weights at the model's own first pass, and not at its body's. The passes of
        # bitsandbytes repack weights for a processor, and a state_dict leaves them of no use.
        if self.quantises_inputs:
            attrgetter("hf_quantizer.compressor")(model).decompress_model(model)
        if self.method == "bitsandbytes":
            model.dequantize(dtype=model.dtype)
        if self.method == "fp8":  # which transformers makes bfloat16 of, whatever it was asked for
            cast(nn.Module, model).to(next(iter(self.wanted.values())).dtype)
        for name, outline in self.wanted.items():
            module, _, part = name.rpartition(".")
            loaded = _loaded(model.get_submodule(module), part)
            own, eps = self._weight(name, tuple(outline.shape))
            if not _agree(loaded, own, eps):
                raise IncompatibleError(
                    f"{name} of {str(self.folder)!r} was loaded as another weight than its files hold "
                    f"({self.precision}). Let targets and ignore in its config.json name the quantised layers, update "
                    f"{self.method} and transformers, or take {_BEFORE}"
                )

    def _parts(self, name: str) -> dict[str, TensorInfo]:
        """Return the tensors of a weight's module, by name inside it."""
        return self.parts.get(name[: name.rfind(".") + 1], {})

    def _is_plain(self, name: str, parts: Mapping[str, TensorInfo]) -> bool:
        part = name.rpartition(".")[2]
        return part in parts and parts[part].dtype in _PLAIN and f"{part}_scale" not in parts

    def _matrices(self, name: str, shape: tuple[int, ...]) -> list[list[str]]:
        """Return the weights in the files that `transformers` puts together, one below another, of each expert.

        [] for a weight that is as it is in the files.
        """
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts") or part not in _OF_EXPERTS or len(shape) != 3 or part in self._parts(name):
            return []
        return [[f"{module}.{i}.{one}.weight" for one in _OF_EXPERTS[part]] for i in range(shape[0])]

    def _faults(self, name: str, shape: tuple[int, ...]) -> list[str]:
        if matrices := self._matrices(name, shape):
            inner = (shape[1] // len(matrices[0]), shape[2])
            return [fault for expert in matrices for one in expert for fault in self._faults(one, inner)]
        parts, module = self._parts(name), name.rpartition(".")[0]
        if self._is_plain(name, parts):
            found = parts[name.rpartition(".")[2]].shape
            return [] if found == shape else [f"{name} is {found}, expected {shape}"]
        if len(shape) != 2 or not name.endswith(".weight"):
            return [f"missing {name}"]
        found_names = parts.keys() - {"bias", "input_scale", "input_zero_point"}
        layouts: list[list[str]] = []  # the faults by each
        for needed in self._layouts(name, shape):
            faults = [f"missing {module}.{part}" for part in needed.keys() - found_names]
            faults += [f"unexpected {module}.{part}" for part in found_names - needed.keys()]
            for part in needed.keys() & found_names:
                found = parts[part].shape
                if found != needed[part] and not prod(found) == prod(needed[part]) == 1:
                    faults.append(f"{module}.{part} is {found}, expected {needed[part]}")
            layouts.append(sorted(faults))
        return min(layouts, key=len) if layouts else [f"missing {name}"]

    def _layouts(self, name: str, shape: tuple[int, ...]) -> Iterator[dict[str, tuple[int, ...]]]:
        """Yield the names and shapes that a weight `[N, K]` may have in the files."""
        if self.method == "compressed-tensors":
            yield from (scheme.compressed_tensors(shape) for scheme in self.schemes)
        elif self.method == "fp8":
            yield from ({"weight": shape, "weight_scale_inv": scheme.scales(shape)} for scheme in self.schemes)
        elif self.method == "torchao":
            parts = self._parts(name)
            zeros = {"_weight_zero_point"} & parts.keys()
            scales = parts["_weight_scale"].shape if "_weight_scale" in parts else (shape[0], 1)
            yield {"_weight_qdata": shape, "_weight_scale": scales} | dict.fromkeys(zeros, scales)
        elif self.method == "bitsandbytes":
            yield self._parts_of_bitsandbytes(name, shape)

    def _parts_of_bitsandbytes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        parts, size = self._parts(name), prod(shape)
        state = next((part for part in parts if part.startswith("weight.quant_state.")), None)
        if state is None:
            return {"weight.quant_state.bitsandbytes__nf4": ()}
        values = _json(self._read(f"{name.removesuffix('weight')}{state}"))
        blocks = ceil(size / int(values["blocksize"]))
        found = {"weight": (ceil(size / 2), 1), "weight.absmax": (blocks,), "weight.quant_map": (16,)}
        if parts.get("weight.absmax", TensorInfo("F32", ())).dtype == "U8":
            nested = ceil(blocks / int(values["nested_blocksize"]))
            found |= {"weight.nested_absmax": (nested,), "weight.nested_quant_map": (256,)}
        return found | {state: parts[state].shape}

    def _read(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def _weight(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return a weight in float32 as files that were checked hold it, and the precision of its library."""
        if matrices := self._matrices(name, shape):
            inner = (shape[1] // len(matrices[0]), shape[2])
            read_ones = [[self._weight(one, inner) for one in expert] for expert in matrices]
            whole = torch.stack([torch.cat([weight for weight, _ in expert]) for expert in read_ones])
            return whole, max(eps for expert in read_ones for _, eps in expert)
        module, parts = name.removesuffix("weight"), self._parts(name)
        if self._is_plain(name, parts):
            plain = self._read(name)
            return plain.float(), torch.finfo(plain.dtype).eps
        read = {_NAMES.get(part, part): self._read(module + part) for part in parts}
        if self.method == "bitsandbytes":
            return _of_bitsandbytes(read, shape), torch.finfo(torch.float32).eps
        scales = read["weight_scale"]
        if self.method == "torchao":
            rows, columns = (ceil(count / groups) for count, groups in zip(shape, scales.shape, strict=True))
            scheme = Scheme(8, False, (rows, columns))
        else:
            scheme = next(one for one in self.schemes if self.method == "fp8" or _fits(one, read, shape))
        return _meant(scheme, read, shape), torch.finfo(scales.dtype).eps


def dequantised(tensors: Mapping[str, Tensor], settings: Settings, where: str) -> dict[str, Tensor]:
    """Return the tensors of a drafter that came quantised, by their plain names.

    A product of a number and its scale has the scale's precision, as engines that multiply matrices of it compute it.

    Raises IncompatibleError: it was quantised by another method than compressed-tensors, its inputs are, too, or parts
    of a matrix do not fit the settings.
    """
    method, plain = str(settings.get("quant_method"))[:40], dict(tensors)
    schemes = list(_schemes(method, settings, Path(where)))
    if method != "compressed-tensors" or any(scheme.activations < 16 for scheme in schemes):
        raise IncompatibleError(
            f"{where}: it came quantised as {precision_of(settings)}; matrices by compressed-tensors are read, with "
            "inputs as they are. Take the drafter in bfloat16."
        )
    for module in [name.removesuffix("weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        parts = ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point")
        read = {part: plain.pop(module + part) for part in parts if module + part in plain}
        shape = tuple(read["weight_shape"].tolist()) if "weight_shape" in read else tuple(read["weight"].shape)
        scheme = next((one for one in schemes if _fits(one, read, shape)), None)
        if scheme is None:
            raise IncompatibleError(
                f"{where}: {module}weight has other parts than its quantization_config asks for "
                f"({precision_of(settings)}). {_GOOD_COPY}"
            )
        plain[f"{module}weight"] = _meant(scheme, read, shape).to(read["weight_scale"].dtype)
    return plain


def _fits(scheme: Scheme, read: Mapping[str, Tensor], shape: tuple[int, ...]) -> bool:
    """Return whether tensors of a module have names and sizes of a scheme of compressed-tensors."""
    needed = scheme.compressed_tensors(shape)
    return all(part in read and read[part].numel() == prod(size) for part, size in needed.items())


def _schemes(method: str, settings: Settings, folder: Path) -> Iterator[Scheme]:
    """Yield the schemes that config.json names; raises IncompatibleError for one that is not compared here."""
    try:
        if method == "fp8":
            rows, columns = settings.get("weight_block_size") or (0, 0)
            yield Scheme(8, True, (int(rows), int(columns)))
        if method == "compressed-tensors":
            yield from (_scheme(settings, group) for group in settings["config_groups"].values())
        if method == "bitsandbytes" and not settings.get("load_in_4bit"):
            raise ValueError("LLM.int8() computes columns apart in which any token of a pass is large")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncompatibleError(
            f"{folder / MODEL_CONFIG}: its quantization_config ({method}) is not read: {str(error)[:200]}. "
            f"Take {_BEFORE}"
        ) from error


def _scheme(settings: Settings, group: Settings) -> Scheme:
    """Return the scheme of one of compressed-tensors' groups; raises ValueError, KeyError for what is not read."""
    weights, inputs = group["weights"], group.get("input_activations")
    form = group.get("format") or settings["format"]
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if settings.get(name):
            raise ValueError(f"it has a {name}")
    if group.get("output_activations"):
        raise ValueError("it quantises outputs")
    if form not in _FORMATS:
        raise ValueError(f"the format {str(form)[:40]!r}, expected one of {', '.join(_FORMATS)}")
    if inputs and inputs.get("dynamic") and inputs["strategy"] not in ("token", "group"):
        raise ValueError("a token's inputs are scaled by all tokens of a pass")
    bits, is_float = int(weights["num_bits"]), weights["type"] == "float"
    if (is_float and bits != 8) or not 1 <= bits <= 8:
        raise ValueError(f"{weights['type']} weights of {bits} bits")
    width = int(weights.get("group_size") or 0)
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, width)}
    rows, columns = weights.get("block_structure") or blocks[weights["strategy"]]
    activations = int(inputs["num_bits"]) if inputs else 16
    return Scheme(
        bits, is_float, (int(rows), int(columns)), bool(weights["symmetric"]), form == "pack-quantized", activations
    )


def precision_in(folder: Path) -> dict[str, str]:
    """Return the precision of the model in a folder for a target's source; {} for one that did not come quantised."""
    settings = quantization_config(folder)
    return {} if settings is None else {"precision": precision_of(settings)}


def precision_of(settings: Settings) -> str:
    """Return the precision that a quantization_config names, for people: `W4A16 (compressed-tensors)`."""
    method = str(settings.get("quant_method"))[:40]
    try:
        if method == "bitsandbytes":
            return f"{str(settings['bnb_4bit_quant_type']).upper()} ({method})"
        if method == "torchao":
            return f"{str(settings['quant_type']['default']['_type']).removesuffix('Config')} ({method})"
        names = dict.fromkeys(scheme.name for scheme in _schemes(method, settings, Path()))
        return f"{' + '.join(names)} ({method})" if names else method
    except (KeyError, TypeError, IncompatibleError):
        return method


def quantised_files(folder: Path) -> QuantisedFiles | None:
    """Return the files of the model in a folder if it came quantised; raises as `QuantisedFiles`."""
    settings = quantization_config(folder)
    if settings is not None and settings.get("quant_method") in UNCOMPARED:
        _log.warning("%s came as %s: nothing compares its weights with the files.", folder, settings["quant_method"])
        return None
    return None if settings is None else QuantisedFiles(folder, settings)


def quantization_config(folder: Path) -> Settings | None:
    """Return how the model in a folder was quantised, as its config.json says; None if it was not."""
    config = read_json(folder / MODEL_CONFIG) if (folder / MODEL_CONFIG).is_file() else {}
    inner = config.get("text_config")
    found = config.get("quantization_config") or (inner.get("quantization_config") if isinstance(inner, dict) else None)
    return found if isinstance(found, dict) and found else None


def _meant(scheme: Scheme, read: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the weight `[N, K]` that its parts mean, in float32."""
    numbers, zeros = _numbers(scheme, read, shape)
    moved = numbers if zeros is None else numbers - scheme.spread(zeros, shape)
    return moved * scheme.spread(read["weight_scale"], shape)


def _numbers(scheme: Scheme, read: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Return the numbers of a weight `[N, K]` before scales, and its zero points, in float32."""
    zeros = read.get("weight_zero_point")
    if not scheme.packed:
        return read["weight"].float(), None if zeros is None else zeros.float()
    if zeros is not None:
        zeros = _unpacked(zeros.T.contiguous(), scheme.bits, scheme.scales(shape)[0]).T
    return _unpacked(read["weight_packed"], scheme.bits, shape[1]), zeros


def _unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the numbers `[N, columns]` that stand bit by bit, the lowest first, in words of 32 `[N, W]`."""
    rows = len(words)
    stream = np.unpackbits(words.numpy().astype("<i4").view(np.uint8), axis=1, bitorder="little")
    numbers = stream[:, : columns * bits].reshape(rows, columns, bits) @ (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy(numbers).float() - 2 ** (bits - 1)


def _of_bitsandbytes(read: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a weight `[N, K]` of bitsandbytes: codes of 4 bits, in blocks scaled by their largest number."""
    state = _json(next(read[part] for part in read if part.startswith("weight.quant_state.")))
    largest = read["weight.absmax"]
    if "weight.nested_absmax" in read:
        inner = read["weight.nested_quant_map"][largest.int()]
        wide = read["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))[: len(inner)]
        largest = inner * wide + float(state["nested_offset"])
    pairs = read["weight"].flatten().int()
    codes = torch.stack([pairs >> 4, pairs & 15], 1).flatten()[: prod(shape)]
    wide = largest.repeat_interleave(int(state["blocksize"]))[: len(codes)]
    return (read["weight.quant_map"][codes] * wide).reshape(shape)


def _json(stored: Tensor) -> dict[str, str | float]:
    """Return what bitsandbytes keeps of a weight, as JSON in bytes; raises Unreadable where it is none."""
    return dict(parse_json(bytes(stored.tolist()).decode(errors="replace"), "a quant_state"))


def _agree(loaded: Tensor, own: Tensor, eps: float) -> bool:
    """Return whether a loaded weight is our own reading of it, but for rounding in the coarser of two precisions."""
    if loaded.shape != own.shape or not loaded.is_floating_point():
        return False
    allowed = 4 * max(eps, torch.finfo(loaded.dtype).eps)
    least = torch.finfo(loaded.dtype).smallest_normal  # below it numbers are rounded to a grid
    return bool(((loaded.float().cpu() - own).abs() <= allowed * (own.abs() + least)).all())  # NaN agrees with nothing


def _loaded(module: nn.Module, part: str) -> Tensor:
    """Return a weight of a loaded module as its library dequantises it."""
    weight = getattr(module, part)
    return weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight.detach()
