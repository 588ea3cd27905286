"""Weights: the tensors that a safetensors file holds, modules filled from them strictly, and changes to them noticed.

A stranger's config may ask for sizes that no machine has: nothing is made that its weights do not fill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PreTrainedModel

from ..common.digests import digest_json
from ..common.errors import BadInputError, IncompatibleError, Refusal
from ..common.untrusted_files import MEGABYTE, open_regular
from .layers import Tap
from .model_folder import refuse_pickles

WEIGHTS = "model.safetensors"
MAX_HEADER = 32 * MEGABYTE

_FLOATING = ("F", "BF")  # F64, F32, F16, F8_E4M3, BF16, …
# Smaller floats are quantised: their scales lie elsewhere, and without them they are other numbers.
WEIGHT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: its type as safetensors names it ("F32", "BF16", "I64"), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(_FLOATING)


def stored_tensors(file: Path) -> dict[str, TensorInfo]:
    """Return the types and shapes of the tensors in a safetensors file, from its header; contents are not read.

    The library checks the header: offsets without gaps and inside the file, as many bytes as types and shapes need.

    Raises Refusal if the file is not regular, is damaged, or has a larger header than any model.
    """
    problem, advice = "damaged or not a safetensors file", "Copy it again, or take the last good checkpoint."
    try:
        with open_regular(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER:
            raise Refusal.of(file, f"{problem} (a header of {length} bytes)", f"at most {MAX_HEADER}", advice)
        with safe_open(file, framework="pt") as source:
            views = {name: source.get_slice(name) for name in source.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: TensorInfo(view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except Refusal:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise Refusal.of(file, f"{problem} ({error})", "one as it was written", advice) from error


def stored_digests(file: Path) -> dict[str, str]:
    """Return the digest of each tensor in a safetensors file; one tensor is in memory at a time."""
    with safe_open(file, framework="pt") as opened:
        return {name: digest_tensor(opened.get_tensor(name)) for name in sorted(opened.keys())}


def weight_faults(wanted: Mapping[str, Tensor], stored: Mapping[str, TensorInfo]) -> list[str]:
    """Return how the tensors of a file and of a module differ, in names, shapes and kinds of numbers."""
    problems = name_and_shape_faults(wanted, stored)
    for name in wanted.keys() & stored.keys():
        actual, expected = stored[name], wanted[name]
        if actual.shape == tuple(expected.shape) and actual.is_floating != expected.is_floating_point():
            problems.append(f"{name} is {actual.dtype}, expected {expected.dtype}")
    return sorted(problems)


def name_and_shape_faults(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return how tensors differ from the wanted ones in names and shapes, in words, sorted."""
    problems = [f"missing {name}" for name in wanted.keys() - given.keys()]
    problems += [f"unexpected {name}" for name in given.keys() - wanted.keys()]
    pairs = [(name, tuple(given[name].shape), tuple(wanted[name].shape)) for name in wanted.keys() & given.keys()]
    return sorted(problems + [f"{name} is {is_now}, expected {must}" for name, is_now, must in pairs if is_now != must])


@contextmanager
def no_more_than(num_tensors: int, what: str) -> Iterator[None]:
    """Raise IncompatibleError, inside, where modules with many more parameters are made than `what` holds tensors.

    Ten million layers take hours even without contents. Some parameters are made and replaced, so there may be
    somewhat more of them than tensors.
    """
    made = {"parameters": 0, "modules": 0}
    most = {"parameters": 4 * num_tensors + 1000, "modules": 20 * num_tensors + 10_000}

    def count(kind: str) -> None:
        made[kind] += 1
        if made[kind] > most[kind]:
            raise IncompatibleError(
                f"{what} holds {num_tensors} tensors, and its config.json asks for a network of more than "
                f"{made[kind] - 1} {kind}. Take a good copy of it."
            )

    hooks = [
        register_module_parameter_registration_hook(lambda *_: count("parameters")),
        register_module_module_registration_hook(lambda *_: count("modules")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_true_ties(model: PreTrainedModel) -> None:
    """Raise IncompatibleError if a model's config ties weights that differ: engines would tie them, the library not."""
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        try:
            weights = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(other)
        except AttributeError:  # of an adapter or a quantised layer, which has no such weight
            continue
        if weights[0] is not weights[1] and not weights[0].is_meta:
            raise IncompatibleError(
                f"the config of {type(model).__name__} ties its embeddings (tie_word_embeddings), and {name} differs "
                f"from {other}: engines would read one of them, the library reads both. Set tie_word_embeddings to "
                f"false in the model's config, or take {name} out of its weights if it is a left-over."
            )


def restored(make: Callable[[], M], folder: Path, later: Collection[str] = ()) -> M:
    """Return the module that `make` builds, filled with the weights in `folder`: equal names, shapes and kinds.

    It is built on the meta device first: memory is only taken for sizes that the file has.

    Args:
        later: tensors that the file of an earlier version lacks, which stay as they are built.

    Raises:
        BadInputError: the weights are missing or damaged.
        IncompatibleError: they do not fit such a module.
    """
    refuse_pickles(folder)
    file = folder / WEIGHTS
    stored = stored_tensors(file)
    with torch.device("meta"), no_more_than(len(stored), str(file)):
        empty = make()
    wanted = {name: tensor for name, tensor in empty.state_dict().items() if name not in later}
    if problems := weight_faults(wanted, stored):
        raise IncompatibleError(f"{file} does not fit its config.json: {'; '.join(problems[:4])}.")
    module = make()
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadInputError(
            f"{file}: damaged or not a safetensors file ({error}). Copy it again, or take the last good checkpoint."
        ) from error
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dtype not in WEIGHT_TYPES:
            raise IncompatibleError(f"{file}: {name} is {tensor.dtype}: it is quantised. Take the weights in bfloat16.")
    module.load_state_dict(weights, strict=not later)  # all names were compared
    return module


def weight_versions(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return a value that changes when any of the weights is moved or written to.

    Torch does not count writes to weights made in inference mode: for those only the address is known.
    """
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def module_versions(model: nn.Module) -> list[Hashable]:
    """Return a value that changes when a module is replaced or hooked (not by taps), or an adapter is switched."""
    versions: list[Hashable] = []
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        foreign = tuple(id(hook) for hook in hooks if not isinstance(hook, Tap))
        versions.append((id(module), id(vars(module).get("forward")), foreign, *_adapters(module)))
    return versions


def _adapters(module: nn.Module) -> tuple[Hashable, ...]:
    """Return the PEFT adapters that a module computes with, and whether they are merged or switched off."""
    chosen = getattr(module, "active_adapters", None)
    if not isinstance(chosen, (list, tuple)):
        return ()
    return tuple(chosen), bool(getattr(module, "disable_adapters", False)), bool(getattr(module, "merged", False))


def overflow_of(module: nn.Module) -> str:
    """Return a sentence about a weight so large that its square overflows; "" if there is none.

    A norm divides by such squares, and what it writes is 0: finite, and the same for every text.
    """
    largest = torch.finfo(torch.float32).max ** 0.5
    for name, weight in module.named_parameters():
        if weight.dtype in (torch.float32, torch.bfloat16, torch.float64) and weight.numel() and not weight.is_meta:
            most = max(abs(float(end)) for end in weight.detach().aminmax())
            if largest < most < float("inf"):
                return f"Its {name} holds {most:.1e}, the square of which no float32 can hold. "
    return ""


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and contents; a quantised one's are those of its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, rest = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in sorted(names)}
        digests = {name: digest_tensor(part) for name, part in inner.items() if part is not None}
        return digest_json([str(tensor.dtype), list(tensor.shape), digests, str(rest)])
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
