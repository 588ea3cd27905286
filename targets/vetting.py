"""A model's folder, looked at before any library opens it: what a stranger put there is no request to run code.

It must be made of regular files, name no code, and ask for no more than its weights fill.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import dynamic_module_utils

from ..common.errors import Refusal
from ..common.safe_load import MEGABYTE, FileLimits, Unreadable, kind_of, read_json

MODEL_CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"

# What libraries read beside a model's weights. Vocabularies are large, and read by a parser with limits of its own.
_SMALL = (
    MODEL_CONFIG,
    INDEX,
    GENERATION_CONFIG,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")
_MAX_VOCABULARY, _MAX_ENTRIES, _MAX_LAYERS = 128 * MEGABYTE, 10_000, 1000
_LIMITS = FileLimits(containers=200_000, depth=20, infinite=True)  # Mamba's configs hold an Infinity

# How a model is computed is no part of what it is, and such a setting may name code of the Hub.
_IMPLEMENTATIONS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
)


def is_local(name: str) -> bool:
    """Return whether `name` is a folder rather than an id of the Hub: it exists, or does not look like org/name."""
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") != 1


@contextmanager
def without_questions() -> Iterator[None]:
    """Let the library refuse code inside where nobody said that it may run, in place of asking on stdin.

    Each loading call of ours says it; some load others in turn, without a word.
    """
    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def check_regular(folder: Path) -> None:
    """Raise Refusal if `folder` holds a pipe, a socket or a device: opening one waits for ever, or does something."""
    for number, file in enumerate(folder.iterdir()):
        mode = file.stat().st_mode if file.exists() else file.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or number >= _MAX_ENTRIES:
            found = kind_of(mode) if number < _MAX_ENTRIES else f"more than {_MAX_ENTRIES} files"
            raise Refusal.of(file, found, "the regular files of a model", "Take a good copy of its folder.")


def check_files(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise Refusal if what libraries read in `folder` beside the weights is not what they expect, or names code.

    Args:
        trust_remote_code: the user said that code of this model may run.
    """
    check_regular(folder)
    for name in _SMALL:
        if (folder / name).exists():
            values = read_json(folder / name, _LIMITS)
            if not trust_remote_code:
                check_config(values, str(folder / name))
    for name in _VOCABULARIES:
        file = folder / name
        if file.exists() and file.stat().st_size > _MAX_VOCABULARY:
            raise Unreadable(str(file), f"larger than the {_MAX_VOCABULARY // MEGABYTE} MB that it may have")


def check_config(values: dict[str, Any], where: str) -> None:
    """Raise Refusal for settings that name code, and for more layers than any model has.

    Libraries make lists as long as there are layers before they make anything else.
    """
    for name, value in _settings(values):
        if name in _IMPLEMENTATIONS and "/" in str(value):
            raise Refusal.of(
                where, f"{name} names code of the Hub, {str(value)[:80]!r}", "a model without code", "Take it out."
            )
        if _counts_layers(name) and isinstance(value, int) and value > _MAX_LAYERS:
            raise Refusal.of(where, f"{name} is {value}", f"at most {_MAX_LAYERS}", "Take a good copy of it.")


def _counts_layers(name: str) -> bool:
    """Tell whether a setting says how many layers there are: not `vocab_size_per_layer_input`, for example."""
    return "layer" in name and "_per_" not in name


def _settings(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting by name, also those inside others."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield name, value
            yield from _settings(value)
    elif isinstance(values, list):
        for value in values:
            yield from _settings(value)
