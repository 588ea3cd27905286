"""Drafters by name: their classes and configs, and drafters as they were saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from ..common import BadInputError, IncompatibleError, digests
from ..common.errors import NotFiniteError, did_you_mean
from ..common.plugins import plugin, registered
from ..common.untrusted_files import read_json
from ..targets import Target
from ..targets.weights import overflow_of
from .base import Drafter
from .saved import CONFIG, DrafterConfig, is_stamped, read_config


class DrafterTypes(Mapping[str, type[Drafter]]):
    """The drafter classes by name: the kernel's, and those that packages register under `outrider.drafters`.

    heads/__init__.py fills `kernel`, so that a drafter which is made of others (heads/lookup/fusion.py) can ask for
    them. Another package's class is imported when it is first asked for.
    """

    def __init__(self) -> None:
        self.kernel: dict[str, type[Drafter]] = {}

    def __getitem__(self, name: str) -> type[Drafter]:
        found = self.kernel.get(name) or plugin("drafters", name)
        if found is None:
            raise KeyError(name)
        return cast("type[Drafter]", found)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.kernel, *registered("drafters")]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


HEADS = DrafterTypes()

# Forms in which drafters of any type may be saved, which no recipe names; filled by heads/__init__.py, too.
FORMS: dict[str, type[Drafter]] = {}


def head_class(name: str) -> type[Drafter]:
    """Return the drafter class of that name."""
    if name not in list(HEADS):  # a recipe may say anything, a list too
        near = did_you_mean(str(name), HEADS)
        raise BadInputError(f"unknown drafter type {name!r}; {near}known: {', '.join(sorted(HEADS))}.")
    return HEADS[name]


def drafter_config(values: dict[str, Any], where: str = "drafter") -> tuple[type[Drafter], DrafterConfig]:
    """Return class and config from a mapping like `{type: eagle3, steps: 4}`."""
    if "type" not in values:
        raise BadInputError(f"{where}: 'type' is missing; known types: {', '.join(sorted(HEADS))}.")
    head = head_class(values["type"])
    return head, head.config_class.from_dict({k: v for k, v in values.items() if k != "type"}, where)


def init_words(values: dict[str, Any]) -> tuple[str, ...]:
    """Return what `init` may say in a recipe's `drafter` section beside the folder of a saved drafter."""
    return head_class(values["type"]).config_class.words.get("init", ()) if "type" in values else ()


def is_warm(values: dict[str, Any]) -> bool:
    """Return whether a recipe's `drafter` section starts from a saved drafter."""
    return "init" in values and values["init"] not in init_words(values)


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's `drafter` section with every default; one that starts from a saved drafter is left as it is."""
    if is_warm(values):
        return values
    head, config = drafter_config(values)
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in config.to_dict().items()}
    return {"type": head.name} | settings


def restore_drafter(path: str | Path, target: Target | None = None) -> Drafter:
    """Restore a saved drafter of any kind, as it was saved.

    Raises Refusal if a training wrote it, and its files were altered since.
    """
    if digests.has_seal(Path(path)):
        digests.require_whole(Path(path), "Copy it again, or let its training write it anew.")
    values = read_config(path)
    kind = values.pop("drafter_type", None) or _kind_of_model(values)
    if kind is None:
        raise BadInputError(f"{path}: config.json names no 'drafter_type' and no 'model_type'; this is not a drafter.")
    form = FORMS.get(kind) if isinstance(kind, str) else None
    try:
        return (form or head_class(kind)).from_folder(Path(path), values, target)
    except IncompatibleError as error:
        raw = read_json(Path(path) / CONFIG)
        if "drafter_type" not in raw or is_stamped(raw):
            raise
        early = (
            "Its config.json names no version: an Outrider of before 2026-11-28 wrote it, perhaps under other names."
        )
        raise IncompatibleError(f"{error} {early} Train again, or use an Outrider of its day.") from error


def saved_type(values: dict[str, Any]) -> str:
    """Return the type of the drafter whose config.json holds `values`; "" where there is none."""
    kind = values.get("drafter_type") or _kind_of_model(values) or ""
    return str(values.get("base_type", "") if kind in FORMS else kind)


def load_drafter(path: str | Path, target: Target | None = None, dtype: torch.dtype | None = None) -> Drafter:
    """Load a saved drafter of any kind. A Hugging Face checkpoint is a draft model.

    Args:
        target: the one that it will draft for: it is checked against it, and moved to its device.
        dtype: of the parameters; None for the target's (as saved without one, or if that is no floating-point type).
    """
    drafter: Drafter = restore_drafter(path, target).plain()
    if target is not None:
        drafter.to(target.device)
        drafter.check(target)
        dtype = dtype or (target.dtype if target.dtype.is_floating_point else None)
    if dtype is not None:
        drafter.cast(dtype)
    if overflow := overflow_of(drafter):
        raise NotFiniteError(f"the drafter at {str(path)!r} cannot be used. {overflow}Take a good copy of the weights.")
    return drafter.eval()


def _kind_of_model(values: dict[str, Any]) -> str | None:
    """Return the drafter type of a Hugging Face checkpoint; None if it is none."""
    if "model_type" not in values:
        return None
    return "pard" if values.get("spd_type") == "pard" else "draft_model"
