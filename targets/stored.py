"""What a safetensors file says that it holds, read before anything is made that should hold it.

A stranger's config may ask for sizes that no machine has. Its weights are on the disk: what they do not fill is not
made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..common.errors import IncompatibleError, Refusal
from ..common.safe_load import MEGABYTE, read_json, require_regular

MAX_HEADER = 32 * MEGABYTE

_FLOATING = ("F", "BF")  # F64, F32, F16, F8_E4M3, BF16, …


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, by its type as safetensors names it ("F32", "BF16", "I64") and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(_FLOATING)


def stored_tensors(file: Path) -> dict[str, Stored]:
    """Return what the header of a safetensors file says of its tensors; their contents are not read.

    The library checks it: offsets without gaps and inside the file, as many bytes as types and shapes say.

    Raises:
        Refusal: it is no regular file, damaged, or its header is larger than any model's.
    """
    try:
        require_regular(file)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER:
            raise Refusal.of(
                file,
                f"damaged or not a safetensors file (a header of {length} bytes)",
                f"at most {MAX_HEADER}",
                "Copy it again.",
            )
        with safe_open(file, framework="pt") as source:
            views = {name: source.get_slice(name) for name in source.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: Stored(view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal.of(
            file,
            f"damaged or not a safetensors file ({error})",
            "one as it was written",
            "Copy it again, or take the last good checkpoint.",
        ) from error


def plain_weight_map(index: Path) -> dict[str, str]:
    """Return which file holds each tensor of a model in several files, as its index says.

    Raises:
        Refusal: it says something else, or names files that are not beside it.
    """
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(map(_is_beside, named.values())):
        raise Refusal.of(index, "no plain weight_map", "names of files beside it", "Copy it again.")
    return named


def _is_beside(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name


def misfits(wanted: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> list[str]:
    """Return how a file's tensors differ from those that a module has, in names, shapes and kinds of numbers."""
    problems = [f"missing {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"unexpected {name}" for name in stored.keys() - wanted.keys()]
    for name in wanted.keys() & stored.keys():
        found, expected = stored[name], wanted[name]
        if found.shape != tuple(expected.shape):
            problems.append(f"{name} is {found.shape}, expected {tuple(expected.shape)}")
        elif found.is_floating != expected.is_floating_point():
            problems.append(f"{name} is {found.dtype}, expected {expected.dtype}")
    return sorted(problems)


@contextmanager
def no_more_than(num_tensors: int, what: str) -> Iterator[None]:
    """Refuse inside to make modules with many more parameters than `what` holds tensors.

    Ten million layers without contents take hours, too. Some parameters are made and put aside again, which is why
    there may be more of them.

    Raises:
        IncompatibleError: there are more.
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
