"""The process that work runs in: its software's versions, the extras that it has, and how it holds memory, which
commands set before any work.

It imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .errors import BadInputError

# What a measurement or a training depends on.
_PACKAGES = ("outrider", "torch", "transformers", "accelerate", "datasets")

# Parameters of glibc's mallopt (malloc.h), and the largest values that they take.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _OLDER_GLIBC = 2**31 - 1, 2**25

# How many shapes of products oneDNN remembers, and torch in front of it.
FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}


@dataclass(frozen=True)
class Extra:
    """An extra of the package: what it is for, and the modules and programs that this needs."""

    feature: str
    modules: tuple[str, ...]
    programs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the modules and programs that are not installed here."""
        modules = [name for name in self.modules if find_spec(name) is None]
        return modules + [name for name in self.programs if shutil.which(name) is None]


# By its name for pip: pip install 'outrider[NAME]'.
EXTRAS = {
    "serving": Extra("served, watch and data.servers (real engines)", ("openai", "httpx", "prometheus_client", "h11")),
    "wandb": Extra("wandb (training.report_to: wandb, --registry wandb://…)", ("wandb",)),
    "tensorboard": Extra("tensorboard (training.report_to: tensorboard)", ("tensorboard",)),
    "trackio": Extra("trackio (training.report_to: trackio)", ("trackio", "pandas")),
    "images": Extra("prompts with images", ("PIL",)),
    "deepspeed": Extra("ZeRO training (accelerate launch --use_deepspeed)", ("deepspeed",), ("ninja", "g++")),
    "capacity": Extra("capacity (loads of servers, simulated)", ("simpy",)),
    "rl": Extra("rollouts of TRL's GRPOTrainer (lab/rl.py)", ("trl",)),
    "quantised": Extra("targets of eight bits (--quantize, target.quantize)", ("torchao",)),
    "fast": Extra("kernels of the fast pass, on CUDA", ("triton",)),
    "liger": Extra("losses in fewer passes, on CUDA", ("liger_kernel",)),
    "dev": Extra("the tests (./scripts/test)", ("pytest", "xdist", "ruff", "mypy")),
    "docs": Extra("the site of these pages, and the notebooks", ("mkdocs", "mkdocstrings", "nbclient", "ipykernel")),
    "mutation": Extra("tests of the tests (tests/mutation)", ("mutmut",)),
}


def require_extra(name: str, feature: str) -> None:
    """Raise BadInputError if a module of the extra `name`, which `feature` needs, is not installed."""
    if missing := EXTRAS[name].missing():
        raise BadInputError(f"{feature} needs {' and '.join(missing)}: pip install 'outrider[{name}]'.")


def installed_version(name: str) -> str | None:
    """Return the installed version of the package `name`; None where it is not installed, as in a bare checkout."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions(*names: str) -> dict[str, str]:
    """Return the versions of Python and of the packages `names` (by default `_PACKAGES`), as far as installed."""
    numbers = {name: installed_version(name) for name in names or _PACKAGES}
    return {"python": platform.python_version()} | {name: n for name, n in numbers.items() if n is not None}


def require_docstrings() -> None:
    """Raise BadInputError where Python leaves docstrings out: transformers reads its own at import."""
    if sys.flags.optimize > 1:
        raise BadInputError("PYTHONOPTIMIZE=2 (or -OO) leaves out docstrings, which transformers needs; unset it.")


def keep_large_blocks() -> bool:
    """Make malloc keep freed blocks of any size for the next request, and tell whether it does.

    glibc returns each large block to the kernel, which then zeroes fresh pages for the next one: a tenth of the
    processor time in which the embedded target answers prompts. The peak of memory stays as it is. Other C libraries,
    and users who have set glibc's malloc up themselves, keep their own settings.
    """
    chosen = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = None if chosen else _glibc("mallopt")
    if mallopt is None:
        return False
    kept = mallopt(_MMAP_THRESHOLD, _NEVER) or mallopt(_MMAP_THRESHOLD, _OLDER_GLIBC)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back_unused() -> None:
    """Return malloc's unused memory to the kernel, so that it counts as free. Takes milliseconds."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def remember_few_shapes() -> None:
    """Let oneDNN remember few shapes of products instead of 1024, of half a megabyte each. Variables that are set stay.

    Batches of text bring new shapes all the time, and preparing one again costs no measurable time. The variables are
    read once, at the first product.
    """
    for name, few in FEW_SHAPES.items():
        os.environ.setdefault(name, few)


@cache
def _glibc(function: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of the C library; None if that is not glibc."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 (only glibc has it)
        found: ctypes._NamedFuncPointer = getattr(library, function)
    except (OSError, TypeError, AttributeError):  # Windows has no library of the process itself
        return None
    return found
