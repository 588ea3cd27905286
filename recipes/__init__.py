"""Recipes: the YAML files, their schema, and the files that ship with Outrider."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common import BadInputError
from ..common.untrusted_files import YAML, parse_yaml, read_text
from ..common.values import printable_urls
from .schema import (
    DataSpec,
    EngineSpec,
    EvalSpec,
    Recipe,
    SamplingSpec,
    ServerSpec,
    SourceSpec,
    TargetSpec,
    as_mapping,
)

__all__ = ["Recipe", "embedded_file", "load_recipe", "packaged_file", "packaged_recipes", "recipe_file"]
__all__ += ["DataSpec", "EngineSpec", "EvalSpec", "SamplingSpec", "ServerSpec", "SourceSpec", "TargetSpec"]

_HERE = Path(__file__).parent


def load_recipe(
    path_or_name: str | Path, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> Recipe:
    """Read and validate a recipe.

    Args:
        path_or_name: a YAML file, or the name of a packaged recipe such as "embedded-eagle3".
        overrides: `key.path=value`; values are read as YAML (`data.limit=null`, `eval.suites=[code, docs]`).
        changes: values by dotted key, which overrides may change again.

    Raises:
        BadInputError: no such recipe, not valid YAML (with line and column), an unknown key, or a wrong type.
    """
    file = recipe_file(str(path_or_name))
    values = as_mapping(Recipe, parse_yaml(read_text(file, YAML.num_bytes), str(file)), str(file))
    for path, value in (changes or {}).items():
        _put(values, path.split("."), value, path)
    for change in overrides:
        override(values, change)
    shown = re.sub(r"\b(key\W+)[^\s,}]+", r"\1…", " ".join(overrides))  # some give the key, not its variable's name
    return Recipe.from_dict(values, f"{file.name} with {shown}" if overrides else file.name)


def packaged_recipes() -> dict[str, Path]:
    """Return the recipes that ship with Outrider, by name."""
    return {file.stem: file for file in sorted(_HERE.glob("*.yaml"))}


def embedded_file(name: str) -> Path:
    """Return a file that ships beside the embedded target, e.g. `embedded_file("suites/code.jsonl")`."""
    return packaged_file("embedded", name)


def packaged_file(model: str, name: str) -> Path:
    """Return a file that ships for a model, "embedded" or "smollm2", by its name in that model's folder."""
    folder = _HERE / model
    file = folder / name
    if not file.is_file():
        present = sorted(str(p.relative_to(folder)) for p in folder.glob("**/*.jsonl"))
        known = ", ".join(present) or "none (the installation is incomplete)"
        raise BadInputError(f"there is no {model} file {name!r}; there are: {known}.")
    return file


def recipe_file(name: str) -> Path:
    """Return the file of a recipe; BadInputError if there is none."""
    packaged = packaged_recipes()
    if name in packaged:
        return packaged[name]
    file = Path(name).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise BadInputError(
            f"{name!r} is a folder; a recipe is a YAML file, for example {name.rstrip('/')}/recipe.yaml."
        )
    if file.name != name and not file.suffix:  # a path of a folder: verbs that take a recipe or a pair get one
        raise BadInputError(f"no recipe and no pair at {name!r}: there is no such file or folder.")
    names = difflib.get_close_matches(file.stem, packaged, n=4) or packaged
    raise BadInputError(f"no recipe at {name!r}: there is no such file; packaged recipes: {', '.join(names)}.")


def override(values: dict[str, Any], change: str) -> None:
    """Set one `key.path=value` in place."""
    path, equals, text = change.partition("=")
    shown = printable_urls(repr(change))
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise BadInputError(
            f"cannot use the override {shown}: expected key.path=value, for example training.max_steps=100."
        )
    _put(values, keys, parse_yaml(text, f"override {shown}"), shown)


def _put(values: dict[str, Any], keys: Sequence[str], value: Any, shown: str) -> None:
    here: Any = values
    for depth, key in enumerate(keys[:-1], 1):
        if here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict):
            found = printable_urls(repr(here))
            raise BadInputError(f"cannot use the override {shown}: {'.'.join(keys[:depth])} is {found}, not a mapping.")
    here[keys[-1]] = value
